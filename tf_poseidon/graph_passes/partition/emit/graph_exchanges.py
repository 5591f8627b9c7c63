"""What ranks exchange in a partitioned graph: the ops, their sites, and when they happen.

Ensures: sites are unique; a loop in which ranks exchange something runs its rounds one after the other, since exchanges
are matched by name and count.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_golden.py.
"""

import collections
from collections.abc import Mapping
import functools
import typing

import numpy as np
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.graph.tensors import canonical
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition.emit.row_parts import RowParts
from tf_poseidon.graph_passes.partition.emit.written_graph import joined
from tf_poseidon.graph_passes.partition.emit.written_graph import split
from tf_poseidon.graph_passes.partition.emit.written_graph import transposed
from tf_poseidon.graph_passes.partition.emit.written_graph import WrittenGraph
from tf_poseidon.graph_passes.partition.node_writer import column_range
from tf_poseidon.graph_passes.partition.node_writer import HOST
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import GATHERED
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_GPU = "/device:GPU:0"
# The prefix that calls of tf.functions give to names, which carries no information.
_CALL = "StatefulPartitionedCall/"
# The types that PoseidonSync adds up.
_SUMMED = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_INT32,
           types_pb2.DT_INT64)
_REDUCE_OPS = {"sum": "Sum", "max": "Max", "min": "Min", "prod": "Prod", "all": "All", "any": "Any"}


class _Written(typing.NamedTuple):
    """What the nodes of an exchange have in common.

    Attributes:
        attributes: Attributes of the op that exchanges: its site, which is unique among all kinds, and when it happens.
        provenance: The `Provenance` of all nodes of the exchange.
    """

    attributes: dict[str, str]
    provenance: provenance.Provenance


class GraphExchanges:
    """The exchanges of one partitioned graph.

    Attributes:
        exchanges: The `report.ExchangedTensor`s so far.
        serial: Names of the loops that run one round after the other.
        is_in_step: Whether exchanges are part of the step; those for outputs that someone may read are not.
    """

    def __init__(self, written: WrittenGraph, parts: RowParts, trained: Mapping[str, str],
                 accumulated: Mapping[str, str]) -> None:
        """Makes none yet.

        Args:
            written: The graph in which they are written.
            parts: Which rows ranks have in it.
            trained, accumulated: The results of `naming.variables_of`.
        """
        self.exchanges: list[report_lib.ExchangedTensor] = []
        self.serial: set[str] = set()
        self.is_in_step = True
        self._written = written
        self._sizes = written.sizes
        self._graph = written.original
        self._propagated = written.propagated
        self._parts = parts
        self._trained = trained
        self._accumulated = accumulated
        self._sites: collections.Counter[str] = collections.Counter()
        self._counts_of_ranks: dict[frames_lib.Place, str] = {}

    def gathered(self, value: str, state: Rows, dtype: int, prefix: str, place: frames_lib.Place, name: str) -> str:
        """Gathers the rows of all ranks."""
        if dtype not in GATHERED:
            raise GraphError(f"The rows of '{name}' have a type that cannot be gathered, "
                             f"{types_pb2.DataType.Name(dtype)}; it must be computed from whole inputs.")
        exchange = self._exchange("rows", name, self._written.constant_shape(name), dtype, place.frame)
        device = self._where_exchanged("PoseidonAllGather", value, dtype)
        writer = self._written.writer(f"{prefix}/whole", device, exchange.provenance)
        dimension, shape = state.dimension, self._sizes.shape(name)
        if state.blocks > 1:  # in one exchange: blocks become a dimension behind that of the rows
            value = writer.add("beside", "Pack", split(writer, value, state, dtype), T=dtype, N=state.blocks,
                               axis=dimension + 1)
        order: list[int] = []
        if dimension:
            assert shape is not None  # otherwise it is kept whole
            rank = len(shape) + (state.blocks > 1)
            order = [dimension, *(d for d in range(rank) if d != dimension)]
            value = transposed(writer, "first", value, order, dtype)
        is_last = not dimension and state.blocks == 1
        whole = writer.add("" if is_last else "rows", "PoseidonAllGather", [value, self._parts.part(place)[1]], T=dtype,
                           **exchange.attributes)
        if elements := self._written.elements_of_row(name, dimension):
            writer.nodes[-1].attr[graph_lib.ELEMENTS].i = elements  # of each block
        if dimension:
            whole = transposed(writer, "" if state.blocks == 1 else "back", whole, list(np.argsort(order)), dtype)
        if state.blocks > 1:
            parts = writer.add("parts", "Unpack", [whole], T=dtype, num=state.blocks, axis=dimension + 1)
            whole = joined(writer, "", [tensors.tensor_of(parts, i) for i in range(state.blocks)], dimension, dtype)
        return whole

    def reduced(self, value: str, state: Partial, dtype: int, prefix: str, place: frames_lib.Place, name: str,
                shape: graph_lib.Shape | None = None) -> str:
        """Sums the summands of all ranks, or reduces them otherwise."""
        is_held, state = state == HELD, SUM if state == HELD else state
        is_given = shape is not None
        shape = shape if is_given else self._written.constant_shape(name)
        is_summed = state == SUM and dtype in _SUMMED and self.is_in_step
        exchange = self._exchange(state.reduce, name, shape, dtype, place.frame, is_gathered=not is_summed)
        device = self._where_exchanged("PoseidonSync", value, dtype) if is_summed else HOST
        writer = self._written.writer(f"{prefix}/whole", device, exchange.provenance)
        contributes = writer.constant("contributes", np.array(True), value) if is_held else self._parts.part(place)[1]
        if shape is not None and None not in shape and (is_given or shape != self._sizes.static(name)):
            # The planner needs this shape, which TensorFlow cannot infer.
            value = writer.add("summand", "EnsureShape", [value], T=dtype, shape=shape)
        if is_summed:
            return writer.add("", "PoseidonSync", [value, contributes], T=dtype, shape=shape, **exchange.attributes)
        axis = writer.constant("axis", np.array(0, np.int32), value)
        row = writer.add("one", "ExpandDims", [value, axis], T=dtype, Tdim=types_pb2.DT_INT32)
        rows = writer.add("rows", "PoseidonAllGather", [row, contributes], T=dtype, **exchange.attributes)
        op = _REDUCE_OPS[state.reduce]
        types = {} if op in ("All", "Any") else {"T": dtype}
        return writer.add("", op, [rows, axis], Tidx=types_pb2.DT_INT32, keep_dims=False, **types)

    def scattered(self, value: str, state: Partial, shard: Shard, dtype: int, prefix: str, place: frames_lib.Place,
                  name: str) -> str:
        """Sums the summands of all ranks, of which each rank gets its shard."""
        exchange = self._exchange("scatter", name, self._written.constant_shape(name), dtype, place.frame,
                                  is_gathered=False)
        device = self._where_exchanged("PoseidonReduceScatter", value, dtype)
        writer = self._written.writer(f"{prefix}/shard", device, exchange.provenance)
        contributes = (writer.constant("contributes", np.array(True), value) if state == HELD
                       else self._parts.part(place)[1])
        return writer.add("", "PoseidonReduceScatter", [value, contributes], T=dtype, Tout=dtype,
                          shape=self._written.constant_shape(name), **self._written.division(shard).attributes,
                          **exchange.attributes)

    def joined_shards(self, value: str, shard: Shard, dtype: int, prefix: str, place: frames_lib.Place,
                      name: str) -> str:
        """Gives every rank the shards of all ranks, which are the tensor."""
        exchange = self._exchange("shards", name, self._written.constant_shape(name), dtype, place.frame)
        division = self._written.division(shard)
        device = HOST if division.is_of_matrix else self._where_exchanged("PoseidonGatherShards", value, dtype)
        writer = self._written.writer(f"{prefix}/whole", device, exchange.provenance)
        return writer.add("", "PoseidonGatherShards", [value], T=dtype, shape=self._written.constant_shape(name),
                          **division.attributes, **exchange.attributes)

    def of_all_ranks(self, value: str, dtype: int, prefix: str, frame: frames_lib.Frame, name: str) -> str:
        """Gives every rank the rows of all ranks, whichever rows of the batch these have."""
        exchange = self._exchange("columns", name, None, dtype, frame)
        writer = self._written.writer(prefix, self._where_exchanged("PoseidonAllGather", value, dtype),
                                      exchange.provenance)
        contributes = writer.constant("contributes", np.array(True), value)
        return writer.add("", "PoseidonAllGather", [value, contributes], T=dtype, **exchange.attributes)

    def own_rows_of_sum(self, value: str, dtype: int, prefix: str, place: frames_lib.Place, name: str) -> str:
        """Sums the summands of all ranks, which have all rows, of which each rank gets its own."""
        if dtype not in _SUMMED:
            whole = self.reduced(value, HELD, dtype, prefix, place, name)
            return self._parts.rows_of(whole, 0, dtype, f"{prefix}/own", place)
        exchange = self._exchange("return", name, self._written.constant_shape(name), dtype, place.frame)
        writer = self._written.writer(f"{prefix}/own", HOST, exchange.provenance)
        rows = writer.add("sum", "PoseidonReduceScatterRows", [value, self._counts(place)], T=dtype,
                          **exchange.attributes)
        if not self._written.elements_of_row(name, 0):
            return rows
        return self._written.declared(rows, name, 0, f"{prefix}/own", self._written.device_of(value))

    def _counts(self, place: frames_lib.Place) -> str:
        """Returns how many rows each rank has, [ranks] of int64."""
        if place not in self._counts_of_ranks:
            part, contributes, _ = self._parts.part(place)
            prefix = f"{graph_lib.node_of(part)}/counts"
            writer = self._written.writer(f"{prefix}/own", HOST)
            bounds = [writer.constant(suffix, np.array([bound], np.int32), part)
                      for suffix, bound in (("begin", 2), ("end", 3), ("stride", 1))]
            count = writer.add("count", "StridedSlice", [part, *bounds], T=types_pb2.DT_INT64,
                               Index=types_pb2.DT_INT32, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0,
                               shrink_axis_mask=0)
            none = writer.constant("none", np.zeros(1, np.int64), part)  # a padding row is no row
            count = writer.add("", "SelectV2", [contributes, count, none], T=types_pb2.DT_INT64)
            self._counts_of_ranks[place] = self.of_all_ranks(count, types_pb2.DT_INT64, prefix, place.frame, prefix)
        return self._counts_of_ranks[place]

    def columns_of(self, value: str, rank: int, dimension: int, columns: int, dtype: int, prefix: str) -> str:
        """Slices this rank's columns."""
        writer = self._written.writer(prefix, HOST)
        first, count = column_range(writer, columns, value)
        zero, all_of_it = (writer.constant(name, np.array(number, np.int64), value)
                           for name, number in (("zero", 0), ("all", -1)))
        begin, size = (writer.add(name, "Pack", [own if d == dimension else others for d in range(rank)],
                                  T=types_pb2.DT_INT64, N=rank, axis=0)
                       for name, own, others in (("begin", first, zero), ("size", count, all_of_it)))
        with writer.placed(self._written.device_of(value)):
            return writer.add("", "Slice", [value, begin, size], T=dtype, Index=types_pb2.DT_INT64)

    def gathered_columns(self, value: str, state: Columns, dtype: int, prefix: str, place: frames_lib.Place,
                         name: str) -> str:
        """Gathers the columns of all ranks."""
        exchange = self._exchange("columns", name, self._written.constant_shape(name), dtype, place.frame)
        writer = self._written.writer(f"{prefix}/whole", self._where_exchanged("PoseidonAllGather", value, dtype),
                                      exchange.provenance)
        shape = self._sizes.shape(name)
        assert shape is not None  # otherwise it is kept whole
        order = [state.dimension, *(d for d in range(len(shape)) if d != state.dimension)]
        if state.dimension:
            value = transposed(writer, "first", value, order, dtype)
        contributes = writer.constant("contributes", np.array(True), value)
        whole = writer.add("columns", "PoseidonAllGather", [value, contributes], T=dtype, **exchange.attributes)
        if state.dimension:
            whole = transposed(writer, "back", whole, list(np.argsort(order)), dtype)
        return writer.add("", "EnsureShape", [whole], T=dtype, shape=self._written.constant_shape(name))

    def can_scatter(self, state: Partial, shard: Shard, dtype: int) -> bool:
        """Whether ranks can get shards alone of a sum of summands."""
        return (state in (SUM, HELD) and dtype in _SUMMED and self.is_in_step
                and not self._written.division(shard).is_of_matrix)

    def taken_from_one(self, value: str, dtype: int, prefix: str, frame: frames_lib.Frame, name: str) -> str:
        """Gives every rank the value of rank 0."""
        exchange = self._exchange("value", name, self._written.constant_shape(name), dtype, frame)
        device = self._where_exchanged("PoseidonBroadcast", value, dtype)
        writer = self._written.writer(prefix, device, exchange.provenance)
        return writer.add("", "PoseidonBroadcast", [value], T=dtype, root=0, **exchange.attributes)

    def _exchange(self, kind: str, name: str, shape: graph_lib.Shape | None, dtype: int, frame: frames_lib.Frame,
                  is_gathered: bool = True) -> _Written:
        """Notes an exchange, and names its site; returns a `_Written`."""
        self.serialise(frame)
        scheme = {"value": planning.BROADCAST, "scatter": planning.SCATTER, "shards": planning.SHARDS,
                  "return": planning.RETURN}.get(
            kind, planning.GATHER if is_gathered else "")
        if not self.is_in_step:
            site = f"fetched/{kind}/{name}"  # unique, since each tensor is made whole once
            return _Written({"site": site}, provenance.Provenance(kind, site, scheme, is_fetched=True))
        shown = self._trained.get(name, self._accumulated.get(name, name.removeprefix(_CALL)))
        site = f"{kind}/{shown}" if is_gathered else shown
        self._sites[site] += 1
        if self._sites[site] > 1:
            site = f"{site}#{self._sites[site] - 1}"
        if graph_lib.node_of(name) in self._graph.nodes:
            num_bytes = self._sizes.bytes(name, dtype)
        else:  # a tensor that was made for an op, with a given shape
            num_bytes = report_lib.Bytes.of(shape, dtype)
        variable = "" if is_gathered else self._trained.get(name, "")
        is_waited_for = self._is_waited_for_by_rows(name)
        self.exchanges.append(report_lib.ExchangedTensor(site, kind, name, shape, dtype, num_bytes, frame.name,
                                                         variable, is_waited_for))
        meanwhile = "repeats" if frame.outer is not None else "waits" if is_waited_for else "computes"
        return _Written({"site": site, graph_lib.MEANWHILE: meanwhile}, provenance.Provenance(kind, site, scheme))

    def _is_waited_for_by_rows(self, name: str) -> bool:
        """Whether rows or summands are computed from the one-process value of a tensor."""
        return any(canonical(tensor) == name and outcome.takes[i] == WHOLE and self._leads_to_rows(reader, i)
                   for reader in self._graph.consumers(graph_lib.node_of(name))
                   for outcome in [self._propagated.outcomes[reader.name]]
                   for i, tensor in enumerate(self._graph.inputs(reader)))

    @functools.cached_property
    def _before_rows(self) -> set[str]:
        """The tensors that are rows or summands, or from which such are computed."""
        queue = [tensors.tensor_of(name, i) for name, outcome in self._propagated.outcomes.items()
                 for i, state in enumerate(outcome.gives) if state != WHOLE and not isinstance(state, (Shard, Owned))]
        leading = set(queue)
        while queue:
            tensor = queue.pop()
            inputs = self._graph.inputs(self._graph.node(tensor))
            if self._graph.node(tensor).op == "IdentityN":
                inputs = [inputs[graph_lib.output_of(tensor)]]
            sources = set(map(canonical, inputs)) - leading
            leading |= sources
            queue += sources
        return leading

    def _leads_to_rows(self, node: node_def_pb2.NodeDef, i: int) -> bool:
        """Whether rows or summands are computed from the outputs that depend on an input of a node."""
        outputs = [i] if node.op == "IdentityN" else range(len(self._propagated.outcomes[node.name].gives))
        return any(tensors.tensor_of(node.name, output) in self._before_rows for output in outputs)

    def serialise(self, frame: frames_lib.Frame) -> None:
        while frame.outer is not None:
            self.serial.add(frame.name)
            frame = frame.outer

    def _where_exchanged(self, op: str, tensor: str, dtype: int) -> str:
        """Returns the device of a tensor if an op can exchange it there, else the host."""
        device = self._written.device_of(tensor)  # empty if TensorFlow is to choose
        return device if devices.has_kernel(op, device or _GPU, T=dtype) else HOST
