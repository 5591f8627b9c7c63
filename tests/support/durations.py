"""How long tests take: recorded by `pytest --record-durations`, in seconds of a worker, by tier and test file.

The longest files start first, so that workers end at about the same time; test_tiers.py adds the records up.
"""

import collections
import json
import pathlib

import pytest
import tiers

FILE = pathlib.Path(__file__).resolve().parents[1] / "durations.json"


def load() -> dict[str, dict[str, float]]:
    """Returns the recorded seconds, by tier and file, such as "unit/test_plan.py"."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def file_of(name: str) -> str:
    """Returns the file of a test that is named as pytest does."""
    return name.removeprefix("tests/").partition("::")[0]


class Recorder:
    """A plugin of pytest that replaces the records of what it sees; it must see all tests of a file and a tier."""

    def __init__(self):
        self._seconds = collections.defaultdict(lambda: collections.defaultdict(float))

    def pytest_configure(self, config):
        if config.getoption("keyword") or any("::" in argument for argument in config.args):
            raise pytest.UsageError("--record-durations was given for some tests of a file, expected all: leave out -k "
                                    "and what follows '::'.")

    def pytest_runtest_logreport(self, report):
        self._seconds[tiers.tier_of(report.nodeid)][file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self):
        recorded = load()
        for tier, files in self._seconds.items():
            recorded[tier] = recorded.get(tier, {}) | {file: round(seconds, 1) for file, seconds in files.items()}
        by_length = {tier: dict(sorted(recorded[tier].items(), key=lambda item: (-item[1], item[0])))
                     for tier in tiers.TIERS if tier in recorded}
        FILE.write_text(json.dumps(by_length, indent=1) + "\n")
