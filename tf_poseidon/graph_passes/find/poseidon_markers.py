"""Finds the gradients that graphs of our own programs synchronise.

Requires: a flat graph. Ensures: the markers in the order of the graph, with unique names.

A marker is the op that sums a gradient, or another summand that may be planned: `PoseidonSync`, or
`PoseidonSyncSlices` for slices. The partitioner writes it (`emit/graph_exchanges.py`), in `strategy.run` `ops.sync`.
`foreign.py` returns the same `Marker`s for graphs without these ops.

Tests: tests/graphs/test_passes.py.
"""

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.find.markers import KeptPart
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition.states import Division

# The ops that sum gradients.
OPS = ("PoseidonSync", "PoseidonSyncSlices")
# One that sums a gradient of which each rank needs its KV pairs alone: nothing is left to plan.
SCATTER = "PoseidonReduceScatter"
# The op of verify mode, which reads sums and what they are made of.
VERIFY = "PoseidonVerify"


def find(graph: graph_lib.Graph) -> list[Marker]:
    """Returns the `Marker`s of a graph.

    Raises:
        GraphError: If two gradients have the same name.
    """
    markers = [marker for node in graph.graph_def.node
               if (marker := _marker(graph, node)) is not None]
    by_site: dict[str, Marker] = {}
    for marker in markers:
        other = by_site.setdefault(marker.site, marker)
        if other is not marker:
            raise GraphError(f"the nodes '{other.node}' and '{marker.node}' synchronise the same "
                             f"site '{marker.site}'; give each synchronisation a name of its own")
    return markers


def _marker(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> Marker | None:
    """Returns the `Marker` of a node; None if the node is no marker."""
    if node.op not in OPS or graph_lib.is_decided(node):
        return None
    site, dtype = node.attr["site"].s.decode(), node.attr["T"].type
    if node.op == "PoseidonSync":
        wire = node.attr["wire_dtype"].s.decode() if "wire_dtype" in node.attr else ""
        gradient, contributes = graph_lib.data_inputs(node)
        return Marker(site, node.name, gradient, contributes, graph.shape(node.name), dtype,
                      wire_dtype=tf.as_dtype(wire).as_datatype_enum if wire else None,
                      meanwhile=graph_lib.meanwhile(node), kept=_kept(graph, node))
    indices, values, contributes = graph_lib.data_inputs(node)
    shape = tuple(dim.size for dim in node.attr["shape"].shape.dim)
    return Marker(site, node.name, values, contributes, shape, dtype, indices)


def _kept(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> KeptPart | None:
    """Returns the columns or rows of a sum that are all that the step needs of it; None if it needs more."""
    readers = graph.consumers(node.name)
    shards = [reader for reader in readers if reader.op != VERIFY]
    if len(shards) != 1 or shards[0].op != "PoseidonShard" or list(shards[0].input) != [node.name]:
        return None
    attributes = shards[0].attr
    if "divided" not in attributes or attributes["divided"].i < 0:
        return None
    division = Division(attributes["layout"].s.decode(), divided=attributes["divided"].i,
                        columns=attributes["columns"].i)
    return KeptPart(shards[0].name, division, is_verified=len(readers) > 1)
