"""Jobs whose ranks are killed, and which start again: how they are run and compared, and the report about them."""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import statistics
import subprocess
import sysconfig
import tempfile
import threading
import time

import numpy as np
from rich import progress

from evaluation import modules
from evaluation.faults import killed_program
from tf_poseidon.emulation import emulated_cluster

_RUN = os.path.join(sysconfig.get_path("scripts"), "tf-poseidon")
_LONGEST_S = 120.0  # of a start
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill, and what became of it.

    Attributes:
        moment: When, of `killed_program.MOMENTS`.
        rank: Whom.
        place: Where the job ran, of `PLACES`.
        ranks: Number of ranks.
        seconds: From the kill to the end of the job, all of its processes; None if the moment was not reached.
        status: The exit status of the job.
    """

    moment: str
    rank: int
    place: str
    ranks: int
    seconds: float | None
    status: int | None


def run_job(directory: pathlib.Path, place: str, ranks: int, seed: int, kills: Sequence[tuple[str, int]],
            dedicated: int = 0, updated: str = "whole") -> tuple[list[Kill], str]:
    """Runs a job that is killed, and starts it again; returns the kills, and what is wrong, or "".

    Args:
        directory: A new directory for its files.
        place: Where, of `PLACES`.
        ranks: Number of ranks.
        seed: Of data and weights.
        kills: (moment, rank) of the kill in each start.
        dedicated: How many of the ranks only serve.
        updated: What each rank updates of variables: "whole" or "shards".
    """
    directory.mkdir()
    program = [*modules.command("faults.killed_program"), str(directory), str(seed), str(dedicated), updated,
               *(f"{moment}:{rank}" for moment, rank in kills)]
    ends, status, output = _START[place](program, ranks, len(kills))
    done, shared = [], []
    for start, (moment, rank) in enumerate(kills):
        file = directory / f"killed.{start}"
        ended, code = ends[start] if start < len(ends) else (None, None)
        seconds = None
        if file.exists():
            killed = json.loads(file.read_text())
            shared += killed["shared"]
            seconds = ended - killed["time"] if ended else None
        done.append(Kill(moment, rank, place, ranks, seconds, code))
    where = f"{ranks} ranks, {place}"
    wrong = [f"{where}: the rank {kill.rank} was not killed at '{kill.moment}'" for kill in done
             if kill.seconds is None]
    if status:
        wrong.append(f"{where}: the job ended with status {status}: {output[-1500:]}")
    if left := _processes_with(str(directory)):
        wrong.append(f"{where}: the processes {left} are left")
    if left := [path for path in shared if os.path.exists(path)]:
        wrong.append(f"{where}: {left} are left")
    return done, "; ".join(wrong)


# Each of these starts a program, and starts it again when it fails. They return the times and statuses of those starts
# that have failed, the status of the last one, and what was printed.
_Starts = tuple[list[tuple[float, int]], int, str]


def _by_tf_poseidon_run(program: Sequence[str], ranks: int, restarts: int,
                        cluster: emulated_cluster.EmulatedCluster | None = None) -> _Starts:
    hosts = ["-hosts", ",".join(cluster.names)] if cluster else []
    command = [_RUN, "run", "-n", str(ranks), *hosts, "--restarts", str(restarts), "--", *program]
    lines: list[tuple[float, str]] = []
    reading, writing = os.pipe()

    def read() -> None:
        with open(reading, errors="replace") as errors:
            for line in errors:
                lines.append((time.time(), line))

    reader = threading.Thread(target=read)
    reader.start()
    options = {"stdout": subprocess.DEVNULL, "stderr": writing, "env": os.environ | _QUIET}
    try:
        if cluster:
            status = cluster.run(command, launcher="command", **options)
        else:
            status = subprocess.run(command, timeout=_LONGEST_S * (restarts + 1), **options).returncode
    finally:
        os.close(writing)
        reader.join()
    ends = [(when, int(found[1])) for when, line in lines
            if (found := re.match(r"tf-poseidon run: the job ended with status (\d+)", line))]
    return ends, status, "".join(line for _, line in lines)


def _on_emulated_hosts(program: Sequence[str], ranks: int, restarts: int) -> _Starts:
    with emulated_cluster.EmulatedCluster(ranks, 1) as cluster:
        return _by_tf_poseidon_run(program, ranks, restarts, cluster)


def _by_horovodrun(program: Sequence[str], ranks: int, restarts: int) -> _Starts:
    command = [os.path.join(os.path.dirname(_RUN), "horovodrun"), "--gloo", "-np", str(ranks), "-H",
               f"localhost:{ranks}", *program]
    ends, output = [], ""
    for start in range(restarts + 1):
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
                              timeout=_LONGEST_S, env=os.environ | _QUIET | {"TF_POSEIDON_RESTARTS": str(start)})
        output += done.stderr
        if done.returncode == 0:
            break
        ends.append((time.time(), done.returncode))
    return ends, done.returncode, output


_ROUNDING = 1e-9  # of 18 steps in double precision, as derived in tests/training/test_training.py
_START = {"one host": _by_tf_poseidon_run, "emulated hosts": _on_emulated_hosts, "horovodrun": _by_horovodrun}
PLACES = tuple(_START)


def _processes_with(text: str) -> list[int]:
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def weights(directory: pathlib.Path, ranks: int) -> list[list[np.ndarray]]:
    """Returns the weights of each rank; empty lists if it has not written them."""
    paths = [directory / f"weights.{rank}.npz" for rank in range(ranks)]
    return [list(np.load(path).values()) if path.exists() else [] for path in paths]


def difference(place: str, found: Sequence[Sequence[np.ndarray]], undisturbed: Sequence[Sequence[np.ndarray]]) -> str:
    """Returns what is wrong with the weights of a job's ranks, "" if nothing.

    Horovod's sums of three and more ranks are taken in another order from run to run.
    """
    def bits(ranks: Sequence[Sequence[np.ndarray]]) -> list[list[bytes]]:
        return [[value.tobytes() for value in values] for values in ranks]

    if not all(found) or bits(found) != [bits(found)[0]] * len(undisturbed):
        return "ranks have no weights, or others than rank 0"
    if place == "horovodrun" and len(found) > 2:
        is_same = all(np.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING) for a, b in zip(found[0], undisturbed[0]))
        return "" if is_same else "other weights than an undisturbed job"
    return "" if bits(found) == bits(undisturbed) else "other bits than an undisturbed job"


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that is killed several times.

    Attributes:
        number: Its number.
        place: Where it runs, one of `PLACES`.
        ranks: Its number of ranks.
        kills: The moments, and the rank that is killed at each.
    """

    number: int
    place: str
    ranks: int
    kills: tuple[tuple[str, int], ...]


def jobs(number: int, places: Sequence[str], ranks: Sequence[int], together: int, seed: int) -> list[Job]:
    """Returns the jobs of a campaign.

    Args:
        number: Number of kills.
        places: Of `PLACES`, one after the other.
        ranks: Numbers of ranks, one after the other in each place.
        together: Kills of one job.
        seed: Of ranks and of the order of moments.
    """
    rng = random.Random(seed)
    moments = itertools.cycle(killed_program.MOMENTS)
    found: list[Job] = []
    for size, place in itertools.cycle(itertools.product(ranks, places)):
        left = number - sum(len(job.kills) for job in found)
        if left <= 0:
            return found
        kills = []
        for _ in range(min(together, left)):
            moment = next(moments)
            # Rank 0 alone writes backups.
            kills.append((moment, 0 if moment == "while a backup is written" else rng.randrange(size)))
        rng.shuffle(kills)
        # After these, no step is left in which others could be reached.
        last = ("end of training", "after training")
        kills.sort(key=lambda kill: last.index(kill[0]) if kill[0] in last else -1)
        found.append(Job(len(found), place, size, tuple(kills)))


def campaign(all_jobs: Sequence[Job], seed: int, at_once: int = 3) -> tuple[list[Kill], list[str]]:
    """Runs jobs; returns the kills, and what is wrong.

    Args:
        all_jobs: The `Job`s.
        seed: Of the program.
        at_once: How many run at a time: a job that starts again waits more than it computes.
    """
    done, wrong = [], []
    # In processes: a cluster of emulated hosts handles signals, for which it needs the main thread.
    with (tempfile.TemporaryDirectory() as name, progress.Progress() as bar,
          futures.ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool):
        task = bar.add_task("kills", total=sum(len(job.kills) for job in all_jobs))

        def start(size: int, place: str, label: str, kills: Sequence[tuple[str, int]] = ()) -> tuple[
                pathlib.Path, "futures.Future[tuple[list[Kill], str]]"]:
            path = pathlib.Path(name) / label
            return path, pool.submit(run_job, path, place, size, seed, kills)

        undisturbed = {(ranks, place): start(ranks, place, f"undisturbed {ranks} {place}")
                       for ranks, place in dict.fromkeys((job.ranks, job.place) for job in all_jobs)}
        started = [(job, *start(job.ranks, job.place, f"job {job.number:03}", job.kills)) for job in all_jobs]
        wrong += [problem for _, run in undisturbed.values() if (problem := run.result()[1])]
        for job, path, run in started:
            found, problem = run.result()
            done += found
            expected = weights(undisturbed[job.ranks, job.place][0], job.ranks)
            if other := difference(job.place, weights(path, job.ranks), expected):
                problem = "; ".join(filter(None, [problem, f"{job.ranks} ranks, {job.place}: {other}"]))
            if problem:
                wrong.append(f"job {job.number}, {job.kills}: {problem}")
            bar.console.print(f"job {job.number}, {job.ranks} ranks, {job.place}: {problem or 'as it must'}")
            bar.update(task, completed=len(done))
    return done, wrong


def report(kills: Sequence[Kill], wrong: Sequence[str]) -> str:
    """Returns the report as Markdown."""
    rows = []
    for place, moment in itertools.product(PLACES, killed_program.MOMENTS):
        found = [kill for kill in kills if (kill.place, kill.moment) == (place, moment) and kill.seconds is not None]
        if found:
            seconds = sorted(kill.seconds for kill in found)
            rows.append(f"| {place} | {moment} | {len(found)} "
                        f"| {', '.join(map(str, sorted({kill.ranks for kill in found})))} "
                        f"| {statistics.median(seconds):.1f} | {seconds[-1]:.1f} |")
    return "\n".join([
        "# Ranks that are killed", "",
        "Written by `evaluation.faults.kills --markdown`. A rank kills itself with SIGKILL; `tf-poseidon run` starts",
        "the job again, and horovodrun is run again. It resumes from its backup of every second step, and is killed",
        "again. In the end it must have the bits of a job that was not disturbed, and leave no process, and nothing in",
        "/dev/shm. With Horovod on three and more ranks, whose sums are taken in another order from run to run,",
        f"weights may differ by {_ROUNDING:g}. Seconds are those from the kill to the end of all processes of the job.",
        "",
        "| where | killed | kills | ranks | median, s | longest, s |", "|---|---|---|---|---|---|", *rows, "",
        f"{len(kills)} kills; {len(wrong) or 'nothing'} {'jobs are' if wrong else 'is'} wrong.",
        *(f"* {text}" for text in wrong), ""])
