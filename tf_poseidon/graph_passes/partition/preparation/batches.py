"""Reorders the blocks into which dilated convolutions divide images, so that a rank's rows stay contiguous.

SpaceToBatchND concatenates the first block of every image, then the second block of every image, and so on, so the rows
of a rank are no longer contiguous. Ops that work image by image do not depend on the order of images. So between
SpaceToBatchND and BatchToSpaceND, all blocks of an image may come together instead, and these two ops are written as
ops that have rules: Pad, Reshape, Transpose, Slice.

Requires: a flat graph. Ensures: a graph that computes the same. The graph is unchanged if an op that is not known to
work image by image reads blocks, or if sizes of images are unknown.

Tests: tests/graphs/test_partition_families.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

_MAKES, _ENDS = "SpaceToBatchND", "BatchToSpaceND"
# The inputs that are images, by op.
_ONE_BY_ONE = {
    **dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative", "MaxPool", "AvgPool", "BiasAdd", "Relu", "Identity",
                     "ExpandDims", "Squeeze", "Reshape"), (0,)),
    "ReluGrad": (0, 1),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), (2,)),
}
_SUMS = {**dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"),
                         (0, 2)), "BiasAddGrad": (0,)}
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
_INT32 = types_pb2.DT_INT32

# (sizes of images, block, paddings or crops).
_Geometry = tuple[list[int], list[int], list[list[int]]]


def together(graph_def: graph_pb2.GraphDef, fetches: Iterable[str],
             add_shapes: graph_lib.AddShapes) -> graph_pb2.GraphDef:
    """Returns the GraphDef in which all blocks of an image come together.

    Args:
        graph_def, fetches, add_shapes: Same as in `partitioner.partition`.
    """
    if not any(node.op == _MAKES for node in graph_def.node):
        return graph_def
    graph = graph_lib.Graph(add_shapes(graph_def))
    if not _can_be_together(graph, {graph_lib.node_of(fetch) for fetch in fetches}):
        return graph_def
    nodes = []
    for node in graph_def.node:
        if node.op in (_MAKES, _ENDS):
            writer = graph_lib.Writer(f"poseidon/blocks/{node.name}", node.device)
            (_write_made if node.op == _MAKES else _write_ended)(writer, graph, node)
            writer.nodes[-1].name = node.name
            nodes += writer.nodes
        else:
            nodes.append(node)
    return graph_lib.with_nodes(graph_def, nodes)


def _can_be_together(graph: graph_lib.Graph, fetches: Collection[str]) -> bool:
    """Whether nothing depends on the order of blocks."""
    ends = [node for node in graph.graph_def.node if node.op in (_MAKES, _ENDS)]
    if any(_geometry(graph, node) is None for node in ends):
        return False
    # The number of blocks per image, by node with blocks.
    counts = {node.name: _num_blocks(graph, node) for node in ends if node.op == _MAKES}
    queue = list(counts)
    while queue:
        name = queue.pop()
        if name in fetches:
            return False
        for node in graph.consumers(name):
            read = {i for i, tensor in enumerate(graph.inputs(node)) if graph_lib.node_of(tensor) == name}
            if node.op in _SHAPES or node.op == _ENDS and read == {0} or read <= set(_SUMS.get(node.op, ())):
                continue
            if not read <= set(_ONE_BY_ONE.get(node.op, ())) or not _keeps_first(graph, node):
                return False
            if node.name not in counts:
                counts[node.name] = counts[name]
                queue.append(node.name)
    return all(counts.get(graph_lib.node_of(node.input[0])) == _num_blocks(graph, node)
               for node in ends if node.op == _ENDS) and all(
        len({counts.get(graph_lib.node_of(node.input[i])) for i in images}) == 1
        for node in graph.graph_def.node
        if (images := _SUMS.get(node.op) or node.name in counts and _ONE_BY_ONE.get(node.op)))


def _num_blocks(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> int:
    block = graph.constant(graph.inputs(node)[1])
    assert block is not None  # else there is no `_geometry`
    return int(np.prod(block))


def _keeps_first(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> bool:
    """Whether the first dimension stays first, and unchanged."""
    if node.op not in ("Reshape", "ExpandDims", "Squeeze"):
        return True
    shape, after = graph.shape(graph.inputs(node)[0]), graph.shape(node.name)
    if not shape or not after:
        return False
    count = graph_lib.num_elements(shape[1:])
    return count is not None and 0 < count == graph_lib.num_elements(after[1:])


def _geometry(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> _Geometry | None:
    """Returns (sizes of images, block, paddings or crops) as lists; None if unknown."""
    tensor, block, borders = graph.inputs(node)
    shape = graph.shape(tensor)
    sizes = shape[1:] if shape else None
    if not graph_lib.is_known(sizes):
        return None
    in_block, around = graph.constant(block), graph.constant(borders)
    if in_block is None or around is None:
        return None
    return [int(size) for size in sizes], in_block.tolist(), around.tolist()


def _write_made(writer: graph_lib.Writer, graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> None:
    geometry = _geometry(graph, node)
    assert geometry is not None  # `_can_be_together`
    sizes, block, paddings = geometry
    value, count, rest = graph.inputs(node)[0], len(block), sizes[len(block):]
    if np.any(paddings):
        around = np.array([[0, 0], *paddings, *[[0, 0]] * len(rest)], np.int32)
        value = writer.add("padded", "Pad", [value, writer.constant("paddings", around, value)],
                           T=node.attr["T"].type, Tpaddings=_INT32)
    small = [(size + sum(padding)) // b for size, padding, b in zip(sizes, paddings, block)]
    split = [size for pair in zip(small, block) for size in pair]
    value = _reshaped(writer, "split", value, [-1, *split, *rest], node)
    order = [0, *range(2, 2 * count + 1, 2), *range(1, 2 * count + 1, 2),
             *range(2 * count + 1, 2 * count + 1 + len(rest))]
    value = _transposed(writer, value, order, node)
    _reshaped(writer, "", value, [-1, *small, *rest], node)


def _write_ended(writer: graph_lib.Writer, graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> None:
    geometry = _geometry(graph, node)
    assert geometry is not None  # `_can_be_together`
    sizes, block, crops = geometry
    value, count = graph.inputs(node)[0], len(block)
    small, rest = sizes[:count], sizes[count:]
    value = _reshaped(writer, "split", value, [-1, *block, *small, *rest], node)
    order = [0, *(d for i in range(count) for d in (1 + count + i, 1 + i)),
             *range(2 * count + 1, 2 * count + 1 + len(rest))]
    value = _transposed(writer, value, order, node)
    large = [size * b for size, b in zip(small, block)]
    is_cut = np.any(crops)
    value = _reshaped(writer, "joined" if is_cut else "", value, [-1, *large, *rest], node)
    if is_cut:
        begin = [0, *(crop[0] for crop in crops), *[0] * len(rest)]
        size = [-1, *(size - sum(crop) for size, crop in zip(large, crops)), *rest]
        bounds = [writer.constant(name, np.array(values, np.int32), value)
                  for name, values in (("begin", begin), ("size", size))]
        writer.add("", "Slice", [value, *bounds, *graph_lib.control_inputs(node)], T=node.attr["T"].type, Index=_INT32)


def _reshaped(writer: graph_lib.Writer, suffix: str, value: str, sizes: Sequence[int],
              node: node_def_pb2.NodeDef) -> str:
    shape = writer.constant(f"{suffix or 'last'}/shape", np.array(sizes, np.int32), value)
    return writer.add(suffix, "Reshape", [value, shape, *(() if suffix else graph_lib.control_inputs(node))],
                      T=node.attr["T"].type, Tshape=_INT32)


def _transposed(writer: graph_lib.Writer, value: str, order: Sequence[int], node: node_def_pb2.NodeDef) -> str:
    by = writer.constant("order", np.array(order, np.int32), value)
    return writer.add("transposed", "Transpose", [value, by], T=node.attr["T"].type, Tperm=_INT32)
