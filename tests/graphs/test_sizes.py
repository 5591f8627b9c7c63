"""Sizes that follow from integers and lists where TensorFlow infers none; partitioned programs show most others."""

import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.graph_passes.partition import inline
from tf_poseidon.graph_passes.partition import sizes as sizes_lib

raw = tf.raw_ops


def counts(x):
    """Returns [rows, 5] numbers; TensorFlow does not know how many, since it evaluates no maximum."""
    return raw.DenseBincount(input=x, size=tf.reduce_max(tf.stack([tf.shape(x)[1], 3])) + 1,
                             weights=tf.zeros([0], tf.float32), binary_output=False)


def put(items, i, value):
    return raw.TensorListSetItem(input_handle=items, index=i, item=value)


def taken(items, i=0):
    return raw.TensorListGetItem(input_handle=items, index=i, element_shape=-1, element_dtype=tf.int32)


def element(first, second):
    """Returns an element of a list of unknown shapes; the second is computed from the first."""
    items = put(raw.TensorListReserve(element_shape=-1, num_elements=2, element_dtype=tf.int32), 0, first)
    return taken(put(items, 1, second(taken(items))), 1)


@pytest.mark.parametrize("build, shape", [
    (counts, ["rows", 5]), (lambda x: tf.reduce_sum(counts(x), -1), ["rows"]),
    (lambda x: tf.reduce_sum(counts(x), 0), [5]), (lambda x: tf.reduce_sum(counts(x), []), ["rows", 5]),
    (lambda x: tf.zeros(tf.shape(tf.reduce_sum(counts(x), -1, keepdims=True))), ["rows", 1]),
    (lambda x: element(x, lambda e: e + 1), ["rows", 4]), (lambda x: element(x, lambda e: x[:, 1:]), None),
    (lambda x: element(x, lambda e: tf.concat([e, x], 1)), None)])
def test_sizes(build, shape):
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.int32, [None, 4], name="x"))
        name = build(x).name
    sizes = sizes_lib.Sizes(inline.inline(graph.as_graph_def(), [name]), grappler.add_shapes)
    found = sizes.shape(name)
    assert shape == (None if found is None else [
        None if size is None else "rows" if size.per_row == 1 else size.constant for size in found])
