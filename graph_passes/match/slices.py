"""Counts the slices of gradients that are some rows of a variable.

Ensures: a `SlicesMatch` for each gradient that is slices.
"""

import dataclasses

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.match.matches import SlicesMatch


class MatchSlices(passes.Pass):
    """Counts slices."""

    def call(self, known: passes.TrainingGraph) -> passes.TrainingGraph:
        matches = {marker.site: match(known.graph, marker) for marker in known.markers if marker.indices is not None}
        return dataclasses.replace(known, matches={**known.matches, **matches})

    def ensures(self, known: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        missing = [marker.site for marker in known.markers if marker.site not in result.matches]
        return f"nothing was found out about '{missing[0]}'" if missing else ""


def match(graph: graph_lib.Graph, marker: Marker) -> SlicesMatch:
    """Returns how many slices a gradient has: as many as its indices, if their number is known."""
    tensor = marker.indices
    assert tensor is not None
    while ((shape := graph.shape(tensor)) is None or shape == (None,)) and graph.node(tensor).op in ("Cast", "Reshape"):
        tensor = graph_lib.data_inputs(graph.node(tensor))[0]  # neither changes the number of indices
    return SlicesMatch(graph_lib.num_elements(graph.shape(tensor)), graph.nodes[marker.node].attr["Tidx"].type)
