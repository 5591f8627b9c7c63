"""Finds the gradients that the graph casts to float from half or bfloat16: ranks can send them as they were before.

Ensures: a `NarrowGradient` for each such gradient, also for those that become shards, whose exchanges say so. A cast to
float is exact, so a sum in float has the same bits.

Tests: tests/training/test_rewritten.py, tests/training/test_sharded_update.py.
"""

import dataclasses

import tensorflow as tf
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.factors import PASS_ON
from tf_poseidon.graph_passes.match.matches import NarrowGradient

_FLOAT = types_pb2.DT_FLOAT


class FindCasts(passes.Pass):
    """Finds what gradients are cast from."""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        graph = training.graph
        gradients = {marker.site: marker.gradient for marker in training.markers if _is_sum_of_floats(marker)}
        gradients |= {node.attr["site"].s.decode(): node.input[0] for node in exchanges.nodes(graph)
                      if node.op == poseidon_markers.SCATTER and node.attr["T"].type == _FLOAT
                      and not ("wire_dtype" in node.attr and node.attr["wire_dtype"].s)}
        narrow_sums = {site: narrow for site, gradient in gradients.items()
                       if (narrow := _before_cast(graph, gradient))}
        return dataclasses.replace(training, narrow=narrow_sums, exchanges=tuple(
            dataclasses.replace(exchange, cast_from=tf.as_dtype(narrow_sums[exchange.site].dtype).name)
            if exchange.site in narrow_sums else exchange for exchange in training.exchanges))

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        return next((f"'{site}' is cast from another type than half or bfloat16"
                     for site, narrow in result.narrow.items() if narrow.dtype not in graph_lib.HALVES), "")


def _is_sum_of_floats(marker: Marker) -> bool:
    """Whether a marker sums a dense gradient in float, which it does not round."""
    return not marker.is_foreign and marker.indices is None and marker.wire_dtype is None and marker.dtype == _FLOAT


def _before_cast(graph: graph_lib.Graph, gradient: str) -> NarrowGradient | None:
    """Returns from what a gradient in float is cast; None if from nothing narrower."""
    node = graph.node(gradient)
    while node.op in PASS_ON and not graph_lib.control_inputs(node):
        node = graph.node(node.input[0])
    if node.op != "Cast" or graph_lib.control_inputs(node) or node.attr["SrcT"].type not in graph_lib.HALVES:
        return None
    return NarrowGradient(node.input[0], node.attr["SrcT"].type)
