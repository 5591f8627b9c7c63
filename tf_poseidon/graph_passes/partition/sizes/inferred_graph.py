"""The shapes and integers of a graph for one number of rows, or for any.

Tests: tests/graphs/test_sizes.py.
"""

from collections.abc import Collection
import math

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import inference
from tf_poseidon.graph_passes.partition.containers import resource_stores as stores_lib
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.sizes import op_values
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes.poseidon_rows import ROWS

# Values with more elements are not followed.
_MAX_ELEMENTS = 256
INTEGERS = (types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_BOOL)
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
# The input that is the shape of the output, by op.
_SHAPED = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0}
_PASS_ON = ("Identity", "StopGradient", "Switch", "Snapshot", "PreventGradient")
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
# Ops that may return large outputs for small inputs.
_ENLARGING = ("Fill", "Range", "Tile", "BroadcastTo", "OneHot")
# Ops whose outputs may depend on more than the values of their inputs, or on which input arrives first.
_UNKNOWN = ("Merge", "NextIteration", "Exit", "Placeholder", "PlaceholderWithDefault", "_Arg", ROWS)


class InferredGraph:
    """The shapes and values of a graph for one number of rows, or for any."""

    def __init__(self, graph: graph_lib.Graph, rows_nodes: Collection[str] = ()) -> None:
        self.graph = graph
        self.rows_nodes = rows_nodes  # names of the PoseidonRows that placeholders replace
        self._values: dict[str, dict[int, np.ndarray] | None] = {}
        self._lists: lists_lib.Lists | None = None
        self._stores: stores_lib.Stores | None = None

    def _stands_for(self, tensor: str) -> str:
        """Returns the tensor of this graph with the shape and value of a tensor of the original graph."""
        name = graph_lib.node_of(tensor)
        if name in self.rows_nodes:
            return poseidon_rows.placeholder(name, graph_lib.output_of(tensor))
        element = element_node(name)
        if element in self.graph.nodes and lists_lib.taken(self.graph.nodes[name]) == tensor:
            return element
        return tensor

    def static(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape that TensorFlow infers for a tensor of the original graph."""
        return self.graph.shape(self._stands_for(tensor))

    def shape(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape of a tensor of the original graph: a tuple with None, or None."""
        tensor = self._stands_for(tensor)
        shape = self.graph.shape(tensor)
        return self._followed(tensor) or shape if shape is None or None in shape else shape

    def _followed(self, tensor: str) -> graph_lib.Shape | None:
        """Returns a shape that follows from integers that TensorFlow does not evaluate; None if unknown."""
        node = self.graph.node(tensor)
        inputs = self.graph.inputs(node)
        if node.op == "TensorListElementShape":
            return self._shape_of_element_shape(inputs[0])
        if node.op == "DenseBincount":
            shape, size = self.shape(inputs[0]), self.value(inputs[1])
            return shape and (*shape[:-1], None if size is None else int(size))
        if node.op in _REDUCTIONS:
            shape, axes = self.shape(inputs[0]), self.value(inputs[1])
            if shape is None or axes is None:
                return None
            reduced = {int(axis) % len(shape) for axis in axes.flatten()} if shape else set()
            return tuple(1 if d in reduced else size for d, size in enumerate(shape)
                         if d not in reduced or node.attr["keep_dims"].b)
        if node.op == "Transpose":
            shape, order = self.shape(inputs[0]), self.value(inputs[1])
            return None if shape is None or order is None else tuple(shape[int(axis)] for axis in order)
        if node.op in _SHAPED:
            sizes = self.value(inputs[_SHAPED[node.op]])
            if sizes is not None and sizes.ndim == 1 and min(sizes, default=0) >= 0:
                return tuple(map(int, sizes))
        return None

    def _shape_of_element_shape(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape of the shape of a list's elements, which was given where the list was made."""
        if self._lists is None:
            self._lists = lists_lib.Lists(self.graph)
        shapes = {self.shape(self.graph.inputs(node)[lists_lib.MAKES[node.op]]) if node.op in lists_lib.MAKES else None
                  for node in map(self.graph.node, self._lists.origins(tensor))}
        return shapes.pop() if len(shapes) == 1 else None

    def _size_of_array(self, node: node_def_pb2.NodeDef) -> str | None:
        """Returns the tensor with the size of a TensorArray, None if the array may grow."""
        if self._stores is None:
            self._stores = stores_lib.Stores(self.graph)
        return self._stores.size(node.name)

    def value(self, tensor: str) -> np.ndarray | None:
        """Returns the value of an integer tensor of the original graph, None if unknown."""
        tensor = self._stands_for(tensor)
        stack = [graph_lib.node_of(tensor)]
        while stack:  # depth-first without recursion: expressions can be deep
            node = self.graph.nodes[stack[-1]]
            missing = [] if node.name in self._values else [
                name for name in map(graph_lib.node_of, self._operands(node)) if name not in self._values]
            if missing:
                stack += missing
                continue
            stack.pop()
            if node.name not in self._values:
                self._values[node.name] = self._evaluate(node)
        return self._known(tensor)

    def _operands(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the inputs whose values determine the value of a node."""
        inputs = self.graph.inputs(node)
        if node.op in _UNKNOWN or node.op in _SHAPES or node.op == "Const":
            return []
        if node.op == "Enter":
            return inputs if node.attr["is_constant"].b else []
        if node.op in _PASS_ON:
            return inputs[:1]
        if node.op == stores_lib.SIZE:
            size = self._size_of_array(node)
            return [] if size is None else [size]
        return inputs if self._is_small_integer(node) else []

    def _is_small_integer(self, node: node_def_pb2.NodeDef) -> bool:
        op = tf_compat.op_def(node.op)
        if op is None or op.is_stateful or not op.output_arg or not self.graph.inputs(node):
            return False
        if any(op_values.type_of(node, argument) not in INTEGERS for argument in (*op.input_arg, *op.output_arg)):
            return False
        if node.op not in _ENLARGING:
            return True
        shape = self.graph.shape(node.name)
        return graph_lib.is_known(shape) and math.prod(shape) <= _MAX_ELEMENTS

    def _evaluate(self, node: node_def_pb2.NodeDef) -> dict[int, np.ndarray] | None:
        """Returns the known outputs of a node as arrays, by number; None if there are none."""
        if node.op == "Const":
            if node.attr["dtype"].type not in INTEGERS:
                return None
            value = self.graph.constant(node.name)
            return {0: value} if value is not None and value.size <= _MAX_ELEMENTS else None
        inputs = self.graph.inputs(node)
        if node.op in _SHAPES:
            return {i: value for i, tensor in enumerate(inputs)
                    if (value := self._of_shape(node.op, tensor)) is not None} or None
        operands = self._operands(node)
        values = [value for tensor in operands if (value := self._known(tensor)) is not None]
        if not operands or len(values) < len(operands):
            return None
        if node.op in (*_PASS_ON, stores_lib.SIZE, "Enter"):
            return dict.fromkeys((0, 1), values[0])
        if node.op in _REDUCTIONS and not values[0].ndim and values[1].size:
            return None  # TensorFlow would log an error
        outputs = op_values.execute(node, values)
        return None if outputs is None else dict(enumerate(outputs))

    def _known(self, tensor: str) -> np.ndarray | None:
        outputs = self._values[graph_lib.node_of(tensor)]
        return None if outputs is None else outputs.get(graph_lib.output_of(tensor))

    def _of_shape(self, op: str, tensor: str) -> np.ndarray | None:
        shape = self.shape(tensor)
        if shape is None:
            return None
        if op == "Rank":
            return np.array(len(shape))
        if not graph_lib.is_known(shape):
            return None
        return np.array(math.prod(shape) if op == "Size" else shape, np.int64)


def element_node(name: str) -> str:
    """Returns the name of the node with the shape or value of an element that a node takes from a list."""
    return f"poseidon/elements/{name}"


def inferred(graph_def: graph_pb2.GraphDef, infer: inference.Inference) -> graph_lib.Graph:
    """Returns the `Graph` of a GraphDef, with the shapes that TensorFlow infers."""
    return graph_lib.Graph(graph_def, infer(graph_def))
