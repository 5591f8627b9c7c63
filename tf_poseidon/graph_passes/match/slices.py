"""Finds the indices of gradients that are some rows of a variable.

Ensures: a `SlicesMatch` for each gradient that is slices.

Tests: tests/graphs/test_passes.py.
"""

import dataclasses

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.matches import SlicesMatch


class MatchSlices(passes.Pass):
    """Finds indices."""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        matches = {marker.site: match(training.graph, marker) for marker in training.markers
                   if marker.indices is not None}
        return dataclasses.replace(training, matches={**training.matches, **matches})

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        missing = [marker.site for marker in training.markers if marker.site not in result.matches]
        return f"nothing was found out about '{missing[0]}'" if missing else ""


def match(graph: graph_lib.Graph, marker: Marker) -> SlicesMatch:
    """Returns the indices of a gradient, and what they are computed from with as many elements."""
    assert marker.indices is not None
    indices = [marker.indices]
    while graph.node(indices[-1]).op in ("Cast", "Reshape"):  # neither changes the number of elements
        indices.append(graph_lib.data_inputs(graph.node(indices[-1]))[0])
    return SlicesMatch(tuple(indices), graph.nodes[marker.node].attr["Tidx"].type)
