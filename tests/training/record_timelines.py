"""A program that records timelines of training, started on several ranks: record_timelines.py DIRECTORY.

Backpropagation is slow between the two layers, and there rank 1 is later than the others. Then a step that was
partitioned by rows is recorded, which exchanges more than gradients.
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.partition import unroll

SLOW_S, LATE_S = 0.1, 0.3
STEPS = 6


def record_partitioned(strategy, path):
    """Records a step with moments that rows wait for, values of rank 0, a maximum, and rows that an op needs whole."""
    weights = tf.Variable(tf.reshape(tf.range(32.0), (8, 4)) / 32, name="weights")
    seen = tf.Variable(0, name="seen")

    @poseidon.distribute
    def step(x):
        with tf.GradientTape() as tape:
            h = x @ weights
            h -= tf.reduce_mean(h, 0, name="mean")
            h /= 1.0 + tf.reduce_mean(tf.square(h), 0, name="variance")
            noise = tf.raw_ops.RandomUniform(shape=[4], dtype=tf.float32, name="noise")  # without a seed
            largest = tf.stop_gradient(tf.reduce_max(tf.abs(h), name="largest"))
            loss = tf.reduce_mean(tf.square(h + noise) / largest, name="loss")
        kinds, _ = tf.unique(tf.cast(10 * h[:, 0], tf.int32, name="kinds"))
        seen.assign_add(tf.size(kinds))
        weights.assign_sub(0.1 * tape.gradient(loss, weights))
        return loss

    x = tf.random.stateless_normal((4 * strategy.num_replicas_in_sync, 8), (1, 2))
    step(x)  # traces it
    with strategy.timeline(path) as timeline:
        for _ in range(STEPS):
            step(x)
    return dict(table=str(timeline), exchanges={e.site: e.is_waited_for for e in step.report.exchanges})


def record_eager(strategy, model, x, y, path):
    """Records a loop over strategy.run that runs eagerly."""
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / strategy.num_replicas_in_sync
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(4 * strategy.num_replicas_in_sync)
    batches, ends = strategy.experimental_distribute_dataset(batches), []
    with strategy.timeline(path) as timeline:
        for batch in batches:
            strategy.run(step, args=batch)
            ends.append(time.perf_counter())
    return dict(tables=[timeline.table(rank) for rank in range(strategy.num_replicas_in_sync)], mine=str(timeline),
                ends=ends)


def main(folder):
    unroll.ORDERED |= {"PyFunc"}  # that of this program uses no variables, so its steps may overlap
    strategy = poseidon.PoseidonStrategy("sfb", pins={"*table/embeddings": "sparse"}, timeout_s=30)
    sleep_s = SLOW_S + (LATE_S if strategy.rank == 1 else 0)

    @tf.custom_gradient
    def slow_backwards(x):
        def gradient(upstream):
            late = tf.numpy_function(lambda v: time.sleep(sleep_s) or v, [upstream], upstream.dtype)
            return tf.ensure_shape(late, upstream.shape)
        return tf.identity(x), gradient

    batch = 4 * strategy.num_replicas_in_sync
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x = keras.Input((8,))
        h = keras.layers.Dense(16, name="first")(x)
        ids = keras.layers.Embedding(400, 2, name="table")(keras.ops.cast(x, "int32"))
        h = keras.layers.BatchNormalization(name="norm")(h)  # exchanges its statistics too
        h = keras.layers.Lambda(slow_backwards)(h)
        h = keras.layers.Concatenate()([h, keras.layers.Flatten()(ids)])
        model = keras.Model(x, keras.layers.Dense(3, name="last")(h))
    x, y = np.ones((batch * STEPS, 8), "float32"), np.ones((batch * STEPS, 3), "float32")
    reports = {}
    for mode in ("rewritten", "as_it_is"):
        if mode == "as_it_is":
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        with strategy.scope():
            model.compile("sgd", "mse", steps_per_execution=2 if mode == "rewritten" else 1)
        ends = []
        note_end = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
        fit = dict(batch_size=batch, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN(), note_end])
        model.fit(x[:2 * batch], y[:2 * batch], **fit)  # traces its functions
        with strategy.timeline(folder / "traces" / f"{mode}.json") as timeline:
            ends.clear()
            model.fit(x, y, **fit)
        size = strategy.num_replicas_in_sync
        reports[mode] = dict(tables=[timeline.table(rank) for rank in range(size)], mine=str(timeline),
                             ends=ends)
        if mode == "rewritten":
            plan = strategy.plan
            reports["plan"] = {d.site: d.scheme for d in plan.decisions} | {e.site: e.kind for e in plan.exchanges}
    reports["eager"] = record_eager(strategy, model, x, y, folder / "traces" / "eager.json")
    assert not any("timeline" in site for site in strategy.stats()["sites"])
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    reports["partitioned"] = record_partitioned(strategy, folder / "traces" / "partitioned.json")
    try:
        with strategy.timeline(folder / "outer.json"):
            with strategy.timeline(folder / "inner.json"):
                pass
    except PoseidonError as error:
        reports["nested"] = str(error)
    (folder / f"{strategy.rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
