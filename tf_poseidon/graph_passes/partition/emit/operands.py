"""Operands that are shapes or integers: those of a rank's rows in place of those of one process, and checks of values.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_golden.py.
"""

from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.graph.tensors import canonical
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.emit.conversions import Conversions
from tf_poseidon.graph_passes.partition.emit.row_parts import RowParts
from tf_poseidon.graph_passes.partition.emit.written_graph import WrittenGraph
from tf_poseidon.graph_passes.partition.node_writer import HOST
from tf_poseidon.graph_passes.partition.node_writer import PREFIX
from tf_poseidon.graph_passes.partition.states import Rows

# Ops whose second input determines the order or the number of dimensions.
ARRANGED = frozenset(("Transpose", "Sum", "Mean", "Max", "Min", "Prod"))
_INT64 = types_pb2.DT_INT64


class Operands:
    """Writes the operands of nodes that run on a rank's rows."""

    def __init__(self, written: WrittenGraph, parts: RowParts, conversions: Conversions) -> None:
        """Makes none yet.

        Args:
            written: The graph in which they are written.
            parts: Which rows ranks have in it.
            conversions: Its tensors in other states.
        """
        self._written = written
        self._sizes = written.sizes
        self._graph = written.original
        self._parts = parts
        self._conversions = conversions

    def known(self, node: node_def_pb2.NodeDef, tensor: str, original: str) -> str:
        """Returns an operand as a constant if its value is known, so that TensorFlow can infer the output's shape."""
        value = None if self._graph.node(original).op == "Const" else self._sizes.constant(canonical(original))
        if value is None:
            return tensor
        dtype = self._written.dtype_of(original)
        return self._written.writer(f"{PREFIX}/{node.name}/operand", HOST).constant(
            "", value.astype(tf.as_dtype(dtype).as_numpy_dtype), tensor)

    def declare_rows(self, node: node_def_pb2.NodeDef, dimension: int, local: Mapping[int, int]) -> None:
        """Declares the size of a tensor for planning, if its shape is computed from the number of rows.

        Args:
            node: Its node.
            dimension: The dimension of its rows.
            local: The `Outcome.local` of the node.
        """
        inputs = self._graph.inputs(node)
        if self._is_known_reshape(node, dimension) or all(self._with_shape(inputs[i], d) for i, d in local.items()):
            return  # TensorFlow infers it
        shape = self._written.constant_shape(node.name)
        if shape is None or not self._written.elements_of_row(node.name, dimension):
            return  # for example a list of tensors, which has no dimensions
        value, prefix = node.name, f"{PREFIX}/{node.name}/rows"
        static = self._sizes.static(node.name) or (None,) * len(shape)
        if any(size is not None and size != inferred for size, inferred in zip(shape, static)):
            value = self._written.writer(prefix, node.device).add(
                "shaped", "EnsureShape", [value], T=tensors.dtype_of(node, 0), shape=shape)
        self._written.renamed[node.name] = self._written.declared(value, node.name, dimension, prefix, node.device)

    def local_shape(self, node: node_def_pb2.NodeDef, tensor: str, original: str, i: int, dimension: int,
                    place: frames_lib.Place) -> str:
        """Returns a shape in which a dimension has the size of this rank's rows."""
        prefix = f"{PREFIX}/{node.name}/local{i}"
        dtype = self._written.dtype_of(original)
        if (rows := self._with_shape(original, dimension)) is not None:
            return self._written.writer(prefix, "").add(
                "", "Shape", [self._conversions.tensor(rows, None)], out_type=dtype,
                T=self._graph.node(original).attr["T"].type)
        if self._is_known_reshape(node, dimension):
            # TensorFlow should still infer what it infers for any number of rows.
            static = self._sizes.static(node.name)
            assert static is not None
            sizes = np.array([-1 if d == dimension else size for d, size in enumerate(static)])
            return self._written.writer(prefix, "").constant(
                "", sizes.astype(np.int32 if dtype == types_pb2.DT_INT32 else np.int64), tensor)
        writer = self._written.writer(prefix, HOST)
        return writer.add("", "PoseidonLocalShape", [tensor, self._parts.part(place)[0]], Tshape=dtype,
                          dimension=dimension)

    def _with_shape(self, shape: str, dimension: int) -> str | None:
        """Returns a tensor with rows in a dimension whose shape another tensor is in one process; None if unknown."""
        node = self._graph.node(shape)
        if node.op not in ("Shape", "ShapeN"):
            return None
        tensor = self._graph.inputs(node)[graph_lib.output_of(shape)]
        return tensor if self._written.computed_state(tensor) == Rows(dimension) else None

    def _is_known_reshape(self, node: node_def_pb2.NodeDef, dimension: int) -> bool:
        """Whether a node is a Reshape for which TensorFlow infers all sizes except that of the rows."""
        static, many = self._sizes.static(node.name), self._sizes.shape(node.name)
        return node.op == "Reshape" and static is not None and many is not None and all(
            size and (many_size := many[d]) is not None and many_size.constant == size
            for d, size in enumerate(static) if d != dimension)

    def check(self, node: node_def_pb2.NodeDef, tensor: str, i: int, index: int, value: int) -> str:
        """Writes a check of the value of a part of an integer input; returns the control edge that waits for it."""
        dtype = self._written.dtype_of(self._graph.inputs(node)[i])
        numpy_type = tf.as_dtype(dtype).as_numpy_dtype
        writer = self._written.writer(f"{PREFIX}/{node.name}/check{i}", HOST)
        bounds = [writer.constant(name, np.array([bound], np.int32), tensor)
                  for name, bound in (("begin", index), ("end", index + 1), ("stride", 1))]
        part = writer.add("part", "StridedSlice", [tensor, *bounds], T=dtype, Index=types_pb2.DT_INT32, begin_mask=0,
                          end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
        flat = writer.add("flat", "Reshape", [part, writer.constant("any", np.array([-1], np.int32), tensor)], T=dtype,
                          Tshape=types_pb2.DT_INT32)
        equal = writer.add("equal", "Equal", [flat, writer.constant("value", np.array(value, numpy_type), tensor)],
                           T=dtype)
        axis = writer.constant("axis", np.array([0], np.int32), tensor)
        is_right = writer.add("all", "All", [equal, axis], Tidx=types_pb2.DT_INT32, keep_dims=False)
        text = writer.constant("text", (
            f"The {node.op} '{node.name}' changes the rows of a batch in a way that depends on how many there are; it "
            "cannot be partitioned for batches as small as this one."), tensor)
        writer.add("", "Assert", [is_right, text], T=[types_pb2.DT_STRING], summarize=3)
        return f"^{PREFIX}/{node.name}/check{i}"
