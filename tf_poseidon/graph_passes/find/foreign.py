"""Finds the gradients that a program for Horovod or tf.distribute synchronises itself.

Requires: a flat graph. Ensures: the markers in the order of the graph, with unique names.

The markers are those libraries' all-reduces, whatever they add up: all-reduces of tensors that are not products of
factors are left unchanged. One op may reduce several tensors: grouped by Horovod, or concatenated by tf.distribute,
which splits the sum again.

Tests: tests/engines/test_drop_in.py, tests/engines/test_horovod.py.
"""

import collections
import dataclasses

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.find.markers import Bundle
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

HOROVOD = ("HorovodAllreduce", "HorovodGroupedAllreduce")
TENSORFLOW = ("CollectiveReduceV2", "CollectiveReduceV3")
OPS = (*HOROVOD, *TENSORFLOW)

# Horovod's numbers of the supported reductions.
AVERAGE, SUM = 0, 1

_SUMMED = (types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_HALF, types_pb2.DT_BFLOAT16)


def find(graph: graph_lib.Graph, size: int) -> list[Marker]:
    """Returns the `Marker`s of a graph.

    Args:
        graph: The `Graph`.
        size: Number of ranks. Reductions over only some of them are left unchanged: all ranks must agree.
    """
    markers = []
    for node in graph.graph_def.node:
        if node.op in OPS and not graph_lib.is_decided(node):
            refusal = _refusal(graph, node, size)
            markers += [dataclasses.replace(marker, refusal=refusal) for marker in _markers(graph, node)]
    times = collections.Counter(marker.site for marker in markers)
    numbers: collections.Counter[str] = collections.Counter()
    for i, marker in enumerate(markers):
        if times[marker.site] > 1:
            markers[i] = dataclasses.replace(marker, site=f"{marker.site}#{numbers[marker.site]}")
            numbers[marker.site] += 1
    return markers


def is_of_all_ranks(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node is an all-reduce of Horovod that all ranks run: under one name, maybe with other types."""
    return node.op in HOROVOD and node.attr["process_set_id"].i == 0


def _refusal(graph: graph_lib.Graph, node: node_def_pb2.NodeDef, size: int) -> str | None:
    """Returns why factors cannot replace an all-reduce, whatever its input is; None if they can."""
    if node.attr["T"].type not in _SUMMED:
        return "it does not reduce floating-point numbers"
    if node.op in HOROVOD:
        if node.attr["reduce_op"].i not in (AVERAGE, SUM):
            return "its reduction is neither a sum nor an average"
        if node.attr["process_set_id"].i != 0:
            return "only the ranks of a process set add it up"
        return None
    if node.op == "CollectiveReduceV3":
        return "TensorFlow has no gathering collective for the communicators of CollectiveReduceV3"
    if node.attr["T"].type == types_pb2.DT_BFLOAT16:
        return "TensorFlow's collectives do not gather bfloat16"
    merge, final = (node.attr[key].s.decode() for key in ("merge_op", "final_op"))
    if (merge, final) != ("Add", "Id"):
        return f"its reduction is {merge} and {final}, not a sum"
    if node.attr["communication_hint"].s == b"nccl" or "GPU" in node.device:
        return "collectives on GPUs have to run in one order, which factors would change"
    group_size = graph.constant(node.input[1])
    if group_size is None or int(group_size) != size:
        return f"its group is not that of all {size} ranks"
    return None


def _markers(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> list[Marker]:
    """Returns a marker for each gradient that a node reduces."""
    bundle = (Bundle(node.name, tuple(graph_lib.data_inputs(node)), node.name)
              if node.op == "HorovodGroupedAllreduce" else
              _laid_end_to_end(graph, node) if node.op == "CollectiveReduceV2" else None)
    tensors = bundle.gradients if bundle else graph_lib.data_inputs(node)[:1]
    markers = []
    for part, tensor in enumerate(tensors):
        gradient = _before_flattening(graph, tensor)
        markers.append(Marker(
            _site_of(graph, node, gradient, part if bundle else None), node.name, gradient, None, graph.shape(gradient),
            node.attr["T"].type, is_foreign=True, is_flat=gradient != tensor, bundle=bundle, part=part))
    return markers


def _site_of(graph: graph_lib.Graph, reduce: node_def_pb2.NodeDef, gradient: str, part: int | None) -> str:
    """Returns a name for a gradient.

    An op of Horovod has the same name on all ranks, whatever else they compute. A gradient that TensorFlow reduces gets
    the name of the node that computes it.
    """
    if reduce.op in HOROVOD:
        name = reduce.name.rpartition("/")[2]
        return name if part is None else f"{name}/{part}"
    node = graph.node(gradient)
    while node.op == "Identity":
        node = graph.node(node.input[0])
    return node.name


def _before_flattening(graph: graph_lib.Graph, tensor: str) -> str:
    """Returns the matrix before it was flattened to a vector, or the tensor itself."""
    node, shape = graph.node(tensor), graph.shape(tensor)
    if node.op != "Reshape" or shape is None or len(shape) != 1:
        return tensor
    source = graph_lib.data_inputs(node)[0]
    sizes = graph.shape(source) or ()
    return source if sum(size != 1 for size in sizes) > 1 else tensor  # a bias is a vector anyway


def _laid_end_to_end(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> Bundle | None:
    """Returns the `Bundle` of a sum that is split as its input was concatenated, or None."""
    ends = graph.node(node.input[0])
    pieces = [reader for reader in graph.consumers(node.name)
              if any(graph_lib.node_of(tensor) == node.name for tensor in graph.inputs(reader))]
    if ends.op != "ConcatV2" or len(pieces) != 1 or pieces[0].op != "SplitV":
        return None
    *gradients, _ = graph_lib.data_inputs(ends)
    sizes = graph.constant(pieces[0].input[1])
    shapes = [graph.shape(tensor) for tensor in gradients]
    lengths = [graph_lib.num_elements(shape) for shape in shapes]
    if any(shape is None or len(shape) != 1 for shape in shapes):
        return None
    if sizes is None or sizes.tolist() != lengths:
        return None
    return Bundle(node.name, tuple(gradients), pieces[0].name)
