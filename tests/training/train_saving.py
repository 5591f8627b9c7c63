"""Trains with callbacks that write files, on several ranks: train_saving.py DIRECTORY [interrupt] [HOW].

With HOW "shards", each rank holds a part of each slot; with "columns", columns or rows of those of matrices; with
"owners", of an optimizer for which one rank updates a matrix; with "divided", columns of weights and accumulators, too.
"""

import functools
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.job.job_variables.shard_service import ShardService
from tf_poseidon.keras_hook.checkpoints import large_values

ROWS, BATCH, EPOCHS = 97, 32, 4  # 4 steps in an epoch
large_values._AT_A_TIME = 200  # bytes: less than what matrices have
PINS = {"columns": {"*/kernel": "hfb"}, "divided": {"*/kernel": "columns"}}  # by HOW


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("interrupted on purpose")


def make_model(optimizer, accumulates, units):
    """Returns a model that has every kind of state: accumulators, perhaps, slots, statistics, seeds."""
    x = keras.Input((8,))
    h = keras.layers.Dense(units, "tanh", use_bias=False)(x)
    h = keras.layers.BatchNormalization(synchronized=True)(h)
    model = keras.Model(x, keras.layers.Dense(3)(keras.layers.GaussianNoise(0.0, seed=3)(h)))
    # Three steps do not divide an epoch: gradients are on their way when it ends.
    model.compile(optimizer(0.01, gradient_accumulation_steps=3 if accumulates else None), "mse", metrics=["mae"])
    return model


def in_parts(save, path):
    """Saves variables of which this rank never has the whole of a large one."""
    def whole(service, number):
        holding = service._held(number)
        assert holding.num_elements * holding.dtype.size <= 200, f"{holding.path} is read as a whole"
        return read(service, number)

    read, ShardService.whole = ShardService.whole, whole
    try:
        save(path)
    finally:
        ShardService.whole = read


def main(directory, *how):
    directory = pathlib.Path(directory)
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    is_owned, is_sharded = "owners" in how, bool({"shards", "columns", "owners"}.intersection(how))
    strategy = poseidon.PoseidonStrategy("ps" if is_owned else "auto", timeout_s=30, shard_update=is_sharded,
                                         pins=next((pins for name, pins in PINS.items() if name in how), None))
    with strategy.scope():
        model = make_model(keras.optimizers.Adafactor if is_owned else functools.partial(
            keras.optimizers.Adam, epsilon=1e-3), "columns" not in how,  # what is accumulated is no product
                           60 if PINS.keys() & set(how) else 16)
    # Another path than on the other ranks, to see who writes and reads.
    own, backup = directory / str(strategy.rank), directory / "0" / "backup" / "latest.weights.h5"
    callbacks = [
        keras.callbacks.BackupAndRestore(own / "backup", delete_checkpoint=False),
        keras.callbacks.ModelCheckpoint(own / "{epoch}-{loss:.4f}.keras"),
        keras.callbacks.ModelCheckpoint(own / "best.weights.h5", "loss", save_best_only=True,
                                        save_weights_only=True),
        keras.callbacks.ModelCheckpoint(own / "batch.weights.h5", save_weights_only=True,
                                        save_freq=3),
        keras.callbacks.TensorBoard(own / "tensorboard"),
        keras.callbacks.CSVLogger(own / "log.csv"),
        *([Interrupt()] if "interrupt" in how else []),
    ]
    rng = np.random.default_rng(2)
    x, y = (rng.integers(-3, 4, (ROWS, n)).astype("float64") for n in (8, 3))
    history = model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0,
                        callbacks=callbacks)
    assert "divided" not in how or strategy.num_replicas_in_sync == 1 or model.layers[1].kernel.value.holds_shard
    state = [*model.weights, *(v for v in model.optimizer.variables if "accum" not in v.path)]
    np.savez(directory / f"state.{strategy.rank}.npz", *[v.numpy() for v in state], epochs=history.epoch, x=x,
             iterations=model.optimizer.iterations.numpy(), predictions=model.predict(x, verbose=0))
    # Written a moment ago by rank 0, read by all.
    model.load_weights(directory / "0" / "best.weights.h5")
    model.load_weights(backup)
    if strategy.rank == 0:
        in_parts(model.save, directory / "model.keras")
        in_parts(model.save_weights, directory / "model.weights.h5")
        model.export(directory / "exported", verbose=False)
        tf.saved_model.save(model, str(directory / "saved"))
        tf.train.Checkpoint(model=model).write(str(directory / "checkpoint"))


if __name__ == "__main__":
    main(*sys.argv[1:])
