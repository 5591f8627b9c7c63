"""Small sums that travel together: which ones do, and that they equal those of one process."""

import numpy as np
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import ops

FEATURES = 3


def _placeholder(dtype=tf.float64):
    return partitioning.rows(tf.compat.v1.placeholder(dtype, [None, FEATURES], "x"))[0]


def metrics():
    """Scalars, vectors and empty tensors, as in losses and metrics."""
    x = _placeholder()
    return tf.reduce_sum(x), tf.reduce_sum(x * x, 0), tf.reduce_sum(x[:, :0], 0), tf.reduce_sum(tf.abs(x)) / 7


def of_two_types():
    x = _placeholder()
    return [tf.reduce_sum(tf.cast(x, dtype)) for dtype in (tf.float64, tf.int64, tf.int64, tf.float64)]


def one_waits_for_rows():
    """Rows depend on the first sum: it leaves at once."""
    x = _placeholder()
    total = tf.reduce_sum(x)
    return tf.reduce_sum(x * total), tf.reduce_sum(x * x), tf.reduce_sum(tf.abs(x)), total


def one_after_another():
    """The second sum begins after the first, although it does not depend on its value."""
    x = _placeholder()
    first = tf.reduce_sum(x)
    with tf.control_dependencies([first + 1]):
        later = tf.identity(x)
    return first, tf.reduce_sum(later * later), tf.reduce_sum(tf.abs(x)), tf.reduce_sum(x * x * x)


def in_a_branch():
    x = _placeholder()
    choice = tf.compat.v1.placeholder_with_default(tf.constant(True), [], "choice")
    chosen = tf.cond(choice, lambda: tf.square(tf.reduce_sum(x)) + tf.square(tf.reduce_sum(x * x)),
                     lambda: tf.constant(0.0, tf.float64))
    return chosen, tf.reduce_sum(tf.abs(x)), tf.reduce_sum(x + 1)


def in_a_loop():
    x = _placeholder()

    def body(i, total):
        return i + 1, total + tf.reduce_sum(tf.square(total + x))

    _, total = tf.while_loop(lambda i, _: i < 2, body, (0, tf.constant(0.0, tf.float64)))
    return total, tf.reduce_sum(tf.abs(x)), tf.reduce_sum(x + 1)


def after_a_loop():
    """The result of a loop may depend on another sum."""
    x = _placeholder()
    _, total = tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + tf.reduce_sum(x, 0)),
                             (0, tf.zeros([FEATURES], tf.float64)))
    return total, tf.reduce_sum(tf.abs(x)), tf.reduce_sum(x + 1)


def large():
    x = _placeholder()
    return tf.reduce_sum(tf.tile(x, [1, 400]), 0), tf.reduce_sum(x), tf.reduce_sum(x * x)


def means_of_own_rows():
    """What is weighted by rows before its sum, and divided by them behind it; and a sum that is not."""
    x = _placeholder()
    own = ops.own(x)
    return ops.join(tf.reduce_mean(own, 0), by="mean"), ops.join(tf.reduce_mean(own), by="mean"), tf.reduce_sum(x)


# Elements of the exchanged sums.
CASES = {
    metrics: [5], means_of_own_rows: [5], of_two_types: [2, 2], one_waits_for_rows: [1, 3], one_after_another: [1, 3],
    in_a_branch: [1, 1, 2], in_a_loop: [1, 2], after_a_loop: [3 + 2], large: [1200, 2]}


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_small_sums_travel_together(build):
    rng = np.random.default_rng(1)
    feeds = [{"x": rng.integers(-3, 4, (rows, FEATURES)) / 2} for rows in (7, 1, 12)]
    made = partitioning.check(build, feeds, runs_whole=True)
    assert sorted(int(np.prod(e.shape)) for e in made.report.exchanges) == sorted(CASES[build]), made.report
    assert len({e.site for e in made.report.exchanges}) == len(CASES[build])
    apart = partitioning.check(build, feeds, ranks=(3,))
    # The same bits: each element is summed as if it travelled alone.
    for together, alone in zip(made.on_ranks(feeds, 3), apart.on_ranks(feeds, 3)):
        for one, other in zip(together[0], alone[0], strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_what_is_fetched_apart_travels_apart():
    """Fetching one loss of a saved graph does not require the feeds of another."""
    assert len(partitioning.Partitioned(metrics).report.exchanges) == 4
