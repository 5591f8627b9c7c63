"""Lets the last op that computes with a gradient wait for the others, so that it may overwrite it.

TensorFlow's ops write in place of an input that nobody else has any more. An optimizer computes from a gradient what it
adds to each of its slots; if all begin at the same time, each needs a temporary tensor of the gradient's size.

Tests: tests/graphs/test_partition_columns.py.
"""

from collections.abc import Mapping

from tensorflow.core.framework import graph_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.updates import run_order

_ASSIGN = "Assign"
_SAME_MEMORY = ("Reshape", "Identity")
_OF_OTHERS = ("Const", "Placeholder", "VarHandleOp", "ReadVariableOp")  # whose memory nobody overwrites


def waiting(graph_def: graph_pb2.GraphDef, layouts: Mapping[str, str]) -> graph_pb2.GraphDef:
    """Returns a flat graph in which last readers wait of what leads to updates of variables of one layout alone.

    Not in branches and loops, where an op may not run.

    Args:
        graph_def: The graph.
        layouts: The layouts of the variables, by name of the node from which their resource comes.
    """
    if not layouts:
        return graph_def
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    graph, nodes = graph_lib.Graph(graph_def), {node.name: node for node in result.node}
    elsewhere = run_order.behind(graph, [node.name for node in graph_def.node
                                         if node.op in (*run_order.ENTERS, *run_order.BRANCHES)])
    leading = _leading_to_updates(graph, layouts) - elsewhere
    readers: dict[str, list[str]] = {}  # by name of a node, in the order of the graph
    for node in graph.ordered:
        if node.op not in _SAME_MEMORY:
            for origin in dict.fromkeys(_origin(graph, tensor) for tensor in graph.inputs(node)):
                if origin in leading and graph.nodes[origin].op not in _OF_OTHERS:
                    readers.setdefault(origin, []).append(node.name)
    added: dict[str, set[str]] = {}  # by name of a reader: the last one, if it waits for it
    for *others, last in readers.values():
        behind = run_order.behind(graph, [last], added)
        for other in others:
            if other not in behind and last not in run_order.behind(graph, [other], added):
                nodes[last].input.append(f"^{other}")
                added.setdefault(other, set()).add(last)
    return result


def _leading_to_updates(graph: graph_lib.Graph, layouts: Mapping[str, str]) -> set[str]:
    """Returns the names of the nodes whose results go into updates of variables of one layout alone."""
    found: dict[str, str] = {}  # the layout
    for node in reversed(graph.ordered):
        inputs = graph.inputs(node)
        if node.op.startswith(_ASSIGN):
            into = {layouts.get(variables_lib.source(graph, inputs[0]), "")}
        else:
            into = {found.get(reader.name, "") for reader in graph.consumers(node.name)
                    if node.name in map(graph_lib.node_of, graph.inputs(reader))}
        if len(into) == 1 and "" not in into:
            found[node.name], = into
    return set(found)


def _origin(graph: graph_lib.Graph, tensor: str) -> str:
    """Returns the name of the node whose memory a tensor has."""
    node = graph.node(tensor)
    while node.op in _SAME_MEMORY:
        node = graph.node(graph.inputs(node)[0])
    return node.name
