"""Gradients of tables of which a batch uses few rows: the cheaper form travels."""

import numpy as np
import partitioning
import pytest
import tensorflow as tf

v1 = tf.compat.v1
_WIDTH = 3


def _summed(size):
    """Returns two dense tensors made from the slices of a table's gradient, as Keras' optimizers do."""
    x, = partitioning.rows(v1.placeholder(tf.float64, (None, 2, _WIDTH), "x"))
    ids = tf.cast(tf.abs(x[..., 0]) * 10, tf.int32) % size
    values = tf.reshape(tf.tanh(x @ tf.ones((_WIDTH, _WIDTH), tf.float64)), (-1, _WIDTH))
    ids = tf.reshape(ids, (-1,))
    return [tf.math.unsorted_segment_sum(values, ids, size), tf.math.unsorted_segment_sum(values * values, ids, size)]


@pytest.mark.parametrize("size, usual_rows, kinds", [
    (1000, 16, ["rows"]),  # 2 * 16 rows of a table of 1,000; their squares are made of them
    (10, 16, ["sum", "sum"]),
    (16, 16, ["sum", "sum"]), (17, 16, ["rows"]),  # a row travels once, a sum to a server and back
    (1000, None, ["sum", "sum"]),
])
def test_what_is_cheaper_travels(size, usual_rows, kinds):
    made = partitioning.Partitioned(lambda: _summed(size), rows=usual_rows)
    assert [exchange.kind for exchange in made.report.exchanges] == kinds
    assert not made.report.whole


def test_few_rows_of_a_large_table_are_those_of_one_process():
    feeds = [{"x": np.random.default_rng(rows).normal(size=(rows, 2, _WIDTH))} for rows in (7, 1, 2)]
    partitioning.check(lambda: _summed(1000), feeds, rows=16)
