"""Tests as items: a plugin for a session of pytest, which all ranks of a job run side by side."""

from collections.abc import Callable
from collections.abc import Sequence
import fnmatch
from typing import Any

import pytest

from evaluation.runner.notes import Notes


class NotedTests:
    """Chooses the tests that are to run, and notes how they end.

    Attributes:
        notes: The notes of this rank.
    """

    def __init__(self, notes: Notes, name: Callable[[str], str], without: Sequence[str] = (),
                 value: Callable[[], Any] = lambda: None) -> None:
        """Makes the plugin.

        Args:
            notes: The notes of this rank.
            name: Returns the name of an item, given what pytest calls it.
            without: Patterns of functions that are left out.
            value: Returns what is noted of a test that has ended.
        """
        self.notes = notes
        self._name, self._without, self._value = name, without, value
        self._reports: list[pytest.TestReport] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {self._name(item.nodeid): item for item in items
                 if not any(fnmatch.fnmatchcase(item.name, pattern) for pattern in self._without)}
        items[:] = [found[name] for name in self.notes.chosen(found)]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            name = self._name(report.nodeid)
            self.notes.begin(name)
            self.notes.write(ends=name, outcome="failed", error=_text(report), trace=report.longreprtext, value=None)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.notes.begin(self._name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failed = [report for report in self._reports if report.failed]
        skipped = [report for report in self._reports if report.skipped and not hasattr(report, "context")]
        outcome, reports = ("failed", failed) if failed else ("skipped", skipped) if skipped else ("passed", [])
        self._reports = []
        self.notes.end(self._name(nodeid), outcome, _text(reports[0]) if reports else "",
                       reports[0].longreprtext if failed else "", self._value())


def run(plugin: NotedTests, *arguments: str) -> None:
    """Runs pytest with the plugin."""
    pytest.main(["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", *arguments], plugins=[plugin])
    plugin.notes.write(finished=True)


def _text(report: Any) -> str:
    """Returns why a test failed, or was skipped."""
    why = report.longrepr
    if isinstance(why, tuple):
        return why[2].removeprefix("Skipped: ")
    crash = getattr(why, "reprcrash", None)
    return crash.message if crash is not None else str(why).strip().splitlines()[-1]
