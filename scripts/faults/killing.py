"""Jobs whose ranks are killed, and which start again: how they are run and compared, and the report about them."""

from collections.abc import Sequence
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

import killed_program
import numpy as np
from rich import progress

_PROGRAM = pathlib.Path(killed_program.__file__)
_RUN = os.path.join(sysconfig.get_path("scripts"), "tf-poseidon")
_LONGEST_S = 120.0  # of a start


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill, and what became of it.

    Attributes:
        moment: When, of `killed_program.MOMENTS`.
        rank: Whom.
        ranks: Number of ranks.
        seconds: From the kill to the end of the job, all of its processes; None if the moment was not reached.
        status: The exit status of the job.
    """

    moment: str
    rank: int
    ranks: int
    seconds: float | None
    status: int | None


def run_job(directory: pathlib.Path, ranks: int, seed: int, kills: Sequence[tuple[str, int]]) -> tuple[
        list[Kill], str]:
    """Runs a job that is killed, and starts it again; returns the kills, and what is wrong, or "".

    Args:
        directory: A new directory for its files.
        ranks: Number of ranks.
        seed: Of data and weights.
        kills: (moment, rank) of the kill in each start.
    """
    directory.mkdir()
    process = subprocess.Popen(
        [_RUN, "run", "-n", str(ranks), "--restarts", str(len(kills)), "--", sys.executable, str(_PROGRAM),
         str(directory), str(seed), *(f"{moment}:{rank}" for moment, rank in kills)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})
    ends, lines, deadline = [], [], time.monotonic() + _LONGEST_S * (len(kills) + 1)
    for line in process.stderr:
        lines.append(line)
        if found := re.match(r"tf-poseidon run: the job ended with status (\d+)", line):
            ends.append((time.time(), int(found[1])))
        if time.monotonic() > deadline:
            break
    status = process.wait(_LONGEST_S)
    done, shared = [], []
    for start, (moment, rank) in enumerate(kills):
        file = directory / f"killed.{start}"
        ended, code = ends[start] if start < len(ends) else (None, None)
        seconds = None
        if file.exists():
            killed = json.loads(file.read_text())
            shared += killed["shared"]
            seconds = ended - killed["time"] if ended else None
        done.append(Kill(moment, rank, ranks, seconds, code))
    wrong = [f"{ranks} ranks: the rank {kill.rank} was not killed at '{kill.moment}'" for kill in done
             if kill.seconds is None]
    if status:
        wrong.append(f"{ranks} ranks: the job ended with status {status}: {''.join(lines)[-1500:]}")
    if left := _processes_with(str(directory)):
        wrong.append(f"{ranks} ranks: the processes {left} are left")
    if left := [path for path in shared if os.path.exists(path)]:
        wrong.append(f"{ranks} ranks: {left} are left")
    return done, "; ".join(wrong)


def _processes_with(text: str) -> list[int]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def weights(directory: pathlib.Path, ranks: int) -> list[list[bytes]]:
    """Returns the bits of the weights of each rank; empty lists if it has not written them."""
    paths = [directory / f"weights.{rank}.npz" for rank in range(ranks)]
    return [[value.tobytes() for value in np.load(path).values()] if path.exists() else [] for path in paths]


def campaign(number: int, ranks: Sequence[int], together: int, seed: int) -> tuple[list[Kill], list[str]]:
    """Runs jobs until there were as many kills; returns these, and what is wrong."""
    rng = random.Random(seed)
    moments = itertools.cycle(killed_program.MOMENTS)
    done: list[Kill] = []
    wrong = []
    with tempfile.TemporaryDirectory() as name, progress.Progress() as bar:
        task = bar.add_task("kills", total=number)
        undisturbed = {}
        for job, size in zip(itertools.count(), itertools.cycle(ranks)):
            if len(done) >= number:
                break
            if size not in undisturbed:
                path = pathlib.Path(name) / f"undisturbed {size}"
                wrong += filter(None, [run_job(path, size, seed, ())[1]])
                undisturbed[size] = weights(path, size)
            kills = []
            for _ in range(min(together, number - len(done))):
                moment = next(moments)
                # Rank 0 alone writes backups.
                kills.append((moment, 0 if moment == "while a backup is written" else rng.randrange(size)))
            rng.shuffle(kills)
            # After these, no step is left in which others could be reached.
            last = ("end of training", "after training")
            kills.sort(key=lambda kill: last.index(kill[0]) if kill[0] in last else -1)
            path = pathlib.Path(name) / f"job {job}"
            found, problem = run_job(path, size, seed, kills)
            done += found
            found_weights = weights(path, size)
            if found_weights != undisturbed[size] or not all(found_weights):
                problem = "; ".join(filter(None, [problem, f"{size} ranks: other bits than an undisturbed job"]))
            if problem:
                wrong.append(f"job {job}, {kills}: {problem}")
            bar.update(task, completed=len(done))
    return done, wrong


def report(kills: Sequence[Kill], wrong: Sequence[str]) -> str:
    """Returns the report as Markdown."""
    rows = []
    for moment in killed_program.MOMENTS:
        seconds = sorted(kill.seconds for kill in kills if kill.moment == moment and kill.seconds is not None)
        if seconds:
            ranks = sorted({kill.ranks for kill in kills if kill.moment == moment})
            rows.append(f"| {moment} | {len(seconds)} | {', '.join(map(str, ranks))} "
                        f"| {statistics.median(seconds):.1f} | {seconds[-1]:.1f} |")
    return "\n".join([
        "# Ranks that are killed", "",
        "Written by `scripts/faults/kills.py --markdown`. A rank kills itself with SIGKILL; `tf-poseidon run` starts",
        "the job again, which resumes from its backup of every second step, and is killed again. In the end it must",
        "have the bits of a job that was not disturbed, and leave no process, and nothing in /dev/shm. Seconds are",
        "those from the kill to the end of all processes of the job.", "",
        "| killed | kills | ranks | median, s | longest, s |", "|---|---|---|---|---|", *rows, "",
        f"{len(kills)} kills; {len(wrong) or 'nothing'} {'jobs are' if wrong else 'is'} wrong.",
        *(f"* {text}" for text in wrong), ""])
