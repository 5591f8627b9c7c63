"""Scenarios that give the same bits on all ranks, but not (or only roughly) the result of one process."""

import keras
import numpy as np
from small_models import BATCH
from small_models import batch_norm
from small_models import dense
from small_models import flat
from small_models import make_data
from small_models import result
from small_models import small


def default_batch_norm(strategy):
    """Moments of each rank's rows: moving statistics are averaged, weighted by rows."""
    with strategy.scope():
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.BatchNormalization(momentum=0.5)(x))
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = make_data(model)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return result(model, x=x)


def dropout(strategy):
    """In strategy.run, random layers draw different numbers on every rank, from equal state."""
    with strategy.scope():
        x = keras.Input((64,))
        model = keras.Model(x, keras.layers.Dropout(0.5, seed=3)(x))
        model.compile(loss="mse")
    keep = strategy.run(lambda: model(np.ones((1, 64)), training=True) > 0)
    return {"local/keep": keep.numpy(), **result(model)}


def float32(strategy):
    """Single precision, with every kind of layer whose bits depend on the order of sums."""
    keras.config.set_floatx("float32")
    try:
        with strategy.scope():
            model = keras.Model(*batch_norm())
            model.compile("adam", "mse")
        x, y = make_data(model)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        return result(model, **flat(history))
    finally:
        keras.config.set_floatx("float64")


def bfloat16(strategy):
    """Weights and slots in half precision, not only the arithmetic."""
    keras.config.set_dtype_policy("bfloat16")
    try:
        with strategy.scope():
            model = keras.Model(*dense())
            model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        x, y = make_data(model)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        return {name: np.asarray(value, "float32")
                for name, value in result(model, **flat(history)).items()}
    finally:
        keras.config.set_dtype_policy("float64")


def stopped_by_one_rank(strategy):
    """Only one rank has a callback that stops within an epoch, and others between the phases."""
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = batch == 1

    model, x, y = small(strategy)
    stop = [Stop()] if strategy.rank == 1 else []
    fit = dict(batch_size=BATCH, verbose=0, callbacks=stop)
    model.fit(x, y, epochs=3, **fit)
    return result(model, iterations=model.optimizer.iterations, evaluate=model.evaluate(x, y, **fit),
                  predict=model.predict(x, **fit))


def rows_of_predict(strategy):
    """Measures the rows of predictions that each rank sends: only those that it has computed, once for all steps."""
    with strategy.scope():
        x = keras.Input((3,))
        model = keras.Model(x, keras.layers.Dense(2, kernel_initializer="ones")(x))
    rows = np.arange(3.0 * 96).reshape(96, 3)
    before, of_predict = _sent_rows(strategy), _sent_rows(strategy, "rows/predict")
    predicted = model.predict(rows, batch_size=BATCH, verbose=0)
    return {"right": predicted == rows.sum(1, keepdims=True), "local/sent": _sent_rows(strategy) - before,
            "local/of_predict": _sent_rows(strategy, "rows/predict") - of_predict}


def _sent_rows(strategy, prefix="rows/"):
    """Returns the bytes of rows that this rank has sent so far."""
    return sum(site["sent_bytes"] for name, site in strategy.stats()["sites"].items() if name.startswith(prefix))


def changed_on_one_rank(strategy):
    """Weights that only one rank has loaded: all ranks continue with rank 0's."""
    model, x, y = small(strategy)
    if strategy.rank == 0:
        model.set_weights([w + 1 for w in model.get_weights()])
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return result(model)


def mixed_precision(dtype):
    """Trains in mixed precision; with float16, Keras scales the loss."""
    def way(strategy):
        keras.config.set_dtype_policy(f"mixed_{dtype}")
        try:
            with strategy.scope():
                x, ids = keras.Input((8,)), keras.Input((5,), dtype="int32")
                h = keras.layers.Flatten()(keras.layers.Embedding(400, 4)(ids))
                h = keras.layers.Dense(16, "tanh")(keras.layers.Concatenate()([x, h]))
                model = keras.Model([x, ids], keras.layers.Dense(3, dtype="float32")(h))
                model.compile(keras.optimizers.SGD(0.1), "mse")
            assert (dtype == "float16") == hasattr(model.optimizer, "initial_scale")
            x, y = make_data(model)
            before = model.get_weights()
            model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
            return {"step": [np.abs(a - b).max() for a, b in zip(before, model.get_weights())],
                    **result(model)}
        finally:
            keras.config.set_dtype_policy("float64")

    return way


def loss_scales(strategy):
    """The scale falls when a sum over all rows is too large for half precision, even if no rank's part is."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
            model.compile(keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.25), initial_scale=2.0**20, dynamic_growth_steps=2), "mse")
        rng = np.random.default_rng(3)
        x, y = rng.integers(-3, 4, (23, 6)) / 2, rng.integers(-3, 4, (23, 3)) / 2
        scales = []
        for _ in range(3):
            for i in range(0, 23, 7):
                model.train_on_batch(x[i:i + 7], y[i:i + 7])
                scales.append(float(model.optimizer.dynamic_scale.numpy()))
        return {"scales": np.array(scales)}
    finally:
        keras.config.set_dtype_policy("float64")


def class_weights_and_mixed_precision(strategy):
    """Half-precision layers around a batch norm whose statistics are in single precision."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with strategy.scope():
            x = keras.Input((8,))
            h = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(8)(x))
            model = keras.Model(x, keras.layers.Dense(3, dtype="float32")(h))
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = make_data(model)
        model.fit(x, y.argmax(1), class_weight={0: 1.0, 1: 2.0, 2: 3.0}, batch_size=BATCH, verbose=0)
        return result(model)
    finally:
        keras.config.set_dtype_policy("float64")


BITS = {way.__name__: way for way in (
    default_batch_norm, dropout, float32, bfloat16, class_weights_and_mixed_precision,
    stopped_by_one_rank, rows_of_predict, changed_on_one_rank)}

SCALES = {"loss_scales": loss_scales}

HALVES = {f"mixed_{dtype}": mixed_precision(dtype) for dtype in ("float16", "bfloat16")}
