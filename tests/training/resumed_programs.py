"""Programs that are interrupted, and resume from a backup."""

import pathlib

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH, EPOCHS = 41, 8, 5  # 6 steps in an epoch, the last of which has one row
WEIGHTS = 8  # of the model


class Interrupted(Exception):
    """Stands for the end of the process."""


class Interrupt(keras.callbacks.Callback):
    """Ends the program after a number of steps, before or after the backup is written."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            raise Interrupted


class Note(keras.callbacks.Callback):
    """Keeps the logs of epochs."""

    def on_train_begin(self, logs=None):
        self.logs = {}

    def on_epoch_end(self, epoch, logs=None):
        self.logs[epoch] = {name: float(value) for name, value in logs.items()}


def arrays():
    rng = np.random.default_rng(3)
    return rng.integers(-4, 5, (ROWS, 6)) / 4, rng.integers(-4, 5, (ROWS, 2)) / 4


def dataset():
    return tf.data.Dataset.from_tensor_slices(arrays())


def augmented(x, y):
    return x + tf.random.uniform([6], dtype=tf.float64), y


class Batches(keras.utils.PyDataset):
    """Shuffles after every epoch."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(5)
        self.order = np.arange(ROWS)

    def __len__(self):
        return ROWS // BATCH

    def __getitem__(self, index):
        chosen = self.order[index * BATCH:(index + 1) * BATCH]
        return tuple(array[chosen] for array in arrays())

    def on_epoch_end(self):
        self.rng.shuffle(self.order)


def generated():
    rng = np.random.default_rng(5)
    x, y = arrays()
    while True:
        chosen = rng.integers(0, ROWS, BATCH)
        yield x[chosen], y[chosen]


def given(x, y):
    return {"x": x, "y": y, "batch_size": BATCH}


# What fit is given.
DATA = {
    "arrays": lambda: given(*arrays()),
    "arrays in order": lambda: given(*arrays()) | {"shuffle": False},
    "reshuffled dataset": lambda: {"x": dataset().shuffle(ROWS, seed=7).batch(BATCH).prefetch(2)},
    "dataset in order": lambda: {"x": dataset().batch(BATCH)},
    "augmented dataset": lambda: {"x": dataset().shuffle(9, seed=7).map(augmented).batch(BATCH)},
    "repeated dataset": lambda: {"x": dataset().shuffle(ROWS, seed=7).repeat().batch(BATCH), "steps_per_epoch": 4},
    "unknown length": lambda: {"x": dataset().filter(lambda x, y: x[0] > -1).shuffle(ROWS, seed=7).batch(BATCH)},
    "PyDataset": lambda: {"x": Batches()},
    "generator": lambda: {"x": generated(), "steps_per_epoch": 4},
}


def net():
    """Returns a model that has every kind of state: slots, accumulators, statistics, seeds."""
    x = keras.Input((6,))
    h = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(8, "tanh")(x))
    return keras.Model(x, keras.layers.Dense(2)(keras.layers.Dropout(0.25, seed=4)(h)))


def train(directory, data, scope, after=None, save_freq="epoch", validates=False, steps_per_execution=1, plateau=False):
    """Trains until the end, or until the step after some; returns weights and logs, None if it was interrupted."""
    keras.backend.clear_session()
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    with scope():
        model = net()
        optimizer = keras.optimizers.Adam(0.03, epsilon=1e-2, gradient_accumulation_steps=3)
        model.compile(optimizer, "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()],
                      steps_per_execution=steps_per_execution)
    note = Note()
    callbacks = [
        *([] if directory is None else [keras.callbacks.BackupAndRestore(
            pathlib.Path(directory), save_freq=save_freq, delete_checkpoint=False)]),
        note, *([] if after is None else [Interrupt(after)])]
    if plateau:
        callbacks += [keras.callbacks.EarlyStopping("mae", min_delta=0.01, patience=2, restore_best_weights=True),
                      keras.callbacks.ReduceLROnPlateau("mae", 0.1, patience=1, min_delta=0.2)]
    options = dict(DATA[data]())
    if validates:
        options["validation_data"] = dataset().shuffle(ROWS, seed=9).take(20).batch(BATCH)
    try:
        model.fit(**options, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    except Interrupted:
        return None
    return [v.numpy() for v in (*model.weights, *model.optimizer.variables)], note.logs
