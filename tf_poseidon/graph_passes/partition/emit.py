"""Writes the partitioned graph: each op with inputs in the states that it takes, and their conversions.

Requires: the `Propagated` states of a graph. Ensures: nodes that stay the same op keep their names; nodes that convert
a tensor are below "poseidon/" and the tensor's name, in the tensor's own loop. A loop in which ranks exchange something
runs its rounds one after the other, since exchanges are matched by name and count.

| from | to | by |
|---|---|---|
| whole | rows | a slice |
| whole | partial | the value on rank 0, zeros elsewhere |
| partial | held | the summand, zeros on ranks without rows |
| partial | whole | `PoseidonSync`, whose site is then planned; other reductions by gathering |
| rows | whole | `PoseidonAllGather`; blocks of rows lie beside each other meanwhile |
| inputs with rows | whole | the global batch, which every rank has |

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py, tests/graphs/test_partition_golden.py.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import math
import typing

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import own_values as own_lib
from tf_poseidon.graph_passes.partition import propagate as propagate_lib
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition import sizes as sizes_lib
from tf_poseidon.graph_passes.partition.propagate import canonical
from tf_poseidon.graph_passes.partition.rules import elementwise
from tf_poseidon.graph_passes.partition.rules import sources
from tf_poseidon.graph_passes.partition.rules.case import is_inexact
from tf_poseidon.graph_passes.partition.rules.case import Outcome
from tf_poseidon.graph_passes.partition.sizes import ROWS
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import IDEMPOTENT
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

PREFIX = "poseidon"
# The PoseidonPart of nodes that depend on no rows.
OF_NO_ROWS = f"{PREFIX}/ranks"
_HOST = "/device:CPU:0"
_GPU = "/device:GPU:0"
# The prefix that calls of tf.functions give to names, which carries no information.
_CALL = "StatefulPartitionedCall/"
_INT64 = types_pb2.DT_INT64
# The prefix of the names of nodes with which a node is colocated.
_BESIDE = b"loc:@"
# The types that PoseidonSync adds up.
_SUMMED = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_INT32,
           types_pb2.DT_INT64)
_REDUCE_OPS = {"sum": "Sum", "max": "Max", "min": "Min", "prod": "Prod", "all": "All", "any": "Any"}
# Ops whose second input determines the order or the number of dimensions.
_ARRANGED = frozenset(("Transpose", "Sum", "Mean", "Max", "Min", "Prod"))
# Ops with little arithmetic per element: faster to repeat than to gather.
_LITTLE = frozenset((
    *elementwise.UNARY, *elementwise.BINARY, "Add", "AddV2", "Sub", "Mul", "RealDiv", "Neg", "Identity", "StopGradient",
    "Cast", "Select", "SelectV2", "ZerosLike", "OnesLike", "Reshape", "ExpandDims", "Squeeze", "Transpose", "Pack",
    "Unpack", "ConcatV2", "Split", "SplitV", "Slice", "StridedSlice", "BroadcastTo", "Tile", "Pad", "OneHot",
    "GatherV2", "ReverseV2", "Switch"))

# The outputs of PoseidonPart: (part, contributes, is first).
_Part = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a node runs, and which rows it depends on.

    Attributes:
        frame: The `frames.Frame` of the node.
        marker: Name of the PoseidonRows on which it depends, see `row_inputs.find`.
    """

    frame: frames_lib.Frame
    marker: str | None


class _Written(typing.NamedTuple):
    """What the nodes of an exchange have in common.

    Attributes:
        attributes: Attributes of the op that exchanges: its site, which is unique among all kinds, and when it happens.
        provenance: The `Provenance` of all nodes of the exchange.
    """

    attributes: dict[str, str]
    provenance: provenance.Provenance


class GraphWriter:
    """Writes one partitioned graph.

    Attributes:
        nodes: The NodeDefs so far.
        exchanges: The `report.ExchangedTensor`s so far.
    """

    def __init__(self, sizes: sizes_lib.Sizes, propagated: propagate_lib.Propagated, trained: Mapping[str, str],
                 kept: Mapping[str, str]) -> None:
        """Makes a writer; `trained` and `kept` are the results of `naming.variables_of`."""
        self.nodes: list[node_def_pb2.NodeDef] = []
        self.exchanges: list[report_lib.ExchangedTensor] = []
        self._sizes = sizes
        self._graph = sizes.graph
        self._propagated = propagated
        self._native: dict[str, str] = {}  # by tensor: its name, if that has changed
        self._converted: dict[tuple[str, State] | tuple[str, State, str | None], str] = {}  # by (tensor, state)
        self._available: dict[str, bool] = {}  # by tensor: whether it is available whole without an exchange
        # Tensors that some op needs whole: gathered anyway, or available.
        self._asked_for = {canonical(tensor) for name, outcome in propagated.outcomes.items()
                           for tensor, takes in zip(self._graph.inputs(self._graph.nodes[name]), outcome.takes)
                           if takes == WHOLE and isinstance(self.native_state(tensor), Rows)}
        self._copies: dict[str, str] = {}  # by node: the node that computes it again, whole
        self._controls: dict[str, str] = {}  # by name of a removed node: the node that replaces it
        self._enters = {node.attr["frame_name"].s.decode(): node for node in propagated.ordered
                        if node.op in frames_lib.ENTERS}
        self._markers = {node.name: node for node in sizes_lib.rows_nodes(self._graph.graph_def)}
        self._home = propagated.frames[next(iter(self._markers))]  # the loop that has the rows
        self._places = {node.name: Place(propagated.frames[node.name], propagated.markers[node.name])
                        for node in propagated.ordered}
        self._parts: dict[Place, _Part] = {}  # by place: the outputs of PoseidonPart there
        self._numbers: dict[tuple[str, int], list[str]] = {}  # of rows, by the part that has them and their type
        # By frame and two markers: the check that they have as many rows.
        self._meetings: dict[tuple[frames_lib.Frame, str, str], str] = {}
        self._trained = trained
        self._kept = kept
        self._sites: collections.Counter[str] = collections.Counter()
        self._serial: set[str] = set()  # names of loops that run one round after the other
        self._is_asked_for = True  # whether exchanges are part of the step

    def write(self, fetches: Iterable[str], kept: Iterable[str] = (),
              own: Collection[str] = ()) -> tuple[list[node_def_pb2.NodeDef], list[str]]:
        """Writes all nodes.

        Args:
            fetches: Names of the tensors that must be whole.
            kept: Names of nodes outside loops whose outputs must be available whole under their names.
            own: Those of the fetches of which each rank fetches its own rows.

        Returns:
            (NodeDefs, the names of the fetches in the partitioned graph).
        """
        before = self._before_inputs()
        for node in self._propagated.ordered:
            if node.name in before:
                self._write_node(node)
        for marker in self._markers.values():
            self._write_inputs(marker)
        for node in self._propagated.ordered:
            if node.name not in self._markers and node.name not in before:
                self._write_node(node)
        fetched = [self._own_rows(fetch) if fetch in own else self.tensor(fetch, WHOLE) for fetch in fetches]
        self._is_asked_for = False
        shown = {name: outputs for name in kept if (outputs := self._shown(name))}
        names = {node.name for node in self.nodes}
        nodes = [self._finished(node, names) for node in self.nodes]
        if shown:
            nodes = _renamed(nodes, shown, self._graph)
        return nodes, [_renamed_tensor(fetch, shown) for fetch in fetched]

    def own_fetches(self, fetches: Iterable[str]) -> frozenset[str]:
        """Returns those of some tensors of which each rank has rows, which all ranks, one after the other, have."""
        return frozenset(fetch for fetch in fetches if self.native_state(fetch) == Rows(0) and not (
            self._is_available(fetch)) and propagate_lib.dtype_of(
                self._graph.node(fetch), graph_lib.output_of(fetch)) in propagate_lib.GATHERED)

    def _own_rows(self, tensor: str) -> str:
        """Returns the rows of a tensor that only this rank has: none, if it repeats a row of another."""
        node = self._graph.node(tensor)
        dtype = propagate_lib.dtype_of(node, graph_lib.output_of(tensor))
        name = canonical(tensor)
        value, prefix = self._native.get(name, name), f"{PREFIX}/{name.replace(':', '_output')}/own"
        writer = self._writer(prefix, _HOST)
        begin, all_rows, stride = (writer.constant(suffix, np.array([number], np.int64), value) for suffix, number in (
            ("begin", 0), ("all", np.iinfo(np.int64).max), ("stride", 1)))
        end = writer.add("end", "SelectV2", [self.part(self._places[node.name])[1], all_rows, begin], T=_INT64)
        with writer.placed(self._device_of(value)):
            return writer.add("", "StridedSlice", [value, begin, end, stride], T=dtype, Index=_INT64, begin_mask=0,
                              end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)

    def _shown(self, name: str) -> list[str] | None:
        """Returns the whole outputs of a node, None if they are available under its name, or not at all."""
        outputs = [propagate_lib.tensor_of(name, i) for i in range(len(self._propagated.outcomes[name].gives))]
        if name in self._markers or not outputs or all(self._native.get(t, t) == t and self.native_state(t) == WHOLE
                                                       for t in outputs):
            return None
        for tensor in outputs:
            node, state = self._graph.node(tensor), self.native_state(tensor)
            dtype = propagate_lib.dtype_of(node, graph_lib.output_of(tensor))
            can_be_gathered = dtype in propagate_lib.GATHERED and state != OWN and not (
                isinstance(state, Rows) and state.dimension and self._sizes.shape(tensor) is None)
            if state != WHOLE and not can_be_gathered and not self._is_available(tensor):
                return None
        return [self.tensor(tensor, WHOLE) for tensor in outputs]

    # ---- nodes --------------------------------------------------------------------------------

    def _before_inputs(self) -> set[str]:
        """Returns the names of the nodes that compute the inputs with rows."""
        queue, seen = [tensor for marker in self._markers.values() for tensor in marker.input], set()
        while queue:
            name = graph_lib.node_of(queue.pop())
            if name not in seen:
                seen.add(name)
                queue += self._graph.nodes[name].input
        return seen

    def _write_inputs(self, marker: node_def_pb2.NodeDef) -> None:
        """Writes the PoseidonPart of a PoseidonRows, and slices this rank's rows of each input."""
        inputs = [self.tensor(tensor, WHOLE) for tensor in self._graph.inputs(marker)]
        place = Place(self._home, marker.name)
        writer = self._writer(f"{PREFIX}/{marker.name}", _HOST)
        dimensions = list(marker.attr["dimensions"].list.i)
        counts = []
        for i, (tensor, dimension, dtype) in enumerate(zip(inputs, dimensions, marker.attr["T"].list.type)):
            shape = writer.add(f"shape{i}", "Shape", [tensor], T=dtype, out_type=_INT64)
            bounds = [writer.constant(f"{name}{i}", np.array([value]), tensor)
                      for name, value in (("begin", dimension), ("end", dimension + 1), ("stride", 1))]
            counts.append(writer.add(f"count{i}", "StridedSlice", [shape, *bounds], T=_INT64, Index=_INT64,
                                     begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=1))
        controls = graph_lib.control_inputs(marker)
        part = writer.add("part", "PoseidonPart", [*counts, *controls], N=len(counts), site=marker.name)
        writer.nodes[-1].attr["names"].CopyFrom(marker.attr["names"])
        self._parts[place] = part, f"{part}:1", f"{part}:2"
        self._controls[marker.name] = part
        for i, (tensor, dimension) in enumerate(zip(inputs, dimensions)):
            name, dtype = propagate_lib.tensor_of(marker.name, i), marker.attr["T"].list.type[i]
            self._converted[name, WHOLE] = tensor
            rows = self._rows_of(tensor, dimension, dtype, f"{PREFIX}/{marker.name}/rows{i}", place)
            # `planned.with_sizes` gives this node the rows of one rank. It has one output: where TensorFlow takes the
            # maximum of x before a function that grows with x, it takes the first output of the node that computes x.
            writer = self._writer(f"{PREFIX}/{marker.name}/mine{i}", marker.device)
            self._native[name] = writer.add("", ROWS, [rows], T=[dtype])
            writer.nodes[-1].attr["dimensions"].list.i.append(dimension)
            graph_lib.set_names(writer.nodes[-1].attr["names"], [marker.attr["names"].list.s[i].decode()])

    def _write_node(self, node: node_def_pb2.NodeDef) -> None:
        outcome = self._propagated.outcomes[node.name]
        inputs = self._graph.inputs(node)
        place = self._places[node.name]
        if node.op in frames_lib.ENTERS and place.frame.outer is not None:  # its inputs are outside of the loop
            place = Place(place.frame.outer, place.marker)
        taken = [self.tensor(tensor, takes, place.marker) for tensor, takes in zip(inputs, outcome.takes)]
        if node.op in _ARRANGED and outcome.gives[0] != WHOLE:
            taken[1] = self._known(node, taken[1], inputs[1])
        for i, dimension in outcome.local.items():
            taken[i] = self._local_shape(node, taken[i], inputs[i], i, dimension, place)
        controls = [*graph_lib.control_inputs(node),
                    *(self._check(node, taken[i], i, *check) for i, check in outcome.checks.items()),
                    *self._check_rows(inputs, outcome, place)]
        # Lists stay together: TensorFlow's optimizer would make AddV2 of a chain, which they do not have.
        is_whole_sum = node.op == "AddN" and len(taken) > 2 and outcome.gives[0] in (WHOLE, OWN) and (
            node.attr["T"].type != types_pb2.DT_VARIANT)
        if node.op == "IdentityN" and not controls and not self._is_waited_for(node.name):
            for i, tensor in enumerate(taken):  # separately: factors are matched behind single tensors
                self._native[propagate_lib.tensor_of(node.name, i)] = tensor
            return
        if outcome.write is None and is_whole_sum:
            self._write_sum(node, taken, controls)
            return
        if outcome.write is None:
            self._writer("", node.device).copy(node, [*taken, *controls])
            if outcome.local and isinstance(outcome.gives[0], Rows) and not self._is_known_reshape(
                    node, outcome.gives[0].dimension) and not all(
                        self._with_shape(inputs[i], dimension) for i, dimension in outcome.local.items()):
                self._say_rows(node, outcome.gives[0].dimension)
            if node.op in sources.UNSEEDED:
                self._serialise(place.frame)
            return
        states = [self.native_state(tensor) if takes is None else takes
                  for tensor, takes in zip(inputs, outcome.takes)]
        writer = NodeWriter(self, node, taken, states, controls, place)
        outputs = outcome.write(writer)
        for i, tensor in enumerate(outputs):
            self._native[propagate_lib.tensor_of(node.name, i)] = tensor
        if outputs:
            self._controls[node.name] = graph_lib.node_of(outputs[0])

    def _known(self, node: node_def_pb2.NodeDef, tensor: str, original: str) -> str:
        """Returns an operand as a constant if its value is known, so that TensorFlow can infer the output's shape."""
        value = None if self._graph.node(original).op == "Const" else self._sizes.constant(canonical(original))
        if value is None:
            return tensor
        dtype = propagate_lib.dtype_of(self._graph.node(original), graph_lib.output_of(original))
        return self._writer(f"{PREFIX}/{node.name}/operand", _HOST).constant(
            "", value.astype(tf.as_dtype(dtype).as_numpy_dtype), tensor)

    def _say_rows(self, node: node_def_pb2.NodeDef, dimension: int) -> None:
        """Declares the size of a tensor for planning, if its shape is computed from the number of rows."""
        known = self._constant_shape(node.name)
        if known is None or not self._elements_of_row(node.name, dimension):
            return  # for example a list of tensors, which has no dimensions
        value, prefix = node.name, f"{PREFIX}/{node.name}/rows"
        static = self._sizes.static(node.name) or (None,) * len(known)
        if any(size is not None and size != inferred for size, inferred in zip(known, static)):
            value = self._writer(prefix, node.device).add(
                "shaped", "EnsureShape", [value], T=propagate_lib.dtype_of(node, 0), shape=known)
        self._native[node.name] = self._declared(value, node.name, dimension, prefix, node.device)

    def _elements_of_row(self, tensor: str, dimension: int) -> int | None:
        """Returns how many elements of a dimension belong to one row, None if unknown."""
        sizes = self._sizes.shape(tensor)
        size = sizes[dimension] if sizes and dimension < len(sizes) else None
        return None if size is None else size.per_row

    def _declared(self, value: str, name: str, dimension: int, prefix: str, device: str) -> str:
        """Returns a tensor unchanged, from a PoseidonRows, to which `planned.with_sizes` gives the planned rows.

        Args:
            value: The tensor, this rank's rows.
            name: The tensor of the one-process graph whose rows these are.
            dimension: The dimension of its rows.
            prefix: Name of the PoseidonRows.
            device: Its device.
        """
        elements = self._elements_of_row(name, dimension)
        assert elements is not None
        writer = self._writer(prefix, device)
        declared = writer.add(
            "", ROWS, [value], T=[propagate_lib.dtype_of(self._graph.node(name), graph_lib.output_of(name))])
        writer.nodes[-1].attr["dimensions"].list.i.append(dimension)
        writer.nodes[-1].attr["elements"].list.i.append(elements)
        graph_lib.set_names(writer.nodes[-1].attr["names"], [name])
        return declared

    def _is_waited_for(self, name: str) -> bool:
        """Whether a node is a control input of another."""
        return any(f"^{name}" in reader.input for reader in self._graph.consumers(name))

    def _write_sum(self, node: node_def_pb2.NodeDef, terms: Sequence[str], controls: Sequence[str]) -> None:
        """Writes AddN as a chain of additions: AddN starts with an input that it may overwrite, so its bits vary."""
        writer, total = self._writer(node.name, node.device), terms[0]
        for i, term in enumerate(terms[1:-1], 1):
            total = writer.add(f"sum{i}", "AddV2", [total, term], T=node.attr["T"].type)
        writer.add("", "AddV2", [total, terms[-1], *controls], T=node.attr["T"].type)

    def _finished(self, node: node_def_pb2.NodeDef, names: set[str]) -> node_def_pb2.NodeDef:
        """Returns a node that refers to the replacements of removed nodes, with its loop's rounds in order if needed.

        Args:
            node: The node.
            names: Names of all nodes.
        """
        places = [text[len(_BESIDE):].decode() for text in node.attr["_class"].list.s] if "_class" in node.attr else []
        if not names.issuperset(places):
            kept = [self._controls.get(place, place) for place in places]
            node.attr["_class"].list.s[:] = [_BESIDE + place.encode() for place in kept if place in names]
        for key in [key for key, value in node.attr.items() if value.WhichOneof("value") is None]:
            del node.attr[key]  # reading a missing attribute creates an empty one
        for i, tensor in enumerate(node.input):
            if graph_lib.is_control(tensor):
                node.input[i] = f"^{self._controls.get(graph_lib.node_of(tensor), graph_lib.node_of(tensor))}"
        if node.op in frames_lib.ENTERS and node.attr["frame_name"].s.decode() in self._serial:
            node.attr["parallel_iterations"].i = 1
        return node

    def _local_shape(self, node: node_def_pb2.NodeDef, tensor: str, original: str, i: int, dimension: int,
                     place: Place) -> str:
        """Returns a shape in which a dimension has the size of this rank's rows."""
        prefix = f"{PREFIX}/{node.name}/local{i}"
        dtype = propagate_lib.dtype_of(self._graph.node(original), graph_lib.output_of(original))
        if (rows := self._with_shape(original, dimension)) is not None:
            return self._writer(prefix, "").add("", "Shape", [self.tensor(rows, None)], out_type=dtype,
                                                T=self._graph.node(original).attr["T"].type)
        if self._is_known_reshape(node, dimension):
            # TensorFlow should still infer what it infers for any number of rows.
            static = self._sizes.static(node.name)
            assert static is not None
            sizes = np.array([-1 if d == dimension else size for d, size in enumerate(static)])
            return self._writer(prefix, "").constant(
                "", sizes.astype(np.int32 if dtype == types_pb2.DT_INT32 else np.int64), tensor)
        writer = self._writer(prefix, _HOST)
        return writer.add("", "PoseidonLocalShape", [tensor, self.part(place)[0]], Tshape=dtype, dimension=dimension)

    def _with_shape(self, shape: str, dimension: int) -> str | None:
        """Returns a tensor with rows in a dimension whose shape another tensor is in one process; None if unknown."""
        node = self._graph.node(shape)
        if node.op not in ("Shape", "ShapeN"):
            return None
        tensor = self._graph.inputs(node)[graph_lib.output_of(shape)]
        return tensor if self.native_state(tensor) == Rows(dimension) else None

    def _is_known_reshape(self, node: node_def_pb2.NodeDef, dimension: int) -> bool:
        """Whether a node is a Reshape for which TensorFlow infers all sizes except that of the rows."""
        static, many = self._sizes.static(node.name), self._sizes.shape(node.name)
        return node.op == "Reshape" and static is not None and many is not None and all(
            size and (known := many[d]) is not None and known.constant == size
            for d, size in enumerate(static) if d != dimension)

    def _check(self, node: node_def_pb2.NodeDef, tensor: str, i: int, index: int, value: int) -> str:
        """Writes a check of the value of a part of an integer input; returns the control edge that waits for it."""
        dtype = propagate_lib.dtype_of(self._graph.node(self._graph.inputs(node)[i]), graph_lib.output_of(
            self._graph.inputs(node)[i]))
        numpy_type = tf.as_dtype(dtype).as_numpy_dtype
        writer = self._writer(f"{PREFIX}/{node.name}/check{i}", _HOST)
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

    # ---- conversions --------------------------------------------------------------------------

    def native_state(self, tensor: str) -> State:
        """Returns the state in which a tensor is computed."""
        return self._propagated.states.get(canonical(tensor), WHOLE)

    def tensor(self, tensor: str, state: State | None, marker: str | None = None) -> str:
        """Returns the name of a tensor in a state.

        Args:
            tensor: Its name in the one-process graph.
            state: The state; None for that in which it is computed.
            marker: The `Place.marker` of its reader, which decides about the rows of a whole tensor.
        """
        name = canonical(tensor)
        native = self.native_state(name)
        if state is None or state == native:
            return self._native.get(name, name)
        key = (name, state) if state in (WHOLE, HELD) else (name, state, marker)
        if key not in self._converted:
            self._converted[key] = self._convert(name, native, state, marker)
        return self._converted[key]

    def _convert(self, name: str, native: State, state: State, marker: str | None) -> str:
        if native == OWN:
            raise own_lib.refusal(name)
        node = self._graph.node(name)
        dtype = propagate_lib.dtype_of(node, graph_lib.output_of(name))
        place = self._places[node.name]
        prefix = f"{PREFIX}/{name.replace(':', '_output')}"
        value = self._native.get(name, name)
        if state == HELD and native == SUM:
            return self._selected(value, self.part(place)[1], dtype, f"{prefix}/held")
        if state != WHOLE:
            whole = value if native == WHOLE else self.tensor(name, WHOLE)
            if state == HELD:  # from exactly one rank, whichever rows it is added to
                return self._selected(whole, self.part(place)[2], dtype, f"{prefix}/held")
            if len(self._markers) > 1:
                prefix = f"{prefix}/for/{marker}"
            return self._from_whole(whole, name, state, dtype, prefix, Place(place.frame, marker))
        if isinstance(native, Rows):
            if self._is_available(name):
                return self._again(name)
            return self.gathered(value, native, dtype, prefix, place, name)
        assert isinstance(native, Partial)
        return self.reduced(value, native, dtype, prefix, place, name)

    def _is_available(self, tensor: str) -> bool:
        """Whether a tensor is available whole without an exchange: by a little arithmetic on what every rank has."""
        stack = [canonical(tensor)]
        while stack:
            name = stack[-1]
            node = self._graph.node(name)
            if name not in self._available:
                if (name, WHOLE) in self._converted or self.native_state(name) == WHOLE:
                    self._available[name] = True
                elif node.op not in _LITTLE or not isinstance(self.native_state(name), Rows):
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
            missing = [canonical(t) for t in inputs if self.native_state(t) != WHOLE
                       and (canonical(t), WHOLE) not in self._converted and self._is_available(t)]
            if missing:
                stack += missing
                continue
            name = stack.pop()
            copy = self._copies.get(node.name)
            if copy is None:
                copy = self._copies[node.name] = f"{PREFIX}/{node.name}/again"
                whole = [self.tensor(t, WHOLE) for t in inputs]  # some of them are gathered
                self.nodes.append(type(node)())
                self.nodes[-1].CopyFrom(node)
                self.nodes[-1].name = copy
                self.nodes[-1].input[:] = [*whole, *graph_lib.control_inputs(node)]
            self._converted[name, WHOLE] = propagate_lib.tensor_of(copy, graph_lib.output_of(name))
        return self._converted[canonical(tensor), WHOLE]

    def _from_whole(self, value: str, name: str, state: State, dtype: int, prefix: str, place: Place) -> str:
        if isinstance(state, Rows):
            prefix = f"{prefix}/rows{state.dimension}" + (f"_of_{state.blocks}" if state.blocks > 1 else "")
            rows = self._rows_of_blocks(value, state, dtype, prefix, place)
            if not is_inexact(dtype) or not self._elements_of_row(name, state.dimension):
                return rows
            return self._declared(rows, name, state.dimension, f"{prefix}/mine", self._device_of(value))
        assert isinstance(state, Partial)
        if state.reduce in IDEMPOTENT:
            return value
        return self._selected(value, self.part(place)[2], dtype, f"{prefix}/summand")

    def _selected(self, value: str, condition: str, dtype: int, prefix: str) -> str:
        """Returns a tensor if a condition holds on this rank, else zeros."""
        writer = self._writer(prefix, self._device_of(value))
        zeros = writer.add("zeros", "ZerosLike", [value], T=dtype)
        return writer.add("", "SelectV2", [condition, value, zeros], T=dtype)

    def _rows_of_blocks(self, value: str, state: Rows, dtype: int, prefix: str, place: Place) -> str:
        """Slices this rank's rows of each block."""
        if state.blocks == 1:
            return self._rows_of(value, state.dimension, dtype, prefix, place)
        writer = self._writer(prefix, self._device_of(value))
        parts = [self._rows_of(block, state.dimension, dtype, f"{prefix}/block{i}", place)
                 for i, block in enumerate(self._split(writer, value, state, dtype))]
        return self._joined(writer, "", parts, state.dimension, dtype)

    @staticmethod
    def _split(writer: graph_lib.Writer, value: str, state: Rows, dtype: int) -> list[str]:
        """Splits a tensor into its blocks."""
        axis = writer.constant("axis", np.array(state.dimension, np.int32), value)
        split = writer.add("blocks", "Split", [axis, value], T=dtype, num_split=state.blocks)
        return [propagate_lib.tensor_of(split, i) for i in range(state.blocks)]

    @staticmethod
    def _joined(writer: graph_lib.Writer, suffix: str, parts: Sequence[str], dimension: int, dtype: int) -> str:
        axis = writer.constant(f"{suffix}along", np.array(dimension, np.int32), parts[0])
        return writer.add(suffix, "ConcatV2", [*parts, axis], T=dtype, N=len(parts), Tidx=types_pb2.DT_INT32)

    def _rows_of(self, value: str, dimension: int, dtype: int, prefix: str, place: Place) -> str:
        """Slices this rank's rows."""
        writer = self._writer(prefix, _HOST)
        shape = writer.add("shape", "Shape", [value], T=dtype, out_type=_INT64)
        bounds = writer.add("range", "PoseidonRowRange", [shape, self.part(place)[0]], Tshape=_INT64,
                            dimension=dimension)
        strides = writer.constant("strides", np.ones(dimension + 1, np.int64), shape)
        before = (1 << dimension) - 1
        with writer.placed(self._device_of(value)):
            return writer.add("", "StridedSlice", [value, bounds, f"{bounds}:1", strides], T=dtype, Index=_INT64,
                              begin_mask=before, end_mask=before, ellipsis_mask=0, new_axis_mask=0,
                              shrink_axis_mask=0)

    def gathered(self, value: str, state: Rows, dtype: int, prefix: str, place: Place, name: str) -> str:
        """Gathers the rows of all ranks."""
        if dtype not in propagate_lib.GATHERED:
            raise GraphError(f"The rows of '{name}' have a type that cannot be gathered, "
                             f"{types_pb2.DataType.Name(dtype)}; it must be computed from whole inputs.")
        exchange = self._exchange("rows", name, self._constant_shape(name), dtype, place.frame)
        writer = self._writer(f"{prefix}/whole", self._where_exchanged("PoseidonAllGather", value, dtype), exchange)
        dimension, shape = state.dimension, self._sizes.shape(name)
        if state.blocks > 1:  # in one exchange: blocks become a dimension behind that of the rows
            value = writer.add("beside", "Pack", self._split(writer, value, state, dtype), T=dtype, N=state.blocks,
                               axis=dimension + 1)
        order: list[int] = []
        if dimension:
            assert shape is not None  # otherwise it is kept whole
            rank = len(shape) + (state.blocks > 1)
            order = [dimension, *(d for d in range(rank) if d != dimension)]
            value = self._transposed(writer, "first", value, order, dtype)
        is_last = not dimension and state.blocks == 1
        whole = writer.add("" if is_last else "rows", "PoseidonAllGather", [value, self.part(place)[1]], T=dtype,
                           **exchange.attributes)
        if dimension:
            whole = self._transposed(writer, "" if state.blocks == 1 else "back", whole, list(np.argsort(order)), dtype)
        if state.blocks > 1:
            parts = writer.add("parts", "Unpack", [whole], T=dtype, num=state.blocks, axis=dimension + 1)
            whole = self._joined(writer, "", [propagate_lib.tensor_of(parts, i) for i in range(state.blocks)],
                                 dimension, dtype)
        return whole

    def _constant_shape(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape of a tensor, None for sizes that are unknown or depend on rows."""
        sizes = self._sizes.shape(tensor)
        return None if sizes is None else tuple(
            None if size is None else size.constant for size in sizes)

    @staticmethod
    def _transposed(writer: graph_lib.Writer, suffix: str, value: str, order: Sequence[int], dtype: int) -> str:
        by = writer.constant(f"{suffix}order", np.array(order, np.int32), value)
        return writer.add(suffix, "Transpose", [value, by], T=dtype, Tperm=types_pb2.DT_INT32)

    def reduced(self, value: str, state: Partial, dtype: int, prefix: str, place: Place, name: str,
                shape: graph_lib.Shape | None = None) -> str:
        """Sums the summands of all ranks, or reduces them otherwise."""
        is_held, state = state == HELD, SUM if state == HELD else state
        is_given = shape is not None
        shape = shape if is_given else self._constant_shape(name)
        is_summed = state == SUM and dtype in _SUMMED and self._is_asked_for
        exchange = self._exchange(state.reduce, name, shape, dtype, place.frame, is_gathered=not is_summed)
        device = self._where_exchanged("PoseidonSync", value, dtype) if is_summed else _HOST
        writer = self._writer(f"{prefix}/whole", device, exchange)
        contributes = writer.constant("contributes", np.array(True), value) if is_held else self.part(place)[1]
        if shape is not None and None not in shape and (is_given or shape != self._sizes.static(name)):
            # The planner needs this shape, which TensorFlow cannot infer.
            value = writer.add("summand", "EnsureShape", [value], T=dtype, shape=shape)
        if is_summed:
            return writer.add("", "PoseidonSync", [value, contributes], T=dtype, shape=shape, **exchange.attributes)
        axis = writer.constant("axis", np.array(0, np.int32), value)
        one = writer.add("one", "ExpandDims", [value, axis], T=dtype, Tdim=types_pb2.DT_INT32)
        rows = writer.add("rows", "PoseidonAllGather", [one, contributes], T=dtype, **exchange.attributes)
        op = _REDUCE_OPS[state.reduce]
        types = {} if op in ("All", "Any") else {"T": dtype}
        return writer.add("", op, [rows, axis], Tidx=types_pb2.DT_INT32, keep_dims=False, **types)

    def taken_from_one(self, value: str, dtype: int, prefix: str, frame: frames_lib.Frame, name: str) -> str:
        """Gives every rank the value of rank 0."""
        exchange = self._exchange("value", name, self._constant_shape(name), dtype, frame)
        writer = self._writer(prefix, self._where_exchanged("PoseidonBroadcast", value, dtype), exchange)
        return writer.add("", "PoseidonBroadcast", [value], T=dtype, root=0, **exchange.attributes)

    def _exchange(self, kind: str, name: str, shape: graph_lib.Shape | None, dtype: int, frame: frames_lib.Frame,
                  is_gathered: bool = True) -> _Written:
        """Notes an exchange, and names its site; returns a `_Written`."""
        self._serialise(frame)
        scheme = planning.BROADCAST if kind == "value" else planning.GATHER if is_gathered else ""
        if not self._is_asked_for:
            site = f"fetched/{kind}/{name}"  # unique, since each tensor is made whole once
            return _Written({"site": site}, provenance.Provenance(kind, site, scheme, is_fetched=True))
        shown = self._trained.get(name, self._kept.get(name, name.removeprefix(_CALL)))
        site = f"{kind}/{shown}" if is_gathered else shown
        self._sites[site] += 1
        if self._sites[site] > 1:
            site = f"{site}#{self._sites[site] - 1}"
        if graph_lib.node_of(name) in self._graph.nodes:
            num_bytes = self._sizes.bytes(name, dtype)
        else:  # a tensor that was made for an op, with a given shape
            assert graph_lib.is_known(shape)
            num_bytes = report_lib.Bytes(fixed=math.prod(shape) * tf.as_dtype(dtype).size)
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
        queue = [propagate_lib.tensor_of(name, i) for name, outcome in self._propagated.outcomes.items()
                 for i, state in enumerate(outcome.gives) if state != WHOLE]
        before = set(queue)
        while queue:
            tensor = queue.pop()
            inputs = self._graph.inputs(self._graph.node(tensor))
            if self._graph.node(tensor).op == "IdentityN":
                inputs = [inputs[graph_lib.output_of(tensor)]]
            found = set(map(canonical, inputs)) - before
            before |= found
            queue += found
        return before

    def _leads_to_rows(self, node: node_def_pb2.NodeDef, i: int) -> bool:
        """Whether rows or summands are computed from the outputs that depend on an input of a node."""
        outputs = [i] if node.op == "IdentityN" else range(len(self._propagated.outcomes[node.name].gives))
        return any(propagate_lib.tensor_of(node.name, output) in self._before_rows for output in outputs)

    def _serialise(self, frame: frames_lib.Frame) -> None:
        while frame.outer is not None:
            self._serial.add(frame.name)
            frame = frame.outer

    # ---- rows ---------------------------------------------------------------------------------

    def part(self, place: Place) -> _Part:
        """Returns the outputs of PoseidonPart at a place: (part, contributes, is first)."""
        if place not in self._parts:
            self._parts[place] = self._part_of_none() if place == Place(frames_lib.ROOT, None) else (
                self._entered_part(place))
        return self._parts[place]

    def numbers_of_rows(self, place: Place, dtype: int) -> list[str]:
        """Returns the number of rows in one process, and of this rank, as scalars of a type."""
        part = self.part(place)[0]
        if (part, dtype) not in self._numbers:
            writer = self._writer(f"{graph_lib.node_of(part)}/numbers{dtype}", _HOST)
            numbers = writer.add("", "Unpack", [part], T=_INT64, num=3, axis=0)
            self._numbers[part, dtype] = [writer.add(name, "Cast", [number], SrcT=_INT64, DstT=dtype)
                                          for name, number in (("rows", numbers), ("own_rows", f"{numbers}:2"))]
        return self._numbers[part, dtype]

    def _part_of_none(self) -> _Part:
        """Writes a PoseidonPart that depends on no rows: tensors that are not cut only need to know the first rank."""
        writer = self._writer(OF_NO_ROWS, _HOST)
        part = writer.add("", "PoseidonPart", [writer.constant("one", np.array(1, np.int64))], N=1, site=PREFIX)
        graph_lib.set_names(writer.nodes[-1].attr["names"], ["one"])
        return part, f"{part}:1", f"{part}:2"

    def _entered_part(self, place: Place) -> _Part:
        """Brings a PoseidonPart into a loop."""
        frame = place.frame
        if not frame.within(self._home) or frame.outer is None:
            raise GraphError(f"The inputs with rows ({', '.join(self._markers)}) are in a loop, and values that are "
                             "computed from them are needed outside of it.")
        outer, types = self.part(Place(frame.outer, place.marker)), (_INT64, types_pb2.DT_BOOL, types_pb2.DT_BOOL)
        prefix = f"{PREFIX}/{frame.name}" + (f"/{place.marker}" if len(self._markers) > 1 else "")
        part, contributes, is_first = (
            self._entered(f"{prefix}/{name}", tensor, dtype, frame)
            for name, tensor, dtype in zip(("part", "contributes", "is_first"), outer, types))
        return part, contributes, is_first

    def _entered(self, name: str, tensor: str, dtype: int, frame: frames_lib.Frame) -> str:
        """Brings a tensor into a loop as an invariant."""
        iterations = self._enters[frame.name].attr["parallel_iterations"].i
        return self._writer(name, _HOST).add("", "Enter", [tensor], T=dtype, frame_name=frame.name, is_constant=True,
                                             parallel_iterations=iterations)

    def _check_rows(self, inputs: Iterable[str], outcome: Outcome, place: Place) -> list[str]:
        """Writes checks that the inputs of different markers that a node reads have the same number of rows.

        Returns:
            Control edges that wait for them.
        """
        mine = place.marker
        if len(self._markers) == 1 or mine is None or all(takes == WHOLE for takes in outcome.takes):
            return []
        others = {marker for tensor in inputs if (marker := self._places[graph_lib.node_of(tensor)].marker)
                  not in (None, mine) and self._has_rows(tensor)}
        return [f"^{self._same_rows(place.frame, mine, other)}" for other in sorted(others)]

    def _has_rows(self, tensor: str) -> bool:
        """Whether the size of a tensor depends on rows, or it is an integer that may be their number."""
        if isinstance(self.native_state(tensor), Rows):
            return True
        node = self._graph.node(tensor)
        return propagate_lib.dtype_of(node, graph_lib.output_of(tensor)) in (types_pb2.DT_INT32, _INT64) or any(
            size is not None and size.of_rows for size in self._sizes.shape(canonical(tensor)) or ())

    def _same_rows(self, frame: frames_lib.Frame, marker: str, other: str) -> str:
        """Returns the name of the check that the inputs of two markers have the same number of rows."""
        first, second = sorted((marker, other))
        key = frame, first, second
        if key not in self._meetings:
            loop = f"/in/{frame.name}" if frame.name else ""
            writer = self._writer(f"{PREFIX}/rows_of/{marker}/and/{other}{loop}", _HOST)
            parts = [self.part(Place(frame, each))[0] for each in (marker, other)]
            bounds = [writer.constant(name, np.array([bound], np.int32), parts[0])
                      for name, bound in (("begin", 0), ("end", 1))]
            strides = writer.constant("stride", np.ones(1, np.int32), parts[0])
            rows = [writer.add(f"rows{i}", "StridedSlice", [part, *bounds, strides], T=_INT64, Index=types_pb2.DT_INT32,
                               begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=1)
                    for i, part in enumerate(parts)]
            equal = writer.add("equal", "Equal", rows, T=_INT64)
            text = writer.constant("text", (
                f"'{_input_of(marker)}' and '{_input_of(other)}' have different numbers of rows: give them the same, "
                "or name one of them as the same on all ranks with inputs=."), parts[0])
            writer.add("", "Assert", [equal, text, *rows], T=[types_pb2.DT_STRING, _INT64, _INT64], summarize=3)
            self._meetings[key] = writer.nodes[-1].name
        return self._meetings[key]

    def _device_of(self, tensor: str) -> str:
        name = graph_lib.node_of(tensor)
        node = self._graph.nodes.get(name) or next((node for node in reversed(self.nodes) if node.name == name), None)
        return node.device if node is not None else ""

    def _where_exchanged(self, op: str, tensor: str, dtype: int) -> str:
        """Returns the device of a tensor if an op can exchange it there, else the host."""
        device = self._device_of(tensor)  # empty if TensorFlow is to choose
        return device if devices.has_kernel(op, device or _GPU, T=dtype) else _HOST

    def _writer(self, prefix: str, device: str, exchange: _Written | None = None) -> graph_lib.Writer:
        """Returns a writer; `exchange` is the `_Written` of the exchange that its nodes serve."""
        writer = graph_lib.Writer(prefix, device, exchange and exchange.provenance)
        writer.nodes = self.nodes
        return writer


class NodeWriter:
    """Writes the nodes that replace one op.

    Attributes:
        node: Its NodeDef in the one-process graph.
        inputs: Its inputs, in the states that it takes.
        states: These states.
    """

    def __init__(self, graph_writer: GraphWriter, node: node_def_pb2.NodeDef, inputs: Sequence[str],
                 states: Sequence[State], controls: Sequence[str], place: Place) -> None:
        self.node = node
        self.inputs = inputs
        self.states = states
        self._controls = controls
        self._place = place
        self._all = graph_writer
        # The graph may have nodes below this one's name.
        self._writer = graph_lib.Writer(f"{PREFIX}/of/{node.name}", node.device)
        self._writer.nodes = graph_writer.nodes

    def add(self, suffix: str, op: str, inputs: Iterable[str], **attributes: graph_lib.Attribute) -> str:
        """Adds a node, see `indexed_graph.Writer.add`; without a suffix, it has the name of the op."""
        name = self._writer.add(suffix, op, [*inputs, *self._controls], **attributes)
        if suffix:
            return name
        self._all.nodes[-1].name = self.node.name
        return self.node.name

    def constant(self, suffix: str, value: npt.ArrayLike, beside: str) -> str:
        """Adds a Const, see `indexed_graph.Writer.constant`."""
        return self._writer.constant(suffix, value, beside)

    def type_of_input(self, i: int) -> int:
        """Returns the `types_pb2.DataType` of an input."""
        tensor = graph_lib.data_inputs(self.node)[i]
        return propagate_lib.dtype_of(self._all._graph.node(tensor), graph_lib.output_of(tensor))

    def same(self, suffix: str) -> str:
        """Adds the op itself, and returns its first output."""
        self._all.nodes.append(type(self.node)())
        self._all.nodes[-1].CopyFrom(self.node)
        self._all.nodes[-1].name = f"{PREFIX}/of/{self.node.name}/{suffix}"
        self._all.nodes[-1].input[:] = [*self.inputs, *self._controls]
        return self._all.nodes[-1].name

    def numbers_of_rows(self, dtype: int) -> list[str]:
        """Returns the number of rows in one process, and of this rank, as scalars of a type."""
        return self._all.numbers_of_rows(self._place, dtype)

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
        with self._writer.placed(_HOST):
            return self.add(suffix, "PoseidonGlobalShape", [shape, self._all.part(self._place)[0]], Tshape=dtype,
                            dimension=dimension)

    def made_local(self, shape: str, dimension: int, dtype: int, suffix: str) -> str:
        """Returns a shape with an element, a size or a position, that becomes that of this rank's rows."""
        with self._writer.placed(_HOST):
            return self.add(suffix, "PoseidonLocalShape", [shape, self._all.part(self._place)[0]], Tshape=dtype,
                            dimension=dimension)

    def made_whole(self, tensor: str, state: Partial, dtype: int | None = None) -> str:
        """Returns the one-process value of a summand that was made for this op, and has its output's shape.

        Args:
            tensor: The summand.
            state: Its state.
            dtype: Its `types_pb2.DataType`, None for that of the output.
        """
        return self._all.reduced(tensor, state, dtype or self.node.attr["T"].type, f"{PREFIX}/{tensor}", self._place,
                                 self.node.name)

    def added_up(self, suffix: str, tensor: str, dtype: int, shape: graph_lib.Shape) -> str:
        """Returns the sum over the ranks of a summand that was made for this op, and has a known shape."""
        return self._all.reduced(tensor, SUM, dtype, f"{PREFIX}/{tensor}", self._place, f"{self.node.name}/{suffix}",
                                 shape)

    def of_one_rank(self, node: str) -> list[str]:
        """Returns rank 0's outputs of a node that was made for this op, and has the same outputs."""
        name = self.node.name
        return [self._all.taken_from_one(
            propagate_lib.tensor_of(node, i), dtype, f"{PREFIX}/of/{name}/output{i}" if i else name, self._place.frame,
            propagate_lib.tensor_of(name, i)) for i, dtype in enumerate(propagate_lib.types_of_outputs(self.node))]


def num_by_rows(propagated: propagate_lib.Propagated) -> int:
    """Returns the number of nodes that run on the rank's rows, or return summands."""
    return sum(any(state != WHOLE for state in outcome.gives) for outcome in propagated.outcomes.values())


def _renamed(nodes: Sequence[node_def_pb2.NodeDef], shown: Mapping[str, Sequence[str]],
             graph: graph_lib.Graph) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes with some of them renamed, and nodes with the whole outputs under their old names.

    Args:
        nodes: NodeDefs.
        shown: The whole outputs of nodes, by name.
        graph: The one-process graph.
    """
    places = {_BESIDE + name.encode(): _BESIDE + f"{_ON_ROWS}{name}".encode() for name in shown}
    for node in nodes:
        if node.name in shown:
            node.name = f"{_ON_ROWS}{node.name}"
        for i, tensor in enumerate(node.input):
            if graph_lib.node_of(tensor) in shown:
                node.input[i] = _renamed_tensor(tensor, shown)
        if "_class" in node.attr:
            node.attr["_class"].list.s[:] = [places.get(place, place) for place in node.attr["_class"].list.s]
    result = list(nodes)
    for name, outputs in shown.items():
        node = graph.nodes[name]
        writer = graph_lib.Writer(name, node.device)
        writer.add("", "IdentityN", [_renamed_tensor(tensor, shown) for tensor in outputs],
                   T=propagate_lib.types_of_outputs(node))
        result += writer.nodes
    return result


_ON_ROWS = f"{PREFIX}/on_rows/"


def _renamed_tensor(tensor: str, shown: Collection[str]) -> str:
    if graph_lib.node_of(tensor) not in shown:
        return tensor
    return f"^{_ON_ROWS}{tensor[1:]}" if graph_lib.is_control(tensor) else f"{_ON_ROWS}{tensor}"


def _input_of(marker: str) -> str:
    """Returns the name of an input with rows in messages."""
    return marker.removeprefix(f"{PREFIX}/rows_of/")
