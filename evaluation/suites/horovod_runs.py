"""Runs Horovod's tests and examples in jobs of two ranks, which are continued after a test that died or hung."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
import signal
import subprocess
import sysconfig
import tempfile
import time
from typing import Any

import numpy as np

from evaluation import modules
from evaluation.suites import horovod_examples
from evaluation.suites.horovod_outcomes import merged
from evaluation.suites.horovod_outcomes import Result
from evaluation.suites.horovod_outcomes import Results

RANKS = 2
# How long mpiexec may take to end a job of which a rank has died.
_LAUNCHER_S = 5


def job(arguments: Sequence[str], out: pathlib.Path, keras: int, timeout_s: float, grace_s: float) -> tuple[
        list[list[dict[str, Any]]], str]:
    """Runs horovod_job.py on all ranks; returns their notes, and why the job ended early, or "".

    It is ended when nothing is noted for `timeout_s`, or when a rank has failed in a test that the others have not
    ended `grace_s` later.
    """
    kind, how, *others = arguments
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": str(int(keras == 2)), "PYTHONDONTWRITEBYTECODE": "1"}
    mpiexec = os.path.join(sysconfig.get_path("scripts"), "mpiexec")
    log = pathlib.Path(f"{out}.log")
    with log.open("w") as file:
        process = subprocess.Popen([mpiexec, "-n", str(RANKS), *modules.command("suites.horovod_job"), kind, how,
                                    str(out), *others], stdout=file, stderr=subprocess.STDOUT, cwd=out.parent,
                                   env=environment, start_new_session=True)
    before, since, why = None, time.monotonic(), ""
    try:
        while process.poll() is None and not why:
            time.sleep(0.2)
            notes = notes_of(out)
            if notes != before:
                before, since = notes, time.monotonic()
            waited = time.monotonic() - since
            if waited > timeout_s:
                why = f"did not end within {timeout_s:g} s"
            elif waited > grace_s and _one_has_failed(notes):
                why = f"failed on one rank, and did not end on others within {grace_s:g} s"
            elif waited > _LAUNCHER_S and (died := [rank for rank in range(RANKS) if _has_died(notes[rank])]):
                why = f"rank {died[0]} died"  # mpiexec waits for the others unless they use MPI
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not why and process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = f"the job ended with status {process.returncode}: {' / '.join(lines[-3:])[-300:]}"
    return notes_of(out), why


def notes_of(out: pathlib.Path) -> list[list[dict[str, Any]]]:
    """Returns the notes of each rank; a line that is not complete yet is left out."""
    result = []
    for rank in range(RANKS):
        path = pathlib.Path(f"{out}.{rank}")
        text = path.read_text() if path.exists() else ""
        result.append([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])
    return result


def _has_died(rank: Sequence[Mapping[str, Any]]) -> bool:
    return bool(rank) and "finished" not in rank[-1] and not pathlib.Path("/proc", str(rank[0]["pid"])).exists()


def _one_has_failed(notes: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    ends = [[note for note in rank if "ends" in note] for rank in notes]
    most = max(ends, key=len)
    return min(map(len, ends)) < len(most) and most[-1]["outcome"] == "failed"


def run_suite(path: str, how: str, keras: int, timeout_s: float, grace_s: float,
              without: Sequence[str] = ()) -> Results:
    """Returns the result of each test of a file that no pattern leaves out, in as many jobs as it takes."""
    results: Results = {}
    while True:
        with tempfile.TemporaryDirectory() as directory:
            notes, why = job(["tests", how, path, str(len(results)), ",".join(without)],
                             pathlib.Path(directory) / "notes", keras, timeout_s, grace_s)
        broken = [note["broken"] for rank in notes for note in rank if "broken" in note]
        names, found = merged(notes, why)
        results |= found
        if broken or not names:
            return {"(collection)": Result("failed", broken[0] if broken else why)}
        if len(results) == len(names):
            if why and all(any("finished" in note for note in rank) for rank in notes):
                results["(end of the job)"] = Result("failed", why)
            return results
        if not found:
            results[names[len(results)]] = Result("failed", f"before it began, {why or 'the job ended'}")


def run_example(example: horovod_examples.Example, how: str, checkout: str, timeout_s: float) -> tuple[
        Result, list[dict[str, np.ndarray]]]:
    """Returns the result of an example, and what each rank has computed."""
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "notes"
        notes, why = job(["example", how, checkout, example.name], out, 2, timeout_s, timeout_s)
        _, results = merged(notes, why)
        result = results.get(example.name, Result("failed", why))
        if result.outcome != "passed":
            return result, []
        if why:
            return Result("failed", why), []
        return result, [dict(np.load(f"{out}.{rank}.npz")) for rank in range(RANKS)]
