"""What one rank of keras_suites.py does: it runs Keras' tests, each plainly or in the scope of a PoseidonStrategy."""

import contextlib
import os
import pathlib
import sys
import types

with contextlib.suppress(ImportError):  # it crashes if TensorFlow was imported before
    import torch  # noqa: F401

import keras  # the installed one, before pytest meets the directories of the checkout
from keras.src.testing import test_case
import numpy as np
import pytest

from evaluation.runner import noted_tests
from evaluation.runner.notes import Notes


class _LeaveScope(Exception):
    """Leaves the scope after a test has failed, as the error of the test would."""


class _KerasTests(noted_tests.NotedTests):
    """Runs each test in a scope."""

    def __init__(self, notes):
        super().__init__(notes, lambda name: name.removeprefix("keras/src/"))
        self._strategy = notes.strategy("ps") if notes.how == "scope" else None
        self._number = 0

    def pytest_configure(self, config):
        for marker in ("requires_trainable_backend", "multi_device"):
            config.addinivalue_line("markers", f"{marker}: of Keras' tests")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        # Keras' tests begin with this, which would forget the scope.
        keras.src.backend.common.global_state.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with contextlib.ExitStack() as stack:
            replace = lambda owner, name, value: stack.enter_context(pytest.MonkeyPatch.context()).setattr(
                owner, name, value, raising=False)
            replace(test_case, "clear_session", lambda **_: None)
            if self.notes.options["is_shared"]:
                self._number += 1
                files = _SharedFiles(self.notes.directory / "shared" / str(self._number), self.notes.communicator)
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


def main(directory):
    notes = Notes(directory)
    root = pathlib.Path(notes.options["checkout"])
    files = sorted((root / "keras" / "src" / notes.options["suite"]).glob("*_test.py"))
    if notes.items is not None:
        files = [root / "keras" / "src" / name for name in dict.fromkeys(
            test.partition("::")[0] for test in notes.items)]
    # The checkout must not be in Python's path: it would be imported in place of the installed package.
    noted_tests.run(_KerasTests(notes), "-c", str(root / "pyproject.toml"), "--rootdir", str(root),
                    "--import-mode=importlib", *map(str, files))


if __name__ == "__main__":
    main(sys.argv[1])
