"""The jobs of the training tables, and the tests that each table has."""

from concurrent import futures

import keras_programs
import launch
import numpy as np
import one_process_programs
import pytest
import scenarios
import wrappers


class Jobs:
    """The results of all scenarios, one multi-process job per number of ranks and policy.

    TensorFlow takes seconds to import, so all scenarios run in one job. Ranks leave the processor idle while
    they wait for each other, so two jobs run at a time: when the first result of several ranks is requested,
    the jobs (ranks, policy, repeat) of `ahead` are started too, in that order.
    """

    def __init__(self, directory, full, ahead, needed=None):
        self._directory = directory
        self._ahead = ahead
        self._started = {}
        self._pool = futures.ThreadPoolExecutor(2)
        self._names = {}
        self._repeated = {}
        others = [(name, ranks, scenarios.OTHERS) for name, ranks in scenarios.others(full)]
        for name, ranks, policy in (*table(full), *wrapped(full), *others):
            if needed is not None and name not in needed:
                continue
            self._names.setdefault((ranks, policy), []).append(name)
            self._names.setdefault((1, ONE), []).append(name)
        for name, policy in repeated(full):
            self._repeated.setdefault((3, policy), []).append(name)

    def results(self, name, ranks, policy, repeat=0):
        """Returns the arrays of scenario `name`, a dictionary for each rank."""
        out = self._run(ranks, policy, repeat)
        return [dict(np.load(out / f"{name}.rank{rank}.npz")) for rank in range(ranks)]

    def one_process(self, name):
        """Returns the arrays of scenario `name` in one process."""
        return self.results(name, 1, ONE)[0]

    def start(self, ranks, policy, repeat=0):
        """Starts a job once, as soon as earlier ones leave room."""
        key = ranks, policy, repeat
        if key in self._started:
            return
        out = self._directory / "-".join(map(str, key))
        out.mkdir()
        names = list(dict.fromkeys((self._repeated if repeat else self._names)[ranks, policy]))
        # One process keeps one core busy: two share the scenarios.
        parts = [names] if ranks > 1 else [names[::2], names[1::2]]
        self._started[key] = out, [self._pool.submit(
            launch.run_ok, ["run_scenarios.py", out, policy, *part], ranks if ranks > 1 else 0,
            timeout_s=120 + 12 * len(part)) for part in parts]

    def _run(self, ranks, policy, repeat):
        for job in [(ranks, policy, repeat), *(self._ahead if ranks > 1 else ())]:
            self.start(*job)
        out, parts = self._started[ranks, policy, repeat]
        for part in parts:
            part.result()
        return out

    def stop(self):
        """Starts no more jobs, and waits for the running ones."""
        self._pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def jobs(tmp_path_factory, request):
    jobs = Jobs(tmp_path_factory.mktemp("jobs"), request.config.getoption("--full"),
                ahead=[(1, ONE, 0), *wanted(request.session.items)], needed=needed(request.session.items))
    yield jobs
    jobs.stop()


def wanted(items):
    """Returns the (ranks, policy, repeat) of the jobs that parametrized tests request."""
    values = [item.callspec.params for item in items
              if "jobs" in item.fixturenames and hasattr(item, "callspec")]
    return [(v["ranks"], v.get("policy", scenarios.OTHERS), 0) for v in values if "ranks" in v] + [
        (3, v["policy"], 1) for v in values if "repeated" in v]


def needed(items):
    """Returns the scenarios that tests request; None for all, if some do not name theirs by a parameter."""
    found = [{value for name, value in item.callspec.params.items()
              if name in ("cell", "wrapper", "accumulating", "way")} if hasattr(item, "callspec") else set()
             for item in items if "jobs" in item.fixturenames]
    return set().union(*found) if all(found) else None


# For programs written for one process: all combinations with --full.
RANKS_AND_POLICIES = [(ranks, policy) for ranks in (2, 3) for policy in ("ps", "sfb", "auto")]

ONE = "ps"  # a single process, where there is nothing to decide


def table(full):
    """Returns the (cell, ranks, policy) of the training table to run."""
    return scenarios.full() if full else scenarios.cover()


def wrapped(full):
    """Returns the (cell, ranks, policy) of the wrappers of optimizers to run."""
    return wrappers.full() if full else wrappers.cover()


def repeated(full):
    """Returns the (scenario, policy) that run twice on 3 ranks, and must give the same bits."""
    cells = [(cell, policy) for cell, ranks, policy in table(full)
             if ranks == 3 and (full or policy == scenarios.OTHERS)]
    return [*cells, *((name, scenarios.OTHERS) for name in scenarios.BITS)]


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("--full")
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell, ranks, policy", table(full))
    if "wrapper" in metafunc.fixturenames:
        metafunc.parametrize("wrapper, ranks, policy", wrapped(full))
    if "accumulating" in metafunc.fixturenames:
        metafunc.parametrize("accumulating, ranks, policy",
                             [row for row in wrapped(full) if "accumulation" in row[0]])
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way, ranks", [row for row in scenarios.others(full)
                                            if row[0] in scenarios.WAYS])
    if "program" in metafunc.fixturenames:
        cells = [(*cell, options) for cell in RANKS_AND_POLICIES for options in ((), ("--fit",))]
        metafunc.parametrize("ranks, policy, options", cells if full else [(2, "sfb", ()), (3, "auto", ("--fit",))])
        metafunc.parametrize("program", one_process_programs.PROGRAMS)
    if "keras_program" in metafunc.fixturenames:
        metafunc.parametrize("ranks, policy", RANKS_AND_POLICIES if full else [(3, "sfb")])
        metafunc.parametrize("keras_program", keras_programs.PROGRAMS)
    if "repeated" in metafunc.fixturenames:
        metafunc.parametrize("repeated, policy", repeated(full))
