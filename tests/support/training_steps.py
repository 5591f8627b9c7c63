"""Training steps in which a gradient is hard to recognise: all of them train as in one process.

Each takes weights, and returns a function of a batch that updates them.
"""

import numpy as np
import tensorflow as tf


def weights():
    """Returns kernel and bias of two layers."""
    rng = np.random.default_rng(0)
    return [tf.Variable(rng.normal(0, 0.3, shape).astype("float32"), name=name) for name, shape in (
        ("k0", (8, 8)), ("b0", (8,)), ("k1", (8, 3)), ("b1", (3,)))]


def network(w, x):
    return tf.tanh(x @ w[0] + w[1]) @ w[2] + w[3]


def tied(w, x):
    """The same, with the first kernel used twice: its gradient is a sum of two."""
    return network(w, tf.tanh(x @ w[0]))


def gradients(w, x, y, model=network):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(w, x) - y)**2)
    return tape.gradient(loss, w)


def descend(w, g):
    for variable, gradient in zip(w, g):
        variable.assign_sub(0.1 * gradient)


def _changed(change, model=network):
    """Returns a step that changes the first gradient, by `change(gradient)`, before it descends."""
    def make(w):
        def step(x, y):
            first, *rest = gradients(w, x, y, model)
            descend(w, [change(first), *rest])
        return step
    return make


def _orthogonal(g):
    """Muon's iteration: products of matrices that are not gradients."""
    g /= tf.norm(g) + 1e-7
    for _ in range(3):
        g = 1.5 * g - 0.5 * (g @ tf.transpose(g)) @ g
    return g


def _flat(change):
    """Returns a step that changes all gradients in one tensor."""
    def make(w):
        def step(x, y):
            flat = change(tf.concat([tf.reshape(g, [-1]) for g in gradients(w, x, y)], 0))
            descend(w, [tf.reshape(part, v.shape) for v, part in zip(w, tf.split(flat, [64, 8, 24, 3]))])
        return step
    return make


def _preconditioned(w):
    statistics = tf.Variable(tf.eye(8), name="statistics")

    def step(x, y):
        first, *rest = gradients(w, x, y)
        statistics.assign_add(first @ tf.transpose(first))
        descend(w, [tf.linalg.inv(statistics) @ first, *rest])
    step.keep = statistics
    return step


def _rate_of_loss(w):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((network(w, x) - y)**2)
        descend(w, [g * loss for g in tape.gradient(loss, w)])
    return step


def _functional_gan(w):
    generator = tf.Variable(tf.eye(8), name="generator")

    def step(x, y):
        new = [v - 0.1 * g for v, g in zip(w, gradients(w, x, y))]
        for variable, value in zip(w, new):
            variable.assign(value)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean((network(new, x @ generator) - y)**2)
        generator.assign_sub(0.1 * tape.gradient(loss, generator))
    step.keep = generator
    return step


def _stateful(w):
    state = tf.Variable(tf.zeros((8, 8)), name="state")

    def step(x, y):
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ w[0] + w[1] + state)
            loss = tf.reduce_mean((hidden @ w[2] + w[3] - y)**2)
        state.assign(hidden)
        descend(w, tape.gradient(loss, w))
    step.keep = state
    return step


def _twice(w):
    def step(x, y):
        descend(w, gradients(w, x, y))
        descend(w, gradients(w, x, y))
    return step


def _noisy(w):
    return _changed(lambda g: g + tf.random.normal(g.shape, seed=1))(w)


def _in_a_case(w):
    def step(x, y):
        g = gradients(w, x, y)
        descend(w[:3], g[:3])

        def change(rate):
            w[3].assign_sub(rate * g[3])
            return tf.constant(0)
        tf.switch_case(tf.cast(w[1][0], tf.int32), [lambda: change(0.1), lambda: change(0.2), lambda: change(0.3)])
    return step


def _clipped(w):
    def step(x, y):
        descend(w, tf.clip_by_global_norm(gradients(w, x, y), 0.05)[0])
    return step


def _clipped_with_scalar(w):
    """A norm has the shape of a scalar variable, but is not its gradient."""
    scale = tf.Variable(1.0, name="scale")

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((scale * network(w, x) - y)**2)
        descend([*w, scale], tf.clip_by_global_norm(tape.gradient(loss, [*w, scale]), 0.05)[0])
    step.keep = scale
    return step


def _norm_in_state(w):
    norm = tf.Variable(1.0, name="norm")

    def step(x, y):
        g = gradients(w, x, y)
        size = tf.linalg.global_norm(g)
        descend(w, [gradient * tf.minimum(1.0, norm / size) for gradient in g])
        norm.assign(0.5 * norm + 0.5 * size**2)
    step.keep = norm
    return step


def _teacher(w):
    teacher = [tf.Variable(v, name=f"teacher/{v.name[:-2]}") for v in w]

    def step(x, y):
        descend(w, gradients(w, x, y + 0.1 * network(teacher, x)))
        for average, variable in zip(teacher, w):
            average.assign(0.9 * average + 0.1 * variable)
    step.keep = teacher
    return step


def _embedding_clipped(w):
    """The norm covers all rows; rows with the same index count separately."""
    table = tf.Variable(w[0] * 1.0, name="table")

    def step(x, y):
        ids = tf.cast(tf.abs(x[:, 0]) * 8, tf.int32) % 8
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, ids) @ w[2] - y)**2)
        slices, kernel = tape.gradient(loss, [table, w[2]])
        (slices, kernel), _ = tf.clip_by_global_norm([slices, kernel], 0.05)
        table.scatter_sub(tf.IndexedSlices(0.1 * slices.values, slices.indices))
        w[2].assign_sub(0.1 * kernel)
    step.keep = table
    return step


STEPS = {
    "clipped": _clipped,
    "clipped with a scalar": _clipped_with_scalar,
    "clipped by its own norm": _changed(lambda g: tf.clip_by_norm(g, 0.02)),
    "clipped, tied": _changed(lambda g: tf.clip_by_value(g, -0.01, 0.01), tied),
    "orthogonal": _changed(_orthogonal),
    "orthogonal, tied": _changed(_orthogonal, tied),
    "flat, but linear": _flat(lambda g: 2.0 * g),
    "norm in a state": _norm_in_state,
    "teacher": _teacher,
    "embedding, clipped": _embedding_clipped,
    "softmax": _changed(tf.nn.softmax),
    "softmax, tied": _changed(tf.nn.softmax, tied),
    "flat, clipped": _flat(lambda g: tf.clip_by_norm(g, 0.1)),
    "flat, signs": _flat(tf.sign),
    "preconditioned": _preconditioned,
    "rate of the loss": _rate_of_loss,
    "functional GAN": _functional_gan,
    "stateful": _stateful,
    "twice": _twice,
    "in a case": _in_a_case,
    "noise": _noisy,
}


def save(make, path):
    """Saves a step, of batches of any number of rows (8 where the step's state fixes them)."""
    module = tf.Module()
    module.weights = weights()
    step = make(module.weights)
    module.keep = getattr(step, "keep", None)
    rows = 8 if make is _stateful else None

    @tf.function(input_signature=[tf.TensorSpec((rows, 8)), tf.TensorSpec((rows, 3))])
    def train(x, y):
        step(x, y)
        return {"done": tf.constant(True)}

    module.train = train
    tf.saved_model.save(module, str(path), signatures={"train": train})


def batch(rows, seed):
    """Returns a batch whose second half is larger, so that parts of it differ."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, 8)), rng.normal(size=(rows, 3))
    x[rows // 2:] *= 2
    return {"x": x.astype("float32"), "y": y.astype("float32")}
