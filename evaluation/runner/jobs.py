"""Starts jobs of ranks that run named items, one job after another until each item has an outcome."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sysconfig
import tempfile
import time
from typing import Any

from evaluation import modules
from evaluation.runner import notes as notes_
from evaluation.runner import outcomes
from evaluation.runner.outcomes import Outcome
from evaluation.runner.outcomes import Outcomes

# How much longer it may take until the first item begins.
_START_S = 120.0
# How long mpiexec may take to end a job of which a rank has died.
_LAUNCHER_S = 5.0
_OUTPUT = 4000  # characters

_Notes = Sequence[Sequence[Mapping[str, Any]]]  # of each rank


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks of a job do.

    Attributes:
        module: The module that each rank runs, with the job's directory as its argument: "suites.keras_rank".
        ranks: How many there are.
        how: How they run the items, as "plain".
        options: What else their module needs, as JSON has it.
        environment: Variables of their environment.
        timeout_s: Longest time of an item.
        wait_s: How long the other ranks may take after an item has failed on one.
    """

    module: str
    ranks: int
    how: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    timeout_s: float = 300
    wait_s: float = 60


def run(job: Job, items: Sequence[str] | None = None) -> Outcomes:
    """Runs items in as many jobs as it takes: after one that ends its job, the next job continues.

    Args:
        job: How they run.
        items: Their names; None for all that the ranks find.

    Raises:
        RuntimeError: If a job ended before it knew its items.
    """
    results: Outcomes = {}
    while items is None or items:
        notes, why, output = _run(job, items)
        collected = next((note["collected"] for rank in notes for note in rank if "collected" in note), None)
        if collected is None:
            raise RuntimeError(f"A job of {job.ranks} ranks of {job.module} ended before its first item, {why}:\n"
                               f"{output}")
        found = outcomes.merged(notes, why, output)
        for name, outcome in found.items():
            if outcome.outcome == "failed":
                print(f"{name}: {outcomes.short(outcome.error)}", flush=True)
        results |= found
        items = [name for name in (collected if items is None else items) if name not in results]
        if all(rank and "finished" in rank[-1] for rank in notes):
            results |= {name: Outcome("failed", "no rank has found it") for name in items}
            if why:
                results["(end of the job)"] = Outcome("failed", why, output)
            break
        if items and not found:
            results[items[0]] = Outcome("failed", f"before it began, {why}", output)
            items = items[1:]
    return results


def _run(job: Job, items: Sequence[str] | None) -> tuple[_Notes, str, str]:
    """Runs items up to the first that ends the job; returns the notes, why it has ended early, and its last output."""
    launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(job.ranks)] if job.ranks > 1 else []
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        (directory / "work").mkdir()
        (directory / "job.json").write_text(json.dumps({
            "ranks": job.ranks, "how": job.how, "options": dict(job.options), "items": items, "wait_s": job.wait_s}))
        with (directory / "output").open("w") as output:
            process = subprocess.Popen(
                [*launcher, *modules.command(job.module), name], cwd=directory / "work", stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONDONTWRITEBYTECODE": "1"} | dict(job.environment))
        try:
            why = _watch(process, job, directory)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not why and process.returncode:
            why = f"the job ended with status {process.returncode}"
        return _read(directory, job), why, (directory / "output").read_text(errors="replace")[-_OUTPUT:]


def _watch(process: subprocess.Popen, job: Job, directory: pathlib.Path) -> str:
    """Waits for the end of a job, and returns ""; or why it must be ended."""
    paths = [directory / f"notes.{rank}" for rank in range(job.ranks)]
    before, since = None, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        sizes = [path.stat().st_size for path in paths if path.exists()]
        if sizes != before:
            before, since = sizes, time.monotonic()
        waited = time.monotonic() - since
        if waited <= min(_LAUNCHER_S, job.wait_s, job.timeout_s):
            continue
        notes = _read(directory, job)
        if waited > job.timeout_s + (0 if any("begins" in note for rank in notes for note in rank) else _START_S):
            return f"it took more than {job.timeout_s:g} s"
        if waited > job.wait_s and any(_has_failed_alone(rank, notes) for rank in notes):
            return f"failed on one rank, and did not end on others within {job.wait_s:g} s"
        if waited > _LAUNCHER_S and (died := [number for number, rank in enumerate(notes) if _has_died(rank)]):
            return f"rank {died[0]} died"  # mpiexec waits for the others unless they use MPI
    return ""


def _read(directory: pathlib.Path, job: Job) -> _Notes:
    return [[json.loads(line) for line in notes_.lines(directory / f"notes.{rank}")] for rank in range(job.ranks)]


def _has_died(rank: Sequence[Mapping[str, Any]]) -> bool:
    return bool(rank) and "finished" not in rank[-1] and not pathlib.Path("/proc", str(rank[0]["pid"])).exists()


def _has_failed_alone(rank: Sequence[Mapping[str, Any]], others: _Notes) -> bool:
    last = next((note for note in reversed(rank) if "ends" in note), None)
    return last is not None and last["outcome"] == "failed" and not all(
        any(note.get("ends") == last["ends"] for note in other) for other in others)
