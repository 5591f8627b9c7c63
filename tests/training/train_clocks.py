"""Trains networks, with stale weights or not, and reports weights, versions and logs of each rank."""

import itertools
import json
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS, STEPS, EPOCHS = 24, 12, 2
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([4, 9], [0.5, 0.25, 0.125])),
    "momentum": lambda: keras.optimizers.SGD(0.05, 0.9, nesterov=True, clipnorm=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01, weight_decay=0.01, global_clipnorm=0.5),
    "ema": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=5),
    "muon": lambda: keras.optimizers.Muon(0.01),
}


def network(kind):
    if kind == "rnn":
        return keras.Sequential([keras.Input((6, 5)), keras.layers.LSTM(7), keras.layers.Dense(3)])
    return keras.Sequential([
        keras.Input((30,)), keras.layers.Reshape((6, 5)), keras.layers.Conv1D(8, 3, activation="relu"),
        keras.layers.BatchNormalization(synchronized=False), keras.layers.Flatten(), keras.layers.Dropout(0.3),
        keras.layers.Dense(16, activation="relu", kernel_regularizer="l2"), keras.layers.Dense(3)])


class Reader(keras.callbacks.Callback):
    """Reads logs and weights after each batch."""

    def __init__(self):
        super().__init__()
        self.losses, self.norms = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.norms.append(float(sum(np.abs(weight).sum() for weight in self.model.get_weights())))


def train(strategy, kind, optimizer, directory, pauses):
    """Trains a network; returns its weights, and what it reports. `pauses`: seconds before each batch of this rank."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = network(kind)
        model.compile(OPTIMIZERS[optimizer](), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"], steps_per_execution=5 if kind == "executions" else 1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS * STEPS - 5, *model.input_shape[1:])).astype(np.float32)  # the last batch is smaller
    y = rng.integers(3, size=len(x))

    def batches():
        for i in range(0, len(x), ROWS):
            time.sleep(next(pauses))
            yield x[i:i + ROWS], y[i:i + ROWS]

    data = tf.data.Dataset.from_generator(batches, output_signature=(
        tf.TensorSpec((None, *x.shape[1:])), tf.TensorSpec((None,), tf.int64)))
    data = data.apply(tf.data.experimental.assert_cardinality(STEPS))  # else Keras counts a step at the end of the data
    reader = Reader()
    callbacks = {"callback": [reader], "backup": [keras.callbacks.BackupAndRestore(directory / "backup")]}.get(kind, [])
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks, validation_data=(x[:20], y[:20]))
    weights = [*model.get_weights(), *(np.asarray(variable) for variable in model.optimizer.variables)]
    return weights, {"history": history.history, "losses": reader.losses, "norms": reader.norms,
                     "plan": str(strategy.plan)}


def main(synchrony, programs, directory):
    """Trains programs, such as "rnn-adam", one after the other; "replay" first reads the log of a former job."""
    directory = pathlib.Path(directory)
    names = programs.split(",")
    versions = directory / "log.json" if names[0] == "replay" else None
    bounds = "bsp" if synchrony == "bsp" else eval(f"poseidon.{synchrony}")
    strategy = poseidon.PoseidonStrategy(synchrony=bounds, versions=versions, timeout_s=60,
                                         **({"policy": "ps"} if bounds == "bsp" else {}))
    rank = strategy.rank
    is_late = bounds != "bsp" and bounds.upper and versions is None
    pauses = iter(np.random.default_rng(rank).exponential(0.02, 10**5) if is_late else itertools.repeat(0))
    report = {}
    for name in names[1:] if versions else names:
        weights, report[name] = train(strategy, *name.split("-"), directory, pauses)
        np.savez(directory / f"{name}.{rank}.npz", *weights)
    if bounds != "bsp":
        log = strategy.version_log()
        report["staleness"] = log.staleness()
        if rank == 0:
            log.save(directory / "log.json")
    (directory / f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
