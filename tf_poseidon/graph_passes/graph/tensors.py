"""Names and types of tensors.

Tests: tests/graphs/test_partition.py.
"""

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import op_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib


def tensor_of(name: str, i: int) -> str:
    """Returns the name of an output of a node."""
    return f"{name}:{i}" if i else name


def canonical(tensor: str) -> str:
    """Returns the name of a tensor without ":0"."""
    return tensor.removesuffix(":0")


def num_outputs(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> int:
    """Returns the number of a node's outputs; for an unknown op, of those that are read."""
    op = tf_compat.op_def(node.op)
    if op is None:
        return 1 + max((graph_lib.output_of(tensor) for reader in graph.consumers(node.name)
                        for tensor in graph.inputs(reader) if graph_lib.node_of(tensor) == node.name), default=0)
    return len(types_of_outputs(node, op))


def types_of_outputs(node: node_def_pb2.NodeDef, op: op_def_pb2.OpDef | None = None) -> list[int]:
    """Returns the `types_pb2.DataType` of each output of a node of a known op."""
    op = op or tf_compat.op_def(node.op)
    assert op is not None
    types: list[int] = []
    for argument in op.output_arg:
        if argument.type_list_attr:
            types += node.attr[argument.type_list_attr].list.type
        else:
            count = node.attr[argument.number_attr].i if argument.number_attr else 1
            types += [argument.type or node.attr[argument.type_attr].type] * count
    return types


def dtype_of(node: node_def_pb2.NodeDef, output: int) -> int:
    """Returns the `types_pb2.DataType` of an output of a node; DT_INVALID if its op is unknown."""
    op = tf_compat.op_def(node.op)
    types = types_of_outputs(node, op) if op else []
    return types[output] if output < len(types) else types_pb2.DT_INVALID
