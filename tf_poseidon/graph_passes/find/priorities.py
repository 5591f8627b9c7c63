"""Finds which gradients of a graph with several steps are needed first.

Requires: markers. Ensures: a priority for each site, if some gradient is needed to compute another one.

The longer the way from a gradient's sum to the last gradient that depends on it, the sooner it is needed. So those of
the first layers, which the next forward pass begins with, overtake those of later ones; between the steps of a graph,
the earlier one is first. After its last gradients a graph only updates variables, all of which it waits for.

Tests: tests/graphs/test_priorities.py.
"""

import dataclasses

from tf_poseidon.graph_passes import passes


class FindPriorities(passes.Pass):
    """Gives each site a priority."""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        ways = _ways(training)
        lengths = sorted(set(ways.values()), reverse=True)
        if len(lengths) < 2:
            return training
        places = {length: place for place, length in enumerate(lengths, 1)}
        return dataclasses.replace(training, priorities={
            marker.site: places[ways.get(marker.node, 0)] for marker in training.markers})


def _ways(training: passes.TrainingGraph) -> dict[str, int]:
    """Returns the number of nodes on the longest way from each marker to another one, 0 if none depends on it."""
    graph, markers = training.graph, {marker.node for marker in training.markers}
    after: dict[str, int] = {}  # by node: nodes to the last marker, itself included
    ways: dict[str, int] = {}
    for node in reversed(graph.ordered):
        way = max((after.get(reader.name, 0) for reader in graph.consumers(node.name)), default=0)
        if node.name in markers:
            ways[node.name] = way
        if way or node.name in markers:
            after[node.name] = way + 1
    return ways
