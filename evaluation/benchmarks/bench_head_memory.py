"""Measures the memory of ranks of which each has some classes of a head, beside one process that has all.

    python -m evaluation.benchmarks.bench_head_memory --json docs/results/head_memory.json

Both train some steps by Adam, and take turns. Before anything is reported, their losses are compared. A rank's peak is
the memory that its process has ever had, less what it had before the model was built.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
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

from evaluation import modules
from evaluation import output
import tf_poseidon as poseidon

_JSON = output.json_flag()
_RANKS = flags.DEFINE_integer("ranks", 4, "Number of ranks.", lower_bound=1)
_CLASSES = flags.DEFINE_integer("classes", 1_000_000, "Outputs of the head.", lower_bound=1)
_FEATURES = flags.DEFINE_integer("features", 256, "Its inputs.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Jobs of each kind.", lower_bound=1)
_CHILD = flags.DEFINE_string("child", None, "For its own use: this process is a rank, which writes to this folder.")

_STEPS, _ROWS, _TIMEOUT_S = 4, 16, 900
_TOLERANCE = 1e-5  # of losses, whose terms are added up in another order


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a rank, or one process, has measured.

    Attributes:
        peak_bytes: See above.
        step_seconds: Of each step but the first.
        losses: Of each step.
    """

    peak_bytes: int
    step_seconds: list[float]
    losses: list[float]


class _Steps(keras.callbacks.Callback):
    """Notes when steps end, and their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(float(logs["loss"]))


def train(in_job: bool) -> tuple[int, Trained]:
    """Trains, as a rank of a job or alone; returns its number, and what it has measured."""
    strategy = poseidon.PoseidonStrategy(pins={"*head/kernel": "columns"}, timeout_s=_TIMEOUT_S) if in_job else None
    keras.utils.set_random_seed(1)
    rng, steps = np.random.default_rng(0), _Steps()
    x = rng.normal(size=(_STEPS * _ROWS, _FEATURES.value)).astype(np.float32)
    y = rng.integers(_CLASSES.value, size=len(x))
    before = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((_FEATURES.value,)), keras.layers.Dense(_FEATURES.value, "relu"),
                                  keras.layers.Dense(_CLASSES.value, use_bias=False, name="head")])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, _ROWS, shuffle=False, verbose=0, callbacks=[steps])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return strategy.rank if strategy else 0, Trained(peak, np.diff(steps.ends).tolist(), steps.losses)


def run(ranks: int) -> list[Trained]:
    """Runs a job, or one process."""
    launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*launcher, *modules.command("benchmarks.bench_head_memory"), f"--child={folder}", f"--ranks={ranks}",
             f"--classes={_CLASSES.value}", f"--features={_FEATURES.value}"], capture_output=True, text=True,
            timeout=_TIMEOUT_S, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})
        if done.returncode:
            sys.exit(f"The job ended with status {done.returncode}, expected 0:\n{done.stderr[-4000:]}")
        return [Trained(**json.loads((pathlib.Path(folder) / f"{rank}.json").read_text())) for rank in range(ranks)]


def main(_: list[str]) -> None:
    if _CHILD.value:
        rank, trained = train(_RANKS.value > 1)
        output.write_json(pathlib.Path(_CHILD.value) / f"{rank}.json", trained)
        return
    jobs: dict[int, list[list[Trained]]] = {1: [], _RANKS.value: []}
    with rich.progress.Progress() as progress:
        for turn in progress.track(range(2 * _ROUNDS.value), description="jobs"):
            ranks = list(jobs)[turn % 2]
            jobs[ranks].append(run(ranks))
    expected = jobs[1][0][0].losses
    for job in [job for of_ranks in jobs.values() for job in of_ranks]:
        for rank, trained in enumerate(job):
            if not np.allclose(trained.losses, expected, rtol=_TOLERANCE, atol=0):
                sys.exit(f"Rank {rank} of {len(job)} has losses {trained.losses}, expected {expected}, those of one "
                         "process: the head is not trained alike.")
    alone = statistics.median(job[0].peak_bytes for job in jobs[1])
    rows = []
    for ranks, of_ranks in jobs.items():
        peaks = sorted(trained.peak_bytes for job in of_ranks for trained in job)
        seconds = sorted(second for job in of_ranks for second in job[0].step_seconds)
        rows.append([f"{ranks}", f"{statistics.median(peaks) / 1e9:.2f}", f"{peaks[0] / 1e9:.2f}-{peaks[-1] / 1e9:.2f}",
                     f"{statistics.median(peaks) / alone:.3f}", f"{peaks[-1] / alone:.3f}",
                     f"{statistics.median(seconds):.2f}"])
    output.show(f"{_CLASSES.value:,} classes x {_FEATURES.value}, Adam", [
        "ranks", "peak, GB", "from-to", "of one process", "the largest", "step, s"], rows, left=0)
    output.write_json(_JSON.value, [{"ranks": ranks, "jobs": of_ranks} for ranks, of_ranks in jobs.items()])


if __name__ == "__main__":
    app.run(main)
