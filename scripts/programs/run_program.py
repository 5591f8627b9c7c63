"""Runs a published program for a few steps, and writes what they computed.

    run_program.py plain|POLICY CHECKOUT NAME OUT

"plain" runs it without tf_poseidon; otherwise it runs in the scope of a strategy with that policy, on this rank. What
is changed in a program, besides its recipe: it computes in double precision, its data are small and made up, each `fit`
takes a few batches, and nothing is drawn. It runs twice, with plain SGD and with its own optimizers.
"""

import contextlib
import io
import pathlib
import sys
from typing import Any
from unittest import mock

import keras
import numpy as np
import program_recipes
import tensorflow as tf

_ROWS, _BATCH = 22, 10  # the last batch is smaller
_STEPS = 3


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


def _small_datasets() -> contextlib.ExitStack:
    """Replaces the downloads of keras.datasets by small random data, in a context."""
    rng = np.random.default_rng(5)
    stack = contextlib.ExitStack()

    def images(*shape: int, classes: int, column: bool) -> Any:
        def load_data(*_: Any, **__: Any) -> Any:
            return tuple((rng.integers(0, 256, (rows, *shape), np.uint8),
                          np.arange(rows).reshape((rows, 1) if column else (rows,)) * 7 % classes)
                         for rows in (120, 40))

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


def run(text: str, scope: Any, has_sgd: bool) -> dict[str, np.ndarray]:
    """Runs the text of a program; returns the weights before and after the first steps of each `fit`, and the logs."""
    arrays: dict[str, np.ndarray] = {}
    fits = iter(range(1000))
    original_fit, original_compile, original_predict = keras.Model.fit, keras.Model.compile, keras.Model.predict
    original_evaluate = keras.Model.evaluate

    def fit(model: keras.Model, x: Any = None, y: Any = None, **options: Any) -> Any:
        for unused in ("epochs", "verbose", "steps_per_epoch", "validation_data", "validation_split"):
            options.pop(unused, None)
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

    # Modules that only draw, where the program wants them: other libraries look whether IPython is there.
    drawing = {name: mock.MagicMock() for name in ("matplotlib", "matplotlib.pyplot", "IPython", "IPython.display")
               if name.partition(".")[0] in text and name not in sys.modules}
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with (_small_datasets(), mock.patch.dict(sys.modules, drawing), mock.patch.object(keras.Model, "fit", fit),
          mock.patch.object(keras.Model, "compile", compile_), mock.patch.object(keras.Model, "evaluate", evaluate),
          mock.patch.object(keras.Model, "predict", predict), contextlib.redirect_stdout(io.StringIO()),
          mock.patch.object(keras.utils, "plot_model", mock.MagicMock()), scope()):
        exec(compile(text, "program", "exec"), {"__name__": "__main__"})
    return arrays


def program(checkout: pathlib.Path, recipe: program_recipes.Recipe) -> str:
    """Returns the text of a program after its recipe."""
    text = (checkout / recipe.path).read_text()
    for old, new in (*recipe.edits, *((("float32", "float64"),) if "float32" in text else ())):
        if old not in text:
            raise ValueError(f"{recipe.path} has no {old!r}, which its recipe replaces; use the checkout that "
                             "docs/results/published_programs.md names, or mend the recipe.")
        text = text.replace(old, new)
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
              for key, value in run(text, scope, kind == "sgd").items()}
    np.savez(f"{out}.{rank}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
