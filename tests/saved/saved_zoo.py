"""A zoo of saved training graphs of one process: saved_zoo.py DIRECTORY [NAME...] builds them."""

import dataclasses
import functools
import itertools
import os
import sys
import time

from google.protobuf import text_format
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import loader_impl

v1 = tf.compat.v1

LABELS = 5
INPUTS = {"x": ("float32", (8,), "normal"), "y": ("int32", (), f"label:{LABELS}")}
IMAGES = INPUTS | {"x": ("float32", (8, 8, 1), "normal")}
SEQUENCES = INPUTS | {"x": ("float32", (6, 4), "normal")}
IDS = INPUTS | {"x": ("int32", (3,), "label:40")}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A saved training graph, and its properties.

    Attributes:
        path: The directory of a SavedModel; the .meta file of a MetaGraph, whose checkpoint has the
            same prefix; the .pb or .pbtxt file of a GraphDef.
        kind: "saved_model", "meta_graph" or "graph_def".
        fetches: What selects a step: the name of a SavedModel's signature; else those of the train op
            and of the loss.
        inputs: For each argument of the signature, or each placeholder, (name of its dtype, shape of
            a row, "normal" or "label:N").
        weights: The nodes of the trained variables.
        rows: The number of rows of a call; any number if the size of the batch is None.
        steps: How many batches a call takes, one per step: inputs are [steps, rows, ...] then.
        whole: Ops that run whole on every rank because they have no rule.
        initializer: The op that gives the variables of a GraphDef their constant initial values.
    """
    path: str
    kind: str
    fetches: tuple
    inputs: dict
    weights: tuple
    rows: int = 8
    steps: int | None = None
    whole: tuple = ()
    initializer: str | None = None

    @property
    def inputs_with_rows(self):
        """The settings that the inputs need."""
        return {} if self.steps is None else dict.fromkeys(self.inputs, 1)


def batch(saved, rows, seed):
    """Returns arrays for a call with a number of rows (in each of its steps), by names of the inputs."""
    rng = np.random.default_rng(seed)
    first = (rows,) if saved.steps is None else (saved.steps, rows)
    arrays = {}
    for name, (dtype, row, kind) in saved.inputs.items():
        shape = (*first, *row)
        values = rng.normal(0, 0.5, shape) if kind == "normal" else rng.integers(
            0, int(kind.removeprefix("label:")), shape)
        arrays[name] = values.astype(dtype)
    return arrays


# ---- shared by the builders ---------------------------------------------------------------------


def _cross_entropy(y, logits, reduce=tf.reduce_mean, **options):
    rows = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    return reduce(rows, **options)


def _variable(name, *shape, scale=0.3):
    return tf.Variable(np.random.normal(0, scale, shape).astype("float32"), name=name)


def _slots(name, weights):
    return [tf.Variable(tf.zeros(w.shape), name=f"{w.name.removesuffix(':0')}/{name}") for w in weights]


def _layers(*widths):
    """Returns the kernel and the bias of each layer, in one list."""
    weights = []
    for i, (rows, columns) in enumerate(itertools.pairwise(widths)):
        weights += [_variable(f"dense{i}/kernel", rows, columns), _variable(f"dense{i}/bias", columns)]
    return weights


def _mlp(x, weights):
    *layers, (kernel, bias) = zip(weights[::2], weights[1::2])
    for k, b in layers:
        x = tf.nn.relu(tf.matmul(x, k) + b)
    return tf.matmul(x, kernel) + bias


def _differentiate(weights, x, y, **options):
    """Returns the loss of an MLP, and its gradients."""
    with tf.GradientTape() as tape:
        loss = _cross_entropy(y, _mlp(x, weights), **options)
    return loss, tape.gradient(loss, weights)


def _descend(weights, gradients, rate=0.1):
    for w, g in zip(weights, gradients):
        w.assign_sub(rate * g)


def _nodes(path, function, variables):
    """Returns the nodes of those variables that a saved function uses, by the call of its signature.

    Names of variables do not tell: Keras' variables are saved together with copies of them.
    """
    meta_graph, = loader_impl.parse_saved_model(path).meta_graphs
    name = meta_graph.signature_def["train"].outputs["loss"].name.removesuffix(":0")
    call, = (node for node in meta_graph.graph_def.node if node.name == name)
    captured = function.get_concrete_function().captured_inputs
    nodes = dict(zip(map(id, captured), call.input[-len(captured):]))
    return tuple(nodes[id(v.handle)] for v in variables if id(v.handle) in nodes)


def _save(path, step, weights, keep=(), inputs=INPUTS, size=None, **truths):
    """Saves a function of x and y that runs a step.

    Args:
        path: The directory to save it in.
        step: The function; it returns {"loss": loss}.
        weights: The variables that it trains.
        keep: Other objects that it uses: variables, models, optimizers.
        inputs: Those of `Saved`.
        size: The size of the batch, if that is static.
        **truths: Further properties, same as in `Saved`.
    """
    first = (size,) if truths.get("steps") is None else (truths["steps"], size)
    module = tf.Module()
    module.variables_of_step = [*weights, *keep]
    module.train = tf.function(step, input_signature=[
        tf.TensorSpec((*first, *row), dtype, name) for name, (dtype, row, _) in inputs.items()])
    tf.saved_model.save(module, path, signatures={"train": module.train})
    return Saved(path, "saved_model", ("train",), inputs, _nodes(path, module.train, weights), **truths)


# ---- optimizers that are written by hand --------------------------------------------------------


def sgd(path):
    weights = _layers(8, 16, 12, LABELS)

    def step(x, y):
        loss, gradients = _differentiate(weights, x, y)
        _descend(weights, gradients)
        return {"loss": loss}

    return _save(path, step, weights)


def momentum(path):
    weights = _layers(8, 16, 12, LABELS)
    velocities = _slots("velocity", weights)

    def step(x, y):
        loss, gradients = _differentiate(weights, x, y)
        for w, v, g in zip(weights, velocities, gradients):
            w.assign_sub(0.1 * v.assign(0.9 * v + g))
        return {"loss": loss}

    return _save(path, step, weights, velocities)


def _adam(path, correction, **kept):
    weights = _layers(8, 16, 12, LABELS)
    means, squares = _slots("mean", weights), _slots("square", weights)

    def step(x, y):
        loss, gradients = _differentiate(weights, x, y)
        rate = 0.01 * correction()
        for w, m, s, g in zip(weights, means, squares, gradients):
            m.assign(0.9 * m + 0.1 * g)
            s.assign(0.999 * s + 0.001 * tf.square(g))
            w.assign_sub(rate * m / (tf.sqrt(s) + 1e-3))
        return {"loss": loss}

    return _save(path, step, weights, [*means, *squares, *kept.pop("keep", ())], **kept)


def adam_with_powers(path):
    """The powers of the betas are variables."""
    powers = [tf.Variable(1.0, name=name) for name in ("beta_1_power", "beta_2_power")]

    def correction():
        first, second = (p.assign(p * beta) for p, beta in zip(powers, (0.9, 0.999)))
        return tf.sqrt(1 - second) / (1 - first)

    return _adam(path, correction, keep=powers)


def adam_with_counter(path):
    counter = tf.Variable(0, name="counter", dtype=tf.int64)

    def correction():
        t = tf.cast(counter.assign_add(1), tf.float32)
        return tf.sqrt(1 - tf.pow(0.999, t)) / (1 - tf.pow(0.9, t))

    return _adam(path, correction, keep=[counter])


def fused_updates(path):
    """The ops of the former optimizers, one kind per layer, of clipped gradients."""
    weights = _layers(8, 16, 12, LABELS)
    adam, momentums = weights[:2], weights[2:4]
    means, squares, velocities = (
        _slots("mean", adam), _slots("square", adam), _slots("velocity", momentums))
    powers = [tf.Variable(beta, name=name) for name, beta in
              (("beta_1_power", 0.9), ("beta_2_power", 0.999))]

    def step(x, y):
        loss, gradients = _differentiate(weights, x, y)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        for w, m, s, g in zip(adam, means, squares, gradients):
            tf.raw_ops.ResourceApplyAdam(
                var=w.handle, m=m.handle, v=s.handle, beta1_power=powers[0], beta2_power=powers[1],
                lr=0.01, beta1=0.9, beta2=0.999, epsilon=1e-3, grad=g)
        for w, v, g in zip(momentums, velocities, gradients[2:]):
            tf.raw_ops.ResourceApplyMomentum(var=w.handle, accum=v.handle, lr=0.1, grad=g, momentum=0.9)
        for w, g in zip(weights[4:], gradients[4:]):
            tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=0.1, delta=g)
        for p, beta in zip(powers, (0.9, 0.999)):
            p.assign(p * beta)
        return {"loss": loss}

    return _save(path, step, weights, [*means, *squares, *velocities, *powers])


def embedding_by_scatter(path):
    table, *layers = weights = [_variable("table", 40, 4), *_layers(12, 16, LABELS)]

    def step(x, y):
        with tf.GradientTape() as tape:
            rows = tf.reshape(tf.gather(table, x), [-1, 12])
            loss = _cross_entropy(y, _mlp(rows, layers))
        slices, *gradients = tape.gradient(loss, weights)
        tf.raw_ops.ResourceScatterSub(
            resource=table.handle, indices=slices.indices, updates=0.1 * slices.values)
        _descend(layers, gradients)
        return {"loss": loss}

    return _save(path, step, weights, inputs=IDS)


def sum_of_rows(path):
    weights = _layers(8, 16, LABELS)

    def step(x, y):
        loss, gradients = _differentiate(weights, x, y, reduce=tf.reduce_sum)
        _descend(weights, gradients, 0.01)
        return {"loss": loss}

    return _save(path, step, weights)


def shared_weights(path):
    weights = [_variable("shared", 8, 8), _variable("last", 8, LABELS)]

    def step(x, y):
        with tf.GradientTape() as tape:
            h = tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[0]))
            loss = _cross_entropy(y, tf.matmul(h, weights[1]))
        _descend(weights, tape.gradient(loss, weights))
        return {"loss": loss}

    return _save(path, step, weights)


def as_many_rows_as_columns(path):
    """The batch has the shape of a kernel: shapes do not tell what is a row."""
    weights = _layers(8, 8, 8, LABELS)

    def step(x, y):
        loss, gradients = _differentiate(weights, x, y)
        _descend(weights, gradients)
        return {"loss": loss}

    return _save(path, step, weights, size=8, whole=("Mul",))  # by the literal number of rows


# ---- control flow and functions -----------------------------------------------------------------


def several_steps(path):
    weights = _layers(8, 16, LABELS)
    velocities = _slots("velocity", weights)

    def step(x, y):
        total = 0.0
        for i in tf.range(tf.shape(x)[0]):
            loss, gradients = _differentiate(weights, x[i], y[i])
            for w, v, g in zip(weights, velocities, gradients):
                v.assign(0.9 * v + g)
                w.assign_sub(0.1 * v)
            total += loss
        return {"loss": total / tf.cast(tf.shape(x)[0], tf.float32)}

    # x is [3, rows, 8] and y is [3, rows]: the batches of three steps.
    return _save(path, step, weights, velocities, steps=3)


def accumulated_in_call(path):
    weights = _layers(8, 16, LABELS)

    def step(x, y):
        x, y = tf.reshape(x, [2, -1, 8]), tf.reshape(y, [2, -1])

        def add(i, loss, *sums):
            more, gradients = _differentiate(weights, x[i], y[i])
            return i + 1, loss + more, *(s + g for s, g in zip(sums, gradients))

        _, loss, *sums = tf.while_loop(
            lambda i, *_: i < 2, add, (0, 0.0, *(tf.zeros(w.shape) for w in weights)))
        _descend(weights, [s / 2 for s in sums])
        return {"loss": loss / 2}

    # Rows of all micro-batches are one dimension, and then two.
    return _save(path, step, weights, whole=("Reshape",))


def accumulated_over_calls(path):
    weights = _layers(8, 16, LABELS)
    sums = _slots("sum", weights)
    counter = tf.Variable(0, name="counter", dtype=tf.int64)

    def step(x, y):
        loss, gradients = _differentiate(weights, x, y)
        for s, g in zip(sums, gradients):
            s.assign_add(g / 2)

        def update():
            _descend(weights, sums)
            for s in sums:
                s.assign(tf.zeros_like(s))
            return True

        tf.cond(counter.assign_add(1) % 2 == 0, update, lambda: False)
        return {"loss": loss}

    return _save(path, step, weights, [*sums, counter])


def scaled_loss(path):
    """Gradients that are not finite are skipped."""
    weights = _layers(8, 16, LABELS)
    scale = tf.Variable(128.0, name="scale", trainable=False)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = _cross_entropy(y, _mlp(x, weights))
            scaled = loss * scale
        gradients = [g / scale for g in tape.gradient(scaled, weights)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])

        def update():
            _descend(weights, gradients)
            return True

        tf.cond(finite, update, lambda: False)
        return {"loss": loss}

    return _save(path, step, weights, [scale])


def nested_functions(path):
    weights = _layers(8, 16, LABELS)

    @tf.function
    def forward(x):
        return _mlp(x, weights)

    @tf.function
    def loss_of(x, y):
        return _cross_entropy(y, forward(x))

    @tf.function
    def update(gradients):
        _descend(weights, gradients)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        update(tape.gradient(loss, weights))
        return {"loss": loss}

    return _save(path, step, weights)


# ---- Keras --------------------------------------------------------------------------------------


def _step_of(model, optimizer, *metrics):
    """Returns a step as users of Keras write it; metrics have the predictions or the loss."""
    optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = _cross_entropy(y, tf.cast(logits, tf.float32))
            if model.losses:
                loss += sum(model.losses)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        for metric in metrics:
            if isinstance(metric, keras.metrics.SparseCategoricalAccuracy):
                metric.update_state(y, logits)
            else:
                metric.update_state(loss)
        return {"loss": loss}

    return step


def _save_keras(path, layers, optimizer, *metrics, inputs=INPUTS, **truths):
    """Saves a step of a keras.Sequential of those layers."""
    dtype, row, _ = inputs["x"]
    model = keras.Sequential([keras.Input(row, dtype=dtype, name="x"), *layers], name="model")
    step = _step_of(model, optimizer, *metrics)
    state = [*model.non_trainable_variables, *optimizer.variables, *(v for m in metrics for v in m.variables)]
    return _save(path, step, model.trainable_variables, [model, optimizer, *metrics, *state], inputs, **truths)


def _dense(*units, **options):
    """Returns layers with names that do not depend on what was built before."""
    *hidden, last = units
    return [*(keras.layers.Dense(n, "relu", name=f"dense{i}", **options)
              for i, n in enumerate(hidden)),
            keras.layers.Dense(last, name="last", **options)]


def keras_adam(path):
    return _save_keras(path, _dense(16, LABELS), keras.optimizers.Adam(0.01, name="adam"))


def keras_clipped(path):
    optimizer = keras.optimizers.SGD(
        0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, global_clipnorm=0.5, name="sgd")
    return _save_keras(path, _dense(16, LABELS, kernel_regularizer="l2"), optimizer)


def keras_batch_norm(path):
    layers = [keras.layers.Conv2D(4, 3, use_bias=False, name="conv"),
              keras.layers.BatchNormalization(name="norm"),
              keras.layers.Activation("relu", name="relu"),
              keras.layers.GlobalAveragePooling2D(name="pool"),
              *_dense(LABELS)]
    return _save_keras(path, layers, keras.optimizers.RMSprop(0.01, name="rmsprop"), inputs=IMAGES)


def keras_convolutions(path):
    layers = [keras.layers.Conv2D(4, 3, activation="relu", name="first"),
              keras.layers.MaxPooling2D(name="pool"),
              keras.layers.DepthwiseConv2D(2, name="second"),
              keras.layers.Flatten(name="flatten"),
              *_dense(LABELS)]
    return _save_keras(path, layers, keras.optimizers.SGD(0.1, name="sgd"), inputs=IMAGES)


def keras_accumulated(path):
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, name="adam")
    return _save_keras(path, _dense(16, LABELS), optimizer)


def keras_scaled_loss(path):
    sgd = keras.optimizers.SGD(0.1, name="sgd")
    optimizer = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=128.0, name="scale")
    return _save_keras(path, _dense(16, LABELS), optimizer)


def keras_lstm(path):
    return _save_keras(path, [keras.layers.LSTM(6, name="lstm"), *_dense(LABELS)],
                       keras.optimizers.SGD(0.1, name="sgd"), inputs=SEQUENCES)


def keras_dropout(path):
    first, last = _dense(16, LABELS)
    return _save_keras(path, [first, keras.layers.Dropout(0.3, seed=3, name="dropout"), last],
                       keras.optimizers.SGD(0.1, name="sgd"))


def keras_embedding(path):
    layers = [keras.layers.Embedding(40, 4, name="table"), keras.layers.Flatten(name="flatten"),
              *_dense(16, LABELS)]
    return _save_keras(path, layers, keras.optimizers.Adam(0.01, name="adam"), inputs=IDS)


def keras_metrics(path):
    return _save_keras(path, _dense(16, LABELS), keras.optimizers.SGD(0.1, name="sgd"),
                       keras.metrics.Mean(name="mean"),
                       keras.metrics.SparseCategoricalAccuracy(name="accuracy"))


def keras_mixed_precision(path):
    return _save_keras(path, _dense(16, LABELS, dtype="mixed_bfloat16"),
                       keras.optimizers.SGD(0.1, momentum=0.9, name="sgd"))


def keras_attention(path):
    """A block of a transformer, with a layer norm and kernels that have three dimensions."""
    x = keras.Input((6, 4), name="x")
    h = keras.layers.LayerNormalization(name="norm")(x)
    h = keras.layers.MultiHeadAttention(2, 3, name="attention")(h, h)
    h = keras.layers.Dense(8, "gelu", name="wide")(keras.layers.Add(name="add")([x, h]))
    h = keras.layers.GlobalAveragePooling1D(name="pool")(h)
    model = keras.Model(x, keras.layers.Dense(LABELS, name="last")(h), name="model")
    optimizer = keras.optimizers.AdamW(0.01, name="adamw")
    step = _step_of(model, optimizer)
    # As plain tf.Variables, without the copies that SavedModels have of Keras' variables.
    weights, slots = ([v.value for v in variables] for variables in (model.trainable_variables, optimizer.variables))
    return _save(path, step, weights, slots, SEQUENCES)


def keras_archive(path):
    """What Keras' own exporter writes."""
    model = keras.Sequential([keras.Input((8,), name="x"), *_dense(16, LABELS)], name="model")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="sgd")
    step = _step_of(model, optimizer)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_variable_collection("optimizer", optimizer.variables)
    function = archive.add_endpoint("train", step, [
        tf.TensorSpec((None, *row), dtype, name) for name, (dtype, row, _) in INPUTS.items()])
    archive.write_out(path, verbose=False)
    return Saved(path, "saved_model", ("train",), INPUTS, _nodes(path, function, model.trainable_variables))


# ---- graphs of TensorFlow 1 ---------------------------------------------------------------------


def _v1_variable(name, shape, initial=None, use_resource=False, trainable=True):
    """Makes a variable; its initial value is random where none is given."""
    initializer = None if initial is None else v1.constant_initializer(initial)
    return v1.get_variable(name, shape, initializer=initializer, use_resource=use_resource,
                           trainable=trainable)


def _placeholders(inputs=INPUTS):
    v1.set_random_seed(1)
    return [v1.placeholder(dtype, (None, *row), name) for name, (dtype, row, _) in inputs.items()]


def _v1_dense(name, x, units, constant=False, use_resource=False):
    shape = (x.shape[1], units)
    initial = np.random.normal(0, 0.3, shape) if constant else None
    kernel = _v1_variable(f"{name}/kernel", shape, initial, use_resource)
    bias = _v1_variable(f"{name}/bias", (units,), np.zeros(units), use_resource)
    return tf.nn.bias_add(tf.matmul(x, kernel), bias)


def _v1_loss(**options):
    """Makes an MLP with its inputs, and returns its loss."""
    x, y = _placeholders()
    h = tf.nn.relu(_v1_dense("first", x, 16, **options))
    return _cross_entropy(y, _v1_dense("last", h, LABELS, **options), name="loss")


def _v1_saved(path, kind, inputs=INPUTS, **truths):
    """Returns the `Saved` of the default graph, with placeholders and fetches by their usual names."""
    return Saved(path, kind, ("train", "loss:0"), {f"{k}:0": v for k, v in inputs.items()},
                 tuple(v.op.name for v in v1.trainable_variables()), **truths)


def _save_meta_graph(path, train, **truths):
    """Saves the default graph with initial values of its variables."""
    assert train.name == "train"
    if train not in v1.get_collection("train_op"):  # where optimizers put what they apply
        v1.add_to_collection("train_op", train)
    prefix = os.path.join(path, "model")
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, prefix)
    return _v1_saved(f"{prefix}.meta", "meta_graph", **truths)


def _save_graph_def(path, train, name):
    assert train.name == "train"
    v1.global_variables_initializer()  # named init
    tf.io.write_graph(v1.get_default_graph(), path, name, as_text=name.endswith("txt"))
    return _v1_saved(os.path.join(path, name), "graph_def", initializer="init")


def v1_momentum(path):
    with tf.Graph().as_default():
        loss, global_step = _v1_loss(), v1.train.create_global_step()
        train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, global_step, name="train")
        return _save_meta_graph(path, train)


def v1_adam(path):
    """Resource variables, a regularizer, and gradients that are clipped."""
    with tf.Graph().as_default():
        x, y = _placeholders()
        h = tf.nn.relu(_v1_dense("first", x, 16, use_resource=True))
        rows = _cross_entropy(y, _v1_dense("last", h, LABELS, use_resource=True))
        weights = v1.trainable_variables()
        penalty = tf.add_n([tf.nn.l2_loss(w) for w in weights if "kernel" in w.name])
        loss = tf.add(rows, 0.01 * penalty, name="loss")
        gradients, _ = tf.clip_by_global_norm(tf.gradients(loss, weights), 0.5)
        train = v1.train.AdamOptimizer(0.01).apply_gradients(zip(gradients, weights), name="train")
        return _save_meta_graph(path, train)


def _v1_control_flow(path, optimizer, use_resource):
    """A loop over a sequence, and an update in every second step."""
    was_v2 = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default():
            x, y = _placeholders(SEQUENCES)
            kernel = _v1_variable("kernel", (4, 4), use_resource=use_resource)
            _, h = v1.while_loop(
                lambda i, _: i < 6, lambda i, h: (i + 1, tf.tanh(tf.matmul(x[:, i] + h, kernel))),
                (tf.constant(0), tf.zeros_like(x[:, 0])))
            logits = _v1_dense("last", h, LABELS, use_resource=use_resource)
            loss = _cross_entropy(y, logits, name="loss")
            counter = v1.get_variable("counter", initializer=0, use_resource=use_resource,
                                      trainable=False)
            gradients = optimizer.compute_gradients(loss)
            count = v1.assign_add(counter, 1)
            update = v1.cond(tf.equal(count % 2, 0), lambda: optimizer.apply_gradients(gradients),
                             tf.no_op)
            train = tf.group(update, name="train")
            return _save_meta_graph(path, train, inputs=SEQUENCES)
    finally:
        if was_v2:
            v1.enable_control_flow_v2()


def v1_control_flow(path):
    return _v1_control_flow(path, v1.train.RMSPropOptimizer(0.01), True)


def v1_control_flow_of_references(path):
    return _v1_control_flow(path, v1.train.AdagradOptimizer(0.1), False)


def v1_batch_norm(path):
    with tf.Graph().as_default():
        x, y = _placeholders(IMAGES)
        kernel, scale, offset = (_v1_variable("kernel", (3, 3, 1, 4)),
                                 _v1_variable("scale", (4,), 1), _v1_variable("offset", (4,), 0))
        h, mean, variance = v1.nn.fused_batch_norm(
            tf.nn.conv2d(x, kernel, 1, "SAME"), scale, offset)
        updates = []
        for name, statistic, initial in (("mean", mean, 0), ("variance", variance, 1)):
            moving = _v1_variable(f"moving_{name}", (4,), initial, trainable=False)
            updates.append(v1.assign_sub(moving, 0.1 * (moving - statistic)))
            v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, updates[-1])
        logits = _v1_dense("last", tf.reduce_mean(tf.nn.relu(h), [1, 2]), LABELS)
        loss = _cross_entropy(y, logits, name="loss")
        with v1.control_dependencies(updates):
            train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        return _save_meta_graph(path, train, inputs=IMAGES)


def v1_embedding(path):
    with tf.Graph().as_default():
        x, y = _placeholders(IDS)
        rows = v1.nn.embedding_lookup(_v1_variable("table", (40, 4)), x)
        logits = _v1_dense("last", tf.reshape(rows, [-1, 12]), LABELS)
        loss = _cross_entropy(y, logits, name="loss")
        train = v1.train.AdagradOptimizer(0.1).minimize(loss, name="train")
        return _save_meta_graph(path, train, inputs=IDS, whole=("Unique",))


def graph_def(path):
    with tf.Graph().as_default():
        loss = _v1_loss(constant=True, use_resource=True)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        return _save_graph_def(path, train, "graph.pb")


def graph_def_as_text(path):
    """Reference variables, and momentum of hand-written assignments."""
    with tf.Graph().as_default():
        loss = _v1_loss(constant=True)
        weights, updates = v1.trainable_variables(), []
        gradients = tf.gradients(loss, weights)
        # What backpropagation reads must not change under it, as references would let it.
        with v1.control_dependencies(gradients):
            for w, g in zip(weights, gradients):
                velocity = _v1_variable(f"{w.op.name}/velocity", w.shape, 0, trainable=False)
                updates.append(v1.assign_sub(w, 0.1 * v1.assign(velocity, 0.9 * velocity + g)))
        return _save_graph_def(path, tf.group(*updates, name="train"), "graph.pbtxt")


def _case(builder):
    """Returns a function of a directory that saves the same values there, whatever was built before."""
    @functools.wraps(builder)
    def build(directory):
        keras.utils.set_random_seed(1)
        path = os.path.join(directory, builder.__name__)
        os.makedirs(path, exist_ok=True)
        return builder(path)
    return build


CASES = {builder.__name__: _case(builder) for builder in (
    sgd, momentum, adam_with_powers, adam_with_counter, fused_updates, embedding_by_scatter,
    sum_of_rows, shared_weights, as_many_rows_as_columns, several_steps, accumulated_in_call,
    accumulated_over_calls, scaled_loss, nested_functions, keras_adam, keras_clipped,
    keras_batch_norm, keras_convolutions, keras_accumulated, keras_scaled_loss, keras_lstm,
    keras_dropout, keras_embedding, keras_metrics, keras_mixed_precision, keras_attention,
    keras_archive, v1_momentum, v1_adam, v1_control_flow, v1_control_flow_of_references,
    v1_batch_norm, v1_embedding, graph_def, graph_def_as_text)}


def read_graph(saved):
    """Returns the GraphDef that was saved."""
    if saved.kind == "saved_model":
        return loader_impl.parse_saved_model(saved.path).meta_graphs[0].graph_def
    with open(saved.path, "rb") as file:
        content = file.read()
    if saved.kind == "meta_graph":
        return v1.MetaGraphDef.FromString(content).graph_def
    if saved.path.endswith(".pbtxt"):
        return text_format.Parse(content, v1.GraphDef())
    return v1.GraphDef.FromString(content)


def main(directory, *names):
    for name in names or CASES:
        start = time.perf_counter()
        saved = CASES[name](directory)
        seconds = time.perf_counter() - start
        graph = read_graph(saved)
        nodes = len(graph.node) + sum(len(f.node_def) for f in graph.library.function)
        print(f"{name:32}{nodes:6} nodes{seconds:6.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
