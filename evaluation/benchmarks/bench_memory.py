"""Measures the memory and the steps of ranks that update shards, beside those that update all.

    python -m evaluation.benchmarks.bench_memory --json docs/results/memory.json

Each job trains some steps of a model of square kernels by Adam, and by SGD, which has no slots: the difference of their
steps is what Adam's update takes. Jobs take turns. Before anything is reported, weights are compared: their digests are
the same on all ranks of a job, and in jobs with shards and without. A rank's peak is the memory that its process has
ever had, less what it had before the model was built.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sysconfig
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import keras
import numpy as np
import rich.progress
import tensorflow as tf

from evaluation import modules
from evaluation import output
import tf_poseidon as poseidon

_JSON = output.json_flag()
_RANKS = flags.DEFINE_integer("ranks", 4, "Number of ranks.", lower_bound=2)
_LAYERS = flags.DEFINE_integer("layers", 12, "Number of kernels of --side rows and columns.", lower_bound=1)
_SIDE = flags.DEFINE_integer("side", 4096, "Rows and columns of a kernel.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Jobs of each kind.", lower_bound=1)
_CHILD = flags.DEFINE_string("child", None, "For its own use: this process is a rank, which writes to this folder.")
_SHARDS = flags.DEFINE_bool("shards", False, "For its own use: whether this rank updates shards.")
_OPTIMIZER = flags.DEFINE_string("optimizer", "adam", "For its own use: what this rank trains by.")

_STEPS, _ROWS, _TIMEOUT_S = 6, 8, 900
_OPTIMIZERS = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a rank has measured.

    Attributes:
        slot_bytes: Of the optimizer's variables for trained ones.
        peak_bytes: See above.
        step_seconds: Of each step but the first.
        digest: Of the weights.
    """

    slot_bytes: int
    peak_bytes: int
    step_seconds: list[float]
    digest: str


class _Times(keras.callbacks.Callback):
    """Notes when steps end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def train() -> tuple[int, Rank]:
    """Trains as one rank of a job; returns its number, and what it has measured."""
    strategy = poseidon.PoseidonStrategy("ps", shard_update=_SHARDS.value, timeout_s=_TIMEOUT_S)
    keras.utils.set_random_seed(1)
    before, times, rng = _resident_bytes(), _Times(), np.random.default_rng(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((_SIDE.value,)), *(
            keras.layers.Dense(_SIDE.value, use_bias=False) for _ in range(_LAYERS.value))])
        model.compile(_OPTIMIZERS[_OPTIMIZER.value](1e-3), "mse")
    x, y = rng.normal(size=(2, _ROWS * _STEPS, _SIDE.value)).astype(np.float32)
    model.fit(x, y, batch_size=_ROWS, shuffle=False, verbose=0, callbacks=[times])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    held = sum(_held_bytes(variable.value) for variable in model.optimizer.variables)
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(weight.tobytes())
    return strategy.rank, Rank(held, peak, np.diff(times.ends).tolist(), digest.hexdigest())


def _resident_bytes() -> int:
    """Returns the memory that this process has."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _held_bytes(variable: tf.Variable) -> int:
    """Returns the bytes that this rank has of a variable."""
    held = getattr(variable, "_holding", None)
    value = variable.read_value() if held is None else held.read()
    return int(tf.size(value)) * variable.dtype.size


def run(shards: bool, optimizer: str) -> list[Rank]:
    """Runs a job."""
    launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(_RANKS.value)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher, *modules.command("benchmarks.bench_memory"), f"--child={folder}", f"--shards={shards}",
             f"--optimizer={optimizer}", f"--layers={_LAYERS.value}", f"--side={_SIDE.value}"], capture_output=True,
            text=True, timeout=_TIMEOUT_S, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})
        if done.returncode:
            raise SystemExit(f"The job ended with status {done.returncode}, expected 0:\n{done.stderr[-4000:]}")
        return [Rank(**json.loads((pathlib.Path(folder) / f"{rank}.json").read_text()))
                for rank in range(_RANKS.value)]


def main(_: list[str]) -> None:
    if _CHILD.value:
        rank, measured = train()
        output.write_json(pathlib.Path(_CHILD.value) / f"{rank}.json", measured)
        return
    kinds = [(optimizer, shards) for optimizer in _OPTIMIZERS for shards in (False, True)]
    jobs: dict[tuple[str, bool], list[list[Rank]]] = {kind: [] for kind in kinds}
    with rich.progress.Progress() as progress:
        for turn in progress.track(range(_ROUNDS.value * len(kinds)), description="jobs"):
            optimizer, shards = kinds[turn % len(kinds)]
            jobs[optimizer, shards].append(run(shards, optimizer))
    for optimizer in _OPTIMIZERS:
        digests = {rank.digest for shards in (False, True) for job in jobs[optimizer, shards] for rank in job}
        if len(digests) != 1:
            raise SystemExit(f"Jobs that train by {optimizer} end with {len(digests)} different weights, expected the "
                             "same with shards and without, on all ranks; one of them trains wrongly.")
    rows = []
    for (optimizer, shards), ranks in jobs.items():
        seconds = sorted(second for job in ranks for second in job[0].step_seconds)
        every = [rank for job in ranks for rank in job]
        rows.append([optimizer, "shards" if shards else "all", f"{max(rank.slot_bytes for rank in every) / 1e9:.3f}",
                     f"{max(rank.peak_bytes for rank in every) / 1e9:.2f}", f"{statistics.median(seconds):.2f}",
                     f"{seconds[0]:.2f}-{seconds[-1]:.2f}"])
    output.show(f"{_LAYERS.value * _SIDE.value**2 / 1e6:,.0f} M parameters, {_RANKS.value} ranks", [
        "optimizer", "updates", "slots, GB", "peak, GB", "step, s", "from-to"], rows, left=2)
    output.write_json(_JSON.value, [{"optimizer": optimizer, "shards": shards, "jobs": ranks}
                                    for (optimizer, shards), ranks in jobs.items()])


if __name__ == "__main__":
    app.run(main)
