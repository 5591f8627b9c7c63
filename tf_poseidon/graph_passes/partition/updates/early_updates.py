"""Finds variables that a rank may update before all other ranks have begun the step, and lets updates wait for these.

What a rank holds of a variable can be read while that rank is ahead, in the next step already, as long as no update of
it is early: each comes after a sum over all ranks, to which those that are behind have not added their part.

Tests: tests/graphs/test_partition_shards.py.
"""

from collections.abc import Collection
from collections.abc import Mapping

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.updates import run_order

_SCATTER, _SYNC = "PoseidonReduceScatter", "PoseidonSync"
# What has something of all ranks.
_SUMS = (_SYNC, "PoseidonSyncSlices", _SCATTER, "PoseidonAllGather", "PoseidonReduceScatterRows")


def find(graph_def: graph_pb2.GraphDef, variables: Collection[str]) -> set[str]:
    """Returns those of some variables that a flat partitioned graph updates early, by name of their resource."""
    return {source for _, source in _early(graph_lib.Graph(graph_def), variables)}


def delayed(graph_def: graph_pb2.GraphDef, shards: Mapping[str, str]) -> graph_pb2.GraphDef:
    """Returns a flat partitioned graph in which early updates wait for the gradient, such as those that decay weights.

    They do so where the gradient becomes a shard in each step, and does not depend on what they update; or else for
    what all ranks exchange first in each step.

    Args:
        graph_def: The graph.
        shards: The layouts of its variables that hold shards, by name of their resource.
    """
    graph = graph_lib.Graph(graph_def)
    early = _early(graph, shards)
    if not early:
        return graph_def
    in_loops = run_order.behind(graph, (node.name for node in graph_def.node if node.op in run_order.ENTERS))
    not_always = in_loops | run_order.behind(graph, (
        node.name for node in graph_def.node if node.op in run_order.BRANCHES))
    scatters = {node.attr["layout"].s.decode(): node.name for node in graph_def.node
                if node.name not in not_always and (node.op == _SCATTER or _is_shard_of_sum(graph, node))}
    behind = run_order.behind(graph, [node.name for node, _ in early])
    # Of what is divided, ranks exchange no gradient, but what they compute it from.
    others = next((node.name for node in graph.ordered
                   if node.op in _SUMS and node.name not in not_always | behind), "")
    waits = {node.name: scatters.get(shards[source], others) for node, source in early if node.name not in in_loops}
    waits = {name: sum_of_all for name, sum_of_all in waits.items() if sum_of_all and sum_of_all not in {*behind, name}}
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    for node in result.node:
        if node.name in waits:
            node.input.append(f"^{waits[node.name]}")
    return result


def _early(graph: graph_lib.Graph, variables: Collection[str]) -> list[tuple[node_def_pb2.NodeDef, str]]:
    """Returns (early update, name of the variable's resource) of some variables."""
    late, found = dict[str, bool](), []
    for node in graph.ordered:
        inputs = [late[name] for name in map(graph_lib.node_of, node.input) if name in late]  # not of loops' next turns
        if node.op == "Merge":  # it waits for one of its inputs; an empty one updates nothing (ownership.py)
            inputs = [late[graph_lib.node_of(tensor)] for tensor in graph.inputs(node)
                      if graph_lib.node_of(tensor) in late and not _is_empty(graph, tensor)]
        late[node.name] = node.op in _SUMS or (all if node.op == "Merge" and inputs else any)(inputs)
        if not late[node.name] and node.op not in (*variables_lib.READS, *variables_lib.PASSED_ON):
            found += [(node, source) for tensor in graph.inputs(node)
                      if (source := variables_lib.source(graph, tensor)) in variables]
    return found


def _is_shard_of_sum(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> bool:
    return node.op == "PoseidonShard" and graph.node(node.input[0]).op == _SYNC


def _is_empty(graph: graph_lib.Graph, tensor: str) -> bool:
    value = graph.constant(tensor)
    return value is not None and value.size == 0
