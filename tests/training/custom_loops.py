"""Custom loops over strategy.run: scenarios that give the result of one process."""

import time

from custom_layers import Regression
import keras
import numpy as np
from small_models import BATCH
from small_models import dense
from small_models import make_data
from small_models import OPTIMIZERS
from small_models import result
from small_models import ROWS
import tensorflow as tf


def two_runs_in_one_function(strategy):
    """Exchanges of the same names, on ranks of different speeds."""
    with strategy.scope():
        weight = keras.Variable([0.0])
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def late(x, first):
        slow = (strategy.rank == 0) == first  # rank 0 is late with the first, the others with the next
        return tf.numpy_function(lambda v: time.sleep(0.2 * slow) or v, [x], tf.float64)

    def run(value, first):
        def step(x):
            share = x / strategy.num_replicas_in_sync
            gradient = tf.ensure_shape(late(share, first), [1])
            optimizer.apply([gradient], [weight])
            context = tf.distribute.get_replica_context()
            return context.all_reduce("SUM", tf.ensure_shape(late(share, first), [1]))
        return strategy.run(step, args=(tf.constant([value], tf.float64),))

    @tf.function
    def both():
        return run(1.0, True), run(100.0, False)

    sums = both()
    return {"weight": weight.numpy(), "sums": np.array(sums)}


def rows_reduced_along_their_axis(strategy):
    """Two rows: on three ranks, one has none."""
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices([3.0, 5.0]).batch(2))
    results = [strategy.run(lambda x: x * 1.0, args=(rows,)) for rows in data]
    return {"mean": np.array([strategy.reduce("MEAN", r, axis=0) for r in results])}


def gathered(strategy):
    """The results of strategy.run on each rank's rows, concatenated."""
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(np.arange(10.0).reshape(5, 2)).batch(5))
    rows, = data
    doubled, columns = strategy.run(lambda x: (x * 2, tf.transpose(x)), args=(rows,))

    def norm(x):
        return tf.norm(tf.distribute.get_replica_context().all_gather(x, axis=0))

    return {"rows": strategy.gather(doubled, axis=0), "columns": strategy.gather(columns, axis=1),
            "last": strategy.gather(columns, axis=-1),
            "in_run": tf.function(lambda: strategy.run(norm, args=(rows,)))()}


def _own_loop(strategy, model, optimizer, x, y, epochs):
    """Trains in a loop over strategy.run, scaling the loss as tf.distribute asks its users to."""
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - model(x, training=True))) / BATCH
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    @tf.function
    def run(x, y):
        return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    return result(model, losses=[run(x, y) for _ in range(epochs) for x, y in data])


def custom_loop(strategy):
    with strategy.scope():
        model = keras.Model(*dense())
        optimizer = OPTIMIZERS["adam"]()
    return _own_loop(strategy, model, optimizer, *make_data(model), epochs=2)


def custom_loop_of_two_models(strategy):
    """One model's loss needs the other; each has its optimizer, one of which accumulates."""
    with strategy.scope():
        models = [keras.Model(*dense()), keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])]
        optimizers = [OPTIMIZERS["adam"](), keras.optimizers.SGD(
            0.01, gradient_accumulation_steps=2, global_clipnorm=0.5)]

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            errors = tf.square(y - models[0](x, training=True))
            scores = models[1](errors, training=True)
            losses = [tf.reduce_sum(part) / BATCH for part in (errors, tf.square(scores - 1))]
        for model, optimizer, loss in zip(models, optimizers, losses):
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)

    run = tf.function(lambda x, y: strategy.run(step, args=(x, y)))
    data = tf.data.Dataset.from_tensor_slices(make_data(models[0])).batch(BATCH)
    for x, y in strategy.experimental_distribute_dataset(data):
        run(x, y)
    return {f"{i}/{name}": value for i, model in enumerate(models)
            for name, value in result(model).items()}


def custom_loop_that_builds_the_model(strategy):
    """Variables are created while the step is traced, with different values on each rank."""
    keras.utils.set_random_seed(1 + strategy.rank)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer = OPTIMIZERS["momentum"]()
    rng = np.random.default_rng(2)
    x, y = (rng.integers(-3, 4, (ROWS, n)).astype("float64") for n in (6, 1))
    return _own_loop(strategy, model, optimizer, x, y, epochs=1)


def module_without_keras(strategy):
    """A custom optimizer, for a gradient that is a product and one that is slices."""
    with strategy.scope():
        module = Regression(8, 3)

    def step(x, ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(module(x, ids) - y)) / BATCH
        variables = [module.kernel, module.table]
        kernel, table = strategy.synchronize(tape.gradient(loss, variables), variables)
        module.kernel.assign_sub(0.01 * kernel)
        module.table.scatter_sub(tf.IndexedSlices(0.01 * table.values, table.indices))
        return loss

    run = tf.function(lambda *batch: strategy.reduce("SUM", strategy.run(step, args=batch), None))
    rng = np.random.default_rng(2)
    x, y = (rng.integers(-3, 4, (ROWS, n)).astype("float64") for n in (8, 3))
    ids = rng.integers(0, 11, ROWS)
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices((x, ids, y)).batch(BATCH))
    losses = [run(*batch) for batch in data]
    return {"kernel": module.kernel, "table": module.table, "losses": losses}


LOOPS = {loop.__name__: loop for loop in (
    two_runs_in_one_function, rows_reduced_along_their_axis, gathered,
    custom_loop, custom_loop_of_two_models,
    custom_loop_that_builds_the_model, module_without_keras)}
