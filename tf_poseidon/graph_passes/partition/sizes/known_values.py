"""Integers that are known become constants, so that TensorFlow can infer shapes from them.

Tests: tests/graphs/test_sizes.py.
"""

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import inference
from tf_poseidon.graph_passes.partition.sizes import inferred_graph
from tf_poseidon.graph_passes.partition.sizes import op_values
from tf_poseidon.graph_passes.partition.sizes.inferred_graph import InferredGraph

# The maximum depth to which elements of lists are followed into other lists.
_MAX_NESTING = 5


def with_values(generic: InferredGraph, infer: inference.Inference) -> InferredGraph:
    """Returns an `InferredGraph` whose known integers are constants, so that TensorFlow can infer shapes from them."""
    for _ in range(_MAX_NESTING):
        graph, values = generic.graph, {}
        unknown = [node for node in graph.graph_def.node if not graph_lib.is_known(graph.shape(node.name))]
        for node in unknown:
            for tensor in graph.inputs(node):
                if tensor not in values and graph.node(tensor).op != "Const":
                    dtype = _type_of_integers(graph.node(tensor), graph_lib.output_of(tensor))
                    value = None if dtype is None else generic.value(tensor)
                    if value is not None:
                        values[tensor] = value.astype(dtype)
        if not values or not any(_would_follow(generic, node) for node in unknown):
            break
        result = graph_pb2.GraphDef()
        result.CopyFrom(graph.graph_def)
        for node in result.node:
            for i, tensor in enumerate(node.input):
                if tensor in values:
                    node.input[i] = _valued(tensor)
        for tensor, value in values.items():
            writer = graph_lib.Writer(_valued(tensor))
            writer.constant("", value)
            result.node.extend(writer.nodes)
        generic = InferredGraph(inferred_graph.inferred(result, infer.of(graph)), generic.rows_nodes)
    return generic


def _would_follow(generic: InferredGraph, node: node_def_pb2.NodeDef) -> bool:
    """Whether a node has an unknown shape that may follow from values or shapes that only we know."""
    if graph_lib.is_known(generic.shape(node.name)) or generic.value(node.name) is not None:
        return False
    graph = generic.graph
    return any(generic.value(tensor) is not None or _is_better_known(graph.shape(tensor), generic.shape(tensor))
               for tensor in graph.inputs(node) if graph.node(tensor).op != "Const")


def _is_better_known(shape: graph_lib.Shape | None, other: graph_lib.Shape | None) -> bool:
    """Whether `other` is fully known and `shape` is not."""
    return not graph_lib.is_known(shape) and graph_lib.is_known(other)


def _type_of_integers(node: node_def_pb2.NodeDef, output: int) -> type[np.integer] | None:
    """Returns the NumPy type of an output, None if it is neither int32 nor int64."""
    op = tf_compat.op_def(node.op)
    if op is None or any(argument.number_attr or argument.type_list_attr for argument in op.output_arg):
        types = [node.attr["out_type"].type] * (output + 1) if node.op == "ShapeN" else []
    else:
        types = [op_values.type_of(node, argument) for argument in op.output_arg]
    if output >= len(types) or types[output] not in (types_pb2.DT_INT32, types_pb2.DT_INT64):
        return None
    return tf.as_dtype(types[output]).as_numpy_dtype


def _valued(tensor: str) -> str:
    """Returns the name of the constant that replaces a tensor with a known value."""
    return f"poseidon/value{graph_lib.output_of(tensor)}/{graph_lib.node_of(tensor)}"
