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
from tf_poseidon.graph_passes.find.training_step import StepFacts
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition.sizes.poseidon_rows import ROWS

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
        exchanges = [_exchange(self._usual or training.graph, node, training.facts) for node in found]
        owners = [node.attr["owner"].i if "owner" in node.attr else -1 for node in found]
        return dataclasses.replace(training, exchanges=_with_shares(exchanges, owners))


def nodes(graph: graph_lib.Graph) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes that make the exchanges."""
    return [node for node in graph.graph_def.node if node.op in _OPS and graph_lib.meanwhile(node)]


def _exchange(usual: graph_lib.Graph, node: node_def_pb2.NodeDef, facts: StepFacts) -> planning.Exchange:
    kind, sent = _OPS[node.op], tf.as_dtype(node.attr["T"].type)
    dtype = tf.as_dtype(node.attr["Tout"].type) if kind == planning.SCATTER else sent
    shape = usual.shape(node.name if kind == planning.SHARDS else graph_lib.data_inputs(node)[0])
    if kind == planning.RETURN and shape and shape[0] is None:
        shape = _elements_of_all_rows(usual, node, facts), *shape[1:]
    return planning.Exchange(node.attr["site"].s.decode(), kind, dtype.name, dtype.size,
                             shape if graph_lib.is_known(shape) else None,
                             is_waited_for=graph_lib.meanwhile(node) == "waits",
                             cast_from=sent.name if sent != dtype else None)


def _elements_of_all_rows(usual: graph_lib.Graph, node: node_def_pb2.NodeDef, facts: StepFacts) -> int | None:
    """Returns dimension 0 of a sum of which each rank gets its own rows, from a PoseidonRows that reads these."""
    declared = next((reader.name for reader in usual.consumers(node.name) if reader.op == ROWS), None)
    shape = usual.shape(declared) if declared else None
    own = shape[0] if shape else None
    if own is None or facts.rows is None or facts.global_rows is None:
        return None
    return own // facts.rows * facts.global_rows


def _with_shares(exchanges: Sequence[planning.Exchange], owners: Sequence[int]) -> tuple[planning.Exchange, ...]:
    """Returns exchanges with the share of the busiest owner, given the owner of each, -1 for none."""
    loads = collections.defaultdict[str, collections.Counter[int]](collections.Counter)  # bytes of owners, by kind
    for exchange, owner in zip(exchanges, owners, strict=True):
        if owner >= 0:
            loads[exchange.kind][owner] += exchange.num_bytes or 0
    shares = {kind: max(load.values()) / load.total() for kind, load in loads.items() if load.total()}
    return tuple(exchange if owner < 0 else dataclasses.replace(exchange, busiest_share=shares.get(exchange.kind))
                 for exchange, owner in zip(exchanges, owners, strict=True))
