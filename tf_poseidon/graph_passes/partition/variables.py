"""Finds the variable on which an op works.

Tests: tests/graphs/test_partition_held.py, tests/graphs/test_partition.py.
"""

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

# Ops that read a variable, and do not change it.
READS = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"))
PASSED_ON = ("Identity", "Switch", "Enter", "Merge", "Exit", "NextIteration")


def source(graph: graph_lib.Graph, tensor: str) -> str:
    """Returns the name of the node from which a resource or reference comes."""
    node, seen = graph.node(tensor), set()
    while (node.op in PASSED_ON or node.op.startswith(("Assign", "RefSwitch", "RefEnter"))) and node.name not in seen:
        seen.add(node.name)
        node = graph.node(graph.inputs(node)[0])
    return node.name
