"""Ways to train that are not in the table: scenarios that give the result of one process."""

import contextlib
import json
import logging
import tempfile
from unittest import mock

from custom_layers import CanonicalStep
from custom_layers import Gan
from custom_layers import LossOfRows
from custom_layers import NoisyDense
from custom_layers import OwnResults
from custom_layers import OwnStep
from custom_layers import PenaltyInLoss
from custom_layers import Positives
from custom_layers import ScaledStep
from custom_layers import SimilarRows
from custom_layers import TransposedDense
from custom_layers import UnusualPredictions
from custom_loops import LOOPS
import keras
import numpy as np
from recipes import RECIPES
from small_models import BATCH
from small_models import dense
from small_models import embedding
from small_models import flat
from small_models import make_data
from small_models import MaskRows
from small_models import OPTIMIZERS
from small_models import result
from small_models import ROWS
from small_models import small
from small_models import two_in_two_out
import tensorflow as tf

from tf_poseidon.one_process import partitioning


@contextlib.contextmanager
def warned(strategy, text):
    """Checks that rank 0 of several is told of something."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("tf_poseidon")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if strategy.num_replicas_in_sync > 1 and strategy.rank == 0:
        assert any(text in record.getMessage() for record in records), [record.getMessage() for record in records]


def eager(strategy):
    model, x, y = small(strategy, run_eagerly=True)
    with warned(strategy, "'train_step' runs eagerly"):
        return result(model, **flat(model.fit(x, y, batch_size=BATCH, verbose=0)))


def several_steps_per_execution(strategy):
    model, x, y = small(strategy, steps_per_execution=3)
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)))


def tf_data_with_validation(strategy):
    model, x, y = small(strategy)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS).batch(BATCH)
    history = model.fit(data, epochs=2, validation_data=(x[:50], y[:50]), verbose=0)
    return result(model, **flat(history))


def repeated_data_by_steps(strategy):
    model, x, y = small(strategy)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
    return result(model, **flat(model.fit(data, epochs=2, steps_per_epoch=3, verbose=0)))


def clipped(strategy):
    """Clips by the norm of the whole gradient: wrong if clipped before it is summed."""
    model, x, y = small(strategy, lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05))
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, verbose=0)))


def regularized(strategy):
    with strategy.scope():
        x = keras.Input((8,))
        layer = keras.layers.Dense(3, kernel_regularizer="l2", bias_regularizer=keras.regularizers.L1L2(0.01))
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


def other_seeds(strategy):
    """Ranks that draw different initial values start with rank 0's."""
    keras.utils.set_random_seed(1 + strategy.rank)
    model, x, y = small(strategy)
    return result(model, **flat(model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)))


def generator(strategy):
    model, x, y = small(strategy)

    def batches():
        for begin in range(0, ROWS, BATCH):
            yield x[begin:begin + BATCH], y[begin:begin + BATCH]

    return result(model, **flat(model.fit(batches(), verbose=0)))


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
    model, x, y = small(strategy, steps_per_execution=3)
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
    model, x, y = small(strategy, metrics=["mae"])
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

    model, x, y = small(strategy)
    history = model.fit(Batches(workers=2), epochs=2, validation_data=Batches(), verbose=0)
    return result(model, **flat(history))


def own_batches_of_each_rank(strategy, **options):
    """Ranks read rows of their own; rank 0 has one batch more than the others."""
    model, x, y = small(strategy, **options)

    def rows(context):
        each = 12 // context.num_replicas_in_sync
        mine = np.arange(ROWS) % 12 // each == context.input_pipeline_id
        return tf.data.Dataset.from_tensor_slices((x[mine], y[mine])).batch(each)

    data = strategy.distribute_datasets_from_function(rows)
    for _ in range(3):
        next(iter(data))  # dropped iterators leave nothing behind
    return result(model, **flat(model.fit(data, epochs=2, verbose=0)))


def own_batches_in_executions_of_three_steps(strategy):
    return own_batches_of_each_rank(strategy, steps_per_execution=3)


def own_batches_in_eager_steps(strategy):
    return own_batches_of_each_rank(strategy, run_eagerly=True)


def saved_and_loaded(strategy):
    """Rank 0 saves in the middle of gradient accumulation; all ranks load, and continue."""
    model, x, y = small(strategy, lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, gradient_accumulation_steps=3))
    fit = dict(batch_size=BATCH, verbose=0, shuffle=False)
    model.fit(x, y, **fit)  # four steps
    with tempfile.TemporaryDirectory() as directory:
        directory = communicated(strategy, directory)
        if strategy.rank == 0:
            model.save(f"{directory}/model.keras")
            model.save_weights(f"{directory}/model.weights.h5")
        model.fit(x, y, **fit)
        model.load_weights(f"{directory}/model.weights.h5")
        model.fit(x, y, **fit)
        with strategy.scope():
            loaded = keras.models.load_model(f"{directory}/model.keras")
        loaded.fit(x, y, **fit)
    return {**result(model), **{f"loaded/{k}": v for k, v in result(loaded).items()}}


def communicated(strategy, text):
    """Returns rank 0's text, after all ranks have come here."""
    return str(strategy.gather(tf.constant([text]), axis=0)[0].numpy(), "utf8")


def weights_of_rank_0(strategy):
    """Only rank 0 has other weights before evaluate: rows must not be mixed from two models."""
    model, x, y = small(strategy)
    if strategy.rank == 0:
        model.set_weights([w + 1 for w in model.get_weights()])
    return {"evaluate": model.evaluate(x, y, verbose=0), "predict": model.predict(x, verbose=0)}


def losses_with_additions(strategy):
    """Custom losses in the methods that Keras provides for them."""
    results = {}
    for kind in (PenaltyInLoss, LossOfRows):
        with strategy.scope():
            model = kind(*dense())
            model.mean = keras.metrics.Mean(name="mean")
            model.compile(OPTIMIZERS["sgd"](), "mse")
        x, y = make_data(model)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False)
        results |= {f"{kind.__name__}/{k}": v for k, v in result(model, **flat(history)).items()}
    return results


def predictions_as_long_as_a_batch(strategy):
    """Rows whose sizes differ between steps, inputs, texts, and numbers; and executions of several steps."""
    with strategy.scope():
        model = SimilarRows(*dense())
        model.compile()
        of_two_steps = keras.Model(*dense())
        of_two_steps.compile(steps_per_execution=2)
    x, _ = make_data(model)
    labels = np.array([f"row {i}" for i in range(len(x))])
    predicted = model.predict(tf.data.Dataset.from_tensor_slices((x, labels)).batch(BATCH), verbose=0)
    return {"rows": predicted["rows"], "similar": predicted["similar"].to_tensor(), "inputs": predicted["inputs"],
            "labels": predicted["labels"].astype("S"), "nothing": predicted["nothing"],
            **{f"mean{i}": value for i, value in enumerate(predicted["means"])},
            "of_two_steps": of_two_steps.predict(x, batch_size=BATCH, verbose=0),
            **_predicted_before(of_two_steps, x)}


def _predicted_before(model, x):
    """Returns what a callback has predicted before the loop over batches."""
    batches = []
    before = keras.callbacks.LambdaCallback(
        on_predict_begin=lambda logs: batches.append(model.predict_function([(tf.constant(x[:5]),)])))
    predicted = model.predict(x, batch_size=BATCH, verbose=0, callbacks=[before])
    return {"predicted_after": predicted, "predicted_before": batches[0].numpy()}


def unusual_predictions(strategy):
    """Two rows for each, texts, ragged rows; of batches with fewer rows than ranks too."""
    with strategy.scope():
        model = UnusualPredictions(*dense())
        model.compile()
    x, _ = make_data(model)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    predicted |= {f"one/{k}": v for k, v in model.predict(x[:1], verbose=0).items()}
    return {name: v.row_lengths() if name.endswith("ragged") else
            v.astype("S") if name.endswith("text") else v for name, v in predicted.items()}


def gan(strategy):
    with strategy.scope():
        model = Gan()
        model.compile(OPTIMIZERS["adam"](), OPTIMIZERS["momentum"]())
    rng = np.random.default_rng(2)
    noise, real = (rng.integers(-3, 4, (ROWS, n)).astype("float64") for n in (4, 3))
    history = model.fit(noise, real, batch_size=BATCH, epochs=2, verbose=0)
    return result(model, **flat(history))


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
    """Callbacks see after each batch what one process sees."""
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(list(logs.values())))
    model, x, y = small(strategy, metrics=["mae"])
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[watch])
    with strategy.scope():
        own = OwnStep(*dense())
        own.compile(OPTIMIZERS["sgd"]())
    own.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0, callbacks=[watch])
    return {"logs": np.concatenate(seen)}


def exchanges(strategy, method, *args, **kwargs):
    """Returns what a method returns, and the number of this rank's exchanges in it."""
    def count():
        return sum(counts["count"] for counts in strategy.stats()["sites"].values())

    before = count()
    found = method(*args, verbose=0, **kwargs)
    return found, count() - before


def metrics_that_are_read_later(strategy):
    """Steps of evaluate exchange no metrics that only add up, whatever their state is."""
    with strategy.scope():
        model = keras.Model(*two_in_two_out())
        model.compile(
            OPTIMIZERS["sgd"](), "mse", metrics=[["mae", keras.metrics.R2Score()], ["mse"]],
            weighted_metrics=[[keras.metrics.CosineSimilarity()], [keras.metrics.MeanSquaredError(name="weighted")]])
        own = OwnResults(*dense())
        own.compile()
        classes = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
        classes.compile(OPTIMIZERS["sgd"](), "categorical_crossentropy", metrics=[
            "accuracy", keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.F1Score(average="macro"),
            keras.metrics.OneHotMeanIoU(num_classes=3, name="iou")])
    results = {}
    x, y = make_data(model)
    weights = [np.arange(ROWS) % 3, np.arange(ROWS) % 5]
    results["weighted"] = model.evaluate(x, y, sample_weight=weights, batch_size=BATCH, verbose=0)
    results["two"], _ = exchanges(strategy, model.evaluate, x, y, batch_size=BATCH)
    _, few = exchanges(strategy, model.evaluate, x, y, batch_size=BATCH, steps=1)
    _, many = exchanges(strategy, model.evaluate, x, y, batch_size=BATCH)
    assert few == many
    x, y = make_data(own)
    for rows in (ROWS, BATCH + 1):
        found = own.evaluate(x[:rows], y[:rows], batch_size=BATCH, verbose=0, return_dict=True)
        results |= {f"own/{rows}/{name}": value for name, value in found.items()}
    x, y = make_data(classes)
    y = np.eye(3)[y.argmax(1)]
    history = classes.fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x, y), verbose=0, shuffle=False)
    return result(classes, **flat(history), **results)


def metrics_shown_and_left(strategy):
    """A progress bar shows metrics while evaluate runs; those that an error leaves behind are whole."""
    model, x, y = small(strategy, metrics=["mae"])
    shown = []
    update = keras.utils.Progbar.update

    def note(bar, current, values=None, finalize=None):
        shown.append([value for _, value in values or ()])
        return update(bar, current, values, finalize)

    with mock.patch.object(keras.utils.Progbar, "update", note):
        model.evaluate(x, y, batch_size=BATCH, verbose=1)
    first, last = (np.array(json.loads(communicated(strategy, json.dumps(shown)))[i]) for i in (0, -1))

    def batches():
        yield x[:BATCH], y[:BATCH]
        yield x[BATCH:BATCH + 1], y[BATCH:BATCH + 1]
        raise ValueError("no more")

    specs = tuple(tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in (x, y))
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    try:
        model.evaluate(data, verbose=0)
    except tf.errors.OpError:
        left = [variable.numpy() for metric in model.metrics for variable in metric.variables]
    return {"first": first, "last": last, "left": left, "again": model.evaluate(x, y, verbose=0)}


def random_layers(strategy):
    """Random numbers are those of one process: of dropout, of noise, of augmentation."""
    with strategy.scope():
        x = keras.Input((6, 6, 2))
        h = keras.layers.RandomFlip(seed=1)(keras.layers.RandomTranslation(0.2, 0.2, seed=2)(x))
        h = keras.layers.Dense(8, "tanh")(keras.layers.Flatten()(h))
        h = keras.layers.GaussianNoise(0.1)(keras.layers.Dropout(0.4)(h))
        model = keras.Model(x, keras.layers.Dense(3)(NoisyDense()(h)))
        model.compile(OPTIMIZERS["sgd"](), "mse", metrics=["mae"])
    x, y = make_data(model)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return result(model, **flat(history))


def pass_that_fails_on_one_rank(strategy):
    """All ranks then run whole batches, also where gradients are accumulated: correct, but slow."""
    fails = strategy.rank == strategy.num_replicas_in_sync - 1
    with mock.patch.object(partitioning, "partition", side_effect=RuntimeError("no pass today")) if fails else (
            contextlib.nullcontext()):
        model, x, y = small(strategy, lambda: keras.optimizers.Adam(
            0.01, epsilon=1e-3, gradient_accumulation_steps=2, global_clipnorm=0.5), metrics=["mae"])
        with warned(strategy, "was not partitioned: "):
            history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
    return result(model, predicted=predicted, **flat(history))


def ragged_rows(strategy):
    """Inputs that are not dense are computed whole."""
    class Mean(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self.dense(tf.reduce_mean(x, 1)) - y))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with strategy.scope():
        model = Mean()
        model.dense.build((None, 4))
        model.compile(OPTIMIZERS["sgd"]())
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 5, ROWS)
    x = tf.RaggedTensor.from_row_lengths(rng.integers(-3, 4, (lengths.sum(), 4)).astype("float64"), lengths)
    y = rng.integers(-3, 4, (ROWS, 3)).astype("float64")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    history = model.fit(data, verbose=0)
    return result(model, **flat(history))


def float8(strategy):
    """Scales are overwritten with their gradients. TensorFlow cannot inline such graphs, so they are computed whole."""
    with strategy.scope():
        x = keras.Input((8,))
        model = keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(8, dtype="float8_from_float32")(x)))
        model.compile(OPTIMIZERS["sgd"](), "mse")
    x, y = make_data(model)
    can_inline = tf.__version__.startswith("2.18.")
    with contextlib.nullcontext() if can_inline else warned(strategy, "was not partitioned: "):
        return result(model, **flat(model.fit(x, y, batch_size=BATCH, verbose=0)))


def callbacks_that_decide(strategy):
    """By logs of epochs: on all ranks alike."""
    model, x, y = small(strategy, metrics=["mae"])
    history = model.fit(
        x, y, batch_size=BATCH, epochs=8, validation_split=0.3, verbose=0, callbacks=[
            keras.callbacks.EarlyStopping("val_mae", patience=2, min_delta=0.05,
                                          restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.3)])
    assert len(history.epoch) < 8
    return result(model, epochs=history.epoch, **flat(history))


def terminated_on_nan(strategy):
    """The loss of one rank is not a number: all stop after that batch."""
    model, x, y = small(strategy)
    x[BATCH + 1] = np.nan
    model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, shuffle=False,
              callbacks=[keras.callbacks.TerminateOnNaN()])
    return {"iterations": model.optimizer.iterations}


WAYS = {way.__name__: way for way in (
    eager, several_steps_per_execution, tf_data_with_validation, repeated_data_by_steps, clipped,
    regularized, scaled_gradients_of_transposed_kernel, train_step_without_keras_loss,
    canonical_train_step, unusual_metrics, other_seeds, built_by_first_batch, generator, py_dataset,
    own_batches_of_each_rank, own_batches_in_executions_of_three_steps, own_batches_in_eager_steps, predictions,
    predictions_as_long_as_a_batch, predictions_of_two_outputs, on_batch, gan, metrics_with_weights, logs_of_batches,
    metrics_that_are_read_later, metrics_shown_and_left, random_layers,
    pass_that_fails_on_one_rank, ragged_rows, float8, callbacks_that_decide, terminated_on_nan, saved_and_loaded,
    weights_of_rank_0, losses_with_additions, unusual_predictions)} | LOOPS | RECIPES
