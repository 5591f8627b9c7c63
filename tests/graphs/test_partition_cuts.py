"""Where summands become whole: a table of chains of linear ops, and minimum cuts of random networks."""

import itertools

import numpy as np
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon.base import minimum_cut

_FEATURES = 12
_BATCHES = (7, 1, 12)


def _gradients(y, *of):
    return tf.gradients(tf.reduce_sum(y * y), of)


def _ids(x):
    return tf.cast(tf.abs(x[:, 0]), tf.int32)


def _lora(x, w, a, b):
    return _gradients(x @ (w + 2 * (a @ b)), a, b)


def _lora_of_heads(x, w, a, b):
    """A kernel [features, heads, size]: before it is summed over features, b's gradient is larger than the kernel's."""
    return _gradients(tf.einsum("kf,fhs->khs", x, w + tf.matmul(a, b)), a, b)


def _lora_of_table(x, w, a, b):
    return _gradients(tf.gather(w + a @ b, _ids(x)) + x[:, :4], a, b)


def _product(x, a, b):
    return _gradients(x @ (a @ b), a, b)


def _product_of_three(x, a, b, c):
    """What lies between the kernel's gradient and b's is larger than both."""
    return _gradients(x @ (a @ (b @ c)), b)


def _clipped(x, a, b):
    """The gradient of the product is needed whole, too."""
    kernel = a @ b
    gradient, = _gradients(x @ kernel, kernel)
    return [tf.reduce_max(gradient), *tf.gradients(kernel, [a, b], gradient)]


def _normalised(x, v, g):
    return _gradients(x @ (g * v), v, g)


def _scale_alone(x, v, g):
    return _gradients(x @ (g * v), g)


def _kernels_merged(x, a, b):
    """A convolution by the convolution of two kernels."""
    kernel = tf.nn.conv2d(a, b, 1, "VALID")
    return _gradients(tf.nn.conv2d(tf.reshape(x, [-1, 2, 2, 3]), kernel, 1, "SAME"), b)


def _tied(x, table):
    return _gradients(tf.matmul(tf.gather(table, _ids(x)) + x[:, :4], table, transpose_b=True), table)


def _joined(x, a, b):
    return _gradients(x @ tf.concat([a, b], 1), a, b)


def _parts_of_one(x, w):
    return _gradients(tf.concat([f(x) @ w[i] for i, f in enumerate((tf.abs, tf.sign, tf.negative))], 1), w)


def _needed_twice(x, a):
    total = tf.reduce_sum(x, 0)
    return [tf.linalg.matvec(a, total), tf.reduce_max(total)]


def _repeated(x, a):
    return [tf.tile(tf.reduce_sum(x, 0), [2]) * a]


def _update(x, w):
    """What no op returns: the update of a variable by the gradient, times a rate."""
    variable = tf.Variable(tf.zeros([_FEATURES], tf.float64), use_resource=True)
    with tf.control_dependencies([variable.assign_sub(0.5 * tf.reduce_sum(x, 0))]):
        return [variable.read_value() * w]


def _before_a_loop(x, a):
    total = 2 * tf.reduce_sum(x, 0)
    return tf.while_loop(lambda i, _: i < 3, lambda i, most: (i + 1, tf.maximum(most, tf.reduce_max(total * a))),
                         (0, tf.constant(0.0, tf.float64)))[1:]


def _behind_a_loop(x, a):
    """A sum that is small in each iteration."""
    return tf.while_loop(lambda i, _: i < 3, lambda i, all_: (i + 1, all_ + tf.reduce_sum(x + 1, 0)[:, None] * a),
                         (0, tf.zeros([_FEATURES, 2], tf.float64)))[1:]


def _in_a_loop(x, a):
    """Each iteration needs the last one's sum whole: the last of all is then not exchanged once more."""
    return tf.while_loop(lambda i, _: i < 3, lambda i, all_: (i + 1, all_ + tf.reduce_sum(tf.sign(x + all_))),
                         (0, tf.constant(0.0, tf.float64)))[1:]


def _cast(x, a):
    """The sum is not taken in a type narrower than that of what is made of it."""
    return [tf.cast(tf.reduce_sum(tf.cast(x, tf.float32), 0), tf.float64) * a]


# (a function of an input with rows and of whole ones, the shapes of these, what is exchanged, usual rows).
_CHAINS = [
    (_lora, [(12, 40), (12, 1), (1, 40)], "MatMul 12x1, MatMul 1x40", None),
    (_lora, [(12, 40), (12, 1), (1, 40)], "MatMul 12x40", 1),  # the factors of a few rows are fewer bytes
    (_lora, [(12, 12), (12, 8), (8, 12)], "MatMul 12x12", None),
    (_lora_of_heads, [(12, 2, 30), (12, 2, 4), (4, 30)], "Reshape 12x2x4, Reshape 4x30", None),
    (_lora_of_table, [(40, 4), (40, 1), (1, 4)], "MatMul 1x4, MatMul 40x1", 64),
    (_lora_of_table, [(40, 4), (40, 1), (1, 4)], "Reshape rowsx4", 1),
    (_product, [(12, 2), (2, 40)], "MatMul 12x2, MatMul 2x40", None),
    (_product, [(12, 40), (40, 12)], "MatMul 12x12", None),
    (_product_of_three, [(12, 40), (40, 1), (1, 12)], "MatMul 40x1", None),
    (_clipped, [(12, 2), (2, 12)], "MatMul 12x12", None),
    (_normalised, [(12, 40), (40,)], "MatMul 12x40", None),
    (_scale_alone, [(12, 40), (40,)], "Reshape 40", None),
    (_kernels_merged, [(3, 3, 3, 4), (1, 1, 4, 5)], "Conv2DBackpropFilter 1x1x4x5", None),
    (_tied, [(40, 4)], "AddN 40x4", 64),
    (_tied, [(40, 4)], "MatMul 40x4, Reshape rowsx4", 1),  # the former as factors
    (_joined, [(12, 2), (12, 3)], "MatMul 12x5", None),  # one message rather than two of as many bytes together
    (_parts_of_one, [(3, 12, 4)], "AddN 3x12x4", None),
    (_parts_of_one, [(3, 12, 4)], "MatMul 12x4, MatMul 12x4, MatMul 12x4", 1),
    (_needed_twice, [(2, 12)], "Sum 12", None),
    (_repeated, [(24,)], "Sum 12", None),
    (_update, [(12,)], "Sum 12", None),
    (_before_a_loop, [(12,)], "Sum 12", None),
    (_behind_a_loop, [(1, 2)], "exit 12x2", None),
    (_in_a_loop, [()], "Sum scalar in a loop", None),
    (_cast, [(12,)], "Cast 12", None),
]


def _values(rng, shape):
    return rng.integers(-2, 3, shape).astype(np.float64)


def _described(exchange):
    """Returns the op that computes what is exchanged, as in its name, and its shape."""
    op = exchange.tensor.rstrip("/_0123456789").rpartition("/")[2]
    shape = "x".join("rows" if size is None else str(size) for size in exchange.shape) or "scalar"
    return f"{op} {shape}" + " in a loop" * bool(exchange.loop)


@pytest.mark.parametrize("build, shapes, exchanged, rows", _CHAINS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_costs_least_is_exchanged(build, shapes, exchanged, rows):
    rng = np.random.default_rng(1)
    whole = [_values(rng, shape) for shape in shapes]

    def built():
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, [None, _FEATURES], "x"))
        return build(x, *(tf.compat.v1.placeholder_with_default(value, value.shape) for value in whole))

    feeds = [{"x": _values(rng, (batch, _FEATURES))} for batch in _BATCHES]
    made = partitioning.check(built, feeds, tolerance=0, rows=rows)
    assert ", ".join(sorted(map(_described, made.report.exchanges))) == exchanged


def _networks(rng):
    """Yields random networks of a few nodes: (edges, sources, sinks)."""
    for _ in range(300):
        nodes = "abcdef"[:rng.integers(1, 7)]
        edges = {begin: {end: int(rng.choice([0, 1, 2, 5, 10**6])) for end in nodes if rng.random() < 0.4}
                 for begin in nodes}
        ends = [{node: int(rng.integers(1, 9)) for node in nodes if rng.random() < 0.5} for _ in range(2)]
        yield edges, *ends


def _capacity(behind, edges, sources, sinks):
    """Returns the capacity of a cut, given the nodes behind it."""
    return (sum(capacity for begin, ends in edges.items() for end, capacity in ends.items()
                if begin not in behind and end in behind)
            + sum(sources[node] for node in behind if node in sources)
            + sum(capacity for node, capacity in sinks.items() if node not in behind))


def test_no_cut_has_less_capacity_or_fewer_nodes_behind_it():
    for network in _networks(np.random.default_rng(1)):
        found = minimum_cut.behind(*network)
        cuts = [set(nodes) for number in range(len(network[0]) + 1)
                for nodes in itertools.combinations(network[0], number)]
        assert (_capacity(found, *network), len(found)) == min((_capacity(cut, *network), len(cut)) for cut in cuts)
