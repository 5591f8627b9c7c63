"""The models, optimizers, losses and data of the training tests, and the arrays that are compared.

Data are integer-valued. Models are functions that return (inputs, outputs) for `keras.Model`.
"""

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH = 97, 32  # a last batch of one row: ranks without rows


def dense():
    x = keras.Input((8,))
    return x, keras.layers.Dense(3)(keras.layers.Dense(16, "tanh")(x))


def wide():
    """Wide enough for Algorithm 1 of the paper to send factors; with a 3-D input and a regularizer."""
    x = keras.Input((2, 64))
    h = keras.layers.Dense(64, "tanh", kernel_regularizer="l2")(x)
    h = keras.layers.EinsumDense("abc,cd->abd", (2, 64), bias_axes="d")(h)
    # With 128 features of 1, losses that are summed over a batch grow a hundredfold in each step, and so do roundings.
    return x, keras.layers.Dense(3)(keras.layers.Rescaling(1 / 16)(keras.layers.Flatten()(h)))


def convolution():
    x = keras.Input((6, 6, 1))
    h = keras.layers.Conv2D(4, 3, activation="tanh")(x)
    return x, keras.layers.Dense(3)(keras.layers.Flatten()(h))


def batch_norm():
    # No bias before a synchronized batch norm: its gradient is zero up to rounding.
    x = keras.Input((6, 6, 1))
    h = keras.layers.Conv2D(4, 3, use_bias=False)(x)
    h = keras.layers.BatchNormalization(synchronized=True)(h)
    return x, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Activation("tanh")(h)))


def shared():
    x = keras.Input((8,))
    layer = keras.layers.Dense(8, "tanh")
    return x, keras.layers.Dense(3)(layer(layer(x)))


def two_in_two_out():
    a, b = keras.Input((8,)), keras.Input((4,))
    h = keras.layers.Concatenate()([keras.layers.Dense(5, "tanh")(a), b])
    return [a, b], [keras.layers.Dense(3, name="one")(h), keras.layers.Dense(2, name="two")(h)]


class DenseGradientEmbedding(keras.layers.Embedding):
    """An embedding whose gradient is a dense tensor instead of IndexedSlices, which not all of Keras can take."""

    def call(self, inputs):
        return keras.ops.take(self.embeddings * 1.0, inputs, axis=0)


def embedding():
    x = keras.Input((5,), dtype="int32")
    return x, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.Embedding(400, 4, name="embedding")(x)))


def lstm():
    x = keras.Input((5, 3))
    return x, keras.layers.Dense(3)(keras.layers.LSTM(6)(x))


MODELS = (dense, wide, convolution, batch_norm, shared, two_in_two_out, embedding, lstm)

# epsilon=1e-3: with Keras' 1e-7 an update does not depend continuously on the gradient.
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "adamw": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, weight_decay=0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3),
}


def mean_square_scalar(y_true, y_pred):
    return tf.reduce_mean(tf.square(y_true - y_pred))


LOSSES = {
    "mean": lambda: "mse",
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "scalar": lambda: mean_square_scalar,
    "masked": lambda: keras.losses.MeanSquaredError(),
    "weighted": lambda: keras.losses.MeanSquaredError(),
    "weighted_mean": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
}


class MaskRows(keras.layers.Layer):
    """Passes its second input on, with a mask that hides about every third row."""

    def call(self, inputs):
        return inputs[1] + 0.0

    def compute_mask(self, inputs, previous_mask):
        axes = tuple(range(1, len(inputs[0].shape)))
        return keras.ops.sum(keras.ops.cast(inputs[0], "int32"), axes) % 3 != 0


def make_data(model, seed=5):
    """Returns (inputs, targets): integer-valued arrays with ROWS rows."""
    rng = np.random.default_rng(seed)

    def array(tensor, low, high):
        return rng.integers(low, high, (ROWS, *tensor.shape[1:])).astype(tensor.dtype)

    x = [array(t, 0, 11) if t.dtype == "int32" else array(t, -3, 4) for t in model.inputs]
    y = [array(t, -3, 4) for t in model.outputs]
    return (x[0], y[0]) if len(x) == 1 else (x, y)


def result(model, **more):
    """Returns the arrays of a trained model, and further ones to compare."""
    weights = {f"weights/{i:02} {v.path}": v.numpy() for i, v in enumerate(model.weights)}
    return {**weights, **{name: np.asarray(value) for name, value in more.items()}}


def flat(history):
    """Returns a history as named arrays."""
    return {f"log/{name}": values for name, values in history.history.items()}


def small(strategy, optimizer=OPTIMIZERS["momentum"], **compile_options):
    """Returns (model, x, y): a small model, compiled, and its data."""
    with strategy.scope():
        model = keras.Model(*dense())
        model.compile(optimizer(), "mse", **compile_options)
    return model, *make_data(model)
