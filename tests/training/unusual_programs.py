"""Programs with data, models and state of kinds that are easily forgotten: unusual_programs.py DIRECTORY POLICY
[--plain] NAME...

With --plain they run without tf_poseidon. Each program takes an open scope and the rank, and returns (model, function
that trains or uses it and returns results). Each rank writes the weights before and after, and the results, to
NAME.RANK.npz.
"""

import contextlib
import pathlib
import sys

import keras
from keras import layers
import numpy as np
import tensorflow as tf

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def numbers(*shape, seed=3):
    return np.random.default_rng(seed).integers(-3, 4, shape) / 2


class Late(keras.Model):
    """A model whose layers are built when it is first called."""

    def __init__(self, outputs=1):
        super().__init__()
        self.first, self.dropout = layers.Dense(3, "tanh"), layers.Dropout(0.3)
        self.last = layers.Dense(outputs)

    def call(self, x, training=False):
        return self.last(self.dropout(self.first(x), training=training))


class Steps(keras.callbacks.Callback):
    """Counts the steps."""

    def on_train_begin(self, logs=None):
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1


def compiled(model, loss="mse", metrics=("mae",)):
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=list(metrics))
    return model


def fitting(model, *data, **options):
    """Returns a model, and a function that fits it."""

    def fit():
        steps = Steps()
        history = model.fit(*data, shuffle=False, verbose=0, callbacks=[steps], **options)
        return {"steps": steps.count, **history.history}

    return model, fit


@program
def batches_of_different_lengths(rank):
    """A generator ends when it has been read: a batch that is read to build the model is lost."""
    return fitting(compiled(Late()), ((numbers(n, 4), numbers(n, 1)) for n in (5, 7, 1, 8)))


@program
def sparse_batches(rank):
    return fitting(compiled(Late()), ((tf.sparse.from_dense(numbers(n, 4)), numbers(n, 1)) for n in (5, 7, 3)))


@program
def three_inputs(rank):
    class Three(Late):
        def call(self, inputs, training=False):
            return super().call(inputs[0] * inputs[1] + inputs[2], training)

    return fitting(compiled(Three()), [numbers(12, 4, seed=seed) for seed in range(3)], numbers(12, 1), batch_size=5)


@program
def input_that_is_none(rank):
    class Masked(Late):
        def call(self, inputs, training=False):
            x, mask = inputs
            return super().call(x if mask is None else x * mask, training)

    return fitting(compiled(Masked()), [numbers(12, 4), None], numbers(12, 1), batch_size=5)


@program
def loss_that_is_a_number(rank):
    x = keras.Input((4,))
    h = layers.Dense(3, "tanh")(x)
    model = keras.Model(x, [layers.Dense(1)(h), layers.Dense(2)(h)])
    model.compile(keras.optimizers.SGD(0.1), ["mse", lambda y, y_pred: 2.5])
    return fitting(model, numbers(12, 4), [numbers(12, 1), numbers(12, 2)], batch_size=5)


@program
def metric_that_keeps_a_maximum(rank):
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.value = self.add_variable((), "zeros", name="value")

        def update_state(self, y_true, y_pred, sample_weight=None):
            errors = keras.ops.abs(keras.ops.cast(y_true, y_pred.dtype) - y_pred)
            self.value.assign(keras.ops.maximum(self.value, keras.ops.max(errors)))

        def result(self):
            return self.value

    return fitting(compiled(Late(), metrics=[Largest()]), numbers(12, 4), numbers(12, 1), batch_size=5)


@program
def stateful_rnn(rank):
    """The states of a fixed number of rows are variables, which belong to rows."""
    x = keras.Input(batch_shape=(4, 5, 2))
    model = keras.Model(x, layers.Dense(1)(layers.LSTM(3, stateful=True)(x)))
    return fitting(compiled(model), numbers(12, 5, 2), numbers(12, 1), batch_size=4)


@program
def graph_convolution_and_lstm(rank):
    """Of a shuffled dataset of windows, as in forecasts of traffic."""

    class GraphConvolution(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")

        def call(self, x):
            adjacency = tf.constant(numbers(4, 4), self.compute_dtype)
            return keras.ops.relu(keras.ops.einsum("nm,btmf->btnf", adjacency, keras.ops.matmul(x, self.kernel)))

    x = keras.Input((6, 4, 1))
    h = GraphConvolution()(x)
    h = layers.LSTM(5)(layers.Reshape((6, 12))(h))
    model = compiled(keras.Model(x, layers.Dense(4)(layers.Dropout(0.2)(h))))
    dataset = keras.utils.timeseries_dataset_from_array(
        numbers(40, 4, 1), numbers(40, 4, seed=4), 6, shuffle=True, batch_size=7)

    def fit():
        return model.fit(dataset, epochs=2, verbose=0).history

    return model, fit


@program
def one_batch_of_a_model_built_late(rank):
    model = compiled(Late())

    def run():
        logs = [model.train_on_batch(numbers(5, 4), numbers(5, 1), return_dict=True) for _ in range(3)]
        return {"loss": [log["loss"] for log in logs], "predictions": model.predict_on_batch(numbers(5, 4))}

    return model, run


@program
def evaluated_before_it_is_built(rank):
    model = compiled(Late())

    def run():
        return {"evaluated": model.evaluate(numbers(7, 4), numbers(7, 1), verbose=0, batch_size=4),
                "predicted": model.predict(numbers(7, 4), verbose=0, batch_size=4)}

    return model, run


@program
def training_that_ends_with_nan(rank):
    model = compiled(Late())
    x = numbers(12, 4)
    x[7] = np.nan

    def fit():
        steps = Steps()
        model.fit(x, numbers(12, 1), batch_size=4, epochs=3, shuffle=False, verbose=0,
                  callbacks=[keras.callbacks.TerminateOnNaN(), steps])
        return {"steps": steps.count}

    return model, fit


@program
def steps_of_one_execution(rank):
    model = compiled(Late())
    model.steps_per_execution = 3
    return fitting(model, numbers(33, 4), numbers(33, 1), batch_size=5)


class Recogniser(keras.Model):
    """Predicts the labels of sequences by beam search."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5)

    def call(self, x):
        return self.dense(x)

    def predict_step(self, data):
        outputs = self(data[0] if isinstance(data, tuple) else data)
        lengths = tf.fill([tf.shape(outputs)[0]], tf.shape(outputs)[1])
        return keras.ops.ctc_decode(outputs, lengths, "beam_search", beam_width=3, top_paths=1)[1]


def _sequences():
    return numbers(26, 8, 6), np.random.default_rng(2).integers(1, 5, (26, 3))


@program
def ctc(rank):
    """Its loss is made of functions of TensorFlow 1, which are not inlined."""
    model = Recogniser()
    model.compile(keras.optimizers.SGD(0.05), keras.losses.CTC())
    x, y = _sequences()

    def run():
        history = model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
        return {"loss": history["loss"], "evaluated": model.evaluate(x, y, batch_size=7, verbose=0),
                "scores": model.predict(x, batch_size=8, verbose=0)}

    return model, run


@program
def ctc_in_steps_of_one_execution(rank):
    model = Recogniser()
    model.compile(keras.optimizers.SGD(0.05), keras.losses.CTC(), steps_per_execution=3)
    x, y = _sequences()

    def run():
        losses = [model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history["loss"],
                  model.evaluate(x, y, batch_size=5, verbose=0)]
        model.compile(model.optimizer, keras.losses.CTC())  # traced again: functions of the same names
        losses.append(model.fit(x, y, batch_size=5, shuffle=False, verbose=0).history["loss"])
        return {f"losses {i}": loss for i, loss in enumerate(losses)}

    return model, run


@program
def model_saved_on_one_rank(rank):
    """What Keras creates on the rank that saves must not be missed on others."""
    def net():
        return compiled(keras.Sequential([keras.Input((4,)), layers.Dense(3, "tanh"), layers.Dense(1)]))

    first, fit_first = fitting(net(), numbers(12, 4), numbers(12, 1), batch_size=5)
    fit_first()
    if rank == 0:
        first.save(f"{DIRECTORY}/first.keras")
        first.save_weights(f"{DIRECTORY}/first.weights.h5")
        first.export(f"{DIRECTORY}/first", verbose=False)
    return fitting(net(), numbers(12, 4), numbers(12, 1), batch_size=5)


def main(directory, policy, *names):
    global DIRECTORY
    DIRECTORY = directory
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    if names[0] == "--plain":
        scope, rank, names = contextlib.nullcontext, 0, names[1:]
    else:
        import tf_poseidon as poseidon
        strategy = poseidon.PoseidonStrategy(policy, timeout_s=60)
        scope, rank = strategy.scope, strategy.rank
    for name in names:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        with scope():
            model, run = PROGRAMS[name](rank)
        before = [value.tolist() for value in model.get_weights()]
        results = {f"result {key}": np.array(value) for key, value in run().items()}
        after = {f"weight {i}": value for i, value in enumerate(model.get_weights())}
        if len(before) == len(after):
            after = {key: value - start for (key, value), start in zip(after.items(), before)}
        np.savez(pathlib.Path(directory) / f"{name}.{rank}.npz", **results, **after)


if __name__ == "__main__":
    main(*sys.argv[1:])
