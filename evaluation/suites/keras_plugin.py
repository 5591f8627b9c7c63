"""A pytest plugin that runs each test in the scope of a PoseidonStrategy, and notes on each rank how it ended.

`keras_suites.py` starts pytest with it. Each rank appends lines of JSON to --notes.RANK: {"begun": test}, then
{"test": test, "outcome": ..., "error": ..., "trace": ...}. A job ends with the first test that fails on some ranks, or
in different ways, since the ranks would continue from different places.
"""

import contextlib
import json
import os
import pathlib
import sys
import time
import types

with contextlib.suppress(ImportError):  # it crashes if TensorFlow was imported before
    import torch  # noqa: F401

import keras  # the installed one, before pytest meets the directories of the checkout
from keras.src.testing import test_case
import numpy as np
import pytest

# Part of --wait_s for which a rank whose test has failed waits for others to fail with the same error.
_ALIKE = 1 / 3
# Seconds that it waits for them to note their outcomes, before it ends the job.
_GRACE = 20


class _LeaveScope(Exception):
    """Leaves the scope after a test has failed, as the error of the test would."""


def pytest_addoption(parser):
    parser.addoption("--how", choices=["plain", "scope"], help="without a strategy, or in its scope")
    parser.addoption("--notes", type=pathlib.Path, help="file for the notes of a rank, without .RANK")
    parser.addoption("--tests", type=pathlib.Path, help="file with a line per test to run; all without it")
    parser.addoption("--shared", type=pathlib.Path, help="where tests have the same temporary directories on all ranks")
    parser.addoption("--wait_s", type=float, default=60, help="longest wait for another rank")


def pytest_configure(config):
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: of Keras' tests")
    if config.getoption("--how"):
        config.pluginmanager.register(_Notes(config))


class _Notes:

    def __init__(self, config):
        self._strategy, self._communicator, rank = None, None, 0
        if config.getoption("--how") == "scope":
            import tf_poseidon as poseidon
            self._strategy = poseidon.PoseidonStrategy(policy="ps", timeout_s=config.getoption("--wait_s"))
            job, rank = self._strategy.extended.job, self._strategy.rank
            self._communicator = job and job.communicator
        self._prefix = config.getoption("--notes")
        self._file = open(f"{self._prefix}.{rank}", "a")
        tests = config.getoption("--tests")
        self._tests = tests.read_text().splitlines() if tests else None
        self._shared, self._wait_s = config.getoption("--shared"), config.getoption("--wait_s")
        self._number, self._has_failed = 0, False

    def _note(self, **line):
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_collectreport(self, report):
        if report.failed:
            self._note(file=report.nodeid, error=report.longreprtext.strip().splitlines()[-1])

    def pytest_collection_modifyitems(self, items):
        if self._tests is not None:
            found = {item.nodeid: item for item in items}
            items[:] = [found[name] for name in self._tests if name in found]

    def pytest_collection_finish(self, session):
        self._note(collected=[item.nodeid for item in session.items])

    def pytest_sessionfinish(self):
        self._note(finished=True)

    def pytest_runtest_logstart(self, nodeid):
        self._note(begun=nodeid)
        self._number, self._has_failed = self._number + 1, False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        # Keras' tests begin with this, which would forget the scope.
        keras.src.backend.common.global_state.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with contextlib.ExitStack() as stack:
            replace = lambda owner, name, value: stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                owner, name, value, raising=False)
            replace(test_case, "clear_session", lambda **_: None)
            if self._shared:
                files = _SharedFiles(self._shared / str(self._number), self._communicator)
                replace(test_case, "shutil", files)
                for module in (test_case, item.module):
                    if hasattr(module, "tempfile"):
                        replace(module, "tempfile", files)
                if hasattr(item.module, "os"):
                    replace(item.module, "os", types.SimpleNamespace(**vars(os) | {"remove": files.remove}))
            stack.enter_context(contextlib.suppress(_LeaveScope))
            if self._strategy is not None:
                stack.enter_context(self._strategy.scope())
            result = yield
            if getattr(item, "_excinfo", None):  # unittest hands errors over here
                raise _LeaveScope
            return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" or report.outcome != "passed":
            self._has_failed |= report.failed
            self._note(test=item.nodeid, outcome=report.outcome,
                       error=call.excinfo.exconly() if call.excinfo else "", trace=report.longreprtext[-6000:])
        return report

    def pytest_runtest_logfinish(self, nodeid):
        if self._communicator is None:
            return
        try:
            if self._has_failed and not self._wait_for_others(nodeid, _ALIKE * self._wait_s):
                self._communicator.abort(f"The test {nodeid} has failed on rank {self._strategy.rank}.")
            else:
                self._communicator.sum(f"end of {self._number}", np.zeros(1, np.int64))
                return
        except Exception as error:
            self._note(left=nodeid, error=f"{type(error).__name__}: {error}")
        self._wait_for_others(nodeid, _GRACE)  # mpiexec ends all ranks when one ends
        sys.stdout.flush()
        os._exit(1)

    def _wait_for_others(self, test, seconds):
        """Waits until all ranks have noted how a test has ended; returns whether all errors are the same."""
        paths = [f"{self._prefix}.{rank}" for rank in range(self._communicator.size)]
        deadline = time.monotonic() + seconds
        while not all(errors := [_errors(path, test) for path in paths]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return self._communicator.failure is None and all(error == errors[0] for error in errors)


def _errors(path, test):
    """Returns the errors that a rank has noted for a test, "" where it has passed."""
    lines = pathlib.Path(path).read_text().splitlines() if os.path.exists(path) else []
    notes = [json.loads(line) for line in lines if line.endswith("}")]
    return [note["error"] for note in notes if note.get("test") == test]


class _SharedFiles:
    """What tests take from `tempfile`, `shutil` and `os`: directories of one name on all ranks, which remain."""

    def __init__(self, parent, communicator):
        self._parent, self._communicator, self._number = parent, communicator, 0

    def mkdtemp(self):
        self._number += 1
        path = self._parent / str(self._number)
        path.mkdir(parents=True, exist_ok=True)
        return str(path)

    def TemporaryDirectory(self):
        class Directory(contextlib.nullcontext):
            name = self.mkdtemp()

            def cleanup(self):
                pass

        return Directory(Directory.name)

    def rmtree(self, path):
        """Keeps a directory of `mkdtemp`, which another rank may still read."""

    def remove(self, path):
        """Removes a file once, after all ranks have come to it."""
        self._wait()
        if self._communicator is None or self._communicator.rank == 0:
            os.remove(path)
        self._wait()

    def _wait(self):
        if self._communicator is not None:
            self._communicator.sum("remove", np.zeros(1, np.int64))
