"""Writes the partitioned graph: each op with inputs in the states that it takes.

Requires: the `Propagated` states of a graph. Ensures: nodes that stay the same op keep their names; inputs with rows
are whole, the global batch, which every rank has.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py, tests/graphs/test_partition_golden.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition.emit import operands
from tf_poseidon.graph_passes.partition.emit.conversions import Conversions
from tf_poseidon.graph_passes.partition.emit.graph_exchanges import GraphExchanges
from tf_poseidon.graph_passes.partition.emit.row_parts import RowParts
from tf_poseidon.graph_passes.partition.emit.written_graph import WrittenGraph
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.node_writer import PREFIX
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.graph_passes.partition.rules import sources
from tf_poseidon.graph_passes.partition.sizes import graph_sizes
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes.poseidon_rows import ROWS
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.partition.states import GATHERED
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import WHOLE

_INT64 = types_pb2.DT_INT64
# The prefix of the names of nodes with which a node is colocated.
_BESIDE = b"loc:@"


class GraphWriter:
    """Writes one partitioned graph."""

    def __init__(self, sizes: graph_sizes.Sizes, propagated: propagate_lib.Propagated, trained: Mapping[str, str],
                 accumulated: Mapping[str, str], divisions: Mapping[str, Division]) -> None:
        """Makes a writer.

        Args:
            sizes: The `Sizes` of the one-process graph.
            propagated: The `Propagated` states of its tensors.
            trained, accumulated: The results of `naming.variables_of`.
            divisions: The `Division`s of its layouts.
        """
        self._graph = sizes.graph
        self._sizes = sizes
        self._propagated = propagated
        self._written = WrittenGraph(sizes, propagated, divisions)
        self._parts = RowParts(self._written)
        self._exchanges = GraphExchanges(self._written, self._parts, trained, accumulated)
        self._conversions = Conversions(self._written, self._parts, self._exchanges, self)
        self._operands = operands.Operands(self._written, self._parts, self._conversions)
        self._controls: dict[str, str] = {}  # by name of a removed node: the node that replaces it

    @property
    def nodes(self) -> list[node_def_pb2.NodeDef]:
        """The NodeDefs so far."""
        return self._written.nodes

    @property
    def exchanges(self) -> Sequence[report_lib.ExchangedTensor]:
        """The exchanges so far."""
        return self._exchanges.exchanges

    def dtype_of(self, tensor: str) -> int:
        """Same as in `Emitter`, as are the following."""
        return self._written.dtype_of(tensor)

    def part(self, place: frames_lib.Place) -> tuple[str, str, str]:
        """Returns the outputs of PoseidonPart at a place."""
        return self._parts.part(place)

    def numbers_of_rows(self, place: frames_lib.Place, dtype: int) -> list[str]:
        """Returns the number of rows in one process, and of this rank."""
        return self._parts.numbers_of_rows(place, dtype)

    def reduced(self, value: str, state: Partial, dtype: int, prefix: str, place: frames_lib.Place, name: str,
                shape: graph_lib.Shape | None = None) -> str:
        """Sums the summands of all ranks."""
        return self._exchanges.reduced(value, state, dtype, prefix, place, name, shape)

    def taken_from_one(self, value: str, dtype: int, prefix: str, frame: frames_lib.Frame, name: str) -> str:
        """Gives every rank the value of rank 0."""
        return self._exchanges.taken_from_one(value, dtype, prefix, frame, name)

    def of_all_ranks(self, value: str, dtype: int, prefix: str, frame: frames_lib.Frame, name: str) -> str:
        """Gives every rank the rows of all ranks."""
        return self._exchanges.of_all_ranks(value, dtype, prefix, frame, name)

    def own_rows_of_sum(self, value: str, dtype: int, prefix: str, place: frames_lib.Place, name: str) -> str:
        """Sums summands of all rows, of which each rank gets its own."""
        return self._exchanges.own_rows_of_sum(value, dtype, prefix, place, name)

    def write(self, fetches: Iterable[str], kept: Iterable[str] = (),
              own: Collection[str] = ()) -> tuple[list[node_def_pb2.NodeDef], list[str], frozenset[str]]:
        """Writes all nodes.

        Args:
            fetches: Names of the tensors that are returned, whole unless they are in `own`.
            kept: Names of nodes outside loops whose outputs must be available whole under their names.
            own: Those of the fetches of which each rank's own rows suffice.

        Returns:
            (NodeDefs, the names of the fetches in the partitioned graph, those of `own` of which each rank has rows).
        """
        input_nodes = self._before_inputs()
        for node in self._propagated.ordered:
            if node.name in input_nodes:
                self._write_node(node)
        for rows_node in self._written.rows_nodes.values():
            self._write_inputs(rows_node)
        for node in self._propagated.ordered:
            if node.name not in self._written.rows_nodes and node.name not in input_nodes:
                self._write_node(node)
        of_rows = self._own_fetches(own)
        fetched = [self._parts.own_rows(fetch) if fetch in of_rows else self._conversions.tensor(fetch, WHOLE)
                   for fetch in fetches]
        self._exchanges.is_in_step = False
        shown = {name: outputs for name in kept if (outputs := self._shown(name))}
        names = {node.name for node in self._written.nodes}
        nodes = [self._finished(node, names) for node in self._written.nodes]
        if shown:
            nodes = _renamed(nodes, shown, self._graph)
        return nodes, [_renamed_tensor(fetch, shown) for fetch in fetched], of_rows

    def _own_fetches(self, fetches: Iterable[str]) -> frozenset[str]:
        """Returns those of some tensors of which each rank alone has rows, which one after the other are all."""
        return frozenset(fetch for fetch in fetches if self._written.computed_state(fetch) == Rows(0)
                         and self._written.dtype_of(fetch) in GATHERED
                         and not self._conversions.is_available(fetch))

    def _shown(self, name: str) -> list[str] | None:
        """Returns the whole outputs of a node, None if they are available under its name, or not at all."""
        outputs = [tensors.tensor_of(name, i) for i in range(len(self._propagated.outcomes[name].gives))]
        if name in self._written.rows_nodes or not outputs or all(
                self._written.renamed.get(t, t) == t and self._written.computed_state(t) == WHOLE for t in outputs):
            return None
        for tensor in outputs:
            node, state = self._graph.node(tensor), self._written.computed_state(tensor)
            dtype = tensors.dtype_of(node, graph_lib.output_of(tensor))
            can_be_gathered = dtype in GATHERED and state != OWN and not (
                isinstance(state, Rows) and state.dimension and self._sizes.shape(tensor) is None)
            if state != WHOLE and not can_be_gathered and not self._conversions.is_available(tensor):
                return None
        return [self._conversions.tensor(tensor, WHOLE) for tensor in outputs]

    def _before_inputs(self) -> set[str]:
        """Returns the names of the nodes that compute the inputs with rows."""
        queue, seen = [tensor for rows_node in self._written.rows_nodes.values() for tensor in rows_node.input], set()
        while queue:
            name = graph_lib.node_of(queue.pop())
            if name not in seen:
                seen.add(name)
                queue += self._graph.nodes[name].input
        return seen

    def _write_inputs(self, rows_node: node_def_pb2.NodeDef) -> None:
        """Slices this rank's rows of each input of a PoseidonRows, unless ranks were given their rows alone."""
        inputs = [self._conversions.tensor(tensor, WHOLE) for tensor in poseidon_rows.values(rows_node)]
        given = poseidon_rows.given_part(rows_node)
        place, self._controls[rows_node.name] = self._parts.write(rows_node, inputs, given)
        for i, (tensor, dimension) in enumerate(zip(inputs, rows_node.attr["dimensions"].list.i)):
            name, dtype = tensors.tensor_of(rows_node.name, i), rows_node.attr["T"].list.type[i]
            rows = tensor
            if given is None:
                self._conversions.set_whole(name, tensor)
                rows = self._parts.rows_of(tensor, dimension, dtype, f"{PREFIX}/{rows_node.name}/rows{i}", place)
            # `usual_batch.with_sizes` gives this one the rows of a rank. It has one output: where TensorFlow takes the
            # maximum of x before a function that grows with x, it takes the first output of the node that computes x.
            writer = self._written.writer(f"{PREFIX}/{rows_node.name}/mine{i}", rows_node.device)
            self._written.renamed[name] = writer.add("", ROWS, [rows], T=[dtype])
            writer.nodes[-1].attr["dimensions"].list.i.append(dimension)
            graph_lib.set_names(writer.nodes[-1].attr["names"], [rows_node.attr["names"].list.s[i].decode()])

    def _write_node(self, node: node_def_pb2.NodeDef) -> None:
        outcome = self._propagated.outcomes[node.name]
        inputs = self._graph.inputs(node)
        place = self._written.places[node.name]
        if node.op in frames_lib.ENTERS and place.frame.outer is not None:  # its inputs are outside of the loop
            place = frames_lib.Place(place.frame.outer, place.rows_node)
        taken = [self._conversions.tensor(tensor, takes, place.rows_node)
                 for tensor, takes in zip(inputs, outcome.takes)]
        if node.op in operands.ARRANGED and outcome.gives[0] != WHOLE:
            taken[1] = self._operands.known(node, taken[1], inputs[1])
        for i, dimension in outcome.local.items():
            taken[i] = self._operands.local_shape(node, taken[i], inputs[i], i, dimension, place)
        controls = [*graph_lib.control_inputs(node),
                    *(self._operands.check(node, taken[i], i, *check) for i, check in outcome.checks.items()),
                    *self._parts.checks(inputs, outcome, place)]
        # Lists stay together: TensorFlow's optimizer would make AddV2 of a chain, which they do not have.
        is_whole_sum = node.op == "AddN" and len(taken) > 2 and (
            outcome.gives[0] in (WHOLE, OWN) or isinstance(outcome.gives[0], Owned)) and (
                node.attr["T"].type != types_pb2.DT_VARIANT)
        if node.op == "IdentityN" and not controls and not self._is_waited_for(node.name):
            for i, tensor in enumerate(taken):  # separately: factors are matched behind single tensors
                self._written.renamed[tensors.tensor_of(node.name, i)] = tensor
            return
        if outcome.write is None and is_whole_sum:
            self._write_sum(node, taken, controls)
            return
        if outcome.write is None:
            self._written.writer("", node.device).copy(node, [*taken, *controls])
            if outcome.local and isinstance(outcome.gives[0], Rows):
                self._operands.declare_rows(node, outcome.gives[0].dimension, outcome.local)
            if node.op in sources.UNSEEDED:
                self._exchanges.serialise(place.frame)
            return
        states = [self._written.computed_state(tensor) if takes is None else takes
                  for tensor, takes in zip(inputs, outcome.takes)]
        writer = NodeWriter(self, node, taken, states, controls, place)
        outputs = outcome.write(writer)
        for i, tensor in enumerate(outputs):
            self._written.renamed[tensors.tensor_of(node.name, i)] = tensor
        if outputs:
            self._controls[node.name] = graph_lib.node_of(outputs[0])

    def _is_waited_for(self, name: str) -> bool:
        """Whether a node is a control input of another."""
        return any(f"^{name}" in reader.input for reader in self._graph.consumers(name))

    def _write_sum(self, node: node_def_pb2.NodeDef, terms: Sequence[str], controls: Sequence[str]) -> None:
        """Writes AddN as a chain of additions: AddN starts with an input that it may overwrite, so its bits vary."""
        writer, total = self._written.writer(node.name, node.device), terms[0]
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
        if node.op in frames_lib.ENTERS and node.attr["frame_name"].s.decode() in self._exchanges.serial:
            node.attr["parallel_iterations"].i = 1
        return node


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
                   T=tensors.types_of_outputs(node))
        result += writer.nodes
    return result


_ON_ROWS = f"{PREFIX}/on_rows/"


def _renamed_tensor(tensor: str, shown: Collection[str]) -> str:
    if graph_lib.node_of(tensor) not in shown:
        return tensor
    return f"^{_ON_ROWS}{tensor[1:]}" if graph_lib.is_control(tensor) else f"{_ON_ROWS}{tensor}"
