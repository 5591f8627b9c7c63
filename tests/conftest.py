"""Options of pytest; which tests run, and the order of test files."""

import os
import signal

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true",
                     help="run all cells of tables, not a cover of them, and more random graphs")
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite the golden texts of the graph passes")
    parser.addoption("--tier", help="run only the tests of a tier: unit or rest (tests/support/tiers.py)")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # for the jobs of tests, which would inherit it
    if config.getoption("--full"):
        os.environ.setdefault("POSEIDON_FUZZ_GRAPHS", "20")


# The files that take minutes, longest first.
LONGEST = ("test_training.py", "test_overlapping.py", "test_keras_programs.py", "test_distribution.py",
           "test_partition_fuzz.py", "test_explaining.py", "test_saving.py", "test_long_runs.py")


def pytest_collection_modifyitems(config, items):
    """Selects a tier, and starts with the longest files: two run at a time, and both should end at the same time."""
    import tiers  # pytest puts it on the path after it has read this file
    tier = config.getoption("--tier")
    if tier:
        if tier not in tiers.TIERS:
            raise pytest.UsageError(f"--tier={tier}, expected one of {', '.join(tiers.TIERS)}.")
        config.hook.pytest_deselected(items=[item for item in items if tiers.tier_of(item.nodeid) != tier])
        items[:] = [item for item in items if tiers.tier_of(item.nodeid) == tier]
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def able():
    """Skips where hosts cannot be emulated, but not in CI, where that would hide a failure."""
    import host_emulation  # pytest puts it on the path after it has read this file
    reason = host_emulation.problem()
    if reason and "CI" in os.environ:
        pytest.fail(f"No hosts can be made: {reason}.")
    if reason:
        pytest.skip(f"no hosts can be made: {reason}")
