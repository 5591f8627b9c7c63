"""What the training tests run: each scenario trains something and returns arrays to compare.

A scenario is a function of the strategy. The same scenario runs on 1, 2, 3 and 4 ranks: all ranks
must return the same bits, and what one process returns up to rounding. Computation is in float64,
so that rounding (1e-16) and mistakes (1e-3 and more) are far apart; see test_training.py for the
bound.
"""

import collections
import dataclasses
import itertools
import time

from custom import CanonicalStep
from custom import Gan
from custom import NoisyDense
from custom import OwnStep
from custom import Positives
from custom import Regression
from custom import ScaledStep
from custom import TransposedDense
import keras
from models import BATCH
from models import LOSSES
from models import MODELS
from models import OPTIMIZERS
from models import ROWS
from models import MaskRows
from models import batch_norm
from models import dense
from models import embedding
from models import make_data
from models import two_in_two_out
import numpy as np
from recipes import RECIPES
import tensorflow as tf
import wrappers


def result(model, **more):
    """Returns the arrays of a trained model, and whatever else is to be compared."""
    weights = {f"weights/{i:02} {v.path}": v.numpy() for i, v in enumerate(model.weights)}
    return {**weights, **{name: np.asarray(value) for name, value in more.items()}}


def flat(history):
    """Returns a history as named arrays."""
    return {f"log/{name}": values for name, values in history.history.items()}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the table models x optimizers x losses."""

    model: str
    optimizer: str
    loss: str

    def __call__(self, strategy):
        with strategy.scope():
            inputs, outputs = next(m for m in MODELS if m.__name__ == self.model)()
            if self.loss == "masked":
                first = inputs[0] if isinstance(inputs, list) else inputs
                outputs = keras.tree.map_structure(lambda y: MaskRows()([first, y]), outputs)
            model = keras.Model(inputs, outputs)
            loss = LOSSES[self.loss]()
            several = len(model.outputs) > 1
            metric = keras.metrics.MeanAbsoluteError
            model.compile(OPTIMIZERS[self.optimizer](), [loss] * 2 if several else loss,
                          metrics=[[metric("mae")], [metric("mae")]] if several else [metric("mae")])
        x, y = make_data(model)
        weights = None
        if self.loss.startswith("weighted"):
            weights = np.random.default_rng(6).integers(1, 5, ROWS).astype("float64")
            weights = [weights, weights] if several else weights
        history = model.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=2, verbose=0)
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        return result(model, evaluate=evaluated, **flat(history))


def table():
    """Returns all cells, by name."""
    cells = itertools.product([m.__name__ for m in MODELS], OPTIMIZERS, LOSSES)
    return {"-".join(cell): Cell(*cell) for cell in cells}


RANKS = (2, 3, 4)
POLICIES = ("ps", "sfb", "paper")
# Of scenarios that are not in the table.
OTHERS, OTHER_RANKS = "sfb", (2, 3)


def columns():
    """Returns the values of each column of the table."""
    return [m.__name__ for m in MODELS], list(OPTIMIZERS), list(LOSSES), RANKS, POLICIES


def cover():
    """Returns (cell, ranks, policy) such that every pair of values of two columns occurs."""
    rows = list(itertools.product(*columns()))
    missing = {pair for row in rows for pair in pairs(row)}
    chosen = []
    jobs = collections.Counter()  # so that ranks and policies take turns
    while missing:
        best = max(rows, key=lambda row: (len(missing.intersection(pairs(row))), -jobs[row[3:]]))
        missing.difference_update(pairs(best))
        jobs[best[3:]] += 1
        chosen.append(("-".join(best[:3]), *best[3:]))
    return chosen


def pairs(row):
    """Returns the pairs of values of a row, each value with the number of its column."""
    return set(itertools.combinations(enumerate(row), 2))


def full():
    """Returns (cell, ranks, policy) for every cell and number of ranks.

    Policies take turns, such that each meets every model, optimizer and number of ranks.
    """
    models, optimizers, losses, ranks, policies = map(list, columns())
    return [("-".join((models[m], optimizers[o], losses[l])), ranks[r],
             policies[(m + o + l + r) % len(policies)])
            for m, o, l, r in itertools.product(*(range(len(c)) for c in (models, optimizers, losses,
                                                                           ranks)))]


# ---- other ways to train --------------------------------------------------------------------------


def _small(strategy, optimizer=OPTIMIZERS["momentum"], **compile_options):
    with strategy.scope():
        model = keras.Model(*dense())
        model.compile(optimizer(), "mse", **compile_options)
    return model, *make_data(model)


def eager(strategy):
    model, x, y = _small(strategy, run_eagerly=True)
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, verbose=0)))


def several_steps_per_execution(strategy):
    model, x, y = _small(strategy, steps_per_execution=3)
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)))


def tf_data_with_validation(strategy):
    model, x, y = _small(strategy)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(BATCH)
    history = model.fit(data, epochs=2, validation_data=(x[:50], y[:50]), verbose=0)
    return result(model, **flat(history))


def repeated_data_by_steps(strategy):
    model, x, y = _small(strategy)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    return result(model, **flat(model.fit(data, epochs=2, steps_per_epoch=3, verbose=0)))


def clipped(strategy):
    """Clips by the norm of the whole gradient: wrong if clipped before it is summed."""
    model, x, y = _small(strategy, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05))
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, verbose=0)))


def regularized(strategy):
    with strategy.scope():
        x = keras.Input((8,))
        layer = keras.layers.Dense(3, kernel_regularizer="l2", bias_regularizer="l1")
        model = keras.Model(x, layer(x))
        model.compile(OPTIMIZERS["sgd"](), "mse")
    x, y = make_data(model)
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, verbose=0)))


def scaled_gradients_of_transposed_kernel(strategy):
    with strategy.scope():
        x = keras.Input((8,))
        model = ScaledStep(x, keras.layers.Dense(3)(TransposedDense()(x)))
        model.compile(OPTIMIZERS["sgd"](), "mse")
    x, y = make_data(model)
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return result(model)


def train_step_without_keras_loss(strategy):
    with strategy.scope():
        model = OwnStep(*embedding())
        model.compile(OPTIMIZERS["sgd"]())
    x, y = make_data(model)
    # On 3 ranks, the last batch leaves one of them without a row.
    history = model.fit(x[:34], y[:34], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return result(model, **flat(history))


def canonical_train_step(strategy):
    with strategy.scope():
        model = CanonicalStep(*dense())
        model.compile(OPTIMIZERS["sgd"](), "mse", metrics=["mae"])
    history = model.fit(*make_data(model), batch_size=BATCH, epochs=2, verbose=0)
    logs = {name: np.array([list(v.values()) if isinstance(v, dict) else v for v in values])
            for name, values in flat(history).items()}
    return result(model, **logs)


def unusual_metrics(strategy):
    def scalar(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))

    with strategy.scope():
        model = keras.Model(*dense())
        model.compile(OPTIMIZERS["sgd"](), "mse",
                      metrics=[scalar, Positives(), keras.losses.MeanSquaredError()])
    x, y = make_data(model)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x, y), verbose=0)
    return result(model, **flat(history))


def two_runs_in_one_function(strategy):
    """Exchanges of the same names, of ranks that are not equally fast."""
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
    """Two rows: on three ranks, one has none to give."""
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices([3.0, 5.0]).batch(2))
    results = [strategy.run(lambda x: x * 1.0, args=(rows,)) for rows in data]
    return {"mean": np.array([strategy.reduce("MEAN", r, axis=0) for r in results])}


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


def other_seeds(strategy):
    """Ranks that draw other initial values start with rank 0's."""
    keras.utils.set_random_seed(1 + strategy.rank)
    model, x, y = _small(strategy)
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)))


def custom_loop_that_builds_the_model(strategy):
    """Variables are created while the function of the step is traced, other values on each rank."""
    keras.utils.set_random_seed(1 + strategy.rank)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer = OPTIMIZERS["momentum"]()
    rng = np.random.default_rng(2)
    x, y = (rng.integers(-3, 4, (ROWS, n)).astype("float64") for n in (6, 1))
    return _own_loop(strategy, model, optimizer, x, y, epochs=1)


def generator(strategy):
    model, x, y = _small(strategy)

    def batches():
        for begin in range(0, ROWS, BATCH):
            yield x[begin:begin + BATCH], y[begin:begin + BATCH]

    return result(model, **flat(model.fit(batches(), verbose=0)))


def mixed_precision(dtype):
    """Trains in mixed precision; with float16, Keras scales the loss."""
    def way(strategy):
        keras.config.set_dtype_policy(f"mixed_{dtype}")
        try:
            with strategy.scope():
                x, ids = keras.Input((8,)), keras.Input((5,), dtype="int32")
                h = keras.layers.Flatten()(keras.layers.Embedding(400, 4)(ids))
                h = keras.layers.Dense(16, "tanh")(keras.layers.Concatenate()([x, h]))
                model = keras.Model([x, ids], keras.layers.Dense(3, dtype="float32")(h))
                model.compile(keras.optimizers.SGD(0.1), "mse")
            assert (dtype == "float16") == hasattr(model.optimizer, "initial_scale")
            x, y = make_data(model)
            before = model.get_weights()
            model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
            return {"step": [np.abs(a - b).max() for a, b in zip(before, model.get_weights())],
                    **result(model)}
        finally:
            keras.config.set_dtype_policy("float64")

    return way


def class_weights_and_mixed_precision(strategy):
    """Half-precision layers around a batch norm whose statistics are in single precision."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with strategy.scope():
            x = keras.Input((8,))
            h = keras.layers.BatchNormalization(synchronized=True)(keras.layers.Dense(8)(x))
            model = keras.Model(x, keras.layers.Dense(3, dtype="float32")(h))
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = make_data(model)
        model.fit(x, y.argmax(1), class_weight={0: 1.0, 1: 2.0, 2: 3.0}, batch_size=BATCH, verbose=0)
        return result(model)
    finally:
        keras.config.set_dtype_policy("float64")


def built_by_first_batch(strategy):
    """A model without input shape: its variables are created inside fit."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rng = np.random.default_rng(2)
    x, y = rng.integers(-3, 4, (ROWS, 6)), rng.integers(-3, 4, (ROWS, 1))
    model.fit(x.astype("float64"), y.astype("float64"), batch_size=BATCH, verbose=0)
    return result(model)


def predictions(strategy):
    model, x, y = _small(strategy, steps_per_execution=3)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    batches = []
    watch = keras.callbacks.LambdaCallback(
        on_predict_batch_end=lambda _, logs: batches.append(logs["outputs"]))
    whole = model.predict(x, batch_size=BATCH, verbose=0, callbacks=[watch])
    by_generator = model.predict(((x[i:i + 5],) for i in range(0, 25, 5)), verbose=0)
    return {"predict": whole, "of_callback": np.concatenate(batches), "generator": by_generator,
            "on_batch": model.predict_on_batch(x[:5]), "one_row": model.predict_on_batch(x[:1])}


def predictions_of_two_outputs(strategy):
    with strategy.scope():
        model = keras.Model(*two_in_two_out())
        model.compile()
    return dict(zip("ab", model.predict(make_data(model)[0], batch_size=BATCH, verbose=0)))


def on_batch(strategy):
    model, x, y = _small(strategy, metrics=["mae"])
    weights = np.arange(10) % 3
    logs = [model.train_on_batch(x[:10], y[:10], weights), model.test_on_batch(x[10:], y[10:]),
            list(model.train_on_batch(x[:1], y[:1], return_dict=True).values())]
    return result(model, logs=logs)


def py_dataset(strategy):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-ROWS // BATCH)

        def __getitem__(self, i):
            return x[i * BATCH:(i + 1) * BATCH], y[i * BATCH:(i + 1) * BATCH]

    model, x, y = _small(strategy)
    history = model.fit(Batches(workers=2), epochs=2, validation_data=Batches(), verbose=0)
    return result(model, **flat(history))


def own_batches_of_each_rank(strategy):
    """Ranks read rows of their own; rank 0 has one batch more than the others."""
    model, x, y = _small(strategy)

    def rows(context):
        each = 12 // context.num_replicas_in_sync
        mine = np.arange(ROWS) % 12 // each == context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(each)

    data = strategy.distribute_datasets_from_function(rows)
    return result(model, **flat(model.fit(data, epochs=2, verbose=0)))


def gathered(strategy):
    """What strategy.run makes of a rank's rows, put together again."""
    data = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(np.arange(10.0).reshape(5, 2)).batch(5))
    rows, = data
    doubled, columns = strategy.run(lambda x: (x * 2, tf.transpose(x)), args=(rows,))

    def norm(x):
        return tf.norm(tf.distribute.get_replica_context().all_gather(x, axis=0))

    return {"rows": strategy.gather(doubled, axis=0), "columns": strategy.gather(columns, axis=1),
            "last": strategy.gather(columns, axis=-1),
            "in_run": tf.function(lambda: strategy.run(norm, args=(rows,)))()}


def gan(strategy):
    with strategy.scope():
        model = Gan()
        model.compile(OPTIMIZERS["adam"](), OPTIMIZERS["momentum"]())
    rng = np.random.default_rng(2)
    noise, real = (rng.integers(-3, 4, (ROWS, n)).astype("float64") for n in (4, 3))
    history = model.fit(noise, real, batch_size=BATCH, epochs=2, verbose=0)
    return result(model, **flat(history))


def module_without_keras(strategy):
    """An optimizer of the user's own, for a gradient that is a product and one that is slices."""
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


def metrics_with_weights(strategy):
    """Metrics whose state is more than a mean, with weights of classes, weights of rows and a mask."""
    with strategy.scope():
        inputs, outputs = dense()
        outputs = MaskRows()([inputs, keras.layers.Softmax()(outputs)])
        model = keras.Model(inputs, outputs)
        model.compile(OPTIMIZERS["sgd"](), "categorical_crossentropy",
                      metrics=["accuracy", keras.metrics.F1Score(average="macro")],
                      weighted_metrics=[keras.metrics.AUC(name="auc"), "mse",
                                        keras.metrics.Recall(name="recall")])
    x, y = make_data(model)
    y = np.eye(3)[y.argmax(1)]
    fit = dict(batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
    by_class = model.fit(x, y, class_weight={0: 1.0, 1: 2.0, 2: 3.0}, **fit)
    by_row = model.fit(x, y, sample_weight=np.arange(ROWS) % 3, **fit)
    evaluated = model.evaluate(x, y, sample_weight=np.arange(ROWS) % 5, verbose=0)
    return result(model, evaluate=evaluated, **flat(by_class),
                  **{f"by_row/{k}": v for k, v in flat(by_row).items()})


def logs_of_batches(strategy):
    """With global_batch_logs, callbacks see after each batch what one process sees."""
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(list(logs.values())))
    strategy.extended.global_batch_logs = True
    try:
        model, x, y = _small(strategy, metrics=["mae"])
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[watch])
        with strategy.scope():
            own = OwnStep(*dense())
            own.compile(OPTIMIZERS["sgd"]())
        own.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0, callbacks=[watch])
    finally:
        strategy.extended.global_batch_logs = False
    return {"logs": np.concatenate(seen)}


def callbacks_that_decide(strategy):
    """By logs of epochs: on all ranks alike."""
    model, x, y = _small(strategy, metrics=["mae"])
    history = model.fit(
        x, y, batch_size=BATCH, epochs=8, validation_split=0.3, verbose=0, callbacks=[
            keras.callbacks.EarlyStopping("val_mae", patience=2, min_delta=0.05,
                                          restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.3)])
    assert len(history.epoch) < 8
    return result(model, epochs=history.epoch, **flat(history))


def terminated_on_nan(strategy):
    """The loss of one rank is not a number: all stop after that batch."""
    model, x, y = _small(strategy)
    x[BATCH + 1] = np.nan
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False,
              callbacks=[keras.callbacks.TerminateOnNaN()])
    return {"iterations": model.optimizer.iterations}


WAYS = {way.__name__: way for way in (
    eager, several_steps_per_execution, tf_data_with_validation,
    repeated_data_by_steps, clipped, regularized,
    scaled_gradients_of_transposed_kernel, train_step_without_keras_loss, canonical_train_step,
    unusual_metrics, two_runs_in_one_function, rows_reduced_along_their_axis,
    custom_loop, other_seeds, custom_loop_that_builds_the_model,
    built_by_first_batch, generator, py_dataset, gathered,
    own_batches_of_each_rank, predictions,
    predictions_of_two_outputs, on_batch, gan, module_without_keras, metrics_with_weights,
    logs_of_batches, callbacks_that_decide, terminated_on_nan)} | RECIPES


# ---- equal bits, but not one process' result ------------------------------------------------------


def default_batch_norm(strategy):
    """Moments of each rank's rows: moving statistics are averaged, weighted by rows."""
    with strategy.scope():
        x = keras.Input((4,))
        model = keras.Model(x, keras.layers.BatchNormalization(momentum=0.5)(x))
        model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = make_data(model)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return result(model, x=x)


def dropout(strategy):
    """Random layers draw other numbers on every rank, from equal state."""
    with strategy.scope():
        x = keras.Input((64,))
        model = keras.Model(x, keras.layers.Dropout(0.5, seed=3)(x))
        model.compile(loss="mse")
    keep = strategy.run(lambda: model(np.ones((1, 64)), training=True) > 0)
    return {"local/keep": keep.numpy(), **result(model)}


def float32(strategy):
    """Single precision, with every kind of layer that changes bits when sums change order."""
    keras.config.set_floatx("float32")
    try:
        with strategy.scope():
            model = keras.Model(*batch_norm())
            model.compile("adam", "mse")
        x, y = make_data(model)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        return result(model, **flat(history))
    finally:
        keras.config.set_floatx("float64")


def noisy_weights(strategy):
    with strategy.scope():
        x = keras.Input((8,))
        model = keras.Model(x, keras.layers.Dense(3)(NoisyDense()(x)))
        model.compile(OPTIMIZERS["sgd"](), "mse")
    x, y = make_data(model)
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return result(model)


def stopped_by_one_rank(strategy):
    """One rank alone has a callback that stops within an epoch, and others between the phases."""
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = batch == 1

        def on_predict_batch_end(self, batch, logs=None):
            self.model.stop_predicting = batch == 1

    model, x, y = _small(strategy)
    stop = [Stop()] if strategy.rank == 1 else []
    fit = dict(batch_size=BATCH, verbose=0, callbacks=stop)
    model.fit(x, y, epochs=3, **fit)
    return result(model, iterations=model.optimizer.iterations, evaluate=model.evaluate(x, y, **fit),
                  predict=model.predict(x, **fit))


def rows_of_predict(strategy):
    """Counts the rows that each rank computes."""
    class Count(keras.layers.Layer):
        def build(self, shape):
            self.rows = self.add_weight(shape=(), dtype="int32", initializer="zeros",
                                        trainable=False)

        def call(self, x):
            self.rows.assign_add(keras.ops.shape(x)[0])
            return x * 2

    with strategy.scope():
        x = keras.Input((3,))
        layer = Count()
        model = keras.Model(x, layer(x))
    rows = np.arange(3.0 * 96).reshape(96, 3)
    before = layer.rows.numpy()
    predicted = model.predict(rows, batch_size=BATCH, verbose=0)
    return {"right": predicted == 2 * rows, "local/rows": layer.rows.numpy() - before}


def changed_on_one_rank(strategy):
    """Weights that one rank has loaded alone: all go on with rank 0's."""
    model, x, y = _small(strategy)
    if strategy.rank == 0:
        model.set_weights([w + 1 for w in model.get_weights()])
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return result(model)


BITS = {way.__name__: way for way in (
    default_batch_norm, dropout, float32, noisy_weights, class_weights_and_mixed_precision,
    stopped_by_one_rank, rows_of_predict, changed_on_one_rank)}

HALVES = {f"mixed_{dtype}": mixed_precision(dtype) for dtype in ("float16", "bfloat16")}

SCENARIOS = {**table(), **wrappers.table(), **WAYS, **BITS, **HALVES}
