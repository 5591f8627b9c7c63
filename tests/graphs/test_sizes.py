"""Sizes that follow from integers and lists where TensorFlow infers none; partitioned programs show most others."""

import numpy as np
import partition_cases
import partition_table
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.graph_passes.graph import inference
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.sizes import graph_sizes
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows

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
    (lambda x: tf.transpose(x[..., None], tf.stack([tf.reduce_max(tf.stack([tf.shape(x)[1], 3])) - 3, 2, 0])),
     [4, 1, "rows"]),
    (lambda x: element(x, lambda e: e + 1), ["rows", 4]), (lambda x: element(x, lambda e: x[:, 1:]), None),
    (lambda x: element(x, lambda e: tf.concat([e, x], 1)), None)])
def test_sizes(build, shape):
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.int32, [None, 4], name="x"))
        name = build(x).name
    sizes = graph_sizes.Sizes(inline.inline(graph.as_graph_def(), [name]), grappler.add_shapes)
    found = sizes.shape(name)
    assert shape == (None if found is None else [
        None if size is None else "rows" if size.per_row == 1 else size.constant for size in found])


_CASES_OF_A_GRAPH = 100


@pytest.mark.parametrize("first", range(0, len(partition_cases.CASES), _CASES_OF_A_GRAPH))
def test_what_is_inferred_again_is_as_in_the_whole_graph(first):
    graph = partition_table.Batch(partition_cases.CASES[first:first + _CASES_OF_A_GRAPH]).sizes.graph
    with_rows = poseidon_rows.with_rows(poseidon_rows.with_placeholders(graph), graph, 5, 3)
    inferring = inference.Inference(graph, grappler.add_shapes)
    found = inferring(with_rows)
    assert {name: list(found[name]) for name in found} == {
        name: list(shapes) for name, shapes in grappler.add_shapes(with_rows, alone=True).items()}


def _through_fractions(x):
    return tf.zeros([tf.cast(tf.cast(tf.shape(x)[0], tf.float32) * 2.0, tf.int32), 3])


@pytest.mark.parametrize("build, number", [(_through_fractions, [10, 3])])
def test_sizes_that_are_computed_from_the_number_are_inferred_again(build, number):
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.float32, [None, 4], name="x"))
        name = build(x).op.name
    graph = graph_sizes.Sizes(inline.inline(graph.as_graph_def(), [name]), grappler.add_shapes).graph
    with_rows = poseidon_rows.with_rows(poseidon_rows.with_placeholders(graph), graph, 5, None)
    assert list(inference.Inference(graph, grappler.add_shapes)(with_rows)[name][0]) == number


def test_what_cannot_change_is_not_inferred_again():
    """Neither the gradients of weights, nor what is computed from them."""
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.float32, [None, 4], name="x"))
        w = tf.constant(np.ones((4, 3), np.float32))
        name = (w - 0.1 * tf.clip_by_norm(tf.gradients(tf.nn.relu(x @ w), w)[0], 1.0)).name
    numbers = []

    def add_shapes(graph_def, alone=False):
        numbers.append(len(graph_def.node))
        return grappler.add_shapes(graph_def, alone)

    graph_sizes.Sizes(inline.inline(graph.as_graph_def(), [name]), add_shapes)
    assert len(numbers) > 3 and max(numbers[1:]) < numbers[0] / 2
