"""Trains on ranks of which one becomes slower, by a sleep in backpropagation or input; reports what they notice."""

import itertools
import json
import logging
import os
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

SECONDS = 0.04  # of a step that is not slow
SLOW_AFTER, STEPS = 20, 60


def main(how, factor, directory):
    strategy = poseidon.PoseidonStrategy("ps", timeout_s=30)
    directory = pathlib.Path(directory)
    rank, size = strategy.rank, strategy.num_replicas_in_sync
    done = itertools.count(1)

    def sleep(value):
        is_slow = next(done) > SLOW_AFTER and rank == size - 1
        time.sleep(SECONDS * (factor if is_slow else 1))
        return value

    @tf.custom_gradient
    def slow_backwards(x):
        def gradient(upstream):
            if how == "input":
                return upstream
            return tf.ensure_shape(tf.numpy_function(sleep, [upstream], upstream.dtype), upstream.shape)
        return tf.identity(x), gradient

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(16), keras.layers.Lambda(slow_backwards),
                                  keras.layers.Dense(3)])
        model.compile("sgd", "mse", steps_per_execution=4 if how == "overlapping" else 1)
    warnings, steps = [], 0
    logging.getLogger("tf_poseidon").addFilter(lambda record: warnings.append([steps, record.getMessage()]))
    x = np.ones((4 * size, 4), np.float32)
    report = {"rank": rank}
    if how == "loop":
        @poseidon.distribute
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        while steps < STEPS:
            steps += 1
            step(tf.constant(x))
    else:
        class Count(poseidon.callbacks.Communication):
            """Counts steps; as a subclass, it may read logs, so ranks agree after each batch."""

            def on_train_batch_end(self, batch, logs=None):
                nonlocal steps
                steps += 1
                super().on_train_batch_end(batch, logs)

        kind = Count if how == "callback" else poseidon.callbacks.Communication
        has_client = how == "fit"
        metrics = dict(openmetrics_path=str(directory / "{rank}.prom")) if has_client else {}
        data = tf.data.Dataset.from_tensors((x, x[:, :3])).repeat(STEPS // 2)
        if how == "input":
            data = data.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape), y))
        history = model.fit(data, epochs=2, verbose=0, callbacks=[
            kind(log_dir=directory / "logs", **metrics)])
        report["logs"] = history.history
    stats = strategy.stats()
    report.update(warnings=warnings, stragglers=stats["stragglers"], late=stats["late_seconds"],
                  sites=sorted(stats["sites"]))
    (directory / f"{rank}.json").write_text(json.dumps(report))


main(sys.argv[1], float(sys.argv[2]), os.fspath(sys.argv[3]))
