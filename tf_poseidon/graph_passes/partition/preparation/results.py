"""Takes out of a step what it returns from variables alone, such as the results of metrics.

Requires: a flat graph of one process. Ensures: the step and its results, one after the other, return what the graph
does, and have the same effects. Nothing that the results read changes before they have.

Whoever needs no results of a step need not compute them; and variables that only these read may hold summands from step
to step (held_summands.py).

Tests: tests/graphs/test_partition_held.py, tests/training/test_training.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import functions as functions_lib
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib

_READ = "ReadVariableOp"


@dataclasses.dataclass(frozen=True)
class Results:
    """What a step returns that it computes from variables alone.

    Attributes:
        graph_def: A GraphDef in which the values of variables are placeholders.
        fetches: By number of the step's output, the tensor in it.
        reads: By name of a placeholder, the node from which the resource of its variable comes.
    """

    graph_def: graph_pb2.GraphDef
    fetches: dict[int, str]
    reads: dict[str, str]


def cut(graph_def: graph_pb2.GraphDef, fetches: Sequence[str], ends: Iterable[str], variables: Collection[str],
        captures: Collection[str]) -> tuple[graph_pb2.GraphDef, Results]:
    """Returns (the GraphDef of the step alone, its `Results`).

    Args:
        graph_def: A flat GraphDef.
        fetches: Names of the tensors that the step returns.
        ends: Names of the nodes that stay in the step, whatever it returns; reads stay if anything else needs them.
        variables: Names of the nodes from which the resources of variables come whose reads may be taken out.
        captures: Names of the placeholders of captured tensors.
    """
    graph = graph_lib.Graph(graph_def)
    ends = list(ends)
    updates: dict[str, set[str]] = {name: set() for name in variables}
    for node in map(graph.node, _before(graph, [*ends, *map(graph_lib.node_of, fetches)])):
        if node.op not in (*variables_lib.READS, *variables_lib.PASSED_ON):
            for tensor in graph.inputs(node):
                updates.get(variables_lib.source(graph, tensor), set()).add(node.name)
    behind = {i: _behind(graph, graph_lib.node_of(fetch), updates, captures) for i, fetch in enumerate(fetches)}
    result_fetches = {i: fetches[i] for i, nodes in behind.items()
                      if any(graph.nodes[name].op == _READ for name in nodes)}
    nodes = set().union(*(behind[i] for i in result_fetches))
    reads = {name: variables_lib.source(graph, graph.inputs(graph.nodes[name])[0]) for name in nodes
             if graph.nodes[name].op == _READ}
    stay = _before(graph, [*(name for name in ends if name not in reads), *(
        graph_lib.node_of(fetch) for i, fetch in enumerate(fetches) if i not in result_fetches)])
    results = [_of_results(node) for node in graph_def.node if node.name in nodes]
    return (graph_lib.with_nodes(graph_def, [node for node in graph_def.node if node.name in stay]),
            Results(graph_pb2.GraphDef(node=results, versions=graph_def.versions), result_fetches, reads))


def _behind(graph: graph_lib.Graph, name: str, updates: Mapping[str, Set[str]], captures: Collection[str]) -> set[str]:
    """Returns the names of the nodes from which a node is computed, reads of variables the first of them.

    There are none if it depends on anything else than variables that nothing updates afterwards, constants and captured
    tensors.
    """
    queue, seen = [name], set[str]()
    while queue:
        node = graph.nodes[queue.pop()]
        if node.name in seen:
            continue
        seen.add(node.name)
        if node.op == _READ:
            source = variables_lib.source(graph, graph.inputs(node)[0])
            if source not in updates or not updates[source] <= _before(graph, [node.name]):
                return set()
        elif node.name not in captures:
            op = tf_compat.op_def(node.op)
            if op is None or op.is_stateful or node.op in ("Placeholder", *frames_lib.CONTROL_FLOW) or (
                    functions_lib.called(node)):
                return set()
            queue += map(graph_lib.node_of, graph.inputs(node))
    return seen


def _before(graph: graph_lib.Graph, names: Iterable[str]) -> set[str]:
    """Returns the names of the nodes that run before some nodes, and of these."""
    queue, seen = list(names), set[str]()
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += map(graph_lib.node_of, graph.nodes[name].input)
    return seen


def _of_results(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """Returns a node that runs when the step is over: it waits for nothing, and does not read variables itself."""
    if node.op == _READ:
        return node_def_pb2.NodeDef(name=node.name, op="Placeholder", attr={"dtype": node.attr["dtype"]})
    result = node_def_pb2.NodeDef()
    result.CopyFrom(node)
    result.input[:] = graph_lib.data_inputs(node)
    return result
