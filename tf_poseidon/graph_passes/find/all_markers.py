"""Finds the gradients that a training graph synchronises, in our programs and in others.

Requires: a valid graph. Ensures: markers with unique names.

Tests: tests/graphs/test_passes.py.
"""

import dataclasses

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.graph import check


class FindMarkers(passes.Pass):
    """Finds Poseidon's markers, or the all-reduces of another library."""

    def __init__(self, foreign_ranks: int | None = None) -> None:
        """Makes the pass.

        Args:
            foreign_ranks: Number of ranks of a program for another library; None for a program with our markers.
        """
        self._foreign_ranks = foreign_ranks

    def requires(self, training: passes.TrainingGraph) -> str:
        return check.problem_of(training.graph)

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        if self._foreign_ranks is not None:
            return dataclasses.replace(training, markers=tuple(foreign.find(training.graph, self._foreign_ranks)))
        # TensorFlow reorders graphs; this restores the order of the user's program, as far as that is known.
        order = training.facts.order()
        return dataclasses.replace(training, markers=tuple(sorted(
            poseidon_markers.find(training.graph), key=lambda marker: (order(marker.site), marker.node))))

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        sites = [marker.site for marker in result.markers]
        return "two markers have the same name" if len(set(sites)) < len(sites) else ""
