"""Gradients of tables of which a batch uses few rows: the cheaper form travels."""

import numpy as np
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.graph_passes.partition import partition as partition_lib

v1 = tf.compat.v1
_WIDTH = 3


def _summed(size):
    """Returns two dense tensors made from the slices of a table's gradient, as Keras' optimizers do."""
    x, = partitioning.rows(v1.placeholder(tf.float64, (None, 2, _WIDTH), "x"))
    ids = tf.cast(tf.abs(x[..., 0]) * 10, tf.int32) % size
    values = tf.reshape(tf.tanh(x @ tf.ones((_WIDTH, _WIDTH), tf.float64)), (-1, _WIDTH))
    ids = tf.reshape(ids, (-1,))
    return [tf.math.unsorted_segment_sum(values, ids, size), tf.math.unsorted_segment_sum(values * values, ids, size)]


def _partitioned(size, usual_rows):
    """Returns a `partitioning.Partitioned` for batches that usually have so many rows."""
    made = partitioning.Partitioned(lambda: _summed(size))
    graph_def = made._graph.as_graph_def()
    made.partitioned = partition_lib.partition(graph_def, made._fetches, grappler.add_shapes, rows=usual_rows)
    made.report = made.partitioned.report
    return made


@pytest.mark.parametrize("size, usual_rows, kinds", [
    (1000, 16, ["rows"]),  # 2 * 16 rows of a table of 1,000; their squares are made of them
    (10, 16, ["sum", "sum"]),
    (16, 16, ["sum", "sum"]), (17, 16, ["rows"]),  # a row travels once, a sum to a server and back
    (1000, None, ["sum", "sum"]),
])
def test_what_is_cheaper_travels(size, usual_rows, kinds):
    made = _partitioned(size, usual_rows)
    assert [exchange.kind for exchange in made.report.exchanges] == kinds
    assert not made.report.whole


def test_few_rows_of_a_large_table_are_those_of_one_process():
    made = _partitioned(1000, 16)
    feeds = [{"x": np.random.default_rng(rows).normal(size=(rows, 2, _WIDTH))} for rows in (7, 1, 2)]
    all_expected = made.alone(feeds)
    for size in partitioning.RANKS:
        for results, expected in zip(made.on_ranks(feeds, size), all_expected):
            for values in results:
                for value, want in zip(values, expected):
                    np.testing.assert_allclose(value, want, rtol=1e-12, atol=1e-14)
