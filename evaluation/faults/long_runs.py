"""Trains for long in one process, and shows what grows: memory, descriptors, threads, tables of exchanges.

    mpiexec -n 2 python -m evaluation.faults.long_runs --steps 10000 --fits 300 --markdown docs/results/long_runs.md

First many steps of one model, then many calls of `fit`, each of a new model. The exit status is 1 if the second half of
either needs more than --growth_mib of memory, or any descriptor, thread or table entry. Alone, without mpiexec, it
shows plain Keras.
"""

from collections.abc import Callable
from collections.abc import Sequence
import gc
import os
import pathlib
import sys
from typing import NamedTuple

from absl import app
from absl import flags
import keras
import numpy as np

from evaluation import output
import tf_poseidon as poseidon

ROWS, BATCH, LOOKS = 64, 16, 10


class Resources(NamedTuple):
    """What a process has.

    Attributes:
        mib: Resident memory, MiB.
        descriptors, threads: Their numbers.
        sites: Names under which it has exchanged.
        objects: Python objects.
    """

    mib: float
    descriptors: int
    threads: int
    sites: int
    objects: int


def look(strategy: poseidon.PoseidonStrategy) -> Resources:
    """Returns what this process has, after a garbage collection."""
    gc.collect()
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return Resources(int(status["VmRSS"].split()[0]) / 1024, len(os.listdir("/proc/self/fd")), int(status["Threads"]),
                     len(strategy.stats()["sites"]), len(gc.get_objects()))


def problem(looks: Sequence[Resources], growth_mib: float) -> str:
    """Returns what has grown in the second half of some looks, or ""."""
    middle, last = looks[len(looks) // 2 - 1], looks[-1]
    found = [f"{last.mib - middle.mib:.0f} MiB of memory"] * (last.mib - middle.mib > growth_mib)
    found += [f"{getattr(last, name) - getattr(middle, name)} {name}" for name in ("descriptors", "threads", "sites")
              if getattr(last, name) > getattr(middle, name)]
    return ", ".join(found)


def _model(strategy: poseidon.PoseidonStrategy) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"),
                                  keras.layers.BatchNormalization(), keras.layers.Dense(2)])
        model.compile("adam", "mse", metrics=["mae"])
    return model


def _data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(ROWS, 8)).astype("float32")
    return x, x[:, :2]


def steps(strategy: poseidon.PoseidonStrategy, count: int, tell: Callable[[int, Resources], None]) -> list[Resources]:
    """Makes steps of one model; returns what the process has after each tenth."""
    model, (x, y), looks = _model(strategy), _data(), []
    epochs = count * BATCH // ROWS // LOOKS
    for number in range(1, LOOKS + 1):
        model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)
        looks.append(look(strategy))
        tell(number * epochs * ROWS // BATCH, looks[-1])
    return looks


def fits(strategy: poseidon.PoseidonStrategy, count: int, tell: Callable[[int, Resources], None]) -> list[Resources]:
    """Trains, evaluates and uses one new model after the other; returns what the process has after each tenth."""
    (x, y), looks = _data(), []
    for number in range(1, count + 1):
        model = _model(strategy)
        model.fit(x, y, batch_size=BATCH, verbose=0, validation_data=(x, y))
        model.predict(x, verbose=0)
        del model
        keras.backend.clear_session()
        if number % max(1, count // LOOKS) == 0:
            looks.append(look(strategy))
            tell(number, looks[-1])
    return looks


def report(rows: Sequence[tuple[str, Resources]], ranks: int, problems: Sequence[str]) -> str:
    """Returns the report as Markdown."""
    cells = [(name, f"{found.mib:.0f}", *(f"{value:,}" for value in found[1:])) for name, found in rows]
    header = ("after", "memory, MiB", "descriptors", "threads", "names of exchanges", "Python objects")
    return "\n".join([
        "# Long runs", "", f"Written by `evaluation.faults.long_runs --markdown`: what rank 0 of {ranks} has after "
        "steps of one model, and", "then after calls of `fit`, each of a new model.", "",
        *output.markdown_table(header, cells), "",
        *(problems or ["No second half adds descriptors, threads or names, and each adds less than "
                       f"{_GROWTH_MIB.value:g} MiB of memory."]), ""])


def main(_: Sequence[str]) -> int:
    strategy = poseidon.PoseidonStrategy()
    rows, problems = [], []
    for name, run, count in (("steps", steps, _STEPS.value), ("fits", fits, _FITS.value)):

        def tell(number: int, found: Resources, name: str = name) -> None:
            rows.append((f"{number:,} {name}", found))
            if strategy.rank == 0:
                print(f"{number:,} {name}: {found.mib:.0f} MiB, {found.descriptors} descriptors, {found.threads} "
                      f"threads, {found.sites} names, {found.objects:,} objects", flush=True)

        if grown := problem(run(strategy, count, tell), _GROWTH_MIB.value):
            problems.append(f"Rank {strategy.rank}: the second half of {count} {name} has added {grown}.")
    sys.stdout.write("".join(f"{text}\n" for text in problems))
    if strategy.rank == 0 and _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(report(rows, strategy.num_replicas_in_sync, problems))
    return bool(problems)


if __name__ == "__main__":
    _STEPS = flags.DEFINE_integer("steps", 10000, "Steps of one model.")
    _FITS = flags.DEFINE_integer("fits", 300, "Calls of fit, each of a new model.")
    _GROWTH_MIB = flags.DEFINE_float("growth_mib", 64, "Most memory that a second half may add, MiB.")
    _MARKDOWN = output.markdown_flag()
    app.run(main)
