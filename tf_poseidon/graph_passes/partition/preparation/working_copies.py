"""Lets a step read weights that it casts to 16 bits from copies of that type.

In mixed precision a weight, the *master*, is in float, and layers cast it whenever they read it. The step reads a
*working copy* where it casts the master, and after each assignment of the master it assigns the copy. A master that
nothing else reads whole can then hold shards, and what servers give back to all ranks is the copy: half of the bytes.

Requires: a flat graph. Ensures: the same results and the same masters; a copy is its master, cast, before and after
each step.

Tests: tests/graphs/test_partition_shards.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
import itertools
import typing

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.propagate import held_summands
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib

_READ, _ASSIGN, _SHAPE = "ReadVariableOp", "AssignVariableOp", "VariableShape"
# The ops through which a resource reaches branches and loops that only use it.
_HANDED_ON = ("Identity", "Switch", "Enter")


class Copy(typing.NamedTuple):
    """The working copy of a weight.

    Attributes:
        source: Name of the node from which its resource comes.
        dtype: Its `types_pb2.DataType`.
    """

    source: str
    dtype: int


def updated(graph_def: graph_pb2.GraphDef, names: Iterable[str]) -> set[str]:
    """Returns those of the names of nodes from which the resources of variables come that a flat GraphDef updates."""
    names, graph = set(names), graph_lib.Graph(graph_def)
    return {source for node in graph_def.node if names and node.op.startswith(propagate_lib.UPDATES)
            for tensor in graph.inputs(node)[:1] if (source := variables_lib.source(graph, tensor)) in names}


def types(graph_def: graph_pb2.GraphDef, names: Iterable[str]) -> dict[str, int]:
    """Returns the type of 16 bits to which a flat GraphDef casts weights that it updates, where it is one.

    Args:
        graph_def: The GraphDef.
        names: Names of the nodes from which the resources of weights come.
    """
    graph = graph_lib.Graph(graph_def)
    candidates = held_summands.candidates(graph, names)
    found: dict[str, set[int]] = {name: set() for name in candidates}
    for node, source in _uses(graph, candidates):
        if node.op == _READ:
            found[source] |= {cast.attr["DstT"].type for cast in _casts(graph, node)}
        elif _steps_to(graph, graph.inputs(node)[0], source) is None:
            found[source] |= set(graph_lib.HALVES)  # a use that a copy could not follow
    return {name: dtypes.pop() for name, dtypes in sorted(found.items()) if len(dtypes) == 1}


def with_copies(graph_def: graph_pb2.GraphDef, copies: Mapping[str, Copy]) -> graph_pb2.GraphDef:
    """Returns a flat GraphDef that uses working copies.

    Args:
        graph_def: The GraphDef.
        copies: The copies, by name of the node from which the resource of the master comes.

    Raises:
        PoseidonError: If a master is assigned where its copy cannot be.
    """
    graph = graph_lib.Graph(graph_def)
    written: dict[str, list[node_def_pb2.NodeDef]] = {}  # by name of the node in whose place they are
    resources: dict[str, node_def_pb2.NodeDef] = {}  # of copies, in branches and loops, by name
    uses = _uses(graph, copies)
    replaced = _assigned_again(graph, uses)
    for node, source in uses:
        copy, resource = copies[source], graph.inputs(node)[0]
        steps = _steps_to(graph, resource, source)
        casts = [cast for cast in _casts(graph, node) if cast.attr["DstT"].type == copy.dtype]
        if node.op == _READ and casts and steps is not None:
            of_copy = _read(f"{node.name}/copy", _resource(steps, copy, resources), node, copy.dtype)
            master = _same(node, node.name)
            master.input.append(f"^{of_copy.name}")  # so whatever waits for this waits for both
            written[node.name] = [of_copy, master]
            for cast in casts:
                identity = _node(cast.name, "Identity", [of_copy.name, *graph_lib.control_inputs(cast)], cast)
                identity.attr["T"].type = copy.dtype
                written[cast.name] = [identity]
        elif node.op == _SHAPE and steps is not None:  # of zeros that gradients of loops begin with
            written[node.name] = [_same(node, node.name)]
            written[node.name][0].input[0] = _resource(steps, copy, resources)
        elif node.op in held_summands.TAKES and node.name not in replaced:
            if steps is None:
                raise GraphError(f"Variable '{source}' is assigned by '{node.name}' in a loop that assigns it in each "
                                 "round, expected once in a step; assign it behind the loop.")
            written[node.name] = _assignments(node, resource, _resource(steps, copy, resources), copy.dtype)
    nodes = [*resources.values()]
    for node in graph_def.node:
        nodes += written.get(node.name, [node])
    return graph_lib.with_nodes(graph_def, nodes)


def _uses(graph: graph_lib.Graph, names: Iterable[str]) -> list[tuple[node_def_pb2.NodeDef, str]]:
    """Returns (node, name of the variable's node) of each read, assignment and shape of some variables."""
    names = set(names)
    uses = []
    for node in graph.graph_def.node if names else ():
        if node.op in (_READ, _SHAPE, *held_summands.TAKES):
            source = variables_lib.source(graph, graph.inputs(node)[0])
            if source in names:
                uses.append((node, source))
    return uses


def _assigned_again(graph: graph_lib.Graph, uses: Iterable[tuple[node_def_pb2.NodeDef, str]]) -> set[str]:
    """Returns the names of assignments whose value nothing casts before the same resource is assigned once more."""
    of_resources = collections.defaultdict[str, list[node_def_pb2.NodeDef]](list)
    for node, _ in uses:
        if node.op in held_summands.TAKES:
            of_resources[graph.inputs(node)[0]].append(node)
    casting = {node.name for node, _ in uses if node.op == _READ and _casts(graph, node)}
    found = set()
    for node in itertools.chain.from_iterable(nodes for nodes in of_resources.values() if len(nodes) > 1):
        queue, behind = [node.name], set[str]()
        while queue:
            new = {reader.name for reader in graph.consumers(queue.pop())} - behind
            behind |= new
            queue += new
        others = {other.name for other in of_resources[graph.inputs(node)[0]]} - {node.name}
        if others & behind and not casting & behind:
            found.add(node.name)
    return found


def _casts(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes that cast what a node gives to a type of 16 bits; ends since only loops have cycles."""
    queue, found = [node.name], []
    while queue:
        name = queue.pop()
        for reader in graph.consumers(name):
            if name not in map(graph_lib.node_of, graph.inputs(reader)):
                continue
            if reader.op == "Identity":
                queue.append(reader.name)
            elif reader.op == "Cast" and reader.attr["DstT"].type in graph_lib.HALVES:
                found.append(reader)
    return found


def _steps_to(graph: graph_lib.Graph, tensor: str, source: str) -> list[tuple[node_def_pb2.NodeDef, int]] | None:
    """Returns the nodes that hand a resource on, each with the number of its output, the last one first.

    None if it goes round a loop.
    """
    steps = []
    while (node := graph.node(tensor)).name != source:
        if node.op not in _HANDED_ON:
            return None
        steps.append((node, graph_lib.output_of(tensor)))
        tensor = graph.inputs(node)[0]
    return steps


def _resource(steps: list[tuple[node_def_pb2.NodeDef, int]], copy: Copy,
              resources: dict[str, node_def_pb2.NodeDef]) -> str:
    """Returns the resource of a copy where that of its master is handed on to; adds nodes to `resources`."""
    tensor = copy.source
    for node, output in reversed(steps):
        handing = _same(node, f"{node.name}/copy")
        handing.input[0] = tensor
        for name in [name for name in handing.attr if name.startswith("_handle") or name == "_output_shapes"]:
            del handing.attr[name]
        resources[handing.name] = handing
        tensor = f"{handing.name}:{output}" if output else handing.name
    return tensor


def _assignments(node: node_def_pb2.NodeDef, resource: str, of_copy: str, dtype: int) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes that assign a master, and then its copy: the last has the name for which others wait."""
    master = _same(node, f"{node.name}/master")
    read = _node(f"{node.name}/assigned", _READ, [resource, f"^{master.name}"], node)
    read.attr["dtype"].CopyFrom(node.attr["dtype"])
    cast = _node(f"{node.name}/cast", "Cast", [read.name], node)
    cast.attr["SrcT"].CopyFrom(node.attr["dtype"])
    cast.attr["DstT"].type = dtype
    assignment = _node(node.name, _ASSIGN, [of_copy, cast.name], node)
    assignment.attr["dtype"].type = dtype
    return [master, read, cast, assignment]


def _read(name: str, resource: str, node: node_def_pb2.NodeDef, dtype: int) -> node_def_pb2.NodeDef:
    """Returns a node that reads a copy when `node` reads its master."""
    read = _node(name, _READ, [resource, *graph_lib.control_inputs(node)], node)
    read.attr["dtype"].type = dtype
    return read


def _node(name: str, op: str, inputs: Iterable[str], like: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    return node_def_pb2.NodeDef(name=name, op=op, input=inputs, device=like.device)


def _same(node: node_def_pb2.NodeDef, name: str) -> node_def_pb2.NodeDef:
    result = node_def_pb2.NodeDef()
    result.CopyFrom(node)
    result.name = name
    return result
