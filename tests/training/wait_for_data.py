"""A program whose batches come late on rank 0, started on several ranks: wait_for_data.py DIRECTORY.

Each rank writes, by way in which steps get their batches, how long it has waited for them, and how long all took; then
a table of where the time of steps went, and what `Summary` says.
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

LATE_S, BATCHES = 0.05, 4


def read(self, buffer_size, name=None):
    """Takes the place of `Dataset.prefetch`: a batch comes when a step asks for it, so how long that takes is known."""
    del buffer_size, name
    return self


class ReadsLogs(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        assert logs["loss"] >= 0


def ways(strategy, model, data):
    """Yields (name of a way, what makes a step of each batch)."""
    def compile_model(**options):
        with strategy.scope():
            model.compile("sgd", "mse", **options)

    yield "fit", lambda: model.fit(data, verbose=0)
    yield "evaluate", lambda: model.evaluate(data, verbose=0)
    yield "predict", lambda: model.predict(data, verbose=0)
    yield "fit, and logs are read", lambda: model.fit(data, verbose=0, callbacks=[ReadsLogs()])
    compile_model(steps_per_execution=3)
    yield "fit, several steps at a time", lambda: model.fit(data, verbose=0)
    compile_model(run_eagerly=True)
    yield "fit, eagerly", lambda: model.fit(data, verbose=0)

    def loop():
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(lambda x, y: model(x), batch)

    def loop_in_a_graph():
        step = tf.function(lambda batches: strategy.run(lambda x, y: model(x), next(batches)), autograph=False)
        batches = iter(strategy.experimental_distribute_dataset(data))
        for _ in range(BATCHES):
            step(batches)

    def loop_over_joined_batches():
        for batch in strategy.distribute_datasets_from_function(lambda context: data):
            strategy.run(lambda x, y: model(x), batch)

    yield "a loop", loop
    yield "a loop in a graph", loop_in_a_graph
    yield "a loop over batches of each rank", loop_over_joined_batches


def main(folder):
    tf.data.Dataset.prefetch = read
    strategy = poseidon.PoseidonStrategy("ps", timeout_s=30)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")

    def late(x, y):
        if strategy.rank == 0:
            x = tf.ensure_shape(tf.numpy_function(lambda v: time.sleep(LATE_S) or v, [x], x.dtype), x.shape)
        return x, y

    x = np.ones((8 * BATCHES, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3])).batch(8, drop_remainder=True).map(late)
    waits = {}
    for way, train in ways(strategy, model, data):
        waited, begin = strategy.stats()["input_seconds"], time.monotonic()
        train()
        waits[way] = strategy.stats()["input_seconds"] - waited, time.monotonic() - begin
    with strategy.scope():
        model.compile("sgd", "mse")
    summary = poseidon.Summary()
    model.fit(data, validation_data=data, verbose=0, callbacks=[summary])
    with strategy.timeline(folder / "timeline.json") as timeline:
        model.fit(data, verbose=0)
    report = dict(waits=waits, table=str(timeline), summary=summary.text)
    (folder / f"{strategy.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
