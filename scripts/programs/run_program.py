"""Runs a published program for a few steps, and writes what they computed.

    run_program.py plain|POLICY CHECKOUT NAME OUT

"plain" runs it without tf_poseidon; otherwise it runs in the scope of a strategy with that policy, on this rank. What
is changed in a program, besides its recipe: it computes in double precision, its data are small and made up, each `fit`
takes a few batches, and nothing is drawn. It runs twice, with plain SGD and with its own optimizers.
"""

import contextlib
import importlib
import inspect
import io
import pathlib
import sys
import tempfile
from typing import Any
from unittest import mock

import keras
import numpy as np
import program_recipes
import tensorflow as tf

_ROWS, _BATCH = 25, 10  # the last batch is smaller, also without a tenth of the rows for validation
_STEPS = 3
_UNUSED = ("matplotlib", "matplotlib.pyplot", "IPython", "IPython.display", "PIL", "gdown", "tqdm", "imageio",
           "ipywidgets")


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
        for number, variable in enumerate(self.model.trainable_weights):
            self._arrays[f"{self._name}/step {step}/weight {number} {variable.path}"] = variable.numpy()


def _few(data: Any) -> Any:
    """Returns the first rows of arrays, or the first batches of a dataset."""
    if isinstance(data, tf.data.Dataset):
        return data.take(_STEPS)
    if isinstance(data, (list, tuple)):
        return type(data)(map(_few, data))
    if isinstance(data, dict):
        return {key: _few(value) for key, value in data.items()}
    return data[:_ROWS] if hasattr(data, "__getitem__") else data


def _small_datasets(image_rows: tuple[int, int]) -> contextlib.ExitStack:
    """Replaces the downloads of keras.datasets by small random data, in a context."""
    rng = np.random.default_rng(5)
    stack = contextlib.ExitStack()

    def images(*shape: int, classes: int, column: bool) -> Any:
        def load_data(*_: Any, **__: Any) -> Any:
            return tuple((rng.integers(0, 256, (rows, *shape), np.uint8),
                          np.arange(rows).reshape((rows, 1) if column else (rows,)) * 7 % classes)
                         for rows in image_rows)

        return load_data

    def texts(*_: Any, num_words: int | None = None, **__: Any) -> Any:
        parts = []
        for rows in (120, 40):
            x = np.empty(rows, object)
            x[:] = [rng.integers(1, num_words or 1000, rng.integers(5, 30)).tolist() for _ in range(rows)]
            parts.append((x, np.arange(rows) % 2))
        return tuple(parts)

    for name, load in {
            "mnist": images(28, 28, classes=10, column=False),
            "fashion_mnist": images(28, 28, classes=10, column=False),
            "cifar10": images(32, 32, 3, classes=10, column=True), "imdb": texts,
            "cifar100": images(32, 32, 3, classes=100, column=True)}.items():
        stack.enter_context(mock.patch.object(getattr(keras.datasets, name), "load_data", load))
    return stack


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


def run(text: str, scope: Any, has_sgd: bool, image_rows: tuple[int, int] = (120, 40)) -> dict[str, np.ndarray]:
    """Runs the text of a program; returns the weights before and after the first steps of each `fit`, and the logs."""
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
        if not isinstance(x, tf.data.Dataset):
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

    # Where it is defined: a class with a `compile` of its own is not compiled when it is loaded.
    trainer = next(base for base in keras.Model.__mro__ if "compile" in vars(base))
    # Modules that only draw or download, where the program wants them: other libraries look whether IPython is there.
    drawing = {name: mock.MagicMock() for name in _UNUSED
               if name.partition(".")[0] in text and name not in sys.modules}
    if "tqdm" in drawing:
        drawing["tqdm"].tqdm = lambda iterable, **_: iterable
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with (_small_datasets(image_rows), _double_precision(), mock.patch.dict(sys.modules, drawing),
          mock.patch.object(keras.Model, "fit", fit), mock.patch.object(trainer, "compile", compile_),
          mock.patch.object(keras.Model, "evaluate", evaluate), mock.patch.object(keras.Model, "predict", predict),
          contextlib.redirect_stdout(io.StringIO()), mock.patch.object(keras.utils, "plot_model", mock.MagicMock()),
          scope()):
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:  # AutoGraph reads the text of functions
            file.write(text)
            file.flush()
            exec(compile(text, file.name, "exec"), {"__name__": "__main__"})
    return arrays


def program(checkout: pathlib.Path, recipe: program_recipes.Recipe) -> str:
    """Returns the text of a program after its recipe."""
    text = (checkout / recipe.path).read_text()
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
    return text.partition(recipe.ends_before)[0] if recipe.ends_before else text


def main(how: str, checkout: str, name: str, out: str) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    recipe, = (recipe for recipe in program_recipes.RECIPES if recipe.name == name)
    scope, rank = contextlib.nullcontext, 0
    if how != "plain":
        import tf_poseidon as poseidon
        strategy = poseidon.PoseidonStrategy(policy=how, global_batch_norm=True, timeout_s=120)
        scope, rank = strategy.scope, strategy.rank
    text = program(pathlib.Path(checkout), recipe)
    arrays = {f"{kind}/{key}": value for kind in ("sgd", "own")
              for key, value in run(text, scope, kind == "sgd", recipe.rows).items()}
    np.savez(f"{out}.{rank}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
