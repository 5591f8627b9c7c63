"""Runs suites of items in several ways, compares each run with another, and writes which items end worse, and why."""

import collections
from collections.abc import Callable
from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fnmatch
import importlib.metadata
import json
import pathlib
import time
from typing import Any

from absl import flags

from evaluation import output
from evaluation.runner import outcomes
from evaluation.runner.outcomes import Difference
from evaluation.runner.outcomes import Failure
from evaluation.runner.outcomes import Outcome
from evaluation.runner.outcomes import Outcomes
from evaluation.runner.outcomes import Results

_NAMES = flags.DEFINE_list("names", ["*"], "Patterns of the names of what is to run.")
_JSON = output.json_flag(what="File for all outcomes; runs that it has are not repeated.")
_MARKDOWN = output.markdown_flag()
_TIMEOUT = flags.DEFINE_float("timeout_s", 300, "Longest time of a test, a check or a program.")
_WAIT = flags.DEFINE_float("wait_s", 60, "How long the other ranks may take after one has failed.")

_PACKAGES = {"TensorFlow": "tensorflow-cpu", "Keras": "keras"}


def wanted(names: Iterable[str]) -> list[str]:
    """Returns those of the names that are to run."""
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _NAMES.value)]


def limits() -> dict[str, float]:
    """Returns the limits of a job."""
    return {"timeout_s": _TIMEOUT.value, "wait_s": _WAIT.value}


def stored() -> dict[str, Any]:
    """Returns what the file of --json has."""
    file = pathlib.Path(_JSON.value or "")
    return json.loads(file.read_text()) if file.is_file() else {}


def write(results: Any = None, page: str = "") -> None:
    """Writes results to the file of --json, or a page to that of --markdown."""
    if results is not None:
        output.write_json(_JSON.value, results)
    if _MARKDOWN.value and page:
        pathlib.Path(_MARKDOWN.value).write_text(page)


@dataclasses.dataclass(frozen=True)
class Command:
    """What a command compares, and how its report reads.

    Attributes:
        title: Of the report.
        module: The module of the command.
        about: Its first paragraph.
        runs: The runs in order, each with the one than which no item may end worse: the same one where all may fail, ""
            where all must pass.
        differences: Why items may end worse.
        causes: Why they fail where they may, for the report.
        row: Returns the row of the report in which an item counts, given its suite and its name.
        columns: Further columns: what they count of the outcomes of the last run.
        packages: Further packages whose versions the report has.
    """

    title: str
    module: str
    about: str
    runs: Mapping[str, str]
    differences: Sequence[Difference] = ()
    causes: Sequence[Difference] = ()
    row: Callable[[str, str], str] = lambda suite, item: suite
    columns: Mapping[str, Callable[[Iterable[Outcome]], int]] = dataclasses.field(default_factory=dict)
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def main(self, suites: Iterable[str], run: Callable[[str, str, Mapping[str, Outcomes]], Outcomes],
             with_files: Container[str] = (), is_complete: bool = True) -> int:
        """Runs suites, and reports; returns the status of the command.

        Args:
            suites: Their names.
            run: Returns the outcomes of a suite in a run, given those of its earlier runs.
            with_files: Suites whose runs need files of the earlier ones, which --json has not.
            is_complete: Whether these are all items, unless --names leaves some out.
        """
        results = {suite: {name: {item: Outcome(**outcome) for item, outcome in found.items()}
                           for name, found in runs.items()} for suite, runs in stored().items()}
        suites = list(suites)
        for suite in suites:
            runs = results.setdefault(suite, {})
            if suite in with_files and not runs.keys() >= self.runs.keys():
                runs.clear()
            for name in self.runs:
                if name in runs:
                    continue
                begin = time.monotonic()
                runs[name] = run(suite, name, runs)
                print(f"{suite}, {name}: {len(runs[name])}, of which {_count(runs[name], 'passed')} passed, "
                      f"{time.monotonic() - begin:.0f} s", flush=True)
                write(results)
        results = {suite: results[suite] for suite in suites}
        found = outcomes.failures(results, self.runs, self.differences)
        write(page=self.page(results, found))
        lines = outcomes.problems(found, self.differences, is_complete and _NAMES.value == ["*"])
        print("\n".join([f"{len(found)} end worse than they may, of which "
                         f"{sum(bool(failure.reason) for failure in found)} are explained", *lines]))
        return bool(lines)

    def page(self, results: Results, found: Sequence[Failure]) -> str:
        """Returns the report as Markdown."""
        versions = ", ".join(f"{name} {importlib.metadata.version(package)}"
                             for name, package in {**self.packages, **_PACKAGES}.items())
        reasons = collections.defaultdict(lambda: collections.defaultdict(list))
        for failure in found:
            reasons[failure.reason or "nobody has explained it"][failure.item, failure.error].append(failure.run)
        parts = [f"# {self.title}", f"Written by `{self.module} --markdown`, with {versions}.", self.about,
                 self._counts(results), "## Failures, by their reasons" if found else ""]
        for reason, items in reasons.items():
            parts += [f"### {reason[0].upper()}{reason[1:]}", _table(
                ["item", "runs", "error"], [[_code(item), ", ".join(runs), outcomes.short(error)]
                                            for (item, error), runs in items.items()])]
        for title, table in (("Largest differences", self._differences(results)),
                             ("Failed or skipped plainly", self._causes(results))):
            parts += [f"## {title}", table] if table else []
        return "\n\n".join(filter(None, parts)) + "\n"

    def _counts(self, results: Results) -> str:
        rows = collections.defaultdict(lambda: {name: {} for name in self.runs})
        for suite, runs in results.items():
            for name in self.runs:
                for item, outcome in runs[name].items():
                    rows[self.row(suite, item)][name][item] = outcome
        counted = [(name, outcome) for name in self.runs for outcome in ("passed", "skipped") if outcome == "passed"
                   or any(_count(runs[name], outcome) for runs in rows.values())]
        table = [[row, len(set().union(*runs.values())), *(_count(runs[name], outcome) for name, outcome in counted),
                  *(count(list(runs.values())[-1].values()) for count in self.columns.values())]
                 for row, runs in rows.items()]
        return _table(["suite", "items", *(f"{name}: {outcome}" for name, outcome in counted), *self.columns],
                      [*table, ["**all**", *(sum(column) for column in list(zip(*table))[1:])]])

    def _differences(self, results: Results) -> str:
        names = [name for name, reference in self.runs.items() if reference not in ("", name)]
        rows = [[item, *(_apart(runs[name].get(item)) for name in names)] for runs in results.values()
                for item in runs[names[0]] if any(outcome.difference is not None
                                                  for name in names for outcome in runs[name].values())]
        return _table(["item", *names], rows)

    def _causes(self, results: Results) -> str:
        items = collections.defaultdict(list)
        for runs in results.values():
            for name, reference in self.runs.items():
                for item, outcome in runs[name].items():
                    if reference == name and outcome.outcome != "passed":
                        cause = outcomes.reason(self.causes, item, name, outcome.error)
                        items[outcome.outcome, cause or outcomes.short(outcome.error)].append(_code(item))
        return _table(["outcome", "cause", "number", "items"], [
            [outcome, cause, len(names), ", ".join(names if outcome == "failed" else names[:1])]
            for (outcome, cause), names in sorted(items.items(), key=lambda entry: (entry[0][0], -len(entry[1])))])


def _count(found: Outcomes, outcome: str) -> int:
    return sum(result.outcome == outcome for result in found.values())


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    return "\n".join(output.markdown_table(head, [list(map(str, row)) for row in rows])) if rows else ""


def _code(name: str) -> str:
    return f"`{name.replace('|', '/')}`"


def _apart(outcome: Outcome | None) -> str:
    value = outcome and outcome.difference
    return "not compared" if value is None else "equal bits" if value == 0 else f"{value:.0e}"
