"""Lets updates of large variables wait for what was read of them before, which TensorFlow would copy otherwise.

A variable's memory is handed out when it is read, without a copy; whoever updates it while somebody still has it copies
all of it first. What computes with a weight in backpropagation may be as late as its update.

Tests: tests/graphs/test_partition_columns.py.
"""

from collections.abc import Collection

from tensorflow.core.framework import graph_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.updates import run_order

_READ, _ASSIGN = "ReadVariableOp", "Assign"
_SAME_MEMORY = ("Reshape", "Identity")


def awaited(graph_def: graph_pb2.GraphDef, names: Collection[str]) -> graph_pb2.GraphDef:
    """Returns a flat graph in which assignments of some variables wait for the ops that use what was read of them.

    Not in branches and loops, where an op may not run.

    Args:
        graph_def: The graph.
        names: Names of the nodes from which the resources of the variables come.
    """
    if not names:
        return graph_def
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    graph = graph_lib.Graph(graph_def)
    elsewhere = run_order.behind(graph, [node.name for node in graph_def.node
                                         if node.op in (*run_order.ENTERS, *run_order.BRANCHES)])
    added: dict[str, set[str]] = {}  # by name of an op: the assignments that wait for it
    for node in result.node:
        if not node.op.startswith(_ASSIGN) or node.name in elsewhere:
            continue
        source = variables_lib.source(graph, node.input[0])
        if source not in names:
            continue
        behind = run_order.behind(graph, [node.name], added)
        for user in _users(graph, source):
            if user not in behind and user not in elsewhere:
                node.input.append(f"^{user}")
                added.setdefault(user, set()).add(node.name)
    return result


def _users(graph: graph_lib.Graph, source: str) -> list[str]:
    """Returns the names of the ops that compute with what is read of a variable, in the order of the graph."""
    holders, users = set[str](), []
    for node in graph.ordered:
        inputs = graph.inputs(node)
        if node.op == _READ and variables_lib.source(graph, inputs[0]) == source:
            holders.add(node.name)
        elif inputs and graph_lib.node_of(inputs[0]) in holders and node.op in _SAME_MEMORY:
            holders.add(node.name)
        elif not holders.isdisjoint(map(graph_lib.node_of, inputs)):
            users.append(node.name)
    return users
