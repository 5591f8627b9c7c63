"""Finds the exchanges of a partitioned graph's step besides gradients.

Ensures: an `Exchange` for each of them, in the order of the graph.

Tests: tests/training/test_explaining.py, tests/training/test_timeline.py, tests/communicator/test_shards.py.
"""

import collections
from collections.abc import Sequence
import dataclasses

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from tf_poseidon import planning
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

_OPS = {"PoseidonAllGather": planning.GATHER, "PoseidonBroadcast": planning.BROADCAST,
        "PoseidonReduceScatter": planning.SCATTER, "PoseidonGatherShards": planning.SHARDS,
        "PoseidonReduceScatterRows": planning.RETURN}
OF_SHARDS = tuple(op for op, kind in _OPS.items() if kind in (planning.SCATTER, planning.SHARDS))


class FindExchanges(passes.Pass):
    """Finds gathers, broadcasts, exchanges of shards, and sums of a rank's own rows."""

    def __init__(self, usual: graph_lib.Graph | None = None) -> None:
        """Makes the pass; `usual` is the graph with the shapes of a usual batch, by default its own."""
        self._usual = usual

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        found = nodes(training.graph)
        exchanges = [_exchange(self._usual or training.graph, node) for node in found]
        owners = [node.attr["owner"].i if "owner" in node.attr else -1 for node in found]
        return dataclasses.replace(training, exchanges=_with_shares(exchanges, owners))


def nodes(graph: graph_lib.Graph) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes that make the exchanges."""
    return [node for node in graph.graph_def.node if node.op in _OPS and graph_lib.meanwhile(node)]


def _exchange(usual: graph_lib.Graph, node: node_def_pb2.NodeDef) -> planning.Exchange:
    kind, sent = _OPS[node.op], tf.as_dtype(node.attr["T"].type)
    dtype = tf.as_dtype(node.attr["Tout"].type) if kind == planning.SCATTER else sent
    shape = usual.shape(node.name if kind == planning.SHARDS else graph_lib.data_inputs(node)[0])
    return planning.Exchange(node.attr["site"].s.decode(), kind, dtype.name, dtype.size,
                             shape if graph_lib.is_known(shape) else None,
                             is_waited_for=graph_lib.meanwhile(node) == "waits",
                             cast_from=sent.name if sent != dtype else None)


def _with_shares(exchanges: Sequence[planning.Exchange], owners: Sequence[int]) -> tuple[planning.Exchange, ...]:
    """Returns exchanges with the share of the busiest owner, given the owner of each, -1 for none."""
    loads = collections.defaultdict[str, collections.Counter[int]](collections.Counter)  # bytes of owners, by kind
    for exchange, owner in zip(exchanges, owners, strict=True):
        if owner >= 0:
            loads[exchange.kind][owner] += exchange.num_bytes or 0
    shares = {kind: max(load.values()) / load.total() for kind, load in loads.items() if load.total()}
    return tuple(exchange if owner < 0 else dataclasses.replace(exchange, busiest_share=shares.get(exchange.kind))
                 for exchange, owner in zip(exchanges, owners, strict=True))
