"""Published programs of TensorFlow 1, and their fetches: saved_programs.py CASES OUT runs them.

CASES is a pickled list of (name, path of the original, path of the rewritten MetaGraph); OUT gets a pickled dictionary.
"""

import dataclasses
import hashlib
import pickle
import sys

import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.job import runtime

v1 = tf.compat.v1


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of TensorFlow 1.

    Attributes:
        build: A function that builds the graph, whose step is the node "train".
        calls: The calls of the program, one after the other: (names that it fetches, {placeholder: array}).
        train_op: Its train op.
        inputs: The settings that its inputs need.
        whole: Ops that run whole on every rank.
    """

    build: object
    calls: list
    train_op: tuple = ("train",)
    inputs: dict = dataclasses.field(default_factory=dict)
    whole: tuple = ()


def _rows(seed, *shape):
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype("float32")


def _labels(seed, rows, number):
    return np.random.default_rng(seed).integers(0, number, rows).astype("int32")


def _variable(name, *shape, trainable=True):
    initial = tf.constant(np.random.default_rng(len(name)).normal(0, 0.4, shape), tf.float32)
    return v1.get_variable(name, initializer=initial, trainable=trainable, use_resource=False)


def _placeholder(name, *shape, dtype=tf.float32):
    return v1.placeholder(dtype, shape, name)


def _sgd(loss, rate=0.1, **options):
    return v1.train.GradientDescentOptimizer(rate).minimize(loss, name="train", **options)


def _xy(rows=(7, 4), columns=8):
    """Returns feeds of x and y for calls with these numbers of rows."""
    return [{"x:0": _rows(i, k, columns), "y:0": _labels(i, k, 3)} for i, k in enumerate(rows)]


def _classifier(x, hidden=6):
    h = tf.tanh(x @ _variable("w", 8, hidden) + _variable("b", hidden))
    return tf.add(h @ _variable("v", hidden, 3), _variable("c", 3), name="logits")


def _losses(y, logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)


# ---- losses -------------------------------------------------------------------------------------


def _ratio():
    x, y = _placeholder("x", None, 8), _placeholder("y", None, dtype=tf.int32)
    mask = tf.cast(y > 0, tf.float32)
    loss = tf.divide(tf.reduce_sum(mask * _losses(y, _classifier(x))), tf.reduce_sum(mask) + 1e-3, name="loss")
    _sgd(loss)


def _sum_plus_mean():
    x, y = _placeholder("x", None, 8), _placeholder("y", None, dtype=tf.int32)
    logits = _classifier(x)
    penalty = tf.reduce_sum([tf.nn.l2_loss(w) for w in v1.trainable_variables()])
    loss = tf.add_n([tf.reduce_mean(_losses(y, logits)), 0.1 * tf.reduce_sum(tf.square(logits)), 0.01 * penalty],
                    name="loss")
    _sgd(loss)


def _in_batch_negatives():
    x, y = _placeholder("x", None, 8), _placeholder("y", None, 8)
    a, b = tf.nn.l2_normalize(x @ _variable("w", 8, 4), 1), tf.nn.l2_normalize(y @ _variable("v", 8, 4), 1)
    scores = tf.matmul(a, b, transpose_b=True)
    loss = tf.reduce_mean(_losses(tf.range(tf.shape(x)[0]), scores / 0.5), name="loss")
    _sgd(loss)


# ---- what is fed ----------------------------------------------------------------------------------


def _fed_rate():
    x, y = _placeholder("x", None, 8), _placeholder("y", None, dtype=tf.int32)
    rate = _placeholder("rate")
    training = v1.placeholder_with_default(False, (), "is_training")
    h = tf.cond(training, lambda: x * 1.5, lambda: x)
    loss = tf.reduce_mean(_losses(y, _classifier(h)), name="loss")
    correct = tf.equal(tf.argmax(v1.get_default_graph().get_tensor_by_name("logits:0"), 1, tf.int32), y)
    tf.reduce_mean(tf.cast(correct, tf.float32), name="accuracy")
    v1.train.AdamOptimizer(rate).minimize(loss, name="train")


def _literal_batch():
    x, y = _placeholder("x", 6, 8), _placeholder("y", 6, dtype=tf.int32)
    _sgd(tf.reduce_mean(_losses(y, _classifier(x)), name="loss"))


def _ids():
    ids, y = _placeholder("x", None, dtype=tf.int32), _placeholder("y", None, dtype=tf.int32)
    embedded = tf.nn.embedding_lookup(_variable("table", 9, 8), ids)
    loss = tf.reduce_mean(_losses(y, _classifier(embedded)), name="loss")
    v1.train.AdamOptimizer(0.01).minimize(loss, name="train")


# ---- state ----------------------------------------------------------------------------------------


def _batch_norm_by_hand():
    x, y = _placeholder("x", None, 8), _placeholder("y", None, dtype=tf.int32)
    h, beta, gamma = x @ _variable("w0", 8, 8), _variable("beta", 8), _variable("gamma", 8)
    mean, variance = tf.nn.moments(h, [0])
    moving = [_variable(f"moving_{name}", 8, trainable=False) for name in ("mean", "variance")]
    updates = [v1.assign(m, 0.9 * m + 0.1 * value) for m, value in zip(moving, (mean, variance))]
    with v1.control_dependencies(updates):
        normal = tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-3)
    _sgd(tf.reduce_mean(_losses(y, _classifier(normal)), name="loss"))


def _queue_of_features():
    """MoCo's dictionary: the last features are kept, and the batch's are put in front of them."""
    x = _placeholder("x", None, 8)
    queue = _variable("queue", 12, 4, trainable=False)
    features = tf.nn.l2_normalize(x @ _variable("w", 8, 4), 1)
    logits = features @ tf.transpose(tf.stop_gradient(queue))
    loss = tf.reduce_mean(tf.reduce_logsumexp(logits, 1), name="loss")
    train = _sgd_without_name(loss)
    with v1.control_dependencies([train]):
        kept = tf.concat([tf.stop_gradient(features), queue], 0)[:12]
        tf.group(v1.assign(queue, kept), name="train")


def _sgd_without_name(loss, variables=None):
    return v1.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=variables)


def _moving_average():
    x, y = _placeholder("x", None, 8), _placeholder("y", None, dtype=tf.int32)
    loss = tf.reduce_mean(_losses(y, _classifier(x)), name="loss")
    step = v1.train.get_or_create_global_step()
    average = v1.train.ExponentialMovingAverage(0.9, step)
    rate = v1.train.exponential_decay(0.1, step, 2, 0.5)
    train = v1.train.MomentumOptimizer(rate, 0.9).minimize(loss, step)
    with v1.control_dependencies([train]):
        tf.group(average.apply(v1.trainable_variables()), name="train")


# ---- reinforcement learning, adversaries ------------------------------------------------------------


def _actor_critic():
    """A3C: two losses of different kinds in one update, whose gradients are clipped together."""
    x, action = _placeholder("x", None, 8), _placeholder("action", None, dtype=tf.int32)
    returns = _placeholder("returns", None)
    logits, value = _classifier(x), tf.squeeze(x @ _variable("value", 8, 1), 1)
    policy, chosen = tf.nn.softmax(logits), tf.one_hot(action, 3)
    advantage = tf.stop_gradient(returns - value)
    policy_loss = -tf.reduce_sum(tf.math.log(tf.reduce_sum(policy * chosen, 1) + 1e-8) * advantage)
    value_loss = 0.5 * tf.reduce_sum(tf.square(returns - value))
    entropy = -tf.reduce_sum(policy * tf.math.log(policy + 1e-8))
    loss = tf.add_n([policy_loss, 0.5 * value_loss, -0.01 * entropy], name="loss")
    variables = v1.trainable_variables()
    gradients, norm = tf.clip_by_global_norm(tf.gradients(loss, variables), 0.5)
    tf.identity(norm, name="norm")
    v1.train.RMSPropOptimizer(0.01).apply_gradients(zip(gradients, variables), name="train")


def _two_players():
    x, z = _placeholder("x", None, 8), _placeholder("z", None, 4)
    with v1.variable_scope("generator"):
        fake = tf.tanh(z @ _variable("w", 4, 8))
    with v1.variable_scope("critic"):
        w = _variable("w", 8, 1)
    real, made = x @ w, fake @ w
    critic_loss = tf.subtract(tf.reduce_mean(made), tf.reduce_mean(real), name="critic_loss")
    mixed = 0.5 * (x + fake)
    slope = tf.norm(tf.gradients(tf.square(mixed @ w), mixed)[0], axis=1)
    critic_loss += 10 * tf.reduce_mean(tf.square(slope - 1))
    generator_loss = tf.negative(tf.reduce_mean(made), name="generator_loss")
    by_scope = [v1.trainable_variables(scope) for scope in ("critic", "generator")]
    v1.train.AdamOptimizer(0.01).minimize(critic_loss, var_list=by_scope[0], name="train_critic")
    v1.train.AdamOptimizer(0.01).minimize(generator_loss, var_list=by_scope[1], name="train_generator")


# ---- sequences --------------------------------------------------------------------------------------


def _conditional_random_field():
    """The likelihood of a path of labels, by the forward algorithm over time."""
    x, y = _placeholder("x", None, 5, 4), _placeholder("y", None, 5, dtype=tf.int32)
    lengths = _placeholder("lengths", None, dtype=tf.int32)
    unary = tf.tensordot(x, _variable("w", 4, 3), [[2], [0]])
    transitions = _variable("transitions", 3, 3)
    alpha, score = unary[:, 0], tf.reduce_sum(unary[:, 0] * tf.one_hot(y[:, 0], 3), 1)
    for t in range(1, 5):
        inside = lengths > t
        new = unary[:, t] + tf.reduce_logsumexp(alpha[:, :, None] + transitions[None], 1)
        alpha = tf.where(inside[:, None], new, alpha)
        pair = tf.gather_nd(transitions, tf.stack([y[:, t - 1], y[:, t]], 1))
        score += tf.where(inside, pair + tf.reduce_sum(unary[:, t] * tf.one_hot(y[:, t], 3), 1), tf.zeros_like(score))
    loss = tf.reduce_mean(tf.reduce_logsumexp(alpha, 1) - score, name="loss")
    v1.train.AdamOptimizer(0.05).minimize(loss, name="train")


def _dataset():
    """An input pipeline in the graph, shuffled without a seed: all ranks take the batches of rank 0."""
    data = v1.data.Dataset.from_tensor_slices((_rows(0, 24, 8), _labels(0, 24, 3))).repeat().batch(6)
    x, y = v1.data.make_one_shot_iterator(data).get_next()
    _sgd(tf.reduce_mean(_losses(y, _classifier(x)), name="loss"))


def _dropout():
    x, y = _placeholder("x", None, 8), _placeholder("y", None, dtype=tf.int32)
    h = v1.nn.dropout(_classifier(x), rate=0.4, seed=3)
    _sgd(tf.reduce_mean(_losses(y, h), name="loss"))


# ---- several steps ----------------------------------------------------------------------------------


def _resources():
    """Returns variables that each step reads anew."""
    values = {name: np.random.default_rng(len(name)).normal(0, 0.4, shape) for name, shape in (
        ("w", (8, 6)), ("vv", (6, 3)))}
    return [v1.get_variable(name, initializer=tf.constant(value, tf.float32), use_resource=True)
            for name, value in values.items()]


def _unrolled_steps():
    """A read of a variable waits for its own update in the step before."""
    variables, updates, losses = _resources(), [None, None], []
    for step in range(3):
        x, y = _placeholder(f"x{step}", None, 8), _placeholder(f"y{step}", None, dtype=tf.int32)
        weights = []
        for variable, update in zip(variables, updates):
            with v1.control_dependencies([update] if update is not None else []):
                weights.append(variable.read_value())
        losses.append(tf.reduce_mean(_losses(y, tf.tanh(x @ weights[0]) @ weights[1])))
        updates = [variable.assign_sub(0.1 * gradient, read_value=False)
                   for variable, gradient in zip(variables, tf.gradients(losses[-1], weights))]
    tf.stack(losses, name="loss")
    tf.group(*updates, name="train")


def _steps_in_a_loop():
    variables = _resources()
    x, y = _placeholder("x", None, 8), _placeholder("y", None, dtype=tf.int32)

    def step(i, _):
        w, v = (variable.read_value() for variable in variables)
        loss = tf.reduce_mean(_losses(y, tf.tanh(x @ w) @ v))
        updates = [variable.assign_sub(0.1 * gradient, read_value=False)
                   for variable, gradient in zip(variables, tf.gradients(loss, [w, v]))]
        with v1.control_dependencies(updates):
            return i + 1, tf.identity(loss)

    _, loss = v1.while_loop(lambda i, _: i < 3, step, (0, 0.0), parallel_iterations=1)
    tf.identity(loss, name="loss")
    tf.group(loss, name="train")


_TRAIN = ["train", "loss:0"]
_SEQUENCES = [{"x:0": _rows(i, k, 5, 4), "y:0": _labels(i, (k, 5), 3), "lengths:0": 1 + _labels(i, k, 5)}
              for i, k in enumerate((5, 3))]
_STATES = [{"x:0": _rows(i, k, 8), "action:0": _labels(i, k, 3), "returns:0": _rows(i + 9, k)}
           for i, k in enumerate((5, 2))]

PROGRAMS = {
    "ratio": Program(_ratio, [(_TRAIN, feed) for feed in _xy()]),
    "sum plus mean": Program(_sum_plus_mean, [(_TRAIN, feed) for feed in _xy()]),
    "in-batch negatives": Program(_in_batch_negatives, [
        (_TRAIN, {"x:0": _rows(i, k, 8), "y:0": _rows(i + 5, k, 8)}) for i, k in enumerate((6, 5))]),
    # Further fetches of a program work too: predictions from x alone, an accuracy, its own learning rate.
    "fed rate": Program(_fed_rate, [
        *((_TRAIN, feed | {"rate:0": np.float32(rate), "is_training:0": True})
          for feed, rate in zip(_xy(), (0.1, 0.02))),
        (["logits:0"], {"x:0": _rows(5, 3, 8)}), (["accuracy:0", "loss:0"], _xy((1,))[0])]),
    "literal batch": Program(_literal_batch, [(_TRAIN, feed) for feed in _xy((6, 6))],
                             whole=("Mul", "MatMul", "TanhGrad")),
    "ids": Program(_ids, [(_TRAIN, {"x:0": _labels(i, k, 9), "y:0": _labels(i, k, 3)})
                          for i, k in enumerate((7, 4))], whole=("Unique",)),
    "batch norm by hand": Program(_batch_norm_by_hand, [(_TRAIN, feed) for feed in _xy()]),
    "queue of features": Program(_queue_of_features, [(_TRAIN, {"x:0": _rows(i, k, 8)}) for i, k in enumerate((5, 4))],
                                 whole=("ConcatV2",)),
    "moving average": Program(_moving_average, [(_TRAIN, feed) for feed in _xy((7, 4, 2))]),
    "actor and critic": Program(_actor_critic, [([*_TRAIN, "norm:0"], feed) for feed in _STATES]),
    "two players": Program(_two_players, [
        (["train_critic", "critic_loss:0"], {"x:0": _rows(1, 6, 8), "z:0": _rows(2, 6, 4)}),
        (["train_generator", "generator_loss:0"], {"z:0": _rows(3, 5, 4)})], ("train_critic", "train_generator")),
    "conditional random field": Program(_conditional_random_field, [(_TRAIN, feed) for feed in _SEQUENCES]),
    "dataset": Program(_dataset, [(_TRAIN, {})] * 3),
    "unrolled steps": Program(_unrolled_steps, [
        (_TRAIN, {f"x{step}:0": _rows(step + seed, rows, 8) for step in range(3)}
         | {f"y{step}:0": _labels(step + seed, rows, 3) for step in range(3)}) for seed, rows in ((0, 7), (5, 4))]),
    "steps in a loop": Program(_steps_in_a_loop, [(_TRAIN, feed) for feed in _xy()]),
    "dropout": Program(_dropout, [(_TRAIN, feed) for feed in _xy()]),
}


def save(name, folder):
    """Saves a program's MetaGraph with a checkpoint, and returns its path."""
    return save_graph(PROGRAMS[name].build, folder)


def save_graph(build, folder):
    """Saves the MetaGraph that a function builds, with TensorFlow 1's loops, and a checkpoint; returns its path."""
    was_v2 = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(1)
            build()
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, f"{folder}/model")
    finally:
        if was_v2:
            v1.enable_control_flow_v2()
    return f"{folder}/model.meta"


def run(name, path):
    """Returns what a program's calls fetch, and all variables after them."""
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(intra_op_parallelism_threads=1)) as session:
        saver = v1.train.import_meta_graph(path)
        saver.restore(session, path.removesuffix(".meta"))
        fetched = []
        for names, feeds in PROGRAMS[name].calls:
            fetched += [np.asarray(value) for value in session.run(names, feeds) if value is not None]
        return fetched, dict(zip((v.name for v in v1.global_variables()), session.run(v1.global_variables())))


def main(cases, out):
    rank, _ = poseidon.load_ops()
    with open(cases, "rb") as file:
        cases = pickle.load(file)
    results = {}
    for name, original, rewritten in cases:
        fetched, variables = run(name, rewritten)
        digest = hashlib.sha256(b"".join(v.tobytes() for v in (*fetched, *variables.values()))).digest()
        gathered, = runtime.communicator().submit_factors(
            f"test/{name}", [np.frombuffer(digest, np.uint8).reshape(1, -1)])()
        results[name] = (fetched, variables), len({row.tobytes() for row in gathered}), (
            run(name, original) if rank == 0 else None)
    if rank == 0:
        with open(out, "wb") as file:
            pickle.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
