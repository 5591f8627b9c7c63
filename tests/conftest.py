"""Options of pytest; which tests run, and the order of test files."""

import collections
import os
import pathlib
import signal
import sys

import pytest

# The package `evaluation`; at the end, so that an installed tf_poseidon is tested.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true",
                     help="run all cells of tables, not a cover of them, and more random graphs")
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite the golden texts of the graph passes")
    parser.addoption("--tier", help="run only the tests of some tiers, such as unit,test (tests/support/tiers.py)")
    parser.addoption("--record-durations", action="store_true",
                     help="write how long tests take to tests/durations.json")


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # for the jobs of tests, which would inherit it
    if config.getoption("--full"):
        os.environ.setdefault("POSEIDON_FUZZ_GRAPHS", "20")
        os.environ.setdefault("POSEIDON_PIPELINE_GRAPHS", "20")
        os.environ.setdefault("POSEIDON_INPUT_PROGRAMS", "600")
        os.environ["POSEIDON_ALL_CELLS"] = "1"
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):  # workers report to this process
        import durations  # pytest puts it on the path after it has read this file
        config.pluginmanager.register(durations.Recorder())


def pytest_collection_modifyitems(config, items):
    """Selects tiers, and starts with the longest files: several run at a time, and should end at the same time."""
    import durations
    import tiers
    chosen = (config.getoption("--tier") or ",".join(tiers.TIERS)).split(",")
    if not set(chosen) <= set(tiers.TIERS):
        raise pytest.UsageError(f"--tier={','.join(chosen)}, expected some of {', '.join(tiers.TIERS)}.")
    left_out = [item for item in items if tiers.tier_of(item.nodeid) not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    recorded, seconds = durations.load(), collections.Counter()
    for tier in chosen:
        seconds.update(recorded.get(tier, {}))
    items.sort(key=lambda item: -seconds[durations.file_of(item.nodeid)])


def pytest_generate_tests(metafunc):
    """Gives a test that is marked `table(cases=function)` the cases that the function returns for --full or not."""
    for mark in metafunc.definition.iter_markers("table"):
        metafunc.parametrize("case", mark.kwargs["cases"](metafunc.config.getoption("--full")), ids=str)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, request):
    """The results of all cases that the selected tests of a module name."""
    import jobs as jobs_lib
    items = [item for item in request.session.items if item.path == request.path]
    jobs = jobs_lib.Jobs(tmp_path_factory.mktemp("jobs"), jobs_lib.cases_of(items))
    yield jobs
    jobs.stop()


@pytest.fixture
def alone():
    """A job of one rank, of this process, for the ops that it runs."""
    from tf_poseidon.job import communicator
    rank, = communicator.join_loopback(1)
    rank.use_for_ops()
    yield
    rank.leave()  # other tests of this process run ops outside of a job


@pytest.fixture(scope="session")
def able():
    """Skips where hosts cannot be emulated, but not in CI, where that would hide a failure."""
    import host_emulation  # pytest puts it on the path after it has read this file
    reason = host_emulation.problem()
    if reason and "CI" in os.environ:
        pytest.fail(f"No hosts can be made: {reason}.")
    if reason:
        pytest.skip(f"no hosts can be made: {reason}")
