"""Keras models as people write them for one process, with features that easily go wrong on several.

Each program is a function that returns (model, x, y): compiled with plain SGD, so that a gradient of a wrong length
shows. `fit` trains it in batches of BATCH rows: on several ranks, uneven parts and ranks without rows.
"""

import keras
from keras import layers
from keras import ops
from keras.src.legacy import backend as legacy
import numpy as np
import tensorflow as tf

BATCH, ROWS = 11, 24  # the last batch has two rows
PROGRAMS = {}
# What Keras computes only in single precision.
SINGLE = ("orthogonal_activity_regularizer", "augmentation", "ctc_cost_of_batches")
# Ops that every rank runs for all rows: rows of two tensors in one, logits whose rows are columns, and recurrences over
# labels.
WHOLE = {"simclr": [], "clip": ["SparseSoftmaxCrossEntropyWithLogits"],
         "ctc": ["AddV2", "Sub", "TensorListSetItem", "TensorScatterAdd", "While"],
         "ctc_cost_of_batches": ["CTCLoss", "GatherNd"]}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def _data(*shape, classes=0, seed=3):
    """Returns x, multiples of 1/2, and y: numbers, or class indices."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (ROWS, *shape)) / 2
    return x, rng.integers(0, classes, ROWS) if classes else rng.integers(-3, 4, (ROWS, 3)) / 2


def _net(*more, outputs=3, activation=None, features=6):
    """Two dense layers, and others between them."""
    return keras.Sequential([keras.Input((features,)), layers.Dense(8, "tanh"), *more,
                             layers.Dense(outputs, activation)])


def _sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


def _compiled(model, loss="mse", optimizer=None, **options):
    model.compile(optimizer or _sgd(), loss, **options)
    return model


# ---- losses in layers -------------------------------------------------------------------------


class LossInLayer(layers.Layer):
    """Adds a function of its input to the loss, and returns its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


def _adding(function):
    def make():
        return _compiled(_net(LossInLayer(function))), *_data(6)

    return make


def _orthogonal_rows(x):
    """In-batch: the similarity of the rows."""
    similar = ops.matmul(x, ops.transpose(x))
    return ops.mean(ops.square(similar - tf.eye(tf.shape(x)[0], dtype=x.dtype)))


PROGRAMS |= {
    "keras_loss_in_layer": _adding(lambda x: keras.losses.MeanSquaredError()(ops.zeros_like(x), x)),
    "summed_keras_loss_in_layer": _adding(
        lambda x: keras.losses.MeanSquaredError(reduction="sum")(ops.zeros_like(x), x)),
    "vector_in_layer": _adding(lambda x: ops.mean(ops.square(x), axis=-1)),
    "sum_in_layer": _adding(lambda x: ops.sum(ops.abs(x))),
    "mean_in_layer": _adding(lambda x: 0.3 * ops.mean(ops.square(x))),
    "root_in_layer": _adding(lambda x: ops.sqrt(ops.mean(ops.square(x)) + 1)),
    "rows_alike_in_layer": _adding(_orthogonal_rows),
}


@program
def activity_regularizers():
    return _compiled(_net(layers.Dense(8, activity_regularizer="l2"), layers.ActivityRegularization(l1=0.1))), *_data(6)


@program
def orthogonal_activity_regularizer():
    """The similarity of the features over the batch."""
    return _compiled(_net(layers.Dense(
        8, activity_regularizer=keras.regularizers.OrthogonalRegularizer(0.1, "columns"),
        kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1, "columns")))), *_data(6)


# ---- losses that are compiled -----------------------------------------------------------------


def _with_loss(make_loss, activation="sigmoid", classes=2):
    def make():
        x, y = _data(6, classes=classes)
        return _compiled(_net(activation=activation), make_loss()), x, np.eye(3)[y]

    return make


PROGRAMS |= {f"loss_{name}": _with_loss(loss, activation) for name, loss, activation in (
    ("dice", lambda: keras.losses.Dice(), "sigmoid"),
    ("dice_of_each_class", lambda: keras.losses.Dice(axis=0), "sigmoid"),
    ("tversky", lambda: keras.losses.Tversky(0.3, 0.7), "sigmoid"),
    ("focal", lambda: keras.losses.CategoricalFocalCrossentropy(), "softmax"),
    ("cosine", lambda: keras.losses.CosineSimilarity(), "tanh"),
    ("kl", lambda: keras.losses.KLDivergence(), "softmax"),
    ("huber_summed", lambda: keras.losses.Huber(reduction="sum"), None),
    ("log_cosh_without_reduction", lambda: keras.losses.LogCosh(reduction=None), None))}


@program
def loss_circle_of_labels():
    """Each row with all rows of the batch that have the same label."""
    x, y = _data(6, classes=3)
    model = _net(layers.UnitNormalization(), activation="tanh")
    return _compiled(model, keras.losses.Circle()), x, y


@program
def mean_of_present():
    """A mean over the existing entries, whose number differs between ranks."""
    def loss(y, prediction):
        there = ops.cast(ops.greater(y, 0), prediction.dtype)
        return ops.sum(there * ops.square(y - prediction)) / ops.maximum(ops.sum(there), 1.0)

    return _compiled(_net(), loss), *_data(6)


@program
def masked_sequences():
    x = keras.Input((5,), dtype="int32")
    h = layers.Embedding(7, 4, mask_zero=True)(x)
    model = keras.Model(x, layers.Dense(1)(layers.LSTM(6, return_sequences=True)(h)))
    rng = np.random.default_rng(3)
    return (_compiled(model, weighted_metrics=["mae"]), rng.integers(0, 7, (ROWS, 5)),
            rng.integers(-3, 4, (ROWS, 5, 1)).astype("float64"))


@program
def weights_of_classes():
    x, y = _data(6, classes=3)
    model = _compiled(_net(activation="softmax"), keras.losses.SparseCategoricalCrossentropy(
        reduction="mean_with_sample_weight"), weighted_metrics=["accuracy"])
    return model, x, y, {"class_weight": {0: 1.0, 1: 5.0, 2: 0.5}}


@program
def ctc():
    """The loss of sequences of labels, which TensorFlow makes of functions that are not inlined."""
    model = keras.Sequential([keras.Input((8, 6)), layers.LSTM(5, return_sequences=True), layers.Dense(5)])
    return _compiled(model, keras.losses.CTC()), _data(8, 6)[0], np.random.default_rng(2).integers(1, 5, (ROWS, 3))


@program
def ctc_cost_of_batches():
    """The older function, which takes lengths."""
    def loss(y, outputs):
        ones = tf.ones((tf.shape(outputs)[0], 1), tf.int32)
        return legacy.ctc_batch_cost(y, tf.nn.softmax(outputs), 8 * ones, 3 * ones)

    model = keras.Sequential([keras.Input((8, 6)), layers.Dense(5)])
    return _compiled(model, loss), _data(8, 6)[0], np.random.default_rng(2).integers(0, 4, (ROWS, 3))


@program
def several_outputs():
    x = keras.Input((6,))
    h = layers.Dense(8, "tanh")(x)
    model = keras.Model(x, {"a": layers.Dense(3)(h), "b": layers.Dense(3, "softmax")(h)})
    _compiled(model, {"a": "mae", "b": keras.losses.Dice()}, loss_weights={"a": 0.3, "b": 2.0})
    x, y = _data(6)
    return model, x, {"a": y, "b": np.eye(3)[np.arange(ROWS) % 3]}


@program
def correlation():
    def loss(y, prediction):
        a, b = y - ops.mean(y, 0), prediction - ops.mean(prediction, 0)
        return 1 - ops.mean(ops.sum(a * b, 0) / ops.sqrt(ops.sum(a * a, 0) * ops.sum(b * b, 0) + 1))

    return _compiled(_net(), loss), *_data(6)


# ---- losses between the rows of a batch -------------------------------------------------------


@program
def clip():
    """Two towers: each row must find its partner among all rows."""
    a, b = keras.Input((6,)), keras.Input((6,))
    towers = [layers.UnitNormalization()(layers.Dense(4)(layers.Dense(8, "tanh")(x))) for x in (a, b)]
    similar = layers.Lambda(lambda pair: 5 * ops.matmul(pair[0], ops.transpose(pair[1])))(towers)
    model = keras.Model([a, b], similar)

    def loss(y, similar):
        labels = ops.arange(ops.shape(similar)[0])
        both = (similar, ops.transpose(similar))
        return sum(ops.mean(ops.sparse_categorical_crossentropy(labels, s, from_logits=True)) for s in both) / 2

    x, y = _data(6)
    return _compiled(model, loss), [x, x[::-1] + 1], y


class SimClr(keras.Model):
    """Two views of each row; all others of the batch are negatives."""

    def __init__(self):
        super().__init__()
        self.encoder = _net(outputs=4)
        self.augment = layers.GaussianNoise(0.1, seed=1)
        self.mean = keras.metrics.Mean(name="contrast")

    def train_step(self, batch):
        x, _ = batch
        views = [self.augment(x, training=True) for _ in range(2)]
        with tf.GradientTape() as tape:
            z = tf.concat([tf.math.l2_normalize(self.encoder(view, training=True), -1) for view in views], 0)
            rows = tf.shape(x)[0]
            similar = tf.matmul(z, z, transpose_b=True) / 0.5 - 1e9 * tf.eye(2 * rows, dtype=z.dtype)
            labels = tf.concat([tf.range(rows) + rows, tf.range(rows)], 0)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similar))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.mean.update_state(loss)
        return {"contrast": self.mean.result()}


@program
def simclr():
    model = SimClr()
    model.compile(_sgd())
    return model, *_data(6)


class Experts(layers.Layer):
    """A mixture of experts, whose load is balanced by the product of two means over the batch."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], 3), name="gate")
        self.experts = self.add_weight(shape=(3, shape[-1], 8), name="experts")

    def call(self, x):
        gates = ops.softmax(ops.matmul(x, self.gate))
        chosen = ops.one_hot(ops.argmax(gates, -1), 3, dtype=gates.dtype)
        self.add_loss(0.1 * 3 * ops.sum(ops.mean(gates, 0) * ops.mean(chosen, 0)))
        return ops.einsum("be,bf,efo->bo", gates * chosen, x, self.experts)


@program
def mixture_of_experts():
    return _compiled(_net(Experts())), *_data(6)


# ---- training steps ---------------------------------------------------------------------------


def _own_step(step):
    """A program whose model has a custom training step: step(model, x, y) returns logs."""
    class Own(keras.Model):
        def train_step(self, batch):
            return step(self, *batch)

    def make():
        x = keras.Input((6,))
        model = Own(x, layers.Dense(3)(layers.Dense(8, "tanh")(x)))
        model.compile(_sgd(), "mse")
        return model, *_data(6)

    PROGRAMS[step.__name__] = make
    return step


def _gradients(model, x, y):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


def _apply(model, gradients):
    model.optimizer.apply(gradients, model.trainable_variables)


@_own_step
def losses_of_rows(model, x, y):
    """One loss per row; the tape sums their gradients."""
    with tf.GradientTape() as tape:
        losses = keras.losses.MeanSquaredError(reduction=None)(y, model(x, training=True))
    _apply(model, tape.gradient(losses, model.trainable_variables))
    return {"own_loss": tf.reduce_mean(losses), "worst": tf.reduce_max(losses)}


@_own_step
def clipped_by_norm(model, x, y):
    loss, gradients = _gradients(model, x, y)
    _apply(model, [tf.clip_by_norm(g, 0.05) for g in gradients])
    return {"own_loss": loss}


@_own_step
def clipped_by_global_norm(model, x, y):
    loss, gradients = _gradients(model, x, y)
    clipped, norm = tf.clip_by_global_norm(gradients, 0.1)
    _apply(model, clipped)
    return {"own_loss": loss, "norm": norm}


@_own_step
def signs(model, x, y):
    loss, gradients = _gradients(model, x, y)
    _apply(model, [tf.sign(g) for g in gradients])
    return {"own_loss": loss}


@_own_step
def sharpness_aware(model, x, y):
    """SAM: the gradient a small step uphill."""
    _, gradients = _gradients(model, x, y)
    scale = 0.05 / (tf.linalg.global_norm(gradients) + 1e-12)
    steps = [scale * g for g in gradients]
    for variable, change in zip(model.trainable_variables, steps):
        variable.assign_add(change)
    loss, gradients = _gradients(model, x, y)
    for variable, change in zip(model.trainable_variables, steps):
        variable.assign_sub(change)
    _apply(model, gradients)
    return {"own_loss": loss}


@_own_step
def gradient_penalty(model, x, y):
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            outputs = model(x, training=True)
        norms = tf.sqrt(tf.reduce_sum(tf.square(inner.gradient(outputs, x)), 1) + 1e-6)
        loss = tf.reduce_mean(tf.square(outputs - y)) + tf.reduce_mean(tf.square(norms - 1))
    _apply(model, tape.gradient(loss, model.trainable_variables))
    return {"own_loss": loss}


@_own_step
def rate_of_the_loss(model, x, y):
    loss, gradients = _gradients(model, x, y)
    _apply(model, [g * tf.cast(loss, g.dtype) for g in gradients])
    return {"own_loss": loss}


# ---- metrics, and variables that are no weights -------------------------------------------------


class Last(keras.metrics.Metric):
    """The result of the last batch, in a variable without an aggregation."""

    def __init__(self):
        super().__init__(name="last")
        self.value = self.add_variable((), "zeros", aggregation="none", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.sum(y_pred))

    def result(self):
        return self.value


@program
def metrics():
    x, y = _data(6, classes=3)
    model = _net(activation="softmax")
    _compiled(model, "categorical_crossentropy", metrics=[
        "accuracy", Last(), keras.metrics.AUC(name="auc"), keras.metrics.F1Score(average="macro"),
        keras.metrics.MeanIoU(3, sparse_y_true=False, sparse_y_pred=False), keras.metrics.R2Score(),
        keras.metrics.PrecisionAtRecall(0.5, name="precision")])
    return model, x, np.eye(3)[y]


# ---- optimizers, and random layers ------------------------------------------------------------


def _with_optimizer(**options):
    return lambda: (_compiled(_net(), optimizer=_sgd(**options)), *_data(6))


PROGRAMS |= {
    "clipnorm": _with_optimizer(clipnorm=0.05),
    "global_clipnorm": _with_optimizer(global_clipnorm=0.1),
    "clipvalue": _with_optimizer(clipvalue=0.02),
    "weight_decay": _with_optimizer(weight_decay=0.1),
}


@program
def dropout():
    return _compiled(_net(layers.Dropout(0.4), layers.GaussianDropout(0.2), layers.AlphaDropout(0.2))), *_data(6)


@program
def dropout_in_recurrence():
    model = keras.Sequential([keras.Input((4, 3)), layers.SpatialDropout1D(0.3),
                              layers.LSTM(6, dropout=0.3, recurrent_dropout=0.3), layers.Dense(3)])
    return _compiled(model), *_data(4, 3)


@program
def augmentation():
    model = keras.Sequential([
        keras.Input((8, 8, 3)), *(layer(*arguments, seed=i) for i, (layer, *arguments) in enumerate((
            (layers.RandomFlip,), (layers.RandomTranslation, 0.2, 0.2), (layers.RandomRotation, 0.1),
            (layers.RandomZoom, 0.2), (layers.RandomContrast, 0.3), (layers.RandomBrightness, 0.2, (0, 1))))),
        layers.Conv2D(4, 3, activation="tanh"),
        layers.GlobalAveragePooling2D(), layers.Dense(3)])
    return _compiled(model), *_data(8, 8, 3)


@program
def attention():
    x = keras.Input((5, 6))
    h = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 3, dropout=0.1, seed=1)(x, x))
    model = keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(h)))
    return _compiled(model), *_data(5, 6)


@program
def batch_norm_of_all_rows():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, use_bias=False),
                              layers.BatchNormalization(synchronized=True), layers.Dense(3)])
    return _compiled(model), *_data(6)


@program
def spectral_normalization():
    return _compiled(_net(layers.SpectralNormalization(layers.Dense(8), power_iterations=2))), *_data(6)


@program
def embedding():
    model = keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(40, 4), layers.Flatten(),
                              layers.Dense(3)])
    rng = np.random.default_rng(3)
    return _compiled(model), rng.integers(0, 40, (ROWS, 5)), _data(6)[1]
