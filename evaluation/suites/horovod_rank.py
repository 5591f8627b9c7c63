"""What one rank of horovod_suites.py does: it runs Horovod's tests, or an example, plainly or after `enable()`.

Then, `poseidon.enable()` is called when the program has called `hvd.init()` for the first time.
"""

import collections
import contextlib
import io
import os
import pathlib
import re
import sys
from typing import Any
from unittest import mock

import numpy as np

from evaluation.runner import arrays
from evaluation.runner import noted_tests
from evaluation.runner.notes import Notes
from evaluation.suites import horovod_examples


def use_backend_of_tf_keras() -> None:
    """Gives Horovod's callbacks the backend of `tf.keras`: they import that of `keras`, which is Keras 3's."""
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1":
        from horovod.tensorflow.keras import callbacks  # late: TensorFlow takes seconds to import
        import tensorflow as tf
        callbacks.K = tf.keras.backend


def enabled_after_init(how: str, plans: list[Any], in_graphs: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Makes the program's first `hvd.init()` call `poseidon.enable()`, unless `how` is "plain".

    Args:
        how: The policy.
        plans: Gets, of each graph, how many sums travel by which scheme, or why it is refused.
        in_graphs: Whether that call may be in a graph, as in some of Horovod's tests.
    """
    if how == "plain":
        return contextlib.nullcontext()
    from horovod.common import basics
    import tensorflow as tf
    original, is_enabled = basics.HorovodBasics.init, False

    def init(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal is_enabled
        result = original(self, *args, **options)
        if not is_enabled and (in_graphs or tf.executing_eagerly()):
            is_enabled = True
            import tf_poseidon as poseidon
            passes = poseidon.enable(policy=how, timeout_s=30)
            rewrite = passes.rewrite

            def noted(graph_def: Any) -> Any:
                rewritten = rewrite(graph_def)
                if passes.plan is not None:
                    plans.append(passes.plan.refusal or collections.Counter(
                        decision.scheme for decision in passes.plan.decisions))
                return rewritten

            passes.rewrite = noted
        return result

    return mock.patch.object(basics.HorovodBasics, "init", init)


def run_tests(notes: Notes) -> None:
    """Runs tests of a file, and notes the plans of the graphs that each has run."""
    path, suite, plans = pathlib.Path(notes.options["path"]), notes.options["suite"], []

    def taken() -> list[Any]:
        found = list(plans)
        plans.clear()
        return found

    plugin = noted_tests.NotedTests(notes, lambda name: suite + name.removeprefix(path.name),
                                    notes.options["without"], taken)
    with enabled_after_init(notes.how, plans, in_graphs=False):
        noted_tests.run(plugin, "-c", os.devnull, "--rootdir", str(path.parent), "--capture=fd", str(path))


def run_example(notes: Notes, name: str) -> list[Any]:
    """Runs an example, saves the numbers that it has computed, and returns the plans of its graphs."""
    import tensorflow as tf
    example = next(example for example in horovod_examples.EXAMPLES if example.name == name)
    text = example.small(pathlib.Path(notes.options["checkout"], "examples", example.path).read_text())
    tf.keras.utils.set_random_seed(1 + notes.rank)
    tf.config.experimental.enable_op_determinism()
    models: list[Any] = []
    plans: list[Any] = []
    found: dict[str, np.ndarray] = {}
    original, original_close = tf.keras.Model.__init__, tf.compat.v1.Session.close

    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if not any(model is self for model in models):
            models.append(self)

    def close(self: Any) -> None:
        variables = self.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)
        found.update((variable.name, value) for variable, value in zip(variables, self.run(variables)))
        original_close(self)

    images = np.random.default_rng(notes.rank).integers(0, 256, (96, 28, 28), np.uint8), np.arange(96) % 10
    printed = io.StringIO()
    with (enabled_after_init(notes.how, plans), mock.patch.object(tf.keras.Model, "__init__", init),
          mock.patch.object(tf.compat.v1.Session, "close", close),
          mock.patch.object(tf.keras.datasets.mnist, "load_data", lambda *_, **__: (images, images)),
          mock.patch.object(sys, "argv", [name, *example.arguments]), contextlib.redirect_stdout(printed)):
        try:
            exec(compile(text, example.path, "exec"), {"__name__": "__main__"})
        except SystemExit as ended:
            if ended.code:
                raise
    sys.stdout.write(printed.getvalue())
    found.update((f"printed {number}", np.float64(value)) for number, value in enumerate(
        re.findall(r"(?i)loss.*?(\d+\.\d+(?:e[+-]?\d+)?)", printed.getvalue())))
    if tf.executing_eagerly():
        found.update((f"model {number}, weight {index}", weight.numpy()) for number, model in enumerate(models)
                     for index, weight in enumerate(model.weights))
    arrays.save(notes.options["arrays"], name, notes.rank, found)
    return plans


def main(directory: str) -> None:
    notes = Notes(directory)
    use_backend_of_tf_keras()
    if "path" in notes.options:
        run_tests(notes)
    else:
        notes.run(notes.items, lambda name: run_example(notes, name))


if __name__ == "__main__":
    main(sys.argv[1])
