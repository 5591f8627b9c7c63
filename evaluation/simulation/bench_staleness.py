"""Compares synchronous training, stale weights and balanced rows where ranks are not equally fast.

    python -m evaluation.simulation.bench_staleness --json docs/results/staleness.json --plot docs/results/staleness.png

A small network learns scikit-learn's handwritten digits on the ranks of one host; how long a rank's rows take is
emulated by a sleep. Before anything is reported, it is checked that synchronous training has the weights that the same
steps have with SSP(0), and that no bound was exceeded; the simulation of each run has the same times of steps, and of
the rest of a step what synchronous training shows.

The papers' variant, in which each gradient is applied when it arrives, is simulated beside these: in virtual time, with
gradients of the same network on the same rows. Its rate is that of synchronous training divided by the number of ranks,
so that one small step of each rank makes one of all.
"""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import keras
import numpy as np
import rich.progress
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
import tensorflow as tf

from evaluation import modules
from evaluation import output
from evaluation.simulation import stale_schedule
import tf_poseidon as poseidon
from tf_poseidon.staleness.bounds import Synchrony
from tf_poseidon.staleness.gate import VersionGate

_JSON, _MARKDOWN = output.json_flag(), output.markdown_flag()
_PLOT = flags.DEFINE_string("plot", None, "File for the losses by time.")
_ROUNDS = flags.DEFINE_integer("rounds", 1, "Jobs of each kind; 0 simulates and draws beside what --json has.",
                               lower_bound=0)
_CHILD = flags.DEFINE_string("child", None, "For its own use: this process is a rank, which writes to this folder.")
_WAY = flags.DEFINE_string("way", None, "For its own use: how it trains.")
_CLUSTER = flags.DEFINE_string("cluster", None, "For its own use: how fast ranks are.")
_ROUND = flags.DEFINE_integer("round", 0, "For its own use: from which jitter follows.")

RANKS, ROWS, EPOCHS, STEPS = 4, 64, 4, 33
SECONDS = 0.08  # of a rank's rows, where it is not slow and all have as many
_TIMEOUT_S = 900
# By name of a cluster: how slow its ranks are, and by which shares of rows they would be equally fast.
CLUSTERS = {
    "one rank 2 times slower": ((1, 1, 1, 2), (2, 2, 2, 1)),
    "one rank 4 times slower": ((1, 1, 1, 4), (4, 4, 4, 1)),
    "jitter": (None, None),
}
_BALANCED = "bsp, balanced rows"
_ON_ARRIVAL = "on arrival, simulated"
_BOUND = poseidon.SSP(3)  # of that
_RATE = 0.2
WAYS: dict[str, Any] = {"bsp": "bsp", "SSP(0)": poseidon.SSP(0), "SSP(3)": poseidon.SSP(3),
                        "DSSP(3, 15)": poseidon.DSSP(3, 15), _BALANCED: "bsp"}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a rank has measured.

    Attributes:
        seconds: Of all steps.
        epochs: For each epoch: when it was over, in seconds, and the loss and accuracy on other data.
        weights: The sum of the weights' absolute values.
        staleness: How often a version was read that was so many clocks old.
        waiting: How long it has waited for versions, in seconds.
    """

    seconds: float
    epochs: list[tuple[float, float, float]]
    weights: float
    staleness: dict[str, int]
    waiting: float


def times_of(cluster: str, number: int, shares: tuple[int, ...] | None = None) -> np.ndarray:
    """Returns [ranks, steps]: how long ranks' rows take, in seconds; `number` is that of the round."""
    slow, _ = CLUSTERS[cluster]
    if slow is None:
        paces = 1 + np.random.default_rng(number).exponential(0.5, (RANKS, EPOCHS * STEPS))
    else:
        paces = np.repeat(np.array(slow, float)[:, None], EPOCHS * STEPS, 1)
    rows = np.array(shares or [1] * RANKS)
    return SECONDS * paces * (RANKS * rows / rows.sum())[:, None]


class _Epochs(keras.callbacks.Callback):
    """Notes when epochs end, without their validation."""

    def __init__(self, data: tuple[np.ndarray, np.ndarray]) -> None:
        super().__init__()
        self.data, self.ends = data, list[tuple[float, float, float]]()
        self.seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.begin = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds += time.perf_counter() - self.begin
        loss, accuracy = self.model.evaluate(*self.data, batch_size=512, verbose=0)
        self.ends.append((self.seconds, loss, accuracy))


def digits() -> list[np.ndarray]:
    """Returns images to train with, others, and the labels of both."""
    images, labels = load_digits(return_X_y=True)
    return train_test_split((images / 16).astype(np.float32), labels, random_state=0)


def network(*first: keras.layers.Layer) -> keras.Model:
    """Returns the network, behind some layers."""
    return keras.Sequential([keras.Input((64,)), *first, keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])


def train() -> tuple[int, Run]:
    """Trains, as a rank of a job; returns its number, and what it has measured."""
    synchrony, (_, shares) = WAYS[_WAY.value], CLUSTERS[_CLUSTER.value]
    shares = shares if _WAY.value == _BALANCED else None
    strategy = poseidon.PoseidonStrategy("ps", synchrony=synchrony, rows=shares, timeout_s=_TIMEOUT_S)
    times = iter(times_of(_CLUSTER.value, _ROUND.value, shares)[strategy.rank])
    train_x, test_x, train_y, test_y = digits()
    keras.utils.set_random_seed(1)
    is_measured = False

    def sleep(x: np.ndarray) -> np.ndarray:
        if is_measured:
            time.sleep(next(times))
        return x

    class Slow(keras.layers.Layer):
        """Takes its time when it trains: for whole batches, which all ranks have."""

        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape) if training else x

        def compute_output_shape(self, input_shape: Any) -> Any:
            return input_shape

    with strategy.scope():
        model = network(Slow())
        model.compile(keras.optimizers.SGD(_RATE), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((train_x, train_y)).repeat().batch(ROWS, drop_remainder=True)
    epochs = _Epochs((test_x, test_y))
    initial = model.get_weights()
    model.fit(data, epochs=1, steps_per_epoch=1, verbose=0)  # traces
    model.evaluate(test_x, test_y, batch_size=512, verbose=0)
    model.set_weights(initial)
    is_measured = True
    model.fit(data, epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0, callbacks=[epochs])
    of_ranks = None if synchrony == "bsp" else strategy.version_log()
    return strategy.rank, Run(
        epochs.seconds, epochs.ends, float(sum(np.abs(weight).sum() for weight in model.get_weights())),
        {} if of_ranks is None else {str(age): n for age, n in of_ranks.staleness()[strategy.rank].items()},
        0.0 if of_ranks is None else of_ranks.waiting_seconds[strategy.rank])


def run(way: str, cluster: str, number: int) -> list[Run]:
    """Runs a job."""
    launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher, *modules.command("simulation.bench_staleness"), f"--child={folder}", f"--way={way}",
             f"--cluster={cluster}", f"--round={number}"], capture_output=True, text=True, timeout=_TIMEOUT_S,
            env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"})
        if done.returncode:
            sys.exit(f"The job ended with status {done.returncode}, expected 0:\n{done.stderr[-4000:]}")
        return [Run(**json.loads((pathlib.Path(folder) / f"{rank}.json").read_text())) for rank in range(RANKS)]


def simulated(way: str, cluster: str, number: int, rest_s: float) -> float:
    """Returns the seconds of all steps; epochs follow each other, and `rest_s` is the rest of a step."""
    shares = CLUSTERS[cluster][1] if way == _BALANCED else None
    times = times_of(cluster, number, shares) + rest_s
    bounds = poseidon.SSP(0) if WAYS[way] == "bsp" else WAYS[way]
    return sum(stale_schedule.simulate(times[:, i:i + STEPS].tolist(), 0, lambda: VersionGate(bounds)).seconds
               for i in range(0, EPOCHS * STEPS, STEPS))


def on_arrival(cluster: str, number: int, rest_s: float, synchrony: Synchrony = _BOUND) -> list[Run]:
    """Simulates training in which gradients are applied when they arrive; returns what each rank would measure.

    Args:
        cluster: How fast ranks are.
        number: That of the round.
        rest_s: The rest of a step, in seconds.
        synchrony: How far ranks may run ahead.
    """
    train_x, test_x, train_y, test_y = digits()
    keras.utils.set_random_seed(1)
    model = network()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    times = times_of(cluster, number) + rest_s
    weights = [tf.constant(weight) for weight in model.get_weights()]

    @tf.function
    def gradients(weights: list[tf.Tensor], x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = loss_of(y, model.stateless_call(weights, [], x)[0])
        return tape.gradient(loss, weights)

    def gradient(weights: list[tf.Tensor], rank: int, clock: int) -> list[tf.Tensor]:
        """Of the rank's rows of the batch, which follow each other in the data, and begin again at their end."""
        first = (begin + clock) * ROWS + rank * (ROWS // RANKS)
        rows = np.arange(first, first + ROWS // RANKS) % len(train_x)
        return gradients(weights, tf.constant(train_x[rows]), tf.constant(train_y[rows]))

    def apply(weights: list[tf.Tensor], gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return [weight - _RATE / RANKS * part for weight, part in zip(weights, gradients, strict=True)]

    seconds, ends, waiting = 0.0, [], np.zeros(RANKS)
    for begin in range(0, EPOCHS * STEPS, STEPS):
        schedule = stale_schedule.simulate(times[:, begin:begin + STEPS].tolist(), 0, lambda: VersionGate(synchrony))
        weights = stale_schedule.on_arrival(schedule, weights, gradient, apply)
        seconds += schedule.seconds
        waiting += schedule.waiting
        logits = model.stateless_call(weights, [], test_x)[0].numpy()
        ends.append((seconds, float(loss_of(test_y, logits)), float(np.mean(logits.argmax(-1) == test_y))))
    total = float(sum(np.abs(weight).sum() for weight in weights))
    return [Run(seconds, ends, total, {}, float(waited)) for waited in waiting]


def with_arrivals(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns results of jobs, with simulated ones behind those of each cluster."""
    complete = []
    for cluster in CLUSTERS:
        of_cluster = [result for result in results if result["cluster"] == cluster and result["way"] != _ON_ARRIVAL]
        bsp, = (result["jobs"] for result in of_cluster if result["way"] == "bsp")
        rests = [rest_of(cluster, number, job[0]["seconds"]) for number, job in enumerate(bsp)]
        check_simulated(on_arrival(cluster, 0, rests[0], poseidon.SSP(0))[0].epochs, bsp[0][0]["epochs"])
        runs = [on_arrival(cluster, number, rest_s) for number, rest_s in enumerate(rests)]
        complete += [*of_cluster, {
            "cluster": cluster, "way": _ON_ARRIVAL, "simulated_s": [ranks[0].seconds for ranks in runs],
            "jobs": [[dataclasses.asdict(rank) for rank in ranks] for ranks in runs]}]
    return complete


def check_simulated(without_lead: list[tuple[float, float, float]], bsp: list[tuple[float, float, float]]) -> None:
    """Refuses a simulation that does not train as jobs do: where all ranks wait, it is synchronous training."""
    for (_, loss, _), (_, measured, _) in zip(without_lead, bsp, strict=True):
        if abs(loss - measured) > 1e-4 * measured:
            sys.exit(f"Simulated with SSP(0), the loss is {loss}, expected that of synchronous training, {measured}.")


def rest_of(cluster: str, number: int, seconds: float) -> float:
    """Returns the rest of a step, given the seconds that synchronous training takes."""
    return (seconds - simulated("bsp", cluster, number, 0)) / EPOCHS / STEPS


def check(runs: dict[str, list[Run]]) -> None:
    """Refuses results that are not what they say."""
    if runs["bsp"][0].weights != runs["SSP(0)"][0].weights:
        sys.exit(f"SSP(0) has weights that add up to {runs['SSP(0)'][0].weights}, expected {runs['bsp'][0].weights}, "
                 "those of synchronous training.")
    for way, of_ranks in runs.items():
        upper = 0 if WAYS[way] == "bsp" else WAYS[way].upper
        if (most := max([int(age) for each in of_ranks for age in each.staleness], default=0)) > upper:
            sys.exit(f"{way} has read a version {most} clocks old, expected at most {upper}.")


def main(_: list[str]) -> None:
    if _CHILD.value:
        rank, measured = train()
        output.write_json(pathlib.Path(_CHILD.value) / f"{rank}.json", measured)
        return
    if not _ROUNDS.value:
        report(with_arrivals(json.loads(pathlib.Path(_JSON.value).read_text())))
        return
    jobs: dict[str, dict[str, list[list[Run]]]] = {cluster: {way: [] for way in WAYS} for cluster in CLUSTERS}
    cells = [(cluster, way, number) for number in range(_ROUNDS.value) for cluster in CLUSTERS for way in WAYS
             if way != _BALANCED or CLUSTERS[cluster][1]]
    with rich.progress.Progress() as progress:
        for cluster, way, number in progress.track(cells, description="jobs"):
            jobs[cluster][way].append(run(way, cluster, number))
            if _JSON.value:
                output.write_json(f"{_JSON.value}.partial", jobs)
    results = []
    for cluster, of_ways in jobs.items():
        for number in range(_ROUNDS.value):
            check({way: each[number] for way, each in of_ways.items() if each})
        rests = [rest_of(cluster, number, each[0].seconds) for number, each in enumerate(of_ways["bsp"])]
        results += [{"cluster": cluster, "way": way,
                     "simulated_s": [simulated(way, cluster, number, rests[number]) for number in range(len(each))],
                     "jobs": [[dataclasses.asdict(rank) for rank in job] for job in each]}
                    for way, each in of_ways.items() if each]
    report(with_arrivals(results))


def report(results: list[dict[str, Any]]) -> None:
    """Prints results, and writes what flags ask for."""
    rows = []
    for result in results:
        way, jobs = result["way"], result["jobs"]
        bsp, = (other["jobs"] for other in results if (other["cluster"], other["way"]) == (result["cluster"], "bsp"))
        ratios = sorted(one[0]["seconds"] / other[0]["seconds"] for one, other in zip(bsp, jobs))
        errors = [job[0]["seconds"] / predicted - 1 for job, predicted in zip(jobs, result["simulated_s"])]
        waiting = statistics.median(sum(rank["waiting"] for rank in job) / RANKS for job in jobs)
        _, loss, accuracy = jobs[0][0]["epochs"][-1]
        rows.append([result["cluster"], way,
                     f"{EPOCHS * STEPS / statistics.median(job[0]['seconds'] for job in jobs):.2f}",
                     f"{statistics.median(ratios):.3f}", f"{ratios[0]:.3f}-{ratios[-1]:.3f}",
                     "" if way == _ON_ARRIVAL else f"{100 * max(errors, key=abs):+.1f} %",
                     "" if WAYS.get(way) == "bsp" else f"{waiting:.1f}", f"{loss:.4f}", f"{accuracy:.4f}"])
    header = ["cluster", "way", "steps/s", "of bsp", "from-to", "simulated", "waited, s", "loss", "accuracy"]
    output.show(f"{RANKS} ranks, {EPOCHS} epochs of {STEPS} steps", header, rows, left=2)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n".join(output.markdown_table(header, rows)) + "\n")
    output.write_json(_JSON.value, results)
    if _PLOT.value:
        draw(results, _PLOT.value)


def draw(results: list[dict[str, Any]], path: str) -> None:
    """Draws the losses of the first jobs by time, a panel for each cluster."""
    import matplotlib  # imported late: ranks need it not
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, len(CLUSTERS), figsize=(4 * len(CLUSTERS), 3.4))
    for ax, cluster in zip(axes, CLUSTERS):
        for i, way in enumerate((*WAYS, _ON_ARRIVAL)):
            for result in results:
                if (result["cluster"], result["way"]) == (cluster, way) and way != "SSP(0)":  # which is "bsp"
                    ends = result["jobs"][0][0]["epochs"]
                    ax.plot([end[0] for end in ends], [end[1] for end in ends], "o--" if way == _ON_ARRIVAL else "o-",
                            color=f"C{i}", markersize=3, label=way)
        ax.set(title=cluster, xlabel="seconds", ylabel="loss on other data", yscale="log")
        ax.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})  # omits the version of matplotlib
    pyplot.close(figure)


if __name__ == "__main__":
    app.run(main)
