"""What rules write with: the nodes that replace one op.

Requires: an `Emitter`, which writes what nodes have in common. Ensures: nodes are below "poseidon/of/" and the op's
name, except the one that takes this name.

Tests: tests/graphs/test_partition_families.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import typing

import numpy as np
import numpy.typing as npt
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition.frames import Frame
from tf_poseidon.graph_passes.partition.frames import Place
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM

# The prefix of the names of nodes that the one-process graph does not have.
PREFIX = "poseidon"
HOST = "/device:CPU:0"
_INT64 = types_pb2.DT_INT64


class Emitter(typing.Protocol):
    """What writes the partitioned graph, `emit.graph_writer.GraphWriter`, as rules need it."""

    @property
    def nodes(self) -> list[node_def_pb2.NodeDef]:
        """The NodeDefs so far."""

    def dtype_of(self, tensor: str) -> int:
        """Returns the `types_pb2.DataType` of a tensor of the one-process graph."""

    def part(self, place: Place) -> tuple[str, str, str]:
        """Returns the outputs of PoseidonPart at a place: (part, contributes, is first)."""

    def numbers_of_rows(self, place: Place, dtype: int) -> list[str]:
        """Returns the number of rows in one process, and of this rank, as scalars of a type."""

    def reduced(self, value: str, state: Partial, dtype: int, prefix: str, place: Place, name: str,
                shape: graph_lib.Shape | None = None) -> str:
        """Sums the summands of all ranks, or reduces them otherwise."""

    def taken_from_one(self, value: str, dtype: int, prefix: str, frame: Frame, name: str) -> str:
        """Gives every rank the value of rank 0."""

    def of_all_ranks(self, value: str, dtype: int, prefix: str, frame: Frame, name: str) -> str:
        """Gives every rank the rows of all ranks, in rank order."""

    def own_rows_of_sum(self, value: str, dtype: int, prefix: str, place: Place, name: str) -> str:
        """Sums summands of all ranks that have all rows, of which each rank gets its own."""


class NodeWriter:
    """Writes the nodes that replace one op.

    Attributes:
        node: Its NodeDef in the one-process graph.
        inputs: Its inputs, in the states that it takes.
        states: These states.
    """

    def __init__(self, emitter: Emitter, node: node_def_pb2.NodeDef, inputs: Sequence[str],
                 states: Sequence[State], controls: Sequence[str], place: Place) -> None:
        self.node = node
        self.inputs = inputs
        self.states = states
        self._controls = controls
        self._place = place
        self._emitter = emitter
        # The graph may have nodes below this one's name.
        self._writer = graph_lib.Writer(f"{PREFIX}/of/{node.name}", node.device)
        self._writer.nodes = emitter.nodes

    def add(self, suffix: str, op: str, inputs: Iterable[str], **attributes: graph_lib.Attribute) -> str:
        """Adds a node, see `indexed_graph.Writer.add`; without a suffix, it has the name of the op."""
        name = self._writer.add(suffix, op, [*inputs, *self._controls], **attributes)
        if suffix:
            return name
        self._emitter.nodes[-1].name = self.node.name
        return self.node.name

    def constant(self, suffix: str, value: npt.ArrayLike, beside: str) -> str:
        """Adds a Const, see `indexed_graph.Writer.constant`."""
        return self._writer.constant(suffix, value, beside)

    def type_of_input(self, i: int) -> int:
        """Returns the `types_pb2.DataType` of an input."""
        return self._emitter.dtype_of(graph_lib.data_inputs(self.node)[i])

    def same(self, suffix: str, inputs: Sequence[str] | None = None) -> str:
        """Adds the op itself, perhaps with other inputs, and returns its first output."""
        copy = node_def_pb2.NodeDef()
        copy.CopyFrom(self.node)
        copy.name = f"{PREFIX}/of/{self.node.name}/{suffix}"
        copy.input[:] = [*(self.inputs if inputs is None else inputs), *self._controls]
        self._emitter.nodes.append(copy)
        return copy.name

    def numbers_of_rows(self, dtype: int) -> list[str]:
        """Returns the number of rows in one process, and of this rank, as scalars of a type."""
        return self._emitter.numbers_of_rows(self._place, dtype)

    def shape_of(self, tensor: str) -> str:
        """Returns the shape, [rank] of int64, of this rank's part of a tensor of this op."""
        dtype = self.node.attr["T"].type
        return self.add(f"shape_of_{graph_lib.node_of(tensor).rpartition('/')[2]}", "Shape", [tensor], T=dtype,
                        out_type=_INT64)

    def global_shape(self, i: int, out_type: int = _INT64, is_size: bool = False) -> str:
        """Returns the one-process shape, or number of elements, of an input with rows."""
        state = self.states[i]
        assert isinstance(state, Rows)
        local = self.add(f"of{i}/local", "Size" if is_size else "Shape", [self.inputs[i]], T=self.type_of_input(i),
                         out_type=out_type)
        return self.made_global(local, 0 if is_size else state.dimension, out_type, f"of{i}")

    def made_global(self, shape: str, dimension: int, dtype: int, suffix: str = "") -> str:
        """Returns the one-process shape, given that of this rank's rows."""
        with self._writer.placed(HOST):
            return self.add(suffix, "PoseidonGlobalShape", [shape, self._emitter.part(self._place)[0]], Tshape=dtype,
                            dimension=dimension)

    def made_local(self, shape: str, dimension: int, dtype: int, suffix: str) -> str:
        """Returns a shape with an element, a size or a position, that becomes that of this rank's rows."""
        with self._writer.placed(HOST):
            return self.add(suffix, "PoseidonLocalShape", [shape, self._emitter.part(self._place)[0]], Tshape=dtype,
                            dimension=dimension)

    def made_whole(self, tensor: str, state: Partial, dtype: int | None = None) -> str:
        """Returns the one-process value of a summand that was made for this op, and has its output's shape.

        Args:
            tensor: The summand.
            state: Its state.
            dtype: Its `types_pb2.DataType`, None for that of the output.
        """
        return self._emitter.reduced(tensor, state, dtype or self.node.attr["T"].type, f"{PREFIX}/{tensor}",
                                     self._place, self.node.name)

    def added_up(self, suffix: str, tensor: str, dtype: int, shape: graph_lib.Shape, state: Partial = SUM) -> str:
        """Returns the sum over the ranks of a summand that was made for this op, and has a known shape."""
        return self._emitter.reduced(tensor, state, dtype, f"{PREFIX}/{tensor}", self._place,
                                     f"{self.node.name}/{suffix}", shape)

    def column_range(self, columns: int, beside: str) -> tuple[str, str]:
        """Returns (the first, the number) of the rank's columns of all, scalars of int64."""
        return column_range(self._writer, columns, beside)

    def of_all_ranks(self, suffix: str, tensor: str, dtype: int) -> str:
        """Returns what all ranks have of a tensor that was made for this op, with a dimension of ranks before."""
        axis = self.constant(f"{suffix}/axis", np.array(0, np.int32), tensor)
        row = self.add(f"{suffix}/row", "ExpandDims", [tensor, axis], T=dtype, Tdim=types_pb2.DT_INT32)
        return self.rows_of_all_ranks(suffix, row, dtype)

    def rows_of_all_ranks(self, suffix: str, tensor: str, dtype: int) -> str:
        """Returns what all ranks have of a tensor that was made for this op, one after the other."""
        return self._emitter.of_all_ranks(tensor, dtype, f"{PREFIX}/of/{self.node.name}/{suffix}", self._place.frame,
                                          f"{self.node.name}/{suffix}")

    def own_rows_of_sum(self, tensor: str) -> str:
        """Returns this rank's rows of a sum, of whose summands, made for this op, all ranks have all rows."""
        dtype = tensors.types_of_outputs(self.node)[0]
        return self._emitter.own_rows_of_sum(tensor, dtype, f"{PREFIX}/{tensor}", self._place, self.node.name)

    def of_one_rank(self, node: str) -> list[str]:
        """Returns rank 0's outputs of a node that was made for this op, and has the same outputs."""
        name = self.node.name
        return [self._emitter.taken_from_one(
            tensors.tensor_of(node, i), dtype, f"{PREFIX}/of/{name}/output{i}" if i else name, self._place.frame,
            tensors.tensor_of(name, i)) for i, dtype in enumerate(tensors.types_of_outputs(self.node))]


def column_range(writer: graph_lib.Writer, columns: int, beside: str) -> tuple[str, str]:
    """Writes which columns the rank owns; returns (the first, how many), scalars of int64, in the loop of `beside`."""
    suffix = f"columns_of_{graph_lib.node_of(beside).rpartition('/')[2]}_{len(writer.nodes)}"
    with writer.placed(HOST):
        begin = writer.add(suffix, "PoseidonColumnRange", [f"^{graph_lib.node_of(beside)}"], columns=columns)
    return begin, f"{begin}:1"
