"""What one rank of horovod_suites.py does: runs Horovod's tests or an example, and notes what happens.

    horovod_job.py tests plain|POLICY OUT FILE FIRST WITHOUT
    horovod_job.py example plain|POLICY OUT DIRECTORY NAME

Tests are all of a file but the first FIRST, and but those whose names match a pattern in WITHOUT, a list with commas.
With a POLICY, `poseidon.enable()` is called when the program has called `hvd.init()` for the first time. Notes are
lines of JSON in OUT.RANK, written at once: a job may die, or hang.
"""

import collections
import contextlib
import fnmatch
import io
import json
import os
import pathlib
import re
import sys
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest

from evaluation.suites import horovod_examples


class Notes:
    """The notes of this rank, as lines of a file."""

    def __init__(self, out: str) -> None:
        self.rank, self.size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
        self._paths = [pathlib.Path(f"{out}.{rank}") for rank in range(self.size)]
        self._file = self._paths[self.rank].open("a")
        self._number_of_ends = 0
        self.write(pid=os.getpid())

    def write(self, **note: Any) -> None:
        """Writes a line."""
        self._file.write(json.dumps(note) + "\n")
        self._file.flush()
        self._number_of_ends += "ends" in note

    def wait_for_others(self) -> None:
        """Waits until all ranks have ended as many tests: a rank that has failed early must not join the next test."""
        while any(not path.exists() or path.read_text().count('"ends"') < self._number_of_ends for path in self._paths):
            time.sleep(0.01)


def use_backend_of_tf_keras() -> None:
    """Gives Horovod's callbacks the backend of `tf.keras`: they import that of `keras`, which is Keras 3's."""
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        from horovod.tensorflow.keras import callbacks  # late: TensorFlow takes seconds to import
        import tensorflow as tf
        callbacks.K = tf.keras.backend


def enable_after_init(policy: str, notes: Notes, in_graphs: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Makes the program's first `hvd.init()` call `poseidon.enable()`; the passes note what they do.

    Without `in_graphs`, it is the first call outside of a graph: some of Horovod's tests call it in one.
    """
    from horovod.common import basics
    import tensorflow as tf
    original, is_enabled = basics.HorovodBasics.init, False

    def init(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal is_enabled
        result = original(self, *args, **options)
        if not is_enabled and (in_graphs or tf.executing_eagerly()):
            is_enabled = True
            import tf_poseidon as poseidon
            passes = poseidon.enable(policy=policy, timeout_s=30)
            rewrite = passes.rewrite

            def noted(graph_def: Any) -> Any:
                rewritten = rewrite(graph_def)
                if passes.plan is not None:
                    notes.write(plan=passes.plan.refusal or collections.Counter(
                        decision.scheme for decision in passes.plan.decisions))
                return rewritten

            passes.rewrite = noted
        return result

    return mock.patch.object(basics.HorovodBasics, "init", init)


class Plugin:
    """Notes the tests of a session of pytest, which both ranks run side by side."""

    def __init__(self, notes: Notes, first: int, without: list[str]) -> None:
        self._notes, self._first, self._without = notes, first, without
        self._reports: list[Any] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if not any(fnmatch.fnmatchcase(item.name, p) for p in self._without)]
        self._notes.write(collected=[_name(item.nodeid) for item in items])
        items[:] = items[self._first:]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._notes.write(broken=_text(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._notes.write(begins=_name(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        failed = [report for report in self._reports if report.failed]
        skipped = [report for report in self._reports if report.skipped and not hasattr(report, "context")]
        outcome, reports = ("failed", failed) if failed else ("skipped", skipped) if skipped else ("passed", [])
        self._notes.write(ends=_name(nodeid), outcome=outcome, text=_text(reports[0]) if reports else "")
        self._reports.clear()
        self._notes.wait_for_others()


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _text(report: Any) -> str:
    """Returns why a test failed, or was skipped."""
    why = report.longrepr
    if isinstance(why, tuple):
        return why[2]
    crash = getattr(why, "reprcrash", None)
    return crash.message if crash is not None else str(why).strip().splitlines()[-1]


def run_tests(how: str, notes: Notes, path: str, first: int, without: list[str]) -> None:
    """Runs tests of a file."""
    with contextlib.nullcontext() if how == "plain" else enable_after_init(how, notes, in_graphs=False):
        pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", os.path.dirname(path),
                     "--capture=fd", path], plugins=[Plugin(notes, first, without)])
    notes.write(finished=True)


def run_example(how: str, notes: Notes, directory: str, name: str, out: str) -> None:
    """Runs an example, and writes the numbers that it has computed to OUT.RANK.npz."""
    import tensorflow as tf
    example = next(example for example in horovod_examples.EXAMPLES if example.name == name)
    text = example.small(pathlib.Path(directory, "examples", example.path).read_text())
    tf.keras.utils.set_random_seed(1 + notes.rank)
    tf.config.experimental.enable_op_determinism()
    models: list[Any] = []
    arrays: dict[str, np.ndarray] = {}
    original, original_close = tf.keras.Model.__init__, tf.compat.v1.Session.close

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if not any(model is self for model in models):
            models.append(self)

    def close(self: Any) -> None:
        variables = self.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        arrays.update((variable.name, value) for variable, value in zip(variables, self.run(variables)))
        original_close(self)

    images = np.random.default_rng(notes.rank).integers(0, 256, (96, 28, 28), np.uint8), np.arange(96) % 10
    printed = io.StringIO()
    notes.write(collected=[name])
    notes.write(begins=name)
    try:
        with contextlib.ExitStack() as stack:
            if how != "plain":
                stack.enter_context(enable_after_init(how, notes))
            stack.enter_context(mock.patch.object(tf.keras.Model, "__init__", init))
            stack.enter_context(mock.patch.object(tf.compat.v1.Session, "close", close))
            stack.enter_context(mock.patch.object(
                tf.keras.datasets.mnist, "load_data", lambda *_, **__: (images, images)))
            stack.enter_context(mock.patch.object(sys, "argv", [name, *example.arguments]))
            stack.enter_context(contextlib.redirect_stdout(printed))
            exec(compile(text, example.path, "exec"), {"__name__": "__main__"})
    except BaseException as error:  # of all kinds: an example may call sys.exit
        if not (isinstance(error, SystemExit) and not error.code):
            notes.write(ends=name, outcome="failed", text=f"{type(error).__name__}: {error}")
            raise
    sys.stdout.write(printed.getvalue())
    arrays.update((f"printed {number}", np.float64(value)) for number, value in enumerate(
        re.findall(r"(?i)loss.*?(\d+\.\d+(?:e[+-]?\d+)?)", printed.getvalue())))
    if tf.executing_eagerly():
        arrays.update((f"model {number}, weight {index}", weight.numpy()) for number, model in enumerate(models)
                      for index, weight in enumerate(model.weights))
    np.savez(f"{out}.{notes.rank}.npz", **arrays)
    notes.write(ends=name, outcome="passed", text="")
    notes.write(finished=True)


def main(kind: str, how: str, out: str, *arguments: str) -> None:
    notes = Notes(out)
    use_backend_of_tf_keras()
    if kind == "tests":
        run_tests(how, notes, arguments[0], int(arguments[1]), arguments[2].split(","))
    else:
        run_example(how, notes, *arguments, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
