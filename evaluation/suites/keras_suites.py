"""Runs Keras' own tests in the scope of a PoseidonStrategy, and writes which fail that pass plainly, and why.

    python -m evaluation.suites.keras_suites --keras DIRECTORY --markdown docs/results/keras_suites.md

DIRECTORY is a checkout of Keras, of the version that is installed. Its test files run against the installed package,
each test plainly, then on one rank and on two in the scope (`keras_plugin.py`). A test that fails otherwise on one rank
than on the other, hangs, or kills its job ends that job; the next one continues with the test after it. Some files need
packages that this project does not: jax for `trainers`, torch, pandas and grain too for `trainers/data_adapters`. The
exit status is 1 if a test that passes plainly fails in the scope without a reason in `keras_differences.py`, or if all
suites ran and a reason is not needed.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any

from absl import app
from absl import flags

from evaluation import modules
from evaluation.suites import keras_outcomes

_KERAS = flags.DEFINE_string("keras", None, "Checkout of Keras.", required=True)
_SUITES = flags.DEFINE_list("suites", [], "Suites to run, as \"trainers\"; all by default.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the report.")
_JSON = flags.DEFINE_string("json", None, "File for the outcomes; runs of a suite that it has are not repeated.")
_TIMEOUT = flags.DEFINE_float("timeout_s", 300, "Longest time of a test.")
_WAIT = flags.DEFINE_float("wait_s", 60, "Longest wait for another rank.")

SUITES = ("trainers", "trainers/data_adapters", "callbacks", "optimizers", "saving", "metrics", "losses")
# Their files are written by rank 0 and read by all ranks. In other suites, each rank writes and reads files of its own.
_SHARED = ("callbacks",)
_START = 120.0  # seconds more until the first note of a job


# ---- jobs --------------------------------------------------------------------------------------------------------


def run(files: Sequence[str], ranks: int, tests: Sequence[str] | None,
        is_shared: bool) -> keras_outcomes.Outcomes:
    """Runs tests, in as many jobs as it takes.

    Args:
        files: The test files in the checkout.
        ranks: How many ranks; 0 without a strategy.
        tests: The names of the tests; None for all in the files.
        is_shared: Whether tests have the same temporary directories on all ranks.

    Raises:
        RuntimeError: If a job ended before its first test.
    """
    outcomes, remaining = {}, tests
    while remaining is None or remaining:
        if remaining is not None:
            files = list(dict.fromkeys(test.partition("::")[0] for test in remaining))
        job = _job(files, ranks, remaining, is_shared)
        outcomes |= job.outcomes()
        for test, outcome in job.outcomes().items():
            if outcome.outcome == "failed":
                print(f"{test}: {keras_outcomes.short(outcome.error)}", flush=True)
        if job.has_finished:
            break
        if not job.outcomes():
            raise RuntimeError(f"A job of {ranks} ranks ended before its first test, {job.why}:\n{job.output[-4000:]}")
        wanted = job.collected() if remaining is None else remaining
        remaining = [test for test in wanted if test not in outcomes]
    return outcomes


def _job(files: Sequence[str], ranks: int, tests: Sequence[str] | None, is_shared: bool) -> keras_outcomes.Job:
    """Runs tests up to the first that ends the job."""
    root = pathlib.Path(_KERAS.value).resolve()
    launcher = [str(pathlib.Path(sysconfig.get_path("scripts")) / "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        notes = [directory / f"notes.{rank}" for rank in range(max(ranks, 1))]
        options = [f"--how={'scope' if ranks else 'plain'}", f"--notes={directory / 'notes'}",
                   f"--wait_s={_WAIT.value}"]
        if tests is not None:
            (directory / "tests").write_text("\n".join(tests))
            options.append(f"--tests={directory / 'tests'}")
        if is_shared:
            options.append(f"--shared={directory / 'shared'}")
        (directory / "work").mkdir()
        # The checkout must not be in Python's path: it would be imported in place of the installed package.
        path = os.pathsep.join([str(modules.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(directory / "output", "w") as output:
            process = subprocess.Popen(
                [*launcher, sys.executable, "-m", "pytest", "-p", "evaluation.suites.keras_plugin", "-p",
                 "no:cacheprovider", "-q", "--continue-on-collection-errors", "-c", str(root / "pyproject.toml"),
                 "--rootdir", str(root), "--import-mode=importlib", *options, *(str(root / file) for file in files)],
                cwd=directory / "work", stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "TF_CPP_MIN_LOG_LEVEL": "3",
                                  "TF_NUM_INTRAOP_THREADS": "1"})
            why = _wait(process, notes)
        printed = (directory / "output").read_text(errors="replace")
        return keras_outcomes.Job([_read(path) for path in notes], why, printed)


def _wait(process: subprocess.Popen, notes: Sequence[pathlib.Path]) -> str:
    """Waits for a job, ends it if ranks note nothing for too long, and returns a sentence about its end."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        now = sum(path.stat().st_size for path in notes if path.exists())
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > _TIMEOUT.value + (0 if size else _START):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it took more than {_TIMEOUT.value:g} s"
        time.sleep(0.1)
    return f"the job ended with status {process.returncode}"


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns what a rank has noted, without a line that it could not complete."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


# ---- the command -------------------------------------------------------------------------------------------------


def check_version(root: pathlib.Path) -> None:
    """Refuses a directory that does not have the tests of the installed Keras.

    Raises:
        ValueError: If it is no checkout, or of another version.
    """
    installed, file = importlib.metadata.version("keras"), root / "keras" / "src" / "version.py"
    found = re.search(r'__version__ = "(.*)"', file.read_text()) if file.exists() else None
    if found is None or found[1] != installed:
        raise ValueError(
            f"--keras={root} has {f'Keras {found[1]}' if found else 'no keras/src/version.py'}, expected a checkout of "
            f"the installed version: git clone --depth 1 --branch v{installed} https://github.com/keras-team/keras.git")


def results_of(root: pathlib.Path, suites: Iterable[str], stored: pathlib.Path | None) -> keras_outcomes.Results:
    """Runs suites, except for runs that `stored` has, and returns all outcomes."""
    results = json.loads(stored.read_text()) if stored and stored.exists() else {}
    for suite in suites:
        runs = results.setdefault(suite, {})
        for name, ranks in keras_outcomes.RUNS.items():
            if name in runs:
                continue
            files = sorted(str(path.relative_to(root)) for path in (root / "keras" / "src" / suite).glob("*_test.py"))
            tests = None if ranks == 0 else [test for test, outcome in runs["plain"].items()
                                             if outcome["outcome"] == "passed"]
            begin = time.monotonic()
            outcomes = run(files, ranks, tests, suite in _SHARED)
            runs[name] = {test: dataclasses.asdict(outcome) for test, outcome in outcomes.items()}
            print(f"{suite}, {name}: {len(outcomes)} tests, "
                  f"{sum(o.outcome == 'passed' for o in outcomes.values())} passed, "
                  f"{time.monotonic() - begin:.0f} s", flush=True)
            if stored:
                stored.write_text(json.dumps(results, indent=1) + "\n")
    return {suite: {name: {test: keras_outcomes.Outcome(**outcome) for test, outcome in results[suite][name].items()}
                    for name in keras_outcomes.RUNS} for suite in suites}


def main(_: Sequence[str]) -> int:
    root = pathlib.Path(_KERAS.value).resolve()
    check_version(root)
    suites = _SUITES.value or SUITES
    results = results_of(root, suites, pathlib.Path(_JSON.value) if _JSON.value else None)
    found = keras_outcomes.failures(results)
    lines = keras_outcomes.problems(found, is_complete=set(suites) == set(SUITES))
    if _MARKDOWN.value:
        versions = " and ".join(f"{name} {importlib.metadata.version(package)}" for name, package in (
            ("TensorFlow", "tensorflow-cpu"), ("Keras", "keras")))
        pathlib.Path(_MARKDOWN.value).write_text(keras_outcomes.report(results, versions))
    print("\n".join([f"{len(found)} failures in the scope, {len(found) - sum(not f.reason for f in found)} explained",
                     *lines]))
    return bool(lines)


if __name__ == "__main__":
    app.run(main)
