"""Which inputs of a saved step have rows, and what it cannot read from."""

import pytest
import tensorflow as tf

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.saved import inputs as inputs_lib

_FLOAT = tf.float32.as_datatype_enum


def decided(shapes, **given):
    """Returns the dimensions of the rows of inputs with these shapes, which are named a, b, …."""
    inputs = [inputs_lib.Input(name, name, _FLOAT, shape) for name, shape in zip("abc", shapes)]
    return [each.dimension for each in inputs_lib.decide(inputs, given)]


@pytest.mark.parametrize("shapes, given, dimensions", [
    ([(None, 3), (None,)], {}, [0, 0]), ([(None, 3), (8, 3), ()], {}, [0, None, None]),
    ([(8, 3), (8,), ()], {}, [0, 0, None]), ([(8, 3), (4,)], {"b": "rows"}, [None, 0]),
    ([(8, 3), (8,)], {"b": "same"}, [0, None]), ([(8, 3), (4, 8)], {"a:0": "rows", "b": 1}, [0, 1]),
    ([(1, 3), (None,)], {}, [None, 0]), ([(1, 3)], {"a": 0}, [0]), ([None, (None,)], {"a": 2}, [2, 0])])
def test_inputs_with_rows(shapes, given, dimensions):
    assert decided(shapes, **given) == dimensions


@pytest.mark.parametrize("shapes, given, message", [
    ([(8, 3), (4,)], {}, r"it has a \[8, 3\], b \[4\]\); say which have, as in --inputs x=rows"),
    ([(1, 3), (1,)], {}, r"No input of the step is known to have rows"),  # more likely one number than one row
    ([(8,)], {"a": "same"}, "No input of the step"), ([], {}, "it has no inputs"), ([None], {}, "a of any shape"),
    ([()], {"a": "rows"}, "Input 'a' has 0 dimensions, but is declared to have rows in dimension 0; declare"),
    ([(8,)], {"a": True}, "Input 'a' is declared as True, expected 'rows', 'same', or the number of a dimension.")])
def test_refused_inputs(shapes, given, message):
    with pytest.raises(GraphError, match=message):
        decided(shapes, **given)


@pytest.mark.parametrize("dtype, refusal", [
    (tf.float32, None), (tf.int64, None), (tf.bool, None), (tf.variant, "variants")])
def test_iterators_return_what_rank_0_can_send(dtype, refusal):
    with tf.Graph().as_default() as graph:
        handle = tf.compat.v1.placeholder(tf.resource, name="handle")
        tf.raw_ops.IteratorGetNext(iterator=handle, output_types=[dtype], output_shapes=[tf.TensorShape([None])],
                                   name="next")
    if refusal is None:
        read, = inputs_lib.of_main(graph.as_graph_def())
        assert (read.name, read.shape, read.is_read) == ("next", (None,), True)
    else:
        with pytest.raises(GraphError, match=f"Node 'next', a IteratorGetNext, returns {refusal}, which rank 0"):
            inputs_lib.of_main(graph.as_graph_def())
