"""Programs that train weights of which each rank has columns, or rows: train_divided.py OUT POLICY [OPTION...] NAME...

Options are --sharded: ranks divide what they update of other weights, too; --served: the last rank serves the others.
"""

import functools
import pathlib
import sys

import keras
from keras import ops
import numpy as np
import tensorflow as tf
import wrappers

import tf_poseidon as poseidon

# The divided weights: in most programs, the kernel of a head of 70 classes.
PINS = {"*head/kernel": "columns", "*table/embeddings": "columns", "*fc*/kernel": "columns"}
ROWS, BATCH, FEATURES, CLASSES = 60, 24, 12, 70
STEPS = 20
LENGTH = 5  # of sequences


def data(classes=CLASSES):
    rng = np.random.default_rng(2)
    return rng.integers(-3, 4, (ROWS, FEATURES)) / 4, rng.integers(0, classes, ROWS)


def one_hot_data(classes=CLASSES):
    x, y = data(classes)
    return x, np.eye(classes)[y]


def tokens(size=CLASSES):
    return tuple(np.random.default_rng(3).integers(0, size, (2, ROWS, LENGTH)))


def labels(classes=CLASSES):
    """Returns features, and several labels for each row."""
    return data()[0], np.random.default_rng(4).integers(0, 2, (ROWS, classes)).astype("float64")


def network(classes=CLASSES, activation=None, **kwargs):
    """Returns a model with a head, whose kernel is divided."""
    x = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(24, "tanh", name="body")(x)
    return keras.Model(x, keras.layers.Dense(classes, activation, name="head", **kwargs)(hidden))


class Classes(keras.losses.SparseCategoricalCrossentropy):
    def __init__(self):
        super().__init__(from_logits=True)


def top(function):
    """Returns a metric of the three largest, which TensorFlow finds in float32."""
    return keras.metrics.MeanMetricWrapper(
        lambda y_true, y_pred: function(y_true, ops.cast(y_pred, "float32"), k=3), name="top")


def states(step, model):
    """Returns the values of a model's variables."""
    return {f"{step}/variable{i:02}": variable.numpy() for i, variable in enumerate(model.variables)}


def slots(model):
    """Returns those of its optimizer; which rank has how much of what it accumulates is not specified."""
    return {f"{'local' if 'accum' in variable.path else 'slots'}/{i:02}": variable.numpy()
            for i, variable in enumerate(model.optimizer.variables)}


def held(model):
    """Returns (elements of this rank, elements) of each divided weight, and of its slots."""
    variables = [*model.trainable_variables, *model.optimizer.variables]
    values = [variable.value for variable in variables if hasattr(variable.value, "division")]
    return np.array([(value._holding.read().shape.num_elements(), value.shape.num_elements()) for value in values
                     if value.division.is_of_matrix and value.holds_shard]).reshape(-1, 2)


def sent_bytes():
    """Returns how many bytes this rank has sent, apart from texts about what was assigned since the process began."""
    return sum(counts["sent_bytes"] for site, counts in tf.distribute.get_strategy().stats()["sites"].items()
               if not site.startswith("shards/assigned"))


def trained(model, x, y, optimizer=None, loss=None, metrics=("accuracy",), compiled=None, validates=True, **fit):
    """Trains for one step, and for many; returns all states, logs, and what evaluate and predict give."""
    model.compile(optimizer or keras.optimizers.SGD(0.5), loss or Classes(), metrics=list(metrics), **(compiled or {}))
    fit = {"batch_size": BATCH, "verbose": 0, "shuffle": False} | fit
    first = {name: value[:BATCH] for name, value in fit.items() if name == "sample_weight"}
    found = states("before", model)
    model.fit([a[:BATCH] for a in x] if isinstance(x, list) else x[:BATCH], y[:BATCH], **(fit | first))
    found |= states("step 1", model)
    begin = sent_bytes()
    logs = model.fit(x, y, epochs=-(-(STEPS - 1) // -(-ROWS // BATCH)), **(fit | (
        {"validation_data": (x, y)} if validates else {}))).history
    sent = sent_bytes() - begin
    found |= states("step 20", model) | slots(model)
    results = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return {**found, **{f"logs/{name}": np.array(values) for name, values in logs.items()},
            **{f"evaluated/{name}": np.array(value) for name, value in results.items()},
            "predicted": model.predict(x, batch_size=BATCH, verbose=0), "local/held": held(model),
            "local/sent": sent}


# ---- heads ----

def softmax(classes=CLASSES):
    return trained(network(classes), *data(classes), metrics=[
        "accuracy", top(keras.metrics.sparse_top_k_categorical_accuracy)])


def probabilities(classes=CLASSES):
    return trained(network(classes, "softmax"), *data(classes), loss="sparse_categorical_crossentropy")


def smoothed(classes=CLASSES):
    return trained(network(classes), *one_hot_data(classes), loss=keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=0.1), metrics=["accuracy", top(keras.metrics.top_k_categorical_accuracy)])


def smoothed_probabilities(classes=CLASSES):
    return trained(network(classes, "softmax"), *one_hot_data(classes), loss=keras.losses.CategoricalCrossentropy(
        label_smoothing=0.1), metrics=["accuracy"])


def on_logits(function):
    """Returns a program whose logits a function changes before the loss."""
    def program():
        inner = network()
        return trained(keras.Model(inner.input, function(inner.output)), *data())

    return program


def masked(logits):
    """Some classes are never chosen."""
    return logits - 1e9 * ops.cast(ops.arange(CLASSES) % 9 == 0, logits.dtype)


def multi_label(classes=CLASSES):
    return trained(network(classes), *labels(classes), loss=keras.losses.BinaryCrossentropy(from_logits=True), metrics=[
        keras.metrics.BinaryAccuracy(threshold=0.0)])


def ranked():
    """Metrics of all probabilities, which are gathered for them."""
    return trained(network(activation="sigmoid"), *labels(), loss="binary_focal_crossentropy", metrics=[
        keras.metrics.AUC(multi_label=True, num_labels=CLASSES), keras.metrics.AUC(name="of_all"),
        keras.metrics.F1Score(average="micro", threshold=0.5)])


def counted(classes=CLASSES):
    """A metric with counts of each class."""
    return trained(network(classes, "sigmoid"), *labels(classes), loss="binary_crossentropy", metrics=[
        keras.metrics.F1Score(average="macro", threshold=0.5)])


class ArcFace(keras.layers.Layer):
    """Cosines of features and weights, with a margin on the angle of the labels."""

    def __init__(self, classes, **kwargs):
        super().__init__(**kwargs)
        self.classes = classes

    def build(self, shapes):
        self.kernel = self.add_weight(shape=(shapes[0][-1], self.classes), name="kernel")

    def call(self, inputs):
        features, y = inputs
        cosines = ops.matmul(ops.normalize(features, axis=-1), ops.normalize(self.kernel, axis=0))
        angles = ops.arccos(ops.clip(cosines, -0.999, 0.999))
        return 8.0 * ops.cos(angles + 0.5 * ops.one_hot(y, self.classes, dtype=features.dtype))


def arcface(classes=CLASSES):
    x, y = data(classes)
    features, numbers = keras.Input((FEATURES,)), keras.Input((), dtype="int32")
    logits = ArcFace(classes, name="head")([keras.layers.Dense(24, "tanh", name="body")(features), numbers])
    return trained(keras.Model([features, numbers], logits), [x, y], y)


# ---- tables ----

class Tied(keras.Model):
    """A language model whose head is its table."""

    def __init__(self, size):
        super().__init__()
        self.table = keras.layers.Embedding(size, 8, name="table")
        self.body = keras.layers.Dense(8, "tanh", name="body")

    def call(self, numbers):
        return ops.matmul(self.body(self.table(numbers)), ops.transpose(self.table.embeddings))


def tied(classes=CLASSES):
    model = Tied(classes)
    x, y = tokens(classes)
    model(x[:2])
    return trained(model, x, y)


class LookedUp(keras.layers.Embedding):
    """A table that is looked up without being read, as by TensorFlow's own functions."""

    def call(self, numbers):
        return tf.nn.embedding_lookup(self.embeddings.value, numbers)


def table(classes=CLASSES, optimizer=keras.optimizers.SGD, kind=keras.layers.Embedding):
    numbers = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Flatten()(kind(classes, 8, name="table")(numbers))
    model = keras.Model(numbers, keras.layers.Dense(3, name="top")(hidden))
    return trained(model, tokens(classes)[0], data(3)[1], optimizer(0.1))


# ---- other layers ----

def pair():
    x = keras.Input((FEATURES,))
    hidden = keras.layers.Dropout(0.5, seed=3)(keras.layers.Dense(64, "relu", name="fc1")(x))
    hidden = keras.layers.Dropout(0.5, seed=4)(keras.layers.Dense(48, "relu", name="fc2")(hidden))
    return trained(keras.Model(x, keras.layers.Dense(5, name="top")(hidden)), *data(5))


# ---- of rows and classes, and loops ----

def weighted():
    x, y = data()
    return trained(network(), x, y, sample_weight=np.arange(ROWS) % 5 / 2.0)


def class_weighted():
    return trained(network(), *data(), class_weight={i: 1.0 + i % 3 for i in range(CLASSES)})


def few_classes():
    return trained(network(5), *data(5))


def given():
    """A weight that begins with an array."""
    array = np.random.default_rng(5).integers(-3, 4, (24, CLASSES)) / 4
    return trained(network(kernel_initializer=keras.initializers.Constant(array)), *data())


def in_one_execution():
    return trained(network(), *data(), compiled={"steps_per_execution": 4})


def without_xla():
    return trained(network(), *data(), compiled={"jit_compile": False}, shuffle=True)


def used():
    """Weights that are read and assigned between steps in every way."""
    model, (x, y) = network(), data()
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), Classes())
    kernel, lines, results, before = model.layers[-1].kernel, [], [], states("before", model)
    for i in range(3):
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        results += [model.evaluate(x, y, verbose=0), model(x[:3]).numpy().sum(), kernel.numpy().sum(),
                    tf.gather(kernel.value, [1, 5], axis=1).numpy().sum(), model.train_on_batch(x, y),
                    model.predict_on_batch(x).sum(), model.count_params()]
        model.summary(print_fn=lambda line, **_: lines.append(line))
        if i == 0:
            model.set_weights([0.5 * weight for weight in model.get_weights()])
        else:
            kernel.assign(ops.abs(kernel))
            kernel.assign_sub(0.25 * ops.ones(kernel.shape))
    return {"results": np.array(results, "float64"), "summary": np.array(lines), **before,
            **states("end", model), **slots(model), "local/held": held(model)}


# ---- optimizers ----

OPTIMIZERS = {
    "momentum": functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9),
    "adam": functools.partial(keras.optimizers.Adam, 0.01, epsilon=1e-3),
    "adamw": functools.partial(keras.optimizers.AdamW, 0.01, epsilon=1e-3, weight_decay=0.01),
    "adafactor": functools.partial(keras.optimizers.Adafactor, 0.01),
    "muon": functools.partial(keras.optimizers.Muon, 0.01),
    "lamb": functools.partial(keras.optimizers.Lamb, 0.01, epsilon=1e-3),
    **{name: functools.partial(wrappers.WRAPPERS[name], "adam") for name in (
        "clipnorm", "global_clipnorm", "clipvalue", "ema", "schedule", "loss_scale", "accumulation",
        "accumulation_and_clipping", "accumulation_and_infinity")},
}


def optimizer(name, classes=CLASSES):
    return trained(network(classes), *data(classes), OPTIMIZERS[name](), compiled={"auto_scale_loss": False})


def mixed(policy):
    keras.config.set_floatx("float32")
    keras.mixed_precision.set_global_policy(policy)
    return trained(network(dtype="float32"), *data())


# Programs of any number of classes, or of rows of a table.
HEADS = {**{program.__name__: program for program in (softmax, smoothed_probabilities, counted, arcface, tied, table)},
         "accumulation_and_clipping": functools.partial(optimizer, "accumulation_and_clipping")}
MANY = 10 * CLASSES
PROGRAMS = {
    **HEADS,
    **{name: functools.partial(optimizer, name) for name in OPTIMIZERS if name not in HEADS},
    **{program.__name__: program for program in (
        probabilities, smoothed, multi_label, ranked, pair, weighted, class_weighted, few_classes, given,
        in_one_execution, without_xla, used)},
    "temperature": on_logits(lambda logits: logits / 0.7), "masked": on_logits(masked),
    "table-adam": functools.partial(table, optimizer=functools.partial(keras.optimizers.Adam, epsilon=1e-3)),
    "table-rmsprop": functools.partial(table, optimizer=functools.partial(keras.optimizers.RMSprop, epsilon=1e-3)),
    "looked_up": functools.partial(table, kind=LookedUp),
}
WITH_MANY = {f"{name}-{MANY}": functools.partial(program, classes=MANY) for name, program in HEADS.items()}
MIXED = {name: functools.partial(mixed, name) for name in ("mixed_float16", "mixed_bfloat16")}


def main(out, policy, *names):
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=60, pins=PINS, shard_update="--sharded" in names,
                                         dedicated_servers=1 if "--served" in names else 0)
    for name in names:
        if name.startswith("--"):
            continue
        keras.backend.clear_session()
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        keras.utils.set_random_seed(1)
        with strategy.scope():
            np.savez(pathlib.Path(out) / f"{name}.{strategy.rank}.npz", **(PROGRAMS | WITH_MANY | MIXED)[name]())


if __name__ == "__main__":
    main(*sys.argv[1:])
