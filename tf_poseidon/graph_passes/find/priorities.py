"""Finds which gradients of a graph with several steps are needed first.

Requires: markers. Ensures: a priority for each site, if some gradient is needed to compute another one.

The longer the way from a gradient's sum to the last gradient that depends on it, the sooner it is needed. So those of
the first layers, which the next forward pass begins with, overtake those of later ones; between the steps of a graph,
the earlier one is first. After its last gradients a graph only updates variables, all of which it waits for. The same
applies to sums that become shards, and to shards that all ranks get.

Tests: tests/graphs/test_priorities.py.
"""

import dataclasses

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib


class FindPriorities(passes.Pass):
    """Gives each site a priority."""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        ways = _ways(training)
        lengths = sorted(set(ways.values()), reverse=True)
        if len(lengths) < 2:
            return training
        places = {length: place for place, length in enumerate(lengths, 1)}
        shards = {node.attr["site"].s.decode(): node.name for node in _of_shards(training.graph)}
        sites = {marker.site: marker.node for marker in training.markers} | shards
        return dataclasses.replace(training, priorities={
            site: places[ways.get(name, 0)] for site, name in sites.items()})


def _of_shards(graph: graph_lib.Graph) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes that exchange shards in the step itself."""
    return [node for node in exchanges.nodes(graph) if node.op in exchanges.OF_SHARDS]


def _ways(training: passes.TrainingGraph) -> dict[str, int]:
    """Returns the number of nodes on the longest way from each gradient's sum to another one, 0 if none depends on it.

    The sums are those of markers, and those that become shards; what all ranks get of these has a way, too.
    """
    graph, of_shards = training.graph, _of_shards(training.graph)
    sums = {marker.node for marker in training.markers} | {
        node.name for node in of_shards if node.op == poseidon_markers.SCATTER}
    counted = sums | {node.name for node in of_shards}
    after: dict[str, int] = {}  # by node: nodes to the last sum, itself included
    ways: dict[str, int] = {}
    for node in reversed(graph.ordered):
        way = max((after.get(reader.name, 0) for reader in graph.consumers(node.name)), default=0)
        if node.name in counted:
            ways[node.name] = way
        if way or node.name in sums:
            after[node.name] = way + 1
    return ways
