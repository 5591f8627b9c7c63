"""Finds the gradients that the graph casts to float from half or bfloat16: ranks can send them as they were before.

Ensures: a `NarrowGradient` for each such gradient. A cast to float is exact, so a sum in float has the same bits.

Tests: tests/training/test_rewritten.py.
"""

import dataclasses

from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.factors import PASS_ON
from tf_poseidon.graph_passes.match.matches import NarrowGradient

_FLOAT = types_pb2.DT_FLOAT


class FindCasts(passes.Pass):
    """Finds what gradients are cast from."""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        narrow_sums = {marker.site: narrow for marker in training.markers
                       if (narrow := before_cast(training.graph, marker))}
        return dataclasses.replace(training, narrow=narrow_sums)

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        return next((f"'{site}' is cast from another type than half or bfloat16"
                     for site, narrow in result.narrow.items() if narrow.dtype not in graph_lib.HALVES), "")


def before_cast(graph: graph_lib.Graph, marker: Marker) -> NarrowGradient | None:
    """Returns from what a dense gradient in float is cast; None if from nothing narrower."""
    if marker.is_foreign or marker.indices is not None or marker.wire_dtype is not None or marker.dtype != _FLOAT:
        return None
    node = graph.node(marker.gradient)
    while node.op in PASS_ON and not graph_lib.control_inputs(node):
        node = graph.node(node.input[0])
    if node.op != "Cast" or graph_lib.control_inputs(node) or node.attr["SrcT"].type not in graph_lib.HALVES:
        return None
    return NarrowGradient(node.input[0], node.attr["SrcT"].type)
