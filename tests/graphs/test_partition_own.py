"""Values that each rank computes from its own rows alone: on many ranks in this process, and part by part."""

import numpy as np
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.data import parts as parts_lib
from tf_poseidon.errors import PoseidonError

CHANNELS = 3
ROWS = (1, 2, 7, 12)


def normalised(x, scale, offset):
    """Returns rows that are normalised by the moments of all of them, and these moments."""
    mean = tf.reduce_mean(x, [0, 1])
    variance = tf.reduce_mean(tf.math.squared_difference(x, tf.stop_gradient(mean)), [0, 1])
    return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3), mean, variance


def masked(x, scale, offset):
    """Shapes and numbers of rows are local to the rank too, and so are non-linear functions of summands."""
    weights = tf.cast(x[:, :, :1] > 0, x.dtype)
    number = tf.reduce_sum(weights) + tf.cast(tf.shape(x)[0], x.dtype)
    mean = tf.reduce_sum(x * weights, [0, 1]) / number
    largest = tf.reduce_max(tf.abs(x), [0, 1])
    return tf.reshape((x - mean) / (largest + 1) * scale + offset, tf.shape(x)), mean, largest


def build(parts, form):
    """Makes a step in which each rank, or part, computes separately between layers; returns the tensors to compare.

    Args:
        parts: (begin, number of rows) of each part in a reference; None to leave that to ranks.
        form: What is computed.
    """
    x = tf.compat.v1.placeholder(tf.float64, (None, 2, CHANNELS), name="x")
    rows, = partitioning.rows(x) if parts is None else (x,)
    kernel, scale, offset = (tf.constant(value, tf.float64) for value in (
        np.linspace(-1, 1, 9).reshape(3, 3), [1., 2., -1.], [.5, 0., 2.]))
    h = tf.tanh(tf.tensordot(rows, kernel, 1))
    if parts is None:
        y, *moments = form(ops.own(h), ops.own(scale, joins="sum"), ops.own(offset, joins="sum"))
        y, moments = ops.join(y, "rows"), [ops.join(value, "mean") for value in moments]
    else:
        found = [form(h[begin:begin + count], scale, offset) for begin, count in parts if count]
        weights = [count / sum(count for _, count in parts) for _, count in parts if count]
        y = tf.concat([each[0] for each in found], 0)
        moments = [tf.add_n([weight * each[i] for weight, each in zip(weights, found)]) for i in (1, 2)]
    # In one process, the loss is that of all rows: ratios, too.
    loss = tf.reduce_sum(tf.square(y) * h) / (1 + tf.reduce_mean(tf.abs(y)))
    gradients = tf.gradients(loss, [kernel, scale, offset])
    # Of second order: a penalty of how long they are.
    penalty = tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])
    return [loss, *moments, *gradients, *tf.gradients(penalty, [kernel, scale])]


def reference(form, size, x):
    """Returns the results of one process for each part of a batch separately."""
    parts = [parts_lib.of_rank(len(x), rank, [1] * size) for rank in range(size)]
    with tf.Graph().as_default():
        results = build(parts, form)
        with tf.compat.v1.Session() as session:
            return session.run(results, {"x:0": x})


def test_concatenated_rows_that_become_own_are_contiguous():
    """Their parts are not: they would be gathered where a batch normalisation reads them."""
    def build():
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None, 2, CHANNELS), name="x"))
        z = tf.concat([x, -x], 0)
        y = ops.join(tf.tanh(ops.own(z)), "rows")
        return [tf.reduce_sum(y * z), *tf.gradients(tf.reduce_sum(y * z), [x])]

    made = partitioning.check(build, [{"x": np.random.default_rng(rows).normal(size=(rows, 2, CHANNELS))}
                                      for rows in ROWS])
    assert "ConcatV2" in {op.op for op in made.report.whole}, made.report


@pytest.mark.parametrize("form", [normalised, masked], ids=lambda form: form.__name__)
def test_each_rank_computes_of_its_own_rows(form):
    partitioned = partitioning.Partitioned(lambda: build(None, form))
    assert not partitioned.report.whole
    batches = [np.random.default_rng(rows).normal(size=(rows, 2, CHANNELS)) for rows in ROWS]
    for size in partitioning.RANKS:
        for x, found in zip(batches, partitioned.on_ranks([{"x": x} for x in batches], size)):
            expected = reference(form, size, x)
            for i, values in enumerate(zip(*found, strict=True)):
                for rank, value in enumerate(values):
                    np.testing.assert_array_equal(value, values[0], err_msg=f"rank {rank} of {size}, result {i}")
                np.testing.assert_allclose(values[0], expected[i], rtol=1e-10, atol=1e-10,
                                           err_msg=f"{size} ranks, {len(x)} rows, result {i}")


def test_alone_all_rows_are_its_own():
    partitioned = partitioning.Partitioned(lambda: build(None, normalised))
    x = np.random.default_rng(3).normal(size=(7, 2, CHANNELS))
    for value, expected in zip(*partitioned.alone([{"x": x}]), reference(normalised, 1, x), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_ranks_take_their_rows_of_what_is_whole():
    def step():
        rows, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None, 2, CHANNELS), name="x"))
        h = ops.own(tf.sort(rows, axis=0))  # every rank computes it
        return [ops.join(h - tf.reduce_mean(h, [0, 1]), "rows"), ops.join(tf.reduce_max(h, [0, 1]), "mean")]

    partitioned = partitioning.Partitioned(step)
    x = np.random.default_rng(3).normal(size=(7, 2, CHANNELS))
    for size in partitioning.RANKS:
        parts = np.array_split(np.sort(x, 0), size)
        rows = np.concatenate([part - part.mean((0, 1)) for part in parts])
        largest = sum(len(part) * part.max((0, 1)) for part in parts) / 7
        for found in partitioned.on_ranks([{"x": x}], size)[0]:
            np.testing.assert_allclose(found[0], rows, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(found[1], largest, rtol=1e-12)


@pytest.mark.parametrize("leak", [
    lambda own, rows: own + rows, lambda own, rows: tf.reduce_sum(own) + 1,
    lambda own, rows: tf.cond(tf.reduce_sum(own) > 0, lambda: rows, lambda: -rows),
    lambda own, rows: ops.join(ops.own(own), "rows")])
def test_what_does_not_leave_by_a_join_is_refused(leak):
    def step():
        rows, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None,), name="x"))
        return leak(tf.square(ops.own(rows)), rows)

    with pytest.raises(PoseidonError, match="is computed from each rank's own rows, expected to leave by a "
                                            "PoseidonJoin"):
        partitioning.Partitioned(step)


def test_rows_of_an_unknown_number_are_refused():
    def step():
        rows, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None,), name="x"))
        return ops.join(ops.own(tf.numpy_function(np.sort, [rows], tf.float64, name="sorted")), "rows")

    with pytest.raises(PoseidonError, match="'sorted' must be cut into the rows of each rank, but its number of rows"):
        partitioning.Partitioned(step)


def test_a_mean_over_ranks_has_no_gradient():
    with tf.Graph().as_default():
        x = tf.ones([2])
        with pytest.raises(LookupError, match="has no gradient; it is for variables"):
            tf.gradients(ops.join(ops.own(x), "mean"), x)
