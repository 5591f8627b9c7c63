"""Products of whole tensors that have a size for each row: which of them ranks divide, and that results stay exact."""

import numpy as np
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.graph_passes.partition.propagate import dividing

v1 = tf.compat.v1
# So wide that a row's products are worth gathering its results, with 2 WIDE operations for 8 bytes.
WIDE = 4096


def _x():
    return partitioning.rows(v1.placeholder(tf.float64, (None, 3), "x"))[0]


def _noise(x, width=3):
    """Random numbers for each row of x, which all ranks draw whole."""
    return tf.random.stateless_normal((tf.shape(x)[0], width), (1, 2), dtype=tf.float64)


def _weights(*shape):
    return tf.constant(np.random.default_rng(0).normal(size=shape) / np.sqrt(shape[0]))


def generator_and_critic():
    """The loss is a sum over rows, so nothing is gathered."""
    x = _x()
    w, v = _weights(3, 4), _weights(4, 3)
    fake = tf.tanh(_noise(x) @ w) @ v
    loss = tf.reduce_mean((fake - x)**2)
    return [loss, *tf.gradients(loss, [w, v])]


def gathered_because_it_is_wide():
    return [tf.reverse(_noise(_x(), WIDE) @ _weights(WIDE, 2), [0])]


def many_products_before_one_gather():
    h = _noise(_x(), 512)
    for _ in range(8):
        h = tf.tanh(h @ _weights(512, 512))
    return [tf.reverse(h @ _weights(512, 2), [0])]


def rows_again_behind_a_sort():
    """There is no rule for the sort; what follows is of this rank's rows."""
    x = _x()
    w = _weights(3, 4)
    loss = tf.reduce_mean(tf.tanh(tf.sort(x, 0) @ w)**2)
    return [loss, *tf.gradients(loss, w)]


def beside_own_values():
    x = _x()
    own = ops.join(ops.own(x) * tf.reduce_mean(tf.abs(x)), "rows")
    return [tf.reduce_sum(own), tf.reduce_sum(_noise(x) @ _weights(3, 4))]


def gathered_although_it_is_narrow():
    return [tf.reverse(_noise(_x()) @ _weights(3, 4), [0])]


def fetched():
    return [_noise(_x()) @ _weights(3, 4)]


def a_gather_after_each_product():
    h = _noise(_x(), 8)
    for _ in range(4):
        h = tf.sort(h @ _weights(8, 8), 0)
    return [h]


def kernel_of_all_pairs():
    z = _noise(_x(), 2)
    squares = tf.reduce_sum(z**2, 1, keepdims=True)
    kernel = tf.exp(2 * tf.matmul(z, z, transpose_b=True) - squares - tf.transpose(squares))
    return [tf.linalg.diag_part(kernel), tf.reduce_sum(kernel)]


def products_behind_all_pairs():
    """As in SimCLR. The scores are whole, since their gradient would be a sum with a size for each row."""
    x = _noise(_x())
    w = _weights(3, 4)
    z = tf.math.l2_normalize(tf.concat([x, tf.reverse(x, [1])], 0) @ w, 1)
    loss = tf.reduce_mean(tf.reduce_logsumexp(tf.matmul(z, z, transpose_b=True), 1))
    return [loss, *tf.gradients(loss, w)]


def _loop(body, *state):
    return v1.while_loop(lambda i, *_: i < 3, lambda i, *state: (i + 1, *body(i, *state)), (0, *state))[1:]


def gathered_in_each_iteration():
    """The loop's own variable would keep the rows that a first attempt gave it."""
    x = _x()
    w = _weights(3, 3)

    def body(_, h, total):
        h = tf.tanh(h @ w)
        return h, total + tf.reduce_sum(tf.reverse(h, [0])[0])
    return _loop(body, _noise(x), tf.zeros((), tf.float64))


def gathered_in_each_iteration_of_backpropagation():
    x = _x()
    w = _weights(3, 3)
    h, = _loop(lambda _, h: [tf.reverse(tf.tanh(h @ w), [0])], _noise(x))
    return [tf.reduce_sum(h), *tf.gradients(tf.reduce_sum(h**2), w)]


def divided_outside_and_gathered_in_each_iteration():
    x = _x()
    y = _noise(x) @ _weights(3, 4)
    return _loop(lambda i, total: [total + tf.reduce_sum(tf.gather(y, tf.stack([0, 0]) * i))],
                 tf.zeros((), tf.float64))


def summed_in_each_iteration():
    w = _weights(3, 3)

    def body(_, z):
        z = z @ w
        return [z / tf.sqrt(tf.reduce_mean(z * z))]
    return [tf.reduce_sum(_loop(body, _noise(_x()))[0])]


def gathered_in_each_iteration_around_an_inner_loop():
    w = _weights(3, 3)

    def body(_, h):
        h, = _loop(lambda _, z: [tf.tanh(z @ w)], h)
        return [tf.sort(h, 0)]
    return [tf.reduce_sum(_loop(body, _noise(_x()))[0])]


def meets_own_values():
    """These may only be combined with what is the same on all ranks."""
    x = _x()
    others = _noise(x) @ _weights(3, 3)
    return [tf.reduce_sum(ops.join(tf.matmul(ops.own(x), others, transpose_b=True), "rows"))]


def its_sum_meets_own_values():
    x = _x()
    scale = tf.reduce_mean(tf.abs(_noise(x) @ _weights(3, 3)), 0)
    return [tf.reduce_sum(ops.join(ops.own(x) * scale, "rows"))]


def of_two_inputs():
    x, z = _x(), partitioning.rows(v1.placeholder(tf.float64, (None, 3), "z"))[0]
    return [tf.reduce_sum(x) + tf.reduce_sum(z), tf.reduce_sum(_noise(x) @ _weights(3, 4))]


DIVIDE = (generator_and_critic, gathered_because_it_is_wide, many_products_before_one_gather, rows_again_behind_a_sort,
          beside_own_values, its_sum_meets_own_values, products_behind_all_pairs)
STAY_WHOLE = (gathered_although_it_is_narrow, fetched, a_gather_after_each_product, kernel_of_all_pairs)
# However wide they are.
ALWAYS_WHOLE = (gathered_in_each_iteration, gathered_in_each_iteration_of_backpropagation,
                divided_outside_and_gathered_in_each_iteration, summed_in_each_iteration,
                gathered_in_each_iteration_around_an_inner_loop, meets_own_values, of_two_inputs)


@pytest.mark.parametrize("build", (*DIVIDE, *STAY_WHOLE, *ALWAYS_WHOLE), ids=lambda build: build.__name__)
def test_products_divide_where_that_pays(build, monkeypatch):
    if build in ALWAYS_WHOLE:
        monkeypatch.setattr(dividing, "_OPERATIONS_PER_BYTE", 0)
    feeds = [{"x": np.random.default_rng(rows).normal(size=(rows, 3)), "z": np.ones((5, 3))} for rows in (1, 2, 7)]
    if build is not of_two_inputs:
        feeds = [{"x": feed["x"]} for feed in feeds]
    made = partitioning.check(build, feeds, ranks=(1, 2, 3), tolerance=1e-10)
    products = [node for node in made.partitioned.graph_def.node if node.op == "MatMul"]
    divided = [node.name for node in products if any("/mine" in tensor for tensor in node.input)]
    assert bool(divided) == (build in DIVIDE), made.report
    assert not any(exchange.loop for exchange in made.report.exchanges), made.report
    assert all(exchange.bytes.fixed is not None for exchange in made.report.exchanges if exchange.kind == "sum")


def test_sizes_that_are_no_number_for_each_row_are_not_divided():
    """Of one row, too: TensorFlow infers sizes for three rows and more."""
    def build():
        x = _x()
        columns = tf.random.stateless_normal((tf.shape(x)[0], tf.minimum(tf.shape(x)[0], 2)), (1, 2), dtype=tf.float64)
        return [tf.reduce_sum(x[:, :1] * columns)]

    partitioning.check(build, [{"x": np.ones((rows, 3))} for rows in (1, 2, 7)])
