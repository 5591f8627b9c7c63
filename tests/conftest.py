"""Options and fixtures that several test files use."""

import itertools

import launch
import numpy as np
import pytest
import scenarios


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true",
                     help="run every cell of the training table, not a pairwise cover of it")


def pytest_collection_modifyitems(items):
    """Runs the training table last: the other tests are quick and say more when they fail."""
    items.sort(key=lambda item: item.path.name == "test_training.py")


class Jobs:
    """The results of all scenarios, one multi-process job for each number of ranks.

    TensorFlow takes seconds to import, so all scenarios run in one job; it starts when the first
    result is asked for.
    """

    def __init__(self, directory, full):
        self._directory = directory
        self._full = full
        self._done = {}
        others = [*scenarios.WAYS, *scenarios.BITS]
        cells = table(full)
        self._names = {ranks: [*(cell for cell, r in cells if r == ranks), *others]
                       for ranks in scenarios.RANKS}
        self._names[1] = [*dict.fromkeys(cell for cell, _ in cells), *others]

    def results(self, name, ranks, repeat=0):
        """Returns the arrays of scenario `name`, a dictionary for each rank."""
        out = self._run(ranks, repeat)
        return [dict(np.load(out / f"{name}.rank{rank}.npz")) for rank in range(ranks)]

    def _run(self, ranks, repeat):
        if (ranks, repeat) not in self._done:
            out = self._directory / f"ranks{ranks}-{repeat}"
            out.mkdir()
            self._done[ranks, repeat] = out
            names = repeated(self._full) if repeat else self._names[ranks]
            launch.run_ok(["run_scenarios.py", out, *names], ranks if ranks > 1 else 0,
                          timeout_s=60 + 8 * len(names))
        return self._done[ranks, repeat]


@pytest.fixture(scope="session")
def jobs(tmp_path_factory, request):
    return Jobs(tmp_path_factory.mktemp("jobs"), request.config.getoption("--full"))


def table(full):
    """Returns the (cell, ranks) of the training table to run."""
    if full:
        return list(itertools.product(scenarios.table(), scenarios.RANKS))
    return scenarios.cover()


def repeated(full):
    """Returns the scenarios that run a second time, on 3 ranks, to see the same bits."""
    return [*(cell for cell, ranks in table(full) if ranks == 3), *scenarios.BITS]


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("--full")
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell, ranks", table(full))
    if "repeated" in metafunc.fixturenames:
        metafunc.parametrize("repeated", repeated(full))
