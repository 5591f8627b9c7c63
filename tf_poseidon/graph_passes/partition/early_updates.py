"""Finds variables that a rank may update before all other ranks have begun the step.

What a rank holds of a variable can be read while that rank is ahead, in the next step already, as long as no update of
it is early: each comes after a sum over all ranks, to which those that are behind have not added their part.

Tests: tests/graphs/test_partition_shards.py.
"""

from collections.abc import Collection

from tensorflow.core.framework import graph_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib

_SUMS = ("PoseidonSync", "PoseidonSyncSlices", "PoseidonReduceScatter")


def find(graph_def: graph_pb2.GraphDef, variables: Collection[str]) -> set[str]:
    """Returns those of some variables that a flat partitioned graph updates early, by name of their resource."""
    graph, late, found = graph_lib.Graph(graph_def), dict[str, bool](), set[str]()
    for node in graph.ordered:
        inputs = [late[name] for name in map(graph_lib.node_of, node.input) if name in late]  # not of loops' next turns
        if node.op == "Merge":  # it waits for one of its inputs; an empty one updates nothing (ownership.py)
            inputs = [late[graph_lib.node_of(tensor)] for tensor in graph.inputs(node)
                      if graph_lib.node_of(tensor) in late and not _is_empty(graph, tensor)]
        late[node.name] = node.op in _SUMS or (all if node.op == "Merge" and inputs else any)(inputs)
        if not late[node.name] and node.op not in (*variables_lib.READS, *variables_lib.PASSED_ON):
            found |= {variables_lib.source(graph, tensor) for tensor in graph.inputs(node)} & set(variables)
    return found


def _is_empty(graph: graph_lib.Graph, tensor: str) -> bool:
    value = graph.constant(tensor)
    return value is not None and value.size == 0
