"""Checks that TensorFlow could run a graph.

Tests: tests/graphs/test_passes.py.
"""

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib


def problem_of(graph: graph_lib.Graph) -> str:
    """Returns "" if names are unique, inputs exist and every cycle is a loop; else the problem, without a full stop."""
    graph_def, names = graph.graph_def, graph.nodes.keys()
    if len(names) != len(graph_def.node):
        return "two nodes have the same name"
    for node in graph_def.node:
        sources = {graph_lib.node_of(tensor) for tensor in node.input}
        if not sources <= names:
            return f"node '{node.name}' reads '{min(sources - names)}', which does not exist"
    ordered = {node.name for node in graph.ordered}
    return "" if ordered == names else f"node '{min(names - ordered)}' depends on itself"
