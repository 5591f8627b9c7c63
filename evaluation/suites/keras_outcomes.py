"""How the tests of Keras have ended, from what the ranks of jobs have noted, and the report about it."""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import re
from typing import Any

from evaluation.suites import keras_differences

RUNS = {"plain": 0, "1 rank": 1, "2 ranks": 2}  # and their numbers of ranks, 0 without a strategy


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a test has ended.

    Attributes:
        outcome: "passed", "failed" or "skipped".
        error: Of the first rank that failed.
        trace: Where, on all ranks.
    """

    outcome: str
    error: str = ""
    trace: str = ""


Outcomes = dict[str, Outcome]  # by the name of a test, or of a file that cannot be imported


@dataclasses.dataclass(frozen=True)
class Job:
    """What a job has left.

    Attributes:
        notes: What each rank has noted.
        why: What has become of a test that was begun and has not ended.
        output: What all ranks have printed.
    """

    notes: Sequence[Sequence[Mapping[str, Any]]]
    why: str
    output: str

    @property
    def has_finished(self) -> bool:
        return all(any("finished" in note for note in notes) for notes in self.notes)

    def collected(self) -> list[str]:
        """Returns the names of the tests that were to run."""
        return next((note["collected"] for notes in self.notes for note in notes if "collected" in note), [])

    def outcomes(self) -> Outcomes:
        """Returns how each test has ended on all ranks."""
        outcomes = {note["file"]: Outcome("failed", note["error"])
                    for notes in self.notes for note in notes if "file" in note}
        for test in dict.fromkeys(note["begun"] for notes in self.notes for note in notes if "begun" in note):
            outcomes[test] = self._outcome(test)
        return outcomes

    def _outcome(self, test: str) -> Outcome:
        ended = [[note for note in notes if note.get("test") == test] for notes in self.notes]
        # The error that ended the job comes before its echo on other ranks.
        failed = sorted((note for notes in ended for note in notes if note["outcome"] == "failed"),
                        key=lambda note: "JobEndedError" in note["error"])
        if failed:
            return Outcome("failed", failed[0]["error"], "\n\n".join(filter(None, (note["trace"] for note in failed))))
        if not all(ended):
            return Outcome("failed", self.why)
        left = [note["error"] for notes in self.notes for note in notes if note.get("left") == test]
        return Outcome("failed", left[0]) if left else Outcome(ended[0][-1]["outcome"], ended[0][-1]["error"])


@dataclasses.dataclass(frozen=True)
class Failure:
    """A test that passes plainly and fails in the scope.

    Attributes:
        suite: The directory of its file.
        test: Its name.
        ranks: On how many ranks it fails.
        error: How.
        reason: Why it may; "" if no reason is known.
    """

    suite: str
    test: str
    ranks: int
    error: str
    reason: str


Results = Mapping[str, Mapping[str, Outcomes]]  # by suite and run


def failures(results: Results) -> list[Failure]:
    """Returns what fails in the scope, of each suite."""
    return [Failure(suite, test, ranks, outcome.error, keras_differences.reason(test, ranks, outcome.error))
            for suite, runs in results.items() for name, ranks in RUNS.items() if ranks
            for test, outcome in runs[name].items() if outcome.outcome != "passed"]


def problems(found: Sequence[Failure], is_complete: bool) -> list[str]:
    """Returns a line per failure without a reason and, if all tests ran, per reason without a failure."""
    lines = [f"{failure.test}, {failure.ranks} ranks: {short(failure.error)}"
             for failure in found if not failure.reason]
    used = {failure.reason for failure in found}
    return lines + [f"no test fails because {difference.reason}: delete the line"
                    for difference in keras_differences.DIFFERENCES if is_complete and difference.reason not in used]


def report(results: Results, versions: str) -> str:
    """Returns the report as Markdown."""
    rows, totals = [], collections.Counter()
    for suite, runs in results.items():
        count = _counts(runs)
        totals.update(count)
        rows.append(f"| {suite} | {' | '.join(map(str, count.values()))} |")
    rows.append(f"| **all** | {' | '.join(map(str, totals.values()))} |")
    by_reason = collections.defaultdict(lambda: collections.defaultdict(list))
    for failure in failures(results):
        reason = failure.reason or "nobody has explained it"
        by_reason[reason][failure.test, short(failure.error)].append(failure.ranks)
    lines = []
    for reason, tests in by_reason.items():
        lines += ["", f"### {reason[0].upper()}{reason[1:]}", "", "| test | ranks | error |", "|---|---|---|"]
        lines += [f"| `{_title(test)}` | {', '.join(map(str, ranks))} | {error} |"
                  for (test, error), ranks in tests.items()]
    plain = [f"| `{_title(test)}` | {short(outcome.error)} |" for runs in results.values()
             for test, outcome in runs["plain"].items() if outcome.outcome == "failed"]
    if plain:
        plain = ["", "## Tests that fail plainly", "", "| test | error |", "|---|---|", *plain]
    return "\n".join([
        "# Keras' own tests", "",
        f"Written by `evaluation.suites.keras_suites --markdown`, with {versions}.", "",
        "The tests of these directories of `keras/src` run plainly; those that pass run in the scope of a",
        "PoseidonStrategy, on one rank and on two. On two ranks, a test passes if it passes on both. \"Skipped\" are",
        "tests that Keras skips with TensorFlow, on this machine. Random seeds are the same everywhere. Each rank has",
        "temporary directories of its own, except in `callbacks`, whose files rank 0 alone writes.", "",
        "| suite | tests | skipped | passed plainly | passed on 1 rank | passed on 2 ranks |",
        "|---|---|---|---|---|---|", *rows, "",
        "## Failures in the scope, by their reasons", *lines, *plain, ""])


def _counts(runs: Mapping[str, Outcomes]) -> dict[str, int]:
    tests = {test: outcome.outcome for test, outcome in runs["plain"].items() if "::" in test}
    return {"tests": len(tests), "skipped": sum(outcome == "skipped" for outcome in tests.values()),
            **{name: sum(outcome.outcome == "passed" for outcome in runs[name].values()) for name in RUNS}}


def _title(test: str) -> str:
    """Returns the name of a test without what all names begin with."""
    return test.removeprefix("keras/src/").replace("|", "/")


def short(error: str) -> str:
    """Returns an error on one line, without addresses and temporary directories."""
    error = error.strip().removeprefix("tf_poseidon.errors.")
    text = re.sub(r" at 0x[0-9a-f]+|/tmp/tmp\w+/", "", " ".join((error or "no message").replace("|", "/").split()))
    return text if len(text) <= 160 else f"{text[:157]}..."
