"""Runs Horovod's own tests and examples for TensorFlow, plainly and after `poseidon.enable()`, and compares.

    scripts/install_horovod.sh
    pip install mock parameterized && pip install --no-deps "tf_keras==2.21.*"
    git clone --branch v0.28.1 https://github.com/horovod/horovod DIRECTORY
    python scripts/other_suites/horovod_suites.py --horovod DIRECTORY --markdown docs/results/horovod_suites.md

Each suite is a job of two ranks, which is continued after a test that died or hung. The exit status is 1 if a test
fails after `enable()` but not plainly, without a reason in `horovod_differences.py`; if an example computes something
else; or if a reason is not needed.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
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
import horovod_differences
import horovod_examples
import numpy as np

_HOROVOD = flags.DEFINE_string("horovod", None, "Checkout of Horovod.", required=True)
_NAMES = flags.DEFINE_list("names", ["*"], "Patterns of the names of suites and examples.")
_WITHOUT = flags.DEFINE_list("without", [], "Patterns of tests that are left out, where they would take too long.")
_POLICY = flags.DEFINE_string("policy", "sfb", "Policy of enable().")
_JSON = flags.DEFINE_string("json", None, "File for all results; suites and examples that it has are not run again.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the report.")
_TIMEOUT = flags.DEFINE_integer("timeout_s", 240, "Longest time of a test.")
_GRACE = flags.DEFINE_integer("grace_s", 60, "How long other ranks may take after one has failed in a test.")

VERSION = "0.28.1"
RANKS = 2
# Single precision, some steps: relative to the largest element of an array.
_ROUNDING = 1e-5
# How long mpiexec may take to end a job of which a rank has died.
_LAUNCHER_S = 5
_RUN = str(pathlib.Path(__file__).with_name("horovod_job.py"))


@dataclasses.dataclass(frozen=True)
class Suite:
    """A file of tests.

    Attributes:
        path: Its path in `test/parallel` of the checkout.
        keras: The version of Keras that `tf.keras` is: 2, which Horovod was written for, or 3.
    """

    path: str
    keras: int = 2

    @property
    def name(self) -> str:
        """The file, and the version of Keras unless it is 2."""
        return self.path if self.keras == 2 else f"{self.path}, Keras {self.keras}"


SUITES = (
    Suite("test_tensorflow.py"), Suite("test_tensorflow_process_sets.py"), Suite("test_adasum_tensorflow.py"),
    Suite("test_tensorflow_keras.py"), Suite("test_tensorflow2_keras.py"), Suite("test_tensorflow2_keras.py", 3),
    Suite("test_tensorflow2_keras_process_sets.py"), Suite("test_tensorflow2_keras_process_sets.py", 3))


@dataclasses.dataclass
class Result:
    """How a test ended on all ranks.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        text: Why, unless it passed.
        plans: Of each graph that it ran after `enable()`: how many sums travel by which scheme, or why not.
    """

    outcome: str
    text: str = ""
    plans: list[Any] = dataclasses.field(default_factory=list)


Results = dict[str, Result]


# ---- jobs --------------------------------------------------------------------------------------------------------


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
        process = subprocess.Popen([mpiexec, "-n", str(RANKS), sys.executable, _RUN, kind, how, str(out), *others],
                                   stdout=file, stderr=subprocess.STDOUT, cwd=out.parent, env=environment,
                                   start_new_session=True)
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


def merged(notes: Sequence[Sequence[Mapping[str, Any]]], why: str) -> tuple[list[str], Results]:
    """Returns the names of all tests, and the results of those that began, by the notes of each rank.

    A test has failed if it failed on a rank, or if the job ended in it; it was skipped if all ranks skipped it.
    """
    names = next((note["collected"] for rank in notes for note in rank if "collected" in note), [])
    results: Results = {}
    ended: collections.Counter[str] = collections.Counter()
    for number, rank in enumerate(notes):
        plans: list[Any] = []
        for note in rank:
            if "begins" in note:
                results.setdefault(note["begins"], Result("skipped"))
                plans = results[note["begins"]].plans if number == 0 else []
            elif "plan" in note:
                plans.append(note["plan"])
            elif "ends" in note:
                ended[note["ends"]] += 1
                result = results[note["ends"]]
                if _ORDER[note["outcome"]] > _ORDER[result.outcome] or not result.text:
                    result.text = note["text"]
                result.outcome = max(result.outcome, note["outcome"], key=_ORDER.__getitem__)
    for name, result in results.items():
        if ended[name] < len(notes):
            result.text = f"{result.text} ({why})" if result.outcome == "failed" else why
            result.outcome = "failed"
    return names, results


_ORDER = {"skipped": 0, "passed": 1, "failed": 2}


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


# ---- comparison --------------------------------------------------------------------------------------------------


def difference(plain: Sequence[Mapping[str, np.ndarray]], enabled: Sequence[Mapping[str, np.ndarray]]) -> float:
    """Returns the largest difference of what ranks have computed, relative to the largest element of an array.

    Infinite if they have not computed the same arrays.
    """
    largest = 0.0
    for before, after in zip(plain, enabled):
        if before.keys() != after.keys():
            return float("inf")
        for key, value in before.items():
            if value.shape != after[key].shape or not np.isfinite(value).all() == np.isfinite(after[key]).all():
                return float("inf")
            if value.size and value.dtype.kind == "f":
                apart = np.max(np.abs(value.astype("float64") - after[key]))
                largest = max(largest, float(apart / max(1.0, np.max(np.abs(value)))))
            elif not np.array_equal(value, after[key]):
                return float("inf")
    return largest


def only_after(plain: Results, enabled: Results) -> list[str]:
    """Returns the tests that fail after `enable()` only."""
    return [name for name, result in enabled.items() if result.outcome == "failed"
            and (name not in plain or plain[name].outcome != "failed")]


def problems(plain: Mapping[str, Results], enabled: Mapping[str, Results], is_complete: bool) -> list[str]:
    """Returns a line per failure after `enable()` without a reason and, if all ran, per reason without a failure."""
    lines, used = [], set()
    for suite, results in enabled.items():
        for name in only_after(plain[suite], results):
            reason = horovod_differences.reason(f"{suite}::{name}")
            used.add(reason)
            if not reason:
                lines.append(f"{suite}::{name}: only after enable(): {results[name].text}")
    return lines + [f"no test fails because {reason}: delete the line"
                    for _, reason in horovod_differences.DIFFERENCES if is_complete and reason not in used]


# ---- report ------------------------------------------------------------------------------------------------------


def report(plain: Mapping[str, Results], enabled: Mapping[str, Results], differences: Mapping[str, float],
           versions: str, without: Sequence[str] = ()) -> str:
    """Returns the report as Markdown."""
    rows = []
    for suite, results in plain.items():
        after = enabled[suite]
        cells = [len(results), *(_count(part, outcome) for outcome in ("passed", "skipped") for part in
                                 (results, after)), len(only_after(results, after)), *_sums(after)]
        rows.append(f"| {suite} | {' | '.join(map(str, cells))} |")
    reasons = collections.defaultdict(list)
    causes: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
    skipped: collections.Counter[str] = collections.Counter()
    for suite, results in plain.items():
        for name in only_after(results, enabled[suite]):
            reasons[horovod_differences.reason(f"{suite}::{name}") or "nobody has explained it"].append(
                f"`{suite}::{name}`: {_line(enabled[suite][name].text)}")
        for name, result in results.items():
            if result.outcome == "failed":
                causes[horovod_differences.cause(result.text)].append(f"{suite}::{name}")
            elif result.outcome == "skipped":
                skipped[_line(result.text).removeprefix("Skipped: ")] += 1
    lines = [line for reason, tests in reasons.items() for line in (
        "", f"### {reason[0].upper()}{reason[1:]}", "", *(f"- {test}" for test in tests))]
    examples = [f"| {name} | {_apart(differences.get(name))} |" for name in plain.get("examples", ())]
    return "\n".join([
        "# Horovod's tests and examples", "",
        f"Written by `scripts/other_suites/horovod_suites.py --markdown`, with {versions}, on {RANKS} ranks.", "",
        "Each file of tests, and each example, runs plainly and after `poseidon.enable(policy=\"sfb\")`, which",
        "replaces every sum that it can. `tf.keras` is Keras 2, which Horovod was written for, unless a row says",
        "otherwise. The last two columns count the sums of all graphs that the passes rewrote, and those that became",
        f"factors.{_without(without)}", "",
        "| suite | tests | passed plainly | passed after enable() | skipped plainly | skipped after enable() "
        "| failed only after enable() | sums | as factors |", "|" + "---|" * 9, *rows, "",
        "## Failures after enable() that plain Horovod does not have", *(lines or ["", "None."]), "",
        "## Examples", "",
        f"The largest difference of printed losses and of trained weights on any rank, after the same steps (at most "
        f"{_ROUNDING:g} in", "single precision):", "", "| example | difference |", "|---|---|", *examples, "",
        "## Failures of plain Horovod", "", "| cause | tests |", "|---|---|",
        *(f"| {_line(cause)} | {len(tests)} |" for cause, tests in _by_number(causes)), "",
        "## Skipped by plain Horovod", "", "| its reason | tests |", "|---|---|",
        *(f"| {why} | {number} |" for why, number in skipped.most_common()), ""])


def _without(patterns: Sequence[str]) -> str:
    return f" Left out, since they take long: {', '.join(f'`{pattern}`' for pattern in patterns)}." if patterns else ""


def _count(results: Results, outcome: str) -> int:
    return sum(result.outcome == outcome for result in results.values())


def _sums(results: Results) -> tuple[int, int]:
    plans = [plan for result in results.values() for plan in result.plans if isinstance(plan, dict)]
    return sum(sum(plan.values()) for plan in plans), sum(plan.get("sfb", 0) for plan in plans)


def _by_number(groups: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _apart(value: float | None) -> str:
    return "not compared" if value is None else "equal bits" if value == 0 else f"{value:.0e}"


def _line(text: str) -> str:
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).replace("|", "/").split())
    return line if len(line) <= 160 else f"{line[:157]}..."


# ---- command -----------------------------------------------------------------------------------------------------


def check_checkout(directory: str) -> None:
    """Raises app.UsageError unless a directory is a checkout of Horovod's version, and all is installed."""
    file = pathlib.Path(directory) / "horovod" / "__init__.py"
    found = re.search(r"__version__ = '(.*)'", file.read_text()) if file.exists() else None
    if found is None or found[1] != VERSION:
        raise app.UsageError(f"--horovod={directory} is {f'Horovod {found[1]}' if found else 'no checkout of Horovod'},"
                             f" expected {VERSION}; check out its tag v{VERSION}.")
    missing = [name for name in ("horovod", "mock", "parameterized", "tf_keras")
               if importlib.util.find_spec(name) is None]
    if missing:
        raise app.UsageError(f"{', '.join(missing)} cannot be imported; install as the head of {__file__} says.")


def _wanted(names: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _NAMES.value)]


def main(_: Sequence[str]) -> None:
    check_checkout(_HOROVOD.value)
    stored = pathlib.Path(_JSON.value) if _JSON.value else None
    data = json.loads(stored.read_text()) if stored and stored.exists() else {}
    checkout = os.path.abspath(_HOROVOD.value)
    suites = {suite.name: suite for suite in SUITES}
    examples = {example.name: example for example in horovod_examples.EXAMPLES}
    for name in _wanted([*suites, *examples]):
        results = data.setdefault(name, {"results": []})["results"]
        computed = []
        for how in ("plain", _POLICY.value)[len(results):]:
            begin = time.monotonic()
            if name in suites:
                path = os.path.join(checkout, "test", "parallel", suites[name].path)
                found = run_suite(path, how, suites[name].keras, _TIMEOUT.value, _GRACE.value,
                                  _WITHOUT.value)
            else:
                result, arrays = run_example(examples[name], how, checkout, _TIMEOUT.value)
                found = {name: result}
                computed.append(arrays)
            results.append(_plain(found))
            print(f"{name}, {how}: {time.monotonic() - begin:.0f} s", flush=True)
            if stored and (name in suites or len(results) == 2):  # both runs of an example are needed to compare it
                stored.write_text(json.dumps(data, indent=1) + "\n")
        if len(computed) == 2 and all(computed):
            data[name]["difference"] = difference(*computed)
            if stored:
                stored.write_text(json.dumps(data, indent=1) + "\n")
    plain, enabled = ({} for _ in range(2))
    for name in _wanted([*suites, *examples]):
        for into, results in zip((plain, enabled), data[name]["results"]):
            into.setdefault(name if name in suites else "examples", {}).update(
                {test: Result(**result) for test, result in results.items()})
    differences = {name: data[name]["difference"] for name in _wanted(examples) if "difference" in data[name]}
    lines = problems(plain, enabled, is_complete=_NAMES.value == ["*"] and not _WITHOUT.value)
    lines += [f"examples::{name}: differs by {apart:g} after enable(), expected at most {_ROUNDING:g}"
              for name, apart in differences.items() if apart > _ROUNDING]
    if _MARKDOWN.value:
        versions = ", ".join(f"{title} {importlib.metadata.version(package)}" for title, package in (
            ("Horovod", "horovod"), ("TensorFlow", "tensorflow-cpu"), ("Keras", "tf_keras"), ("Keras", "keras")))
        pathlib.Path(_MARKDOWN.value).write_text(report(plain, enabled, differences, versions, _WITHOUT.value))
    tests = [result for results in enabled.values() for result in results.values()]
    print("\n".join([f"{len(tests)} tests and examples: {sum(test.outcome == 'passed' for test in tests)} pass after "
                     "enable()", *lines]))
    sys.exit(1 if lines else 0)


def _plain(results: Results) -> dict[str, Any]:
    return {name: dataclasses.asdict(result) for name, result in results.items()}


if __name__ == "__main__":
    app.run(main)
