"""Options of pytest, and the order of test files."""

import os


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true",
                     help="run all cells of tables, not a cover of them, and more random graphs")
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite the golden texts of the graph passes")


def pytest_configure(config):
    if config.getoption("--full"):
        os.environ.setdefault("POSEIDON_FUZZ_GRAPHS", "20")


# The files that take minutes, longest first.
LONGEST = ("test_training.py", "test_horovod.py", "test_partition_fuzz.py", "test_rewritten.py")


def pytest_collection_modifyitems(items):
    """Starts with the longest files: make test runs two at a time, and both should end at about the same time."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
