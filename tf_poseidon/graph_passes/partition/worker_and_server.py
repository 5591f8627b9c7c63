"""Divides a partitioned step into the part of a worker and that of a server, where workers read stale weights.

Requires: the flat graph of a partitioned step. Ensures: two graphs. The worker's computes the summands of a step, given
values of the weights; each leaves by PoseidonSend. The server's gets a ticket for each, ends its exchange by
PoseidonRecv, and does all that waits for it: the updates. Run one after the other, on the weights as they are, both do
what the step does, with the same bits. All ranks' servers do the same, as they get sums, and what depends on the batch
only by its size.

What follows from variables alone, such as a learning rate or weight decay, the server computes on its version of the
weights. A variable that changes without the sums of a step, as the state of a random number generator does, changes in
step with the worker's clock: if the worker reads it, it has a copy of its own.

Tests: tests/graphs/test_worker_and_server.py, tests/training/test_clocks.py.
"""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib

_SYNC = "PoseidonSync"


@dataclasses.dataclass(frozen=True)
class DividedStep:
    """A step in two parts.

    Attributes:
        worker: The worker's GraphDef.
        server: The server's GraphDef.
        tickets: The nodes of the worker's graph that start an exchange; the server's graph takes what they return, by
            these names with `TICKET` before them.
        carried: {tensor of the worker's graph: its name in the server's, which takes it}.
        versioned: Names of the variables of which the worker reads a version: its graph takes their values, by these
            names.
        copied: Names of the variables of which the worker has a copy.
        worker_ends: The nodes that always run in the worker's graph.
        server_ends: The same in the server's.
        values: The tensors of the server's graph that are the values of `versioned` after its updates.
        outputs: For each output of the step, whether the worker's graph has it.
    """

    worker: graph_pb2.GraphDef
    server: graph_pb2.GraphDef
    tickets: tuple[str, ...]
    carried: Mapping[str, str]
    versioned: tuple[str, ...]
    copied: tuple[str, ...]
    worker_ends: tuple[str, ...]
    server_ends: tuple[str, ...]
    values: tuple[str, ...]
    outputs: tuple[bool, ...]


TICKET = "ticket/"
_CARRIED = "carried/"
# Ops of which a sum may be one input, and a weight the other, as of a gradient and that of a regularizer.
_ADD = frozenset(("Add", "AddV2", "AddN", "Sub"))


def divide(graph_def: graph_pb2.GraphDef, outputs: Sequence[str], ends: Iterable[str], shared: Collection[str],
           variables: Mapping[str, int], held: Collection[str] = (),
           shapes: graph_lib.Shapes | None = None) -> DividedStep:
    """Divides a step.

    Args:
        graph_def: Its flat GraphDef.
        outputs: Names of its outputs.
        ends: Names of the nodes that always run.
        shared: Names of the placeholders of what all steps share, such as variables.
        variables: The `types_pb2.DataType` of each variable, by name.
        held: The variables that hold summands, which are the worker's.
        shapes: The shapes of its tensors, as in `indexed_graph.Graph`.

    Raises:
        GraphError: If a rank needs what others compute in the same step before it can give its summands.
    """
    return _Division(graph_lib.Graph(graph_def, shapes), shared, variables, held).divided(outputs, list(ends))


class _Division:
    """Finds to which part each node belongs."""

    def __init__(self, graph: graph_lib.Graph, shared: Collection[str], variables: Mapping[str, int],
                 held: Collection[str]) -> None:
        self._graph = graph
        self._graph_def = graph_def = graph.graph_def
        self._variables = variables
        self._exchanges = {node.name: node for node in graph_def.node
                           if (op_def := tf_compat.op_def(node.op)) and op_def.is_distributed_communication}
        for node in self._exchanges.values():
            if node.op != _SYNC:
                raise _no_version(node, f"the exchange {{}} is a {node.op}, no sum of a tensor")
        if conditional := self._exchanges.keys() & frames_lib.inside(graph_def):
            raise _no_version(self._exchanges[min(conditional)], "the exchange {} is in a branch or loop")
        # Behind an exchange, and exchanges themselves.
        self._after = self._reached(self._exchanges, with_controls=True) | self._exchanges.keys()
        arguments = [node.name for node in graph_def.node if node.op == "Placeholder" and node.name not in shared]
        self._with_rows = self._reached(arguments, with_controls=False) | set(arguments)
        self._sources: dict[str, list[str]] = {}  # by node: the variables that it accesses, or passes on
        self._writers: dict[str, list[node_def_pb2.NodeDef]] = collections.defaultdict(list)  # by variable
        for node in graph_def.node:
            for tensor in graph.inputs(node):
                if (source := variables_lib.source(graph, tensor)) not in variables:
                    continue
                self._sources.setdefault(node.name, []).append(source)
                if node.op not in variables_lib.READS and node.op not in variables_lib.PASSED_ON:
                    self._writers[source].append(node)
        self._held = set(held)
        # Servers alone write these.
        self._versioned = {source for source, nodes in self._writers.items()
                           if any(node.name in self._after for node in nodes)}
        self._of_version = self._reached(self._versioned, with_controls=False)
        self._carried: dict[str, str] = {}

    def divided(self, outputs: Sequence[str], ends: list[str]) -> DividedStep:
        graph = self._graph
        written = [node for nodes in self._writers.values() for node in nodes]
        output_nodes = [graph_lib.node_of(output) for output in outputs]
        is_worker_output = [name in self._with_rows and name not in self._after for name in output_nodes]
        worker_ends = [name for name in ends if self._is_workers(name)]
        server_ends = [name for name in ends if name not in worker_ends]
        servers = self._needed([*server_ends, *(name for name, is_workers in zip(output_nodes, is_worker_output)
                                                if not is_workers)], self._stops_server)
        worker_outputs = [name for name, is_workers in zip(output_nodes, is_worker_output) if is_workers]
        begin = [*worker_outputs, *worker_ends, *map(graph_lib.node_of, self._carried),
                 *(graph_lib.node_of(tensor) for node in self._exchanges.values() for tensor in graph.inputs(node))]
        # The worker's updates of variables that change with its clock: each may need another one.
        copied: set[str] = set()
        while True:
            workers = self._needed(begin, self._check_workers)
            read = {source for name in workers for source in self._sources.get(name, ())}
            new = {source for source in read - copied - self._versioned - self._held
                   if any(not self._is_workers(node.name) for node in self._writers.get(source, ()))}
            if not new:
                break
            copied |= new  # ends: as there are finitely many variables
            begin += [node.name for source in new for node in self._writers[source]]
        worker_ends += [node.name for node in written if node.name in workers and node.name not in worker_ends]
        versioned = sorted(read & self._versioned)
        self._check_products(workers, servers)
        server_nodes, values = self._server(servers, versioned, server_ends)
        return DividedStep(
            graph_lib.with_nodes(self._graph_def, self._worker(workers, versioned)),
            graph_lib.with_nodes(self._graph_def, server_nodes), tuple(self._exchanges), self._carried,
            tuple(versioned), tuple(sorted(copied)), tuple(worker_ends),
            tuple(name for name in server_ends if name in servers), tuple(values), tuple(is_worker_output))

    def _check_products(self, workers: Collection[str], servers: Iterable[str]) -> None:
        """Refuses sums that are multiplied by weights which the worker has read too: in a gradient of one version."""
        reads = [name for name in workers if self._reads_version(self._graph.nodes[name])]
        of_reads = {*reads, *self._reached(reads, with_controls=False)} - self._after
        for name in servers:
            node = self._graph.nodes[name]
            given = set(map(graph_lib.node_of, self._graph.inputs(node)))
            if node.op in _ADD or given.isdisjoint(self._after) or given.isdisjoint(of_reads):
                continue
            raise GraphError(
                f"Workers are to read stale weights, but '{name}' takes a sum of all ranks, and "
                f"'{min(given & of_reads)}', which they compute of weights that may be older than those of the server; "
                "train with synchrony='bsp'.")

    def _is_workers(self, name: str) -> bool:
        """Whether a node that always runs is the worker's: it depends on the batch, and on no sum over ranks."""
        return name not in self._after and (
            name in self._with_rows or not self._held.isdisjoint(self._sources.get(name, ())))

    def _reached(self, names: Iterable[str], with_controls: bool) -> set[str]:
        """Returns the names of the nodes behind some nodes."""
        queue, reached = list(names), set[str]()
        while queue:
            name = queue.pop()
            for node in self._graph.consumers(name):
                if node.name in reached or not with_controls and all(
                        graph_lib.is_control(tensor) for tensor in node.input if graph_lib.node_of(tensor) == name):
                    continue
                reached.add(node.name)
                queue.append(node.name)
        return reached

    def _needed(self, names: Iterable[str], stops: Callable[[node_def_pb2.NodeDef, str], bool]) -> set[str]:
        """Returns the names of the nodes that some nodes need, these included."""
        queue, needed = list(names), set[str]()
        while queue:
            name = queue.pop()
            if name in needed:
                continue
            needed.add(name)
            node = self._graph.nodes[name]
            queue += [graph_lib.node_of(tensor) for tensor in node.input if not stops(node, tensor)]
        return needed

    def _check_workers(self, node: node_def_pb2.NodeDef, tensor: str) -> bool:
        """Returns False, since the worker's part ends nowhere; raises GraphError at what waits for an exchange."""
        name = graph_lib.node_of(tensor)
        if name not in self._after:
            return False
        exchange = self._exchange_before(name)
        raise _no_version(exchange, f"'{node.name}' needs the exchange {{}} before this rank's gradients are there")

    def _stops_server(self, node: node_def_pb2.NodeDef, tensor: str) -> bool:
        """Whether the server's part ends at an input of one of its nodes."""
        name = graph_lib.node_of(tensor)
        if node.name in self._exchanges:
            return True  # its inputs are the worker's
        if name in self._after:
            return False
        if graph_lib.is_control(tensor):
            return name in self._with_rows or self._is_workers(name)
        if name not in self._with_rows:
            return False
        if name in self._of_version:
            raise GraphError(
                f"Workers are to read stale weights, but the update '{node.name}' needs '{name}', which each rank "
                "computes with its own version of them, expected sums over ranks; train with synchrony='bsp'.")
        self._carried.setdefault(tensor, f"{_CARRIED}{len(self._carried)}")
        return True

    def _reads_version(self, node: node_def_pb2.NodeDef) -> bool:
        return node.op in variables_lib.READS and not self._versioned.isdisjoint(self._sources.get(node.name, ()))

    def _exchange_before(self, name: str) -> node_def_pb2.NodeDef:
        """Returns an exchange from which a node follows."""
        queue, seen = [name], set[str]()
        while queue:
            node = self._graph.nodes[queue.pop()]
            if node.name in self._exchanges:
                return node
            for before in map(graph_lib.node_of, node.input):
                if before not in seen and before in self._after:
                    seen.add(before)
                    queue.append(before)
        raise AssertionError(f"'{name}' follows from no exchange")

    def _worker(self, names: Collection[str], versioned: Collection[str]) -> list[node_def_pb2.NodeDef]:
        """Returns the nodes of the worker's graph."""
        nodes = []
        for node in self._graph_def.node:
            if node.name in self._exchanges:
                nodes.append(_send(node, names))
            elif node.name in names and node.name not in versioned:
                nodes.append(self._on_value(_within(node, names)))
        return nodes

    def _on_value(self, node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
        """Returns a node of the worker, on the value of a variable if it reads or passes on one that has versions."""
        source = next((source for source in self._sources.get(node.name, ()) if source in self._versioned), None)
        if source is None:
            return node
        if node.op == "ReadVariableOp":
            read = node_def_pb2.NodeDef(name=node.name, op="Identity", input=node.input, device=node.device)
            read.attr["T"].type = self._variables[source]
            return read
        if node.op == "VariableShape":
            node.op = "Shape"
        elif node.op not in variables_lib.PASSED_ON:
            raise GraphError(
                f"Workers are to read stale weights, but the {node.op} '{node.name}' works on a variable itself, "
                "expected one that reads its value; train with synchrony='bsp'.")
        node.attr["T"].type = self._variables[source]
        return node

    def _server(self, names: Collection[str], versioned: Iterable[str],
                ends: Iterable[str]) -> tuple[list[node_def_pb2.NodeDef], list[str]]:
        """Returns (the nodes of the server's graph, the tensors that are the values of some variables at its end)."""
        nodes, values = [], []
        for node in self._graph_def.node:
            if node.name in self._exchanges:  # also if no update needs it: what begins has to end
                nodes.append(_receive(node, self._graph.shape(node.name)))
            elif node.name in names:
                copy = _within(node, {*names, *self._exchanges})
                copy.input[:] = [self._carried.get(tensor, tensor) for tensor in copy.input]
                nodes.append(copy)
        for source in versioned:
            read = node_def_pb2.NodeDef(name=f"version/{source}", op="ReadVariableOp", input=[
                source, *(f"^{name}" for name in ends if name in names)])
            read.attr["dtype"].type = self._variables[source]
            nodes.append(read)
            values.append(f"{read.name}:0")
        return nodes, values


def _within(node: node_def_pb2.NodeDef, names: Collection[str]) -> node_def_pb2.NodeDef:
    """Returns a copy of a node, without the order behind nodes that are not among some, and a place beside others."""
    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    copy.attr.pop("_class", None)
    copy.input[:] = [tensor for tensor in node.input
                     if not graph_lib.is_control(tensor) or graph_lib.node_of(tensor) in names]
    return copy


def _send(node: node_def_pb2.NodeDef, names: Collection[str]) -> node_def_pb2.NodeDef:
    """Returns the node that starts the exchange of a PoseidonSync."""
    inputs = [*graph_lib.data_inputs(node), *(
        control for control in graph_lib.control_inputs(node) if graph_lib.node_of(control) in names)]
    send = node_def_pb2.NodeDef(name=node.name, op="PoseidonSend", input=inputs, device=node.device)
    send.attr["site"].s = node.attr["site"].s
    send.attr["scheme"].s = b"ps"
    send.attr["clocked"].b = True
    send.attr["T"].list.type.append(node.attr["T"].type)
    return send


def _receive(node: node_def_pb2.NodeDef, shape: graph_lib.Shape | None) -> node_def_pb2.NodeDef:
    """Returns the node that ends the exchange of a PoseidonSync, and has its name."""
    receive = node_def_pb2.NodeDef(name=node.name, op="PoseidonRecv", input=[f"{TICKET}{node.name}"],
                                   device=node.device)
    receive.attr["T"].list.type.append(node.attr["T"].type)
    if shape is not None:
        graph_lib.set_attribute(receive.attr["shapes"], "shapes", [shape])
    return receive


def _no_version(node: node_def_pb2.NodeDef, why: str) -> GraphError:
    """Returns the refusal of an exchange in which ranks need each other within a step; `{}` in `why` is its name."""
    site = node.attr["site"].s.decode()
    return GraphError(f"Workers are to read stale weights, but {why.format(repr(site))}: all ranks would have to "
                      "be at the same clock; train with synchrony='bsp', or without what needs it.")
