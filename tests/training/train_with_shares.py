"""Trains with shares of rows: OUTPUT ROWS [PLAN]: "None", "(3, 1)", "'balanced'"; PLAN is followed, or written.

OUTPUT.RANK.json has the logs and a digest of the weights, by program.
"""

import hashlib
import json
import os
import sys
import time

import keras
from keras import layers
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS, BATCH = 100, 24
used_shares = {}  # by shares, the last of the long epoch's steps behind which ranks had them
SLEEP = float(os.environ.get("SLEEP", 0))  # of rank 1, for each of its rows


def arrays():
    rng = np.random.default_rng(3)
    return rng.integers(-4, 5, (ROWS, 6)).astype("float32") / 4, rng.integers(-4, 5, (ROWS, 2)).astype("float32") / 4


def slow(rank):
    def of_row(x):
        time.sleep(SLEEP if rank == 1 else SLEEP / 4)
        return x
    return lambda x, y: (tf.ensure_shape(tf.numpy_function(of_row, [x], tf.float32, stateful=False), [6]), y)


class Slow(keras.callbacks.Callback):
    """Makes rank 1 four times as slow as the others for each of its rows."""

    def __init__(self, strategy):
        super().__init__()
        self.strategy = strategy

    def on_train_batch_end(self, batch, logs=None):
        shares = self.strategy.extended.row_shares
        used_shares[shares] = batch
        time.sleep(BATCH * shares[self.strategy.rank % len(shares)] / sum(shares) * (
            SLEEP if self.strategy.rank == 1 else SLEEP / 4))


def model(**options):
    return keras.Sequential([keras.Input((6,)), layers.Dense(16, "tanh"), layers.BatchNormalization(),
                             layers.Dropout(0.2, seed=1), layers.Dense(2)], **options)


def programs(strategy):
    """Yields (name, model, how it is trained)."""
    x, y = arrays()
    yield "arrays", model(), keras.optimizers.SGD(0.05, momentum=0.9), lambda m: m.fit(
        x, y, batch_size=BATCH, epochs=2, verbose=0, validation_data=(x, y), validation_batch_size=7)
    yield "accumulated", model(), keras.optimizers.Adam(gradient_accumulation_steps=2), lambda m: m.fit(
        x, y, batch_size=BATCH, epochs=2, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, y))
    yield "own_rows", model(), keras.optimizers.SGD(0.05), lambda m: m.fit(
        data.shuffle(20, seed=2).map(slow(strategy.rank)).batch(BATCH), epochs=6, verbose=0,
        validation_data=data.map(slow(strategy.rank)).batch(10))
    yield "long_epoch", model(), keras.optimizers.SGD(0.05), lambda m: m.fit(
        data.repeat().shuffle(20, seed=2).batch(BATCH), steps_per_epoch=100, verbose=0, callbacks=[Slow(strategy)])
    yield "long_epoch_of_own_rows", model(), keras.optimizers.SGD(0.05), lambda m: m.fit(
        data.repeat().shuffle(20, seed=2).map(lambda x, y: (x * 2, y)).batch(BATCH).prefetch(9), steps_per_epoch=100,
        verbose=0, callbacks=[Slow(strategy)])
    yield "full_batches", model(), keras.optimizers.SGD(0.05), lambda m: m.fit(
        data.map(slow(strategy.rank)).cache().batch(BATCH, drop_remainder=True).repeat(), epochs=2, steps_per_epoch=3,
        verbose=0)


def main(output, rows, plan=None):
    chosen = os.environ.get("PROGRAMS", "")
    keras.utils.set_random_seed(7)
    replays = plan is not None and os.path.exists(plan)
    if replays:
        strategy = poseidon.PoseidonStrategy(plan=plan, global_batch_norm=True)
    else:
        strategy = poseidon.PoseidonStrategy(policy="ps", rows=eval(rows), global_batch_norm=True)
    found = {}
    with strategy.scope():
        made = [each for each in programs(strategy) if each[0] in (chosen.split() or each[0])]
    for name, trained, optimizer, train in made:
        if replays and name != "own_rows":
            continue
        with strategy.scope():
            trained.compile(optimizer, "mse", metrics=["mae"])
        used_shares.clear()
        logs = train(trained).history
        weights = b"".join(weight.tobytes() for weight in trained.get_weights())
        found[name] = {"logs": logs, "digest": hashlib.sha256(weights).hexdigest(),
                       "weights": [weight.tolist() for weight in trained.get_weights()],
                       "shares": list(strategy.extended.row_shares), "used": list(used_shares)}
        if plan is not None and name == "own_rows":
            if strategy.rank == 0 and not os.path.exists(plan):
                strategy.plan.save(plan)
            break
    with open(f"{output}.{strategy.rank}.json", "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
