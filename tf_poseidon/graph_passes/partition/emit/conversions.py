"""Conversions of tensors from the state in which they are computed to those that ops take.

Ensures: nodes that convert a tensor are below "poseidon/" and the tensor's name, in the tensor's own loop.

| from | to | by |
|---|---|---|
| whole | rows | a slice |
| whole | partial | the value on rank 0, zeros elsewhere |
| partial | held | the summand, zeros on ranks without rows |
| partial | whole | `PoseidonSync`, whose site is then planned; other reductions by gathering |
| rows | whole | `PoseidonAllGather`; blocks of rows lie beside each other meanwhile |
| partial | shard | `PoseidonReduceScatter`; of a matrix that is divided, `PoseidonSync` and a copy |
| whole | shard | a copy of its elements |
| shard | whole | `PoseidonGatherShards` |
| whole | columns | a slice |
| columns | whole | `PoseidonAllGather` |
| columns, shard of the same | shard, columns | another shape |
| columns | held | with zeros in place of the columns of others |
| owned shard | owned | a Switch, whose other output is dead on the owner |
| owned | owned shard | a Merge with a vector that is empty, and dead on the owner |

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_golden.py.
"""

import collections
import math

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.graph.tensors import canonical
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import is_inexact
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.emit.graph_exchanges import GraphExchanges
from tf_poseidon.graph_passes.partition.emit.row_parts import RowParts
from tf_poseidon.graph_passes.partition.emit.written_graph import joined
from tf_poseidon.graph_passes.partition.emit.written_graph import split
from tf_poseidon.graph_passes.partition.emit.written_graph import WrittenGraph
from tf_poseidon.graph_passes.partition.node_writer import column_range
from tf_poseidon.graph_passes.partition.node_writer import Emitter
from tf_poseidon.graph_passes.partition.node_writer import HOST
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.node_writer import PREFIX
from tf_poseidon.graph_passes.partition.propagate import own_values as own_lib
from tf_poseidon.graph_passes.partition.rules import columns
from tf_poseidon.graph_passes.partition.rules import elementwise
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import IDEMPOTENT
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

# Ops with little arithmetic per element: faster to repeat than to gather.
_LITTLE = frozenset((
    *elementwise.UNARY, *elementwise.BINARY, "Add", "AddV2", "Sub", "Mul", "RealDiv", "Neg", "Identity", "StopGradient",
    "Cast", "Select", "SelectV2", "ZerosLike", "OnesLike", "Reshape", "ExpandDims", "Squeeze", "Transpose", "Pack",
    "Unpack", "ConcatV2", "Split", "SplitV", "Slice", "StridedSlice", "BroadcastTo", "Tile", "Pad", "OneHot",
    "GatherV2", "ReverseV2", "Switch"))


class Conversions:
    """The tensors of one graph in other states than that in which they are computed."""

    def __init__(self, written: WrittenGraph, parts: RowParts, exchanges: GraphExchanges, emitter: Emitter) -> None:
        """Makes none yet.

        Args:
            written: The graph in which they are written.
            parts: Which rows ranks have in it.
            exchanges: What ranks exchange in it.
            emitter: What writes for rules.
        """
        self._emitter = emitter
        self._elements_of_columns: dict[tuple[str, Columns], float] = {}  # that are exchanged to compute them again
        self._written = written
        self._sizes = written.sizes
        self._graph = written.original
        self._propagated = written.propagated
        self._parts = parts
        self._exchanges = exchanges
        self._converted: dict[tuple[str, State] | tuple[str, State, str | None], str] = {}  # by (tensor, state)
        self._available: dict[str, bool] = {}  # by tensor: whether it is available whole without an exchange
        # Tensors that some op needs whole: gathered anyway, or available.
        self._asked_for = {canonical(tensor) for name, outcome in written.propagated.outcomes.items()
                           for tensor, takes in zip(self._graph.inputs(self._graph.nodes[name]), outcome.takes)
                           if takes == WHOLE and isinstance(written.computed_state(tensor), Rows)}
        self._copies: dict[str, str] = {}  # by node: the node that computes it again, whole
        self._layouts = collections.Counter[tuple[str, type]]()  # by tensor and kind of state: how many it is taken in
        self._entrances: dict[tuple[str, Owned], str] = {}  # by tensor and the state it is converted to: the Switch

    def set_whole(self, tensor: str, name: str) -> None:
        """Notes the name of a tensor's whole value."""
        self._converted[tensor, WHOLE] = name

    def tensor(self, tensor: str, state: State | None, rows_node: str | None = None) -> str:
        """Returns the name of a tensor in a state.

        Args:
            tensor: Its name in the one-process graph.
            state: The state; None for that in which it is computed.
            rows_node: The `Place.rows_node` of its reader, which decides about the rows of a whole tensor.
        """
        name = canonical(tensor)
        native = self._written.computed_state(name)
        if state is None or state == native:
            return self._written.renamed.get(name, name)
        key = (name, state) if state in (WHOLE, HELD) or isinstance(state, (Shard, Owned, Columns)) else (
            name, state, rows_node)
        if key not in self._converted:
            self._converted[key] = self._convert(name, native, state, rows_node)
        return self._converted[key]

    def _convert(self, name: str, native: State, state: State, rows_node: str | None) -> str:
        if native == OWN:
            raise own_lib.refusal(name)
        node = self._graph.node(name)
        dtype = tensors.dtype_of(node, graph_lib.output_of(name))
        place = self._written.places[node.name]
        prefix = f"{PREFIX}/{name.replace(':', '_output')}"
        if isinstance(state, (Shard, Owned)):
            number = self._layouts[name, type(state)]
            self._layouts[name, type(state)] += 1
            prefix = f"{prefix}/layout{number}" if number else prefix
        value = self._written.renamed.get(name, name)
        if isinstance(state, Owned):
            return self._entered(name, state, dtype, prefix)
        if isinstance(state, Columns) and not columns.is_divided(native):
            again = self._columns_again(name, state, prefix, place)
            if again is not None:
                return again
        if isinstance(state, Columns) and isinstance(native, Shard) and native.divided == state.dimension:
            return self._shaped(value, name, state, dtype, f"{prefix}/columns{state.dimension}")
        if isinstance(state, Shard) and isinstance(native, Columns) and native.dimension == state.divided:
            writer = self._written.writer(f"{prefix}/shard", self._written.device_of(value))
            flat = writer.constant("flat", np.array([-1], np.int32), value)
            return writer.add("", "Reshape", [value, flat], T=dtype, Tshape=types_pb2.DT_INT32)
        if state == HELD and isinstance(native, Columns):
            return self._between_zeros(value, name, native, dtype, f"{prefix}/held")
        if isinstance(native, Owned):
            if state == native.shard:
                return self._left(value, name, native, dtype, prefix)
            value, native = self.tensor(name, native.shard), native.shard
        if state == HELD and native == SUM:
            return self._selected(value, self._parts.part(place)[1], dtype, f"{prefix}/held")
        if (isinstance(state, Shard) and isinstance(native, Partial)
                and self._exchanges.can_scatter(native, state, dtype)):
            return self._exchanges.scattered(value, native, state, dtype, prefix, place, name)
        if state != WHOLE:
            whole = value if native == WHOLE else self.tensor(name, WHOLE)
            if state == HELD:  # from exactly one rank, whichever rows it is added to
                return self._selected(whole, self._parts.part(place)[2], dtype, f"{prefix}/held")
            if isinstance(state, Shard):
                writer = self._written.writer(f"{prefix}/shard", self._written.device_of(value))
                return writer.add("", "PoseidonShard", [whole], T=dtype, **self._written.division(state).attributes)
            if isinstance(state, Columns):
                shape = self._written.constant_shape(name)
                assert shape is not None  # otherwise it is not divided
                size = shape[state.dimension]
                assert size is not None
                return self._exchanges.columns_of(whole, len(shape), state.dimension, size, dtype,
                                                  f"{prefix}/columns{state.dimension}")
            if len(self._written.rows_nodes) > 1:
                prefix = f"{prefix}/for/{rows_node}"
            return self._from_whole(whole, name, state, dtype, prefix, frames_lib.Place(place.frame, rows_node))
        if isinstance(native, Rows):
            if self.is_available(name):
                return self._again(name)
            return self._exchanges.gathered(value, native, dtype, prefix, place, name)
        if isinstance(native, Columns):
            return self._exchanges.gathered_columns(value, native, dtype, prefix, place, name)
        if isinstance(native, Shard):
            return self._exchanges.joined_shards(value, native, dtype, prefix, place, name)
        assert isinstance(native, Partial)
        return self._exchanges.reduced(value, native, dtype, prefix, place, name)

    def _entered(self, name: str, state: Owned, dtype: int, prefix: str) -> str:
        """Returns a tensor in its own shape on the owner of a layout, dead on other ranks."""
        shard = self.tensor(name, state.shard)
        host = self._written.writer(f"{prefix}/owner", HOST)
        size = host.add("size", "PoseidonShardSize", [f"^{graph_lib.node_of(shard)}"], elements=1,
                        **self._written.division(state.shard).attributes)
        is_owner = host.add("", "Cast", [size], SrcT=types_pb2.DT_INT64, DstT=types_pb2.DT_BOOL)
        writer = self._written.writer(f"{prefix}/owned", self._written.device_of(shard))
        entrance = self._entrances[name, state] = writer.add("enter", "Switch", [shard, is_owner], T=dtype)
        shape = writer.constant("shape", np.array(self._written.constant_shape(name), np.int32), shard)
        return writer.add("", "Reshape", [f"{entrance}:1", shape], T=dtype, Tshape=types_pb2.DT_INT32)

    def _left(self, value: str, name: str, state: Owned, dtype: int, prefix: str) -> str:
        """Returns the shard of an owned tensor, which is live on all ranks: empty but on the owner."""
        entered = name  # of what has entered and leads to it, in the same branch and loop
        while (entered, state) not in self._entrances:
            node = self._graph.node(entered)
            entered = next(canonical(tensor) for tensor, takes in zip(
                self._graph.inputs(node), self._propagated.outcomes[node.name].takes) if takes == state)
        writer = self._written.writer(f"{prefix}/shard", self._written.device_of(value))
        any_size = writer.constant("any", np.array([-1], np.int32), value)
        flat = writer.add("flat", "Reshape", [value, any_size], T=dtype, Tshape=types_pb2.DT_INT32)
        elsewhere = writer.add("elsewhere", "Identity", [self._entrances[entered, state]],
                               T=self._written.dtype_of(entered))
        nothing = writer.constant("nothing", np.zeros(0, tf.as_dtype(dtype).as_numpy_dtype), elsewhere)
        return writer.add("", "Merge", [flat, nothing], T=dtype, N=2)

    def _between_zeros(self, value: str, name: str, state: Columns, dtype: int, prefix: str) -> str:
        """Returns the rank's columns, with zeros in place of those of other ranks."""
        shape = self._written.constant_shape(name)
        assert shape is not None and (size := shape[state.dimension]) is not None  # otherwise it is not divided
        writer, rank = self._written.writer(prefix, HOST), len(shape)
        first, count = column_range(writer, size, value)
        columns_of_all, zero = (writer.constant(suffix, np.array(number, np.int64), value)
                                for suffix, number in (("columns", size), ("zero", 0)))
        end = writer.add("end", "AddV2", [first, count], T=types_pb2.DT_INT64)
        after = writer.add("after", "Sub", [columns_of_all, end], T=types_pb2.DT_INT64)
        pairs = [writer.add(f"pair{d}", "Pack", [first, after] if d == state.dimension else [zero, zero],
                            T=types_pb2.DT_INT64, N=2, axis=0) for d in range(rank)]
        paddings = writer.add("paddings", "Pack", pairs, T=types_pb2.DT_INT64, N=rank, axis=0)
        with writer.placed(self._written.device_of(value)):
            return writer.add("", "Pad", [value, paddings], T=dtype, Tpaddings=types_pb2.DT_INT64)

    def _columns_again(self, name: str, state: Columns, prefix: str, place: frames_lib.Place) -> str | None:
        """Computes a tensor a second time, this rank's columns of it; None if exchanging it is no slower."""
        outcome = self._made(name, state)
        if outcome is None or self._exchanged_elements(name, state) > self._elements(name):
            return None
        node = node_def_pb2.NodeDef()
        node.CopyFrom(self._graph.node(name))
        node.name = f"{prefix}/columns{state.dimension}"
        for key in [key for key in node.attr if key.startswith("_") and key != "_class"]:
            del node.attr[key]
        taken = [self.tensor(tensor, takes, place.rows_node)
                 for tensor, takes in zip(self._graph.inputs(node), outcome.takes)]
        if outcome.write is None:
            self._written.writer("", node.device).copy(node, taken)
            return node.name
        states = [state for state in outcome.takes if state is not None]
        return outcome.write(NodeWriter(self._emitter, node, taken, states, [], place))[0]

    def _made(self, name: str, state: Columns) -> Outcome | None:
        """Returns how an op can compute columns of a tensor, None if it cannot."""
        node = self._graph.node(name)
        inputs = list(map(canonical, self._graph.inputs(node)))
        outcome = columns.made(Case(node, inputs, (WHOLE,) * len(inputs), 1, self._sizes), state.dimension)
        return outcome if graph_lib.output_of(name) == 0 else None

    def _exchanged_elements(self, name: str, state: Columns) -> float:
        """Returns how many elements are exchanged if columns of a tensor are computed again; ends as graphs do."""
        if (name, state) in self._elements_of_columns:
            return self._elements_of_columns[name, state]
        outcome, elements = self._made(name, state), 0.0
        assert outcome is not None
        for tensor, takes in zip(map(canonical, self._graph.inputs(self._graph.node(name))), outcome.takes):
            native = self._written.computed_state(tensor)
            if native == takes or native == WHOLE or columns.is_divided(native) or (
                    isinstance(native, Rows) and self.is_available(tensor)):
                continue
            again = isinstance(takes, Columns) and self._made(tensor, takes) is not None
            elements += min(self._elements(tensor), self._exchanged_elements(tensor, takes) if again and isinstance(
                takes, Columns) else math.inf)
        self._elements_of_columns[name, state] = elements
        return elements

    def _elements(self, name: str) -> float:
        """Returns the number of elements of a usual batch."""
        shape = self._sizes.likely_shape(name)
        return math.inf if shape is None else math.prod(shape)

    def _shaped(self, value: str, name: str, state: Columns, dtype: int, prefix: str) -> str:
        """Returns the rank's columns of a tensor in their shape, of which it has the elements."""
        shape = self._written.constant_shape(name)
        assert graph_lib.is_known(shape)  # of a variable
        writer = self._written.writer(prefix, HOST)
        _, count = column_range(writer, shape[state.dimension], value)
        sizes = writer.add("sizes", "Pack", [
            count if d == state.dimension else writer.constant(f"size{d}", np.array(size, np.int64), value)
            for d, size in enumerate(shape)], T=types_pb2.DT_INT64, N=len(shape), axis=0)
        with writer.placed(self._written.device_of(value)):
            return writer.add("", "Reshape", [value, sizes], T=dtype, Tshape=types_pb2.DT_INT64)

    def is_available(self, tensor: str) -> bool:
        """Whether a tensor is available whole without an exchange: by a little arithmetic on what every rank has."""
        stack = [canonical(tensor)]
        while stack:
            name = stack[-1]
            node = self._graph.node(name)
            if name not in self._available:
                if (name, WHOLE) in self._converted or self._written.computed_state(name) == WHOLE:
                    self._available[name] = True
                elif node.op not in _LITTLE or not isinstance(self._written.computed_state(name), Rows):
                    self._available[name] = False
            if name in self._available:
                stack.pop()
                continue
            inputs = [t for t in map(canonical, self._graph.inputs(node)) if t not in self._asked_for]
            missing = [t for t in inputs if t not in self._available]
            if missing:
                stack += missing
                continue
            self._available[name] = all(self._available[t] for t in inputs)
        return self._available[canonical(tensor)]

    def _again(self, tensor: str) -> str:
        """Computes a tensor a second time, whole."""
        stack = [canonical(tensor)]
        while stack:
            node = self._graph.node(stack[-1])
            inputs = self._graph.inputs(node)
            missing = [canonical(t) for t in inputs if self._written.computed_state(t) != WHOLE
                       and (canonical(t), WHOLE) not in self._converted and self.is_available(t)]
            if missing:
                stack += missing
                continue
            name = stack.pop()
            copy = self._copies.get(node.name)
            if copy is None:
                copy = self._copies[node.name] = f"{PREFIX}/{node.name}/again"
                whole = [self.tensor(t, WHOLE) for t in inputs]  # some of them are gathered
                self._written.nodes.append(type(node)())
                self._written.nodes[-1].CopyFrom(node)
                self._written.nodes[-1].name = copy
                self._written.nodes[-1].input[:] = [*whole, *graph_lib.control_inputs(node)]
            self._converted[name, WHOLE] = tensors.tensor_of(copy, graph_lib.output_of(name))
        return self._converted[canonical(tensor), WHOLE]

    def _from_whole(self, value: str, name: str, state: State, dtype: int, prefix: str, place: frames_lib.Place) -> str:
        if isinstance(state, Rows):
            prefix = f"{prefix}/rows{state.dimension}" + (f"_of_{state.blocks}" if state.blocks > 1 else "")
            rows = self._rows_of_blocks(value, state, dtype, prefix, place)
            if not is_inexact(dtype) or not self._written.elements_of_row(name, state.dimension):
                return rows
            return self._written.declared(rows, name, state.dimension, f"{prefix}/mine", self._written.device_of(value))
        assert isinstance(state, Partial)
        if state.reduce in IDEMPOTENT:
            return value
        return self._selected(value, self._parts.part(place)[2], dtype, f"{prefix}/summand")

    def _selected(self, value: str, condition: str, dtype: int, prefix: str) -> str:
        """Returns a tensor if a condition holds on this rank, else zeros."""
        writer = self._written.writer(prefix, self._written.device_of(value))
        zeros = writer.add("zeros", "ZerosLike", [value], T=dtype)
        return writer.add("", "SelectV2", [condition, value, zeros], T=dtype)

    def _rows_of_blocks(self, value: str, state: Rows, dtype: int, prefix: str, place: frames_lib.Place) -> str:
        """Slices this rank's rows of each block."""
        if state.blocks == 1:
            return self._parts.rows_of(value, state.dimension, dtype, prefix, place)
        writer = self._written.writer(prefix, self._written.device_of(value))
        parts = [self._parts.rows_of(block, state.dimension, dtype, f"{prefix}/block{i}", place)
                 for i, block in enumerate(split(writer, value, state, dtype))]
        return joined(writer, "", parts, state.dimension, dtype)
