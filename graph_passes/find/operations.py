"""Counts the additions and multiplications of a step, and the operations and exchanges before each exchange.

Requires: sites and exchanges, in a graph with shapes. Ensures: each has its counts. Matrix products and convolutions
count, which are nearly all of a step's arithmetic; those inside loops, or with unknown shapes, do not.
"""

from collections.abc import Iterable
import dataclasses
import math

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import exchanges as exchanges_lib
from tf_poseidon.graph_passes.graph import graph as graph_lib


class CountOperations(passes.Pass):
    """Counts what each site and exchange depends on."""

    def requires(self, known: passes.TrainingGraph) -> str:
        return "" if len(known.sites) == len(known.markers) else "not every marker has a site"

    def call(self, known: passes.TrainingGraph) -> passes.TrainingGraph:
        graph, others = known.graph, exchanges_lib.nodes(known.graph)
        operations, before = count(graph, [marker.gradient for marker in known.markers]
                                   + [graph_lib.data_inputs(node)[0] for node in others])
        names = [marker.node for marker in known.markers] + [node.name for node in others]
        depths = _depths(graph, names)
        counted = [(number, depths[name]) for number, name in zip(before, names, strict=True)]
        first = len(known.sites)
        return dataclasses.replace(
            known, operations=operations,
            sites=tuple(dataclasses.replace(site, operations=number, depth=depth) for site, (number, depth) in zip(
                known.sites, counted[:first], strict=True)),
            exchanges=tuple(
                dataclasses.replace(exchange, operations=number, depth=depth)
                for exchange, (number, depth) in zip(known.exchanges, counted[first:], strict=True)))


def _depths(graph: graph_lib.Graph, names: Iterable[str]) -> dict[str, int | None]:
    """Returns the length of the longest chain of some nodes before each of them, by name; None for those in loops."""
    counted = set(names)
    before: dict[str, int] = {}
    found: dict[str, int | None] = {}
    for node in graph_lib.in_order(graph.graph_def):
        # The back edge of a loop has none yet.
        depth = max((before.get(graph_lib.node_of(tensor), 0) for tensor in node.input), default=0)
        before[node.name] = depth + (node.name in counted)
        if node.name in counted:
            found[node.name] = None if graph_lib.meanwhile(node) == "repeats" else depth
    return found


def _product(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> int:
    """[b, m, k] times [b, k, n] takes 2 b m k n, whichever is transposed."""
    a, b = (graph_lib.num_elements(graph.shape(t)) for t in graph_lib.data_inputs(node)[:2])
    out_shape = graph.shape(node.name)
    if a is None or b is None or not graph_lib.is_known(out_shape):
        return 0
    out = math.prod(out_shape)
    batch = math.prod(out_shape[:-2])
    return 2 * round(math.sqrt(a * b * out / batch)) if batch else 0


def _convolution(graph: graph_lib.Graph, node: node_def_pb2.NodeDef, filters: str, positions: str) -> int:
    """Returns the operations of a product with all filters at each output position.

    Args:
        graph: The graph.
        node: The node.
        filters: A tensor with the shape of the filters, whose last dimension is that of the output channels.
        positions: A tensor with the shape of the convolution's output.
    """
    kernel, outputs = graph.shape(filters), graph.shape(positions)
    if not graph_lib.is_known(kernel) or not graph_lib.is_known(outputs):
        return 0
    is_channels_first = node.attr["data_format"].s.startswith(b"NC") if (
        "data_format" in node.attr) else False
    channels = outputs[1 if is_channels_first else -1]
    return 2 * math.prod(kernel) * math.prod(outputs) // max(channels, 1)


def _forward(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> int:
    return _convolution(graph, node, graph_lib.data_inputs(node)[1], node.name)


def _of_filters(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> int:
    return _convolution(graph, node, node.name, graph_lib.data_inputs(node)[2])


def _of_inputs(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> int:
    _, filters, errors = graph_lib.data_inputs(node)[:3]
    return _convolution(graph, node, filters, errors)


def _einsum(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> int:
    """Returns 2 times the product of the sizes of all indices."""
    terms = node.attr["equation"].s.decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, graph_lib.data_inputs(node)):
        shape = graph.shape(tensor)
        if not graph_lib.is_known(shape) or len(shape) != len(term):
            return 0
        sizes.update(zip(term, shape))
    return 2 * math.prod(sizes.values()) if len(terms) == 2 else 0


_COUNTED = {
    **dict.fromkeys(("MatMul", "_FusedMatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"),
                    _product),
    "Einsum": _einsum,
    **dict.fromkeys(("Conv2D", "_FusedConv2D", "Conv3D"), _forward),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"), _of_filters),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _of_inputs),
}


def count(graph: graph_lib.Graph, tensors: Iterable[str]) -> tuple[int, list[int]]:
    """Returns (operations of the whole graph, operations before each of some tensors)."""
    counts: list[int] = []  # of the nodes that count
    before: dict[str, int] = {}  # by node: which of them come before it, as a bit set
    in_loops: set[str] = set()
    for node in graph_lib.in_order(graph.graph_def):
        bits = 0
        for tensor in node.input:
            bits |= before.get(graph_lib.node_of(tensor), 0)  # none yet: the back edge of a loop
        # The number of rounds of a loop is unknown, and so are, in some graphs, the shapes in it.
        if node.op == "Enter" or (node.op != "Exit" and any(
                graph_lib.node_of(tensor) in in_loops for tensor in node.input)):
            in_loops.add(node.name)
        is_counted = node.op in _COUNTED and node.name not in in_loops
        count = _COUNTED[node.op](graph, node) if is_counted else 0
        if count:
            bits |= 1 << len(counts)
            counts.append(count)
        before[node.name] = bits

    def total(bits: int) -> int:
        return sum(count for i, count in enumerate(counts) if bits >> i & 1)

    return sum(counts), [total(before[graph_lib.node_of(tensor)]) for tensor in tensors]
