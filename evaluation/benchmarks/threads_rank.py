"""A rank of bench_threads.py, or one process: trains one of its models, and prints what it has measured as JSON.

Arguments: the model, and how many steps are timed.
"""

from collections.abc import Callable
import json
import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

_FIRST_STEPS = 10  # not timed: tracing, and what TensorFlow allocates


def _dense() -> tuple[keras.Model, int]:
    """Returns that of the tutorial, and the rows of a batch."""
    return keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(2048, "relu"), keras.layers.Dense(2048, "relu"),
        keras.layers.Dense(10)]), 64


def _convolutions() -> tuple[keras.Model, int]:
    return keras.Sequential([
        keras.Input((32, 32, 3)), keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(128, "relu"),
        keras.layers.Dense(10)]), 64


def _recurrent() -> tuple[keras.Model, int]:
    return keras.Sequential([keras.Input((32, 64)), keras.layers.LSTM(128), keras.layers.Dense(10)]), 64


def _transformer() -> tuple[keras.Model, int]:
    layers = keras.layers
    x = words = keras.Input((64, 128))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        x = layers.LayerNormalization()(x + layers.Dense(128)(layers.Dense(512, "gelu")(x)))
    return keras.Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), 32


MODELS: dict[str, Callable[[], tuple[keras.Model, int]]] = {
    "dense": _dense, "convolutions": _convolutions, "recurrent": _recurrent, "transformer": _transformer}


class _Steps(keras.callbacks.Callback):
    """Notes when each step begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.seconds.append(time.perf_counter() - self._begin)


def main() -> None:
    name, steps = sys.argv[1], int(sys.argv[2])
    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy()
    with strategy.scope():
        model, batch = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.001), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(1)
    rows = batch * (steps + _FIRST_STEPS)
    x, y = rng.normal(size=(rows, *model.input_shape[1:])).astype("float32"), rng.integers(0, 10, rows)
    noted = _Steps()
    history = model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(batch), verbose=0, callbacks=[noted])
    if strategy.rank == 0:
        print(json.dumps({"seconds": noted.seconds[_FIRST_STEPS:], "loss": history.history["loss"][0],
                          "threads": tf.config.threading.get_intra_op_parallelism_threads(),
                          "processors": len(os.sched_getaffinity(0))}))


if __name__ == "__main__":
    main()
