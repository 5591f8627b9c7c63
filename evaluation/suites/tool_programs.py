"""What people use around Keras, in small programs: LoRA, KerasHub, KerasTuner, quantisation, mixed precision, data.

Each program takes a `Run` with an open scope, and returns (model, a function that trains it and returns results). Each
rank of tools.py runs them, and saves updates of weights, and the results.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import pathlib
import sys
import time
from typing import Any

import keras
from keras import layers
import numpy as np
import tensorflow as tf

from evaluation.runner import arrays
from evaluation.runner.notes import Notes

Results = dict[str, Any]
Program = tuple[keras.Model | None, Callable[[], Results]]


@dataclasses.dataclass(frozen=True)
class Run:
    """How a program runs: in which scope, on which rank, with files in which directory."""

    scope: Callable[[], contextlib.AbstractContextManager[Any]]
    rank: int
    directory: pathlib.Path


PROGRAMS: dict[str, Callable[[Run], Program]] = {}
PRECISION: dict[str, str] = {}  # by name, a policy of Keras


def program(precision: str = "float64") -> Callable[[Callable[[Run], Program]], Callable[[Run], Program]]:
    """Registers a program, which runs with this policy of Keras."""
    def register(function: Callable[[Run], Program]) -> Callable[[Run], Program]:
        PROGRAMS[function.__name__], PRECISION[function.__name__] = function, precision
        return function
    return register


def numbers(*shape: int, seed: int = 3) -> np.ndarray:
    """Returns multiples of 1/2."""
    return np.random.default_rng(seed).integers(-3, 4, shape) / 2


def ids(*shape: int, below: int = 30, seed: int = 3) -> np.ndarray:
    """Returns numbers of classes, or of words."""
    return np.random.default_rng(seed).integers(0, below, shape)


def _dense() -> keras.Model:
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(3, name="b")(layers.Dense(16, "tanh", name="a")(x)))


def _compiled(model: keras.Model, loss: Any = "mse", **options: Any) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.3), loss, **options)
    return model


class _Logs(keras.callbacks.Callback):
    """Notes logs, and what an optimizer that scales losses decides, after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[list[float]] = []

    def on_train_batch_end(self, batch: int, logs: Results | None = None) -> None:
        optimizer = self.model.optimizer
        self.logs.append([*(logs or {}).values(), float(getattr(optimizer, "dynamic_scale", 0)),
                          float(optimizer.iterations)])


def _fitting(model: keras.Model, *data: Any, **options: Any) -> Program:
    def fit() -> Results:
        logs = _Logs()
        history = model.fit(*data, shuffle=False, verbose=0, callbacks=[logs], **options)
        return {**history.history, "logs of batches": logs.logs}
    return model, fit


def _randomize_lora(model: keras.Model) -> keras.Model:
    """Of the two matrices of LoRA, the second starts as zeros, which would leave the first without a gradient."""
    rng = np.random.default_rng(9)
    for weight in model.weights:
        if "lora" in weight.path:
            weight.assign(rng.normal(size=weight.shape) / 4)
    return model


# ---- LoRA, KerasHub -----------------------------------------------------------------------------


@program()
def lora_of_layers(run: Run) -> Program:
    """Of embeddings, EinsumDense, a convolution and a dense layer; other weights of these are frozen."""
    words = keras.Input((5,), dtype="int32")
    adapted = [layers.Embedding(30, 6), layers.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d"),
               layers.Conv1D(6, 2), layers.Dense(16, "tanh")]
    h = words
    for layer in adapted:
        h = layer(h)
    model = keras.Model(words, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    for layer in adapted:
        layer.enable_lora(2)
    return _fitting(_compiled(_randomize_lora(model)), ids(23, 5), numbers(23, 3), batch_size=7)


def _hub(make: Callable[[Any], tuple[keras.Model, type[keras.Model], Results]], lora: bool = True,
         of_words: bool = True) -> Callable[[Run], Program]:
    """A small model of KerasHub with random weights: a classifier of sequences, or a causal language model."""
    def build(run: Run) -> Program:
        import keras_hub
        backbone, task, options = make(keras_hub.models)
        if lora:
            backbone.enable_lora(2)
            _randomize_lora(backbone)
        model = task(backbone, preprocessor=None, **options)
        _compiled(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        mask = np.arange(6) < np.random.default_rng(1).integers(2, 7, (23, 1))
        x = {"token_ids": ids(23, 6), "padding_mask": mask}
        if of_words:
            return _fitting(model, x, ids(23, 6, seed=5), batch_size=7, sample_weight=mask.astype("float64"))
        return _fitting(model, {**x, "segment_ids": ids(23, 6, below=2)}, ids(23, below=3), batch_size=7)
    return build


_SMALL = {"vocabulary_size": 30, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12}
_HEADS = {"num_heads": 2, "max_sequence_length": 6, "dropout": 0.1}

PROGRAMS |= {
    "bert_classifier": _hub(lambda m: (m.BertBackbone(**_SMALL, **_HEADS), m.BertTextClassifier, {"num_classes": 3}),
                            lora=False, of_words=False),
    "bert_classifier_lora": _hub(lambda m: (m.BertBackbone(**_SMALL, **_HEADS), m.BertTextClassifier,
                                            {"num_classes": 3}), of_words=False),
    "gpt2_lora": _hub(lambda m: (m.GPT2Backbone(**_SMALL, **_HEADS), m.GPT2CausalLM, {})),
    "gemma_lora": _hub(lambda m: (m.GemmaBackbone(**_SMALL, num_query_heads=2, num_key_value_heads=1, head_dim=4),
                                  m.GemmaCausalLM, {})),
}
PRECISION |= {name: "float64" for name in PROGRAMS if name not in PRECISION}


# ---- KerasTuner ---------------------------------------------------------------------------------


def _search(tuner: str, **options: Any) -> Callable[[Run], Program]:
    """A search with files in one directory, whose choices are those of one process."""
    def build(run: Run) -> Program:
        def search() -> Results:
            import keras_tuner
            with run.scope():
                strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None

            def hypermodel(choices: Any) -> keras.Model:
                keras.utils.set_random_seed(7)
                units, rate = choices.Int("units", 2, 32), choices.Float("rate", 1e-3, 1e-1, sampling="log")
                model = keras.Sequential([keras.Input((6,)), layers.Dense(units, "tanh"), layers.Dense(3)])
                model.compile(keras.optimizers.SGD(rate), "mse")
                return model

            searching = getattr(keras_tuner, tuner)(
                hypermodel, "val_loss", seed=3, directory=str(run.directory), project_name=tuner,
                distribution_strategy=strategy, **options)
            x, y = numbers(24, 6), numbers(24, 3, seed=4)
            searching.search(x, y, epochs=2, batch_size=8, validation_data=(x, y), verbose=0, shuffle=False,
                             callbacks=[keras.callbacks.EarlyStopping(patience=1)])
            best = searching.get_best_hyperparameters()[0].values
            return {"units": best["units"], "rate": best["rate"],
                    "scores": [trial.score for _, trial in sorted(searching.oracle.trials.items())],
                    "best model": searching.get_best_models()[0].evaluate(x, y, verbose=0)}

        # Outside of the scope, which ends when KerasTuner clears the session, as that of any strategy does.
        return None, search
    return build


PROGRAMS |= {"random_search": _search("RandomSearch", max_trials=2),
             "grid_search": _search("GridSearch", max_trials=2, executions_per_trial=2),
             "bayesian_optimization": _search("BayesianOptimization", max_trials=3, num_initial_points=2),
             "hyperband": _search("Hyperband", max_epochs=3, factor=3, hyperband_iterations=1)}
PRECISION |= {name: "float64" for name in PROGRAMS if name not in PRECISION}


# ---- precision ----------------------------------------------------------------------------------


def _quantized(mode: str, lora: bool = False) -> Callable[[Run], Program]:
    """Trains, quantises, evaluates, predicts, and trains what still can be."""
    def build(run: Run) -> Program:
        model = _compiled(_dense())
        x, y = numbers(23, 6).astype("float32"), numbers(23, 3).astype("float32")

        def fit() -> Results:
            options: Results = {"batch_size": 7, "verbose": 0}
            first = model.fit(x, y, shuffle=False, **options).history["loss"]
            with run.scope():
                model.quantize(mode)
                if lora:
                    model.get_layer("a").enable_lora(2)
                    _randomize_lora(model)
                _compiled(model)
            return {"first": first, "evaluated": model.evaluate(x, y, **options),
                    "predicted": model.predict(x, **options),
                    "second": model.fit(x, y, epochs=2, shuffle=False, **options).history["loss"]}

        return model, fit
    return build


def _mixed(scale: float | None = None, infinite_rows: tuple[int, ...] = ()) -> Callable[[Run], Program]:
    def build(run: Run) -> Program:
        model = _dense()
        optimizer = keras.optimizers.SGD(0.25)
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale, dynamic_growth_steps=2)
        model.compile(optimizer, "mse", metrics=["mae"])
        x = numbers(23, 6)
        x[list(infinite_rows), 2] = 1e6
        return _fitting(model, x, numbers(23, 3), batch_size=7, epochs=3)
    return build


PROGRAMS |= {
    "int8": _quantized("int8"), "int8_lora": _quantized("int8", lora=True), "int4_lora": _quantized("int4", lora=True),
    "float8": _quantized("float8"),
    "mixed_bfloat16": _mixed(), "mixed_float16": _mixed(), "mixed_float16_infinite_rows": _mixed(2.0**10, (3, 12)),
    "mixed_float16_overflow": _mixed(2.0**20),
}
PRECISION |= {name: "mixed_" + name.split("_")[1] if name.startswith("mixed") else "float32"
              for name in PROGRAMS if name not in PRECISION}


# ---- data ---------------------------------------------------------------------------------------


class _Data(keras.utils.PyDataset):
    """Batches that are ready in another order than they were asked for; shuffled between epochs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y, self.order = numbers(29, 6), numbers(29, 3), np.arange(29)
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.002 * (number * 7 % 3))
        rows = self.order[number * 6:(number + 1) * 6]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


def _dataset(**options: Any) -> Callable[[Run], Program]:
    return lambda run: _fitting(_compiled(_dense()), _Data(**options), epochs=2, validation_data=_Data(**options))


PROGRAMS |= {"py_dataset_threads": _dataset(workers=3),
             "py_dataset_processes": _dataset(workers=2, use_multiprocessing=True)}
PRECISION |= {name: "float64" for name in PROGRAMS if name not in PRECISION}


@program()
def swapped_averages(run: Run) -> Program:
    """Validation uses the moving averages of the weights."""
    model = _dense()
    model.compile(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7), "mse")
    data = numbers(23, 6), numbers(23, 3)

    def fit() -> Results:
        history = model.fit(*data, batch_size=7, epochs=3, shuffle=False, verbose=0, validation_data=data,
                            callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
        return {**history.history, "evaluated": model.evaluate(
            *data, batch_size=7, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])}

    return model, fit


def main(directory: str) -> None:
    """Runs programs, and saves what they give."""
    notes = Notes(directory)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    scope = contextlib.nullcontext if notes.how == "plain" else notes.strategy(notes.how).scope
    run = Run(scope, notes.rank, notes.directory)

    def use(name: str) -> None:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        keras.config.set_floatx("float64" if PRECISION[name] == "float64" else "float32")
        keras.config.set_dtype_policy(PRECISION[name])
        with run.scope():
            model, use = PROGRAMS[name](run)
        weights = model.weights if model else []
        before = {weight.path: weight.numpy().astype("float64") for weight in weights}
        found = {key: np.asarray(value, "float64") for key, value in use().items()}
        for i, weight in enumerate(model.weights if model else []):
            value, start = weight.numpy().astype("float64"), before.get(weight.path)
            is_same_kind = start is not None and start.shape == value.shape
            found[f"weight {i} {weight.path}"] = value - start if is_same_kind else value
        arrays.save(notes.options["arrays"], name, notes.rank, found)

    notes.run(PROGRAMS, use)


if __name__ == "__main__":
    main(sys.argv[1])
