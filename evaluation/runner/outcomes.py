"""How items have ended on all ranks, which have ended worse than in the run that they are compared with, and why."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fnmatch
import re
from typing import Any

_QUALITY = ("failed", "skipped", "passed")
_LONGEST = 250  # characters of an error


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an item has ended.

    Attributes:
        outcome: "passed", "failed" or "skipped": the worst of all ranks.
        error: Of the rank that failed first; or why it was skipped.
        trace: Where, on all ranks.
        values: What each rank has noted.
        difference: Of what it has computed, from what the run with which it is compared has; None if not compared.
    """

    outcome: str
    error: str = ""
    trace: str = ""
    values: Sequence[Any] = ()
    difference: float | None = None


Outcomes = dict[str, Outcome]  # by item
Results = Mapping[str, Mapping[str, Outcomes]]  # by suite and run


def merged(notes: Sequence[Sequence[Mapping[str, Any]]], why: str, output: str = "") -> Outcomes:
    """Returns the outcomes of the items that have begun in a job.

    Args:
        notes: Those of each rank.
        why: What has become of an item that has not ended.
        output: What the job has printed.
    """
    results = {}
    for name in dict.fromkeys(note["begins"] for rank in notes for note in rank if "begins" in note):
        ends = [note for rank in notes for note in rank if note.get("ends") == name]
        # The error that ended the job comes before its echo on other ranks.
        worst = min(ends, default={"outcome": "passed"}, key=lambda end: (
            _QUALITY.index(end["outcome"]), "JobEndedError" in end["error"], end["at"]))
        outcome, error = worst["outcome"], worst.get("error", "")
        traces = [end["trace"] for end in ends if end["trace"]]
        if len(ends) < len(notes):
            error = f"{error} ({why})" if outcome == "failed" else why
            outcome, traces = "failed", [*traces, output]
        results[name] = Outcome(outcome, error, "\n\n".join(traces), [end["value"] for end in ends])
    return results


@dataclasses.dataclass(frozen=True)
class Difference:
    """A kind of failure that is known.

    Attributes:
        items: Pattern of the names of items.
        reason: Why they may fail.
        runs: The runs in which they may; empty for all.
        error: Regular expression of what is in their errors.
    """

    items: str
    reason: str
    runs: tuple[str, ...] = ()
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An item that has ended worse than in the run that it is compared with.

    Attributes:
        item: Its name.
        run: Where.
        error: How.
        reason: Why it may; "" if no reason is known.
    """

    item: str
    run: str
    error: str
    reason: str


def reason(differences: Sequence[Difference], item: str, run: str, error: str) -> str:
    """Returns why an item may fail, by the first difference that matches; "" if no reason is known."""
    return next((known.reason for known in differences if fnmatch.fnmatchcase(item, known.items)
                 and (not known.runs or run in known.runs) and re.search(known.error, error)), "")


def failures(results: Results, references: Mapping[str, str], differences: Sequence[Difference]) -> list[Failure]:
    """Returns what has ended worse in a run than in its reference; what that has not, or without one, must pass."""
    found = []
    for runs in results.values():
        for run, reference in references.items():
            for item, outcome in runs[run].items():
                expected = runs.get(reference, {}).get(item, Outcome("passed"))
                if _QUALITY.index(outcome.outcome) < _QUALITY.index(expected.outcome):
                    found.append(Failure(item, run, outcome.error, reason(differences, item, run, outcome.error)))
    return found


def problems(found: Sequence[Failure], differences: Sequence[Difference], is_complete: bool) -> list[str]:
    """Returns a line per failure without a reason and, if all items ran, per reason without a failure."""
    used = {failure.reason for failure in found}
    needless = dict.fromkeys(known.reason for known in differences if is_complete and known.reason not in used)
    return [*(f"{failure.item}, {failure.run}: {short(failure.error)}" for failure in found if not failure.reason),
            *(f"no item fails because {text}: delete the line" for text in needless)]


def short(error: str) -> str:
    """Returns an error on one line, without colours, addresses and temporary directories."""
    error = error.strip().removeprefix("tf_poseidon.errors.")
    line = " ".join((error or "no message").replace("|", "/").split())
    line = re.sub(r" at 0x[0-9a-f]+|/tmp/tmp\w+/|\x1b\[[0-9;]*m", "", line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST - 3]}..."
