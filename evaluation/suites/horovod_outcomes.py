"""How Horovod's tests and examples have ended, from what the ranks of jobs have noted, and the report about it."""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import re
from typing import Any

import numpy as np

from evaluation.suites import horovod_differences

# Single precision, some steps: relative to the largest element of an array.
ROUNDING = 1e-5


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
        f"Written by `evaluation.suites.horovod_suites --markdown`, with {versions}, on 2 ranks.", "",
        "Each file of tests, and each example, runs plainly and after `poseidon.enable(policy=\"sfb\")`, which",
        "replaces every sum that it can. `tf.keras` is Keras 2, which Horovod was written for, unless a row says",
        "otherwise. The last two columns count the sums of all graphs that the passes rewrote, and those that became",
        f"factors.{_without(without)}", "",
        "| suite | tests | passed plainly | passed after enable() | skipped plainly | skipped after enable() "
        "| failed only after enable() | sums | as factors |", "|" + "---|" * 9, *rows, "",
        "## Failures after enable() that plain Horovod does not have", *(lines or ["", "None."]), "",
        "## Examples", "",
        f"The largest difference of printed losses and of trained weights on any rank, after the same steps (at most "
        f"{ROUNDING:g} in", "single precision):", "", "| example | difference |", "|---|---|", *examples, "",
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
