"""Variables with aggregations in loops over `strategy.run`: replica_variables.py mirrored|poseidon FILE.

"mirrored" runs them on two replicas of TensorFlow's MirroredStrategy, in one process. Each rank writes its values.
"""

import itertools
import json
import sys

import keras
import numpy as np
import tensorflow as tf

AGGREGATIONS = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
METHODS = ("assign", "assign_add", "assign_sub")


def replica_number():
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)


def written(strategy, aggregation, method, graph):
    """A variable that is synchronised when it is written: steps, then an assignment outside, then a step."""
    with strategy.scope():
        variable = tf.Variable([3.0, 5.0], aggregation=tf.VariableAggregation[aggregation], trainable=False)

    def step():
        getattr(variable, method)([1.0, 10.0] * (replica_number() + 1))
        return tf.identity(variable)

    run = (tf.function if graph else lambda f: f)(lambda: strategy.run(step))
    values = []
    for _ in range(2):
        values += [strategy.experimental_local_results(run())[0].numpy().tolist(), variable.numpy().tolist()]
    variable.assign([7.0, 8.0])
    values.append(variable.numpy().tolist())
    run()
    return [*values, variable.numpy().tolist()]


def read(strategy, aggregation, method, graph):
    """A variable that is synchronised when it is read."""
    with strategy.scope():
        variable = tf.Variable([0.0, 0.0], aggregation=tf.VariableAggregation[aggregation], trainable=False,
                               synchronization=tf.VariableSynchronization.ON_READ)

    def step():
        getattr(variable, method)([1.0, 10.0] * (replica_number() + 1))

    run = (tf.function if graph else lambda f: f)(lambda: strategy.run(step))
    values = []
    for _ in range(2):
        run()
        values.append(variable.read_value().numpy().tolist())
    variable.assign(tf.constant([8.0, 4.0]))
    values.append(tf.convert_to_tensor(variable).numpy().tolist())
    run()
    return [*values, variable.numpy().tolist()]


def metric(strategy, name, graph):
    """A metric of Keras, updated by each replica, read outside, reset, and updated again."""
    with strategy.scope():
        measured = {"mean": keras.metrics.Mean, "accuracy": keras.metrics.BinaryAccuracy,
                    "auc": keras.metrics.AUC}[name]()

    def step():
        x = tf.constant([[0.1], [0.4], [0.8]]) * (replica_number() + 1) / 2
        measured.update_state(*([x] if name == "mean" else [[[0.0], [1.0], [1.0]], x]))

    run = (tf.function if graph else lambda f: f)(lambda: strategy.run(step))
    values = []
    for _ in range(2):
        for _ in range(2):
            run()
            values.append(float(measured.result()))
        measured.reset_state()
        values.append(float(measured.result()))
    return values


def texts(strategy):
    """A variable with strings of any bytes."""
    with strategy.scope():
        variable = tf.Variable([b"a\xff\x00", "é", f"rank {getattr(strategy, 'rank', 0)}"])
    return [value.hex() for value in variable.numpy()]


CASES = {
    **{f"{kind.__name__} {aggregation} {method} {'graph' if graph else 'eager'}": (kind, aggregation, method, graph)
       for kind, aggregation, method in itertools.product((written, read), AGGREGATIONS, METHODS)
       for graph in (True, False)},
    **{f"metric {name} {'graph' if graph else 'eager'}": (metric, name, graph)
       for name, graph in itertools.product(("mean", "accuracy", "auc"), (True, False))},
    "texts": (texts,)}


def used_in_fit_too(strategy):
    """A model whose metrics a loop of its own has updated is evaluated, and the loop goes on."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    x, y = np.ones((6, 4), np.float32), np.arange(6, dtype=np.float32)[:, None]
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(6))
    values = []
    step = tf.function(lambda batch: strategy.run(model.test_step, args=(batch,)))
    for _ in range(2):
        model.reset_metrics()
        for batch in dataset:
            step(batch)
        loop = {m.name: m.result() for m in model.metrics}
        values.append([float(model.evaluate(x, y, verbose=0)[1]), *np.ravel(list(loop["compile_metrics"].values()))])
    return np.array(values, float).tolist()


def main(how, path):
    if how == "mirrored":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy, rank = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]), 0
    else:
        import tf_poseidon as poseidon
        strategy = poseidon.PoseidonStrategy(policy="ps", timeout_s=60)
        rank = strategy.rank
    results = {name: run(strategy, *arguments) for name, (run, *arguments) in CASES.items()}
    results["used in fit too"] = used_in_fit_too(strategy)
    with open(f"{path}.{rank}", "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
