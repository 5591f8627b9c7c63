"""Runs published programs for a few steps each on one rank of a job, and saves what they compute.

They run without tf_poseidon, or in the scope of a strategy. What is changed in a program, besides its recipe: it
computes in double precision, its data are small and made up, each `fit` takes a few batches, and nothing is drawn. It
runs twice, with plain SGD and with its own optimizers.
"""

from collections.abc import Callable
from collections.abc import Iterable
import contextlib
import importlib
import inspect
import io
import pathlib
import re
import sys
import tempfile
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from evaluation.programs import program_recipes
from evaluation.programs import stand_ins
from evaluation.runner import arrays
from evaluation.runner.notes import Notes

_ROWS, _BATCH = 25, 10  # the last batch is smaller, also without a tenth of the rows for validation
_STEPS = 3
# Numbers in programs, in either case, and what they become.
_SMALLER = {r"batch_size = ": _BATCH, r"\.batch\(": _BATCH, r"(num_)?epochs = ": 1,
            r"(num_)?transformer_(layers|blocks) = ": 2, r"num_(blocks|layers) = ": 2}
# A parallel map draws random numbers in any order, so that two runs of a program differ.
_PARALLEL = r"num_parallel_calls=(\w+\.)*\w+"
_UNUSED = ("matplotlib", "matplotlib.pyplot", "mpl_toolkits", "mpl_toolkits.axes_grid1",
           "mpl_toolkits.axes_grid1.inset_locator", "IPython", "IPython.display", "PIL", "gdown", "tqdm", "imageio",
           "ipywidgets")


def _weights(models: Iterable[keras.Model], name: str) -> dict[str, np.ndarray]:
    return {f"{name}/weight {number} {variable.path}": variable.numpy()
            for number, variable in enumerate(weight for model in models for weight in model.trainable_weights)}


class _PlainSGD(keras.optimizers.SGD):
    """Plain SGD in place of another optimizer, whatever that is made with."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(0.01, name="sgd")


class _Note(keras.callbacks.Callback):
    """Notes the weights of a model before its steps, as far as it is built, and after each of the first."""

    def __init__(self, arrays: dict[str, np.ndarray], name: str) -> None:
        super().__init__()
        self._arrays, self._name = arrays, name

    def on_train_begin(self, logs: Any = None) -> None:
        self._note(-1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch < _STEPS:
            self._note(batch)
            for key, value in (logs or {}).items():
                self._arrays[f"{self._name}/step {batch}/log {key}"] = np.float64(value)

    def _note(self, step: int) -> None:
        self._arrays |= _weights([self.model], f"{self._name}/step {step}")


def _few(data: Any) -> Any:
    """Returns the first rows of arrays, or the first batches of a dataset."""
    if isinstance(data, tf.data.Dataset):
        return data.take(_STEPS)
    if isinstance(data, (list, tuple)):
        return type(data)(map(_few, data))
    if isinstance(data, dict):
        return {key: _few(value) for key, value in data.items()}
    if isinstance(data, keras.utils.PyDataset) or not hasattr(data, "__getitem__"):
        return data
    return data[:_ROWS]


def _double_precision() -> contextlib.ExitStack:
    """Makes double precision the default of TensorFlow's functions, as `set_floatx` does for those of Keras."""
    stack = contextlib.ExitStack()

    def draw(function: Any) -> Any:
        parameters = inspect.signature(function)

        def drawn(*args: Any, **options: Any) -> Any:
            bound = parameters.bind(*args, **options)
            bound.arguments.setdefault("dtype", tf.float64)
            return function(*bound.args, **bound.kwargs)

        return drawn

    drawing = ("normal", "uniform", "truncated_normal", "gamma")
    same = importlib.import_module("tensorflow.random")  # by its own name, it is another module than tf.random
    for module, names in ((tf.random, drawing), (same, drawing), (tf, ("ones", "zeros"))):
        for name in names:
            stack.enter_context(mock.patch.object(module, name, draw(getattr(module, name))))
    in_top_k = tf.math.in_top_k
    stack.enter_context(mock.patch.object(
        tf.math, "in_top_k", lambda targets, predictions, k: in_top_k(targets, tf.cast(predictions, tf.float32), k)))
    return stack


def run(text: str, scope: Any, has_sgd: bool, image_rows: tuple[int, int] = (120, 40),
        distribute: Callable[[Any], Any] = lambda step: step) -> dict[str, np.ndarray]:
    """Runs the text of a program; returns the weights before and after the first steps of each `fit`, and the logs.

    Programs with loops of their own have a decorator, `distributed`; it takes the models whose weights are noted.

    Args:
        text: The program.
        scope: Returns the context of the program.
        has_sgd: Whether plain SGD takes the place of its optimizers.
        image_rows: Numbers of rows of the training and test parts of image data.
        distribute: Decorates the steps of loops.
    """
    arrays: dict[str, np.ndarray] = {}
    fits = iter(range(1000))
    original_fit, original_compile, original_predict = keras.Model.fit, keras.Model.compile, keras.Model.predict
    original_evaluate = keras.Model.evaluate

    def fit(model: keras.Model, x: Any = None, y: Any = None, **options: Any) -> Any:
        for unused in ("epochs", "verbose", "steps_per_epoch", "validation_steps"):
            options.pop(unused, None)
        for part in ("validation_data", "sample_weight"):
            if options.get(part) is not None:
                options[part] = _few(options[part])
        if isinstance(x, keras.utils.PyDataset):
            options["steps_per_epoch"] = _STEPS
        elif not isinstance(x, tf.data.Dataset):
            options["batch_size"] = _BATCH
        note = _Note(arrays, f"fit {next(fits)}")
        return original_fit(model, _few(x), None if y is None else _few(y), epochs=1, verbose=0,
                            **{**options, "callbacks": [*(options.get("callbacks") or ()), note]})

    def compile_(model: keras.Model, optimizer: Any = "rmsprop", *args: Any, **options: Any) -> None:
        options["jit_compile"] = False
        original_compile(model, keras.optimizers.SGD(0.01) if has_sgd else optimizer, *args, **options)

    def evaluate(model: keras.Model, x: Any = None, y: Any = None, **options: Any) -> Any:
        if not options.get("_use_cached_eval_dataset"):
            x, y = _few(x), None if y is None else _few(y)
        return original_evaluate(model, x, y, **{**options, "verbose": 0})

    def predict(model: keras.Model, x: Any, **options: Any) -> Any:
        return original_predict(model, _few(x), **{**options, "verbose": 0})

    def distributed(*models: keras.Model) -> Any:
        def decorate(step: Any) -> Any:
            name, numbers, step = f"fit {next(fits)}", iter(range(_STEPS)), distribute(step)

            def noted(*args: Any) -> Any:
                number = next(numbers, None)
                if number == 0:
                    arrays.update(_weights(models, f"{name}/step -1"))
                outputs = step(*args)
                if number is not None:
                    arrays.update(_weights(models, f"{name}/step {number}"))
                return outputs

            return noted

        return decorate

    # Where it is defined: a class with a `compile` of its own is not compiled when it is loaded.
    trainer = next(base for base in keras.Model.__mro__ if "compile" in vars(base))
    # Modules that only draw or download, where the program wants them: other libraries look whether IPython is there.
    drawing = {name: mock.MagicMock() for name in _UNUSED
               if name.partition(".")[0] in text and name not in sys.modules}
    if "tqdm" in drawing:
        drawing["tqdm"].tqdm = lambda iterable, **_: iterable
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with (stand_ins.datasets(image_rows), _double_precision(), stand_ins.modules(drawing),
          mock.patch.object(keras.Model, "fit", fit), mock.patch.object(trainer, "compile", compile_),
          mock.patch.object(keras.Model, "evaluate", evaluate), mock.patch.object(keras.Model, "predict", predict),
          contextlib.redirect_stdout(io.StringIO()), mock.patch.object(keras.utils, "plot_model", mock.MagicMock()),
          mock.patch.object(keras.optimizers, "Adam", _PlainSGD if has_sgd else keras.optimizers.Adam), scope()):
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # AutoGraph reads the text of functions
            file.write(text)
            file.flush()
            exec(compile(text, file.name, "exec"), {"__name__": "__main__", "distributed": distributed})
    return arrays


def program(checkout: pathlib.Path, recipe: program_recipes.Recipe) -> str:
    """Returns the text of a program after its recipe."""
    text = recipe.text or (checkout / recipe.path).read_text()
    text = text.replace("float32", "float64")
    for old, new in recipe.edits:
        if old not in text:
            raise ValueError(f"{recipe.path} has no {old!r}, which its recipe replaces; use the checkout that "
                             "docs/results/published_programs.md names, or mend the recipe.")
        text = text.replace(old, new)
    for start, end, new in recipe.stretches:
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise ValueError(f"{recipe.path} has no text from {start!r} to {end!r}, which its recipe replaces; use the "
                             "checkout that docs/results/published_programs.md names, or mend the recipe.")
        text = before + new + end + rest.partition(end)[2]
    for before, value in _SMALLER.items():
        text = re.sub(rf"(?i)(?<![a-z])({before})\d+", rf"\g<1>{value}", text)
    text = re.sub(_PARALLEL, "num_parallel_calls=None", text)
    return text.partition(recipe.ends_before)[0] if recipe.ends_before else text


def main(directory: str) -> None:
    notes = Notes(directory)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    scope, distribute = contextlib.nullcontext, lambda step: step
    if notes.how != "plain":
        import tf_poseidon as poseidon
        scope, distribute = notes.strategy(notes.how, global_batch_norm=True).scope, poseidon.distribute
    recipes = {recipe.name: recipe for recipe in program_recipes.RECIPES}

    def use(name: str) -> None:
        text = program(pathlib.Path(notes.options["checkout"]), recipes[name])
        arrays.save(notes.options["arrays"], name, notes.rank, {
            f"{kind}/{key}": value for kind in ("sgd", "own")
            for key, value in run(text, scope, kind == "sgd", recipes[name].rows, distribute).items()})

    notes.run(recipes, use)


if __name__ == "__main__":
    main(sys.argv[1])
