"""Counts the additions and multiplications of a step, and the operations and exchanges before each exchange.

Requires: sites and exchanges, in a graph with shapes. Ensures: each has its counts. Matrix products and convolutions
count, which are nearly all of a step's arithmetic, unless their shapes are unknown; those in loops count as often as
these have rounds, at most, unless that is unknown. In a graph of several steps, sites of the first one also have the
operations of the next one before these need them.

Tests: tests/graphs/test_priorities.py, tests/training/test_explaining.py.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import functools
import math
import operator

import numpy as np
import numpy.typing as npt
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import loop_rounds

_MOST = 1 << 50  # of a node: sums over thousands fit 64 bits, and are the same on all machines

_ShapeOf = Callable[[str], graph_lib.Shape | None]


class CountOperations(passes.Pass):
    """Counts what each site and exchange depends on."""

    def __init__(self, usual: graph_lib.Graph | None = None) -> None:
        """Makes the pass; `usual` is the graph with the shapes of a usual batch, by default its own."""
        self._usual = usual

    def requires(self, training: passes.TrainingGraph) -> str:
        return "" if len(training.sites) == len(training.markers) else "not every marker has a site"

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        graph, others = training.graph, exchanges.nodes(training.graph)
        counts = count(self._usual or graph)
        depths = _depths(graph, [*(marker.node for marker in training.markers), *(node.name for node in others)])
        needed = _needed(training, counts)
        return dataclasses.replace(
            training, operations=int(counts.numbers.sum()),
            sites=tuple(
                dataclasses.replace(site, operations=counts.of(counts.before[graph_lib.node_of(marker.gradient)]),
                                    needed=needed.get(marker.node), depth=depths[marker.node])
                for site, marker in zip(training.sites, training.markers, strict=True)),
            exchanges=tuple(
                dataclasses.replace(
                    exchange, depth=depths[node.name],
                    operations=counts.of(counts.before[graph_lib.node_of(graph_lib.data_inputs(node)[0])]))
                for exchange, node in zip(training.exchanges, others, strict=True)))


def _needed(training: passes.TrainingGraph, counts: "Counts") -> dict[str, int]:
    """Returns, by marker of the first of several steps, the operations of the next step before one that needs its sum.

    Those of the next step precede its gradients, but not those of the first step.
    """
    steps = training.facts.steps
    markers = {step: [marker for marker, site in zip(training.markers, training.sites, strict=True)
                      if not site.is_waited_for and steps.step_of(site.name) == step] for step in (0, 1)}
    of_first, of_next = (functools.reduce(operator.or_, (
        counts.before[graph_lib.node_of(marker.gradient)] for marker in markers[step]), 0) for step in (0, 1))
    of_next &= ~of_first
    soonest: dict[str, int] = {}  # by node: operations of the next step before the first one that depends on the node
    for node in reversed(training.graph.ordered):
        if (bit := counts.bit.get(node.name, 0)) & of_next:
            soonest[node.name] = counts.of(counts.before[node.name] & of_next & ~bit)
        elif times := [soonest[reader.name] for reader in training.graph.consumers(node.name)
                       if reader.name in soonest]:
            soonest[node.name] = min(times)
    return {marker.node: soonest[marker.node] for marker in markers[0] if marker.node in soonest}


def _depths(graph: graph_lib.Graph, names: Iterable[str]) -> dict[str, int | None]:
    """Returns the length of the longest chain of some nodes before each of them, by name; None for those in loops."""
    counted = set(names)
    counted_depths: dict[str, int] = {}
    depths: dict[str, int | None] = {}
    for node in graph.ordered:
        # The back edge of a loop has none yet.
        depth = max((counted_depths.get(graph_lib.node_of(tensor), 0) for tensor in node.input), default=0)
        counted_depths[node.name] = depth + (node.name in counted)
        if node.name in counted:
            depths[node.name] = None if graph_lib.meanwhile(node) == "repeats" else depth
    return depths


def _product(shape_of: _ShapeOf, node: node_def_pb2.NodeDef) -> int:
    """[b, m, k] times [b, k, n] takes 2 b m k n, whichever is transposed."""
    a_shape, b_shape = map(shape_of, graph_lib.data_inputs(node)[:2])
    a, b = graph_lib.num_elements(a_shape), graph_lib.num_elements(b_shape)
    out_shape = shape_of(node.name)
    if a is None or b is None or not graph_lib.is_known(b_shape):
        return 0
    if not graph_lib.is_known(out_shape):
        is_transposed = any(node.attr[name].b for name in ("transpose_b", "adj_y") if name in node.attr)
        return 2 * a * b_shape[-2 if is_transposed else -1]
    out = math.prod(out_shape)
    batch = math.prod(out_shape[:-2])
    return 2 * round(math.sqrt(a * b * out / batch)) if batch else 0


def _convolution(shape_of: _ShapeOf, node: node_def_pb2.NodeDef, filters: str, positions: str) -> int:
    """Returns the operations of a product with all filters at each output position.

    Args:
        shape_of: Returns the shape of a tensor.
        node: The node.
        filters: A tensor with the shape of the filters, whose last dimension is that of the output channels.
        positions: A tensor with the shape of the convolution's output.
    """
    kernel, outputs = shape_of(filters), shape_of(positions)
    if not graph_lib.is_known(kernel) or not graph_lib.is_known(outputs):
        return 0
    is_channels_first = node.attr["data_format"].s.startswith(b"NC") if (
        "data_format" in node.attr) else False
    channels = outputs[1 if is_channels_first else -1]
    return 2 * math.prod(kernel) * math.prod(outputs) // max(channels, 1)


def _forward(shape_of: _ShapeOf, node: node_def_pb2.NodeDef) -> int:
    return _convolution(shape_of, node, graph_lib.data_inputs(node)[1], node.name)


def _of_filters(shape_of: _ShapeOf, node: node_def_pb2.NodeDef) -> int:
    return _convolution(shape_of, node, node.name, graph_lib.data_inputs(node)[2])


def _of_inputs(shape_of: _ShapeOf, node: node_def_pb2.NodeDef) -> int:
    _, filters, errors = graph_lib.data_inputs(node)[:3]
    return _convolution(shape_of, node, filters, errors)


def _einsum(shape_of: _ShapeOf, node: node_def_pb2.NodeDef) -> int:
    """Returns 2 times the product of the sizes of all indices."""
    terms = node.attr["equation"].s.decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, graph_lib.data_inputs(node)):
        shape = shape_of(tensor)
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


@dataclasses.dataclass(frozen=True)
class Counts:
    """The operations of a graph.

    Attributes:
        numbers: Those of each node that has some.
        bit: By name of such a node: a bit set with its place in `numbers`.
        before: By name of any node: the places of these nodes among it and those before it, as a bit set.
    """

    numbers: npt.NDArray[np.int64]
    bit: Mapping[str, int]
    before: Mapping[str, int]

    def of(self, bits: int) -> int:
        """Returns the operations of the nodes in a bit set."""
        size = len(self.numbers)
        chosen = np.unpackbits(np.frombuffer(bits.to_bytes(size // 8 + 1, "little"), np.uint8), count=size,
                               bitorder="little")
        return int(np.dot(chosen, self.numbers))


def count(graph: graph_lib.Graph) -> Counts:
    """Returns the operations of a graph."""
    numbers: list[int] = []
    bit: dict[str, int] = {}
    loops = loop_rounds.LoopRounds(graph)
    of_loop: collections.Counter[str] = collections.Counter()  # the bits of its nodes
    for node in graph.ordered:
        number = _COUNTED[node.op](loops.shape, node) * loops.of(node.name) if node.op in _COUNTED else 0
        if number:
            bit[node.name] = 1 << len(numbers)
            of_loop.update(dict.fromkeys(loops.loops_of(node.name), bit[node.name]))
            numbers.append(min(number, _MOST))
    bits_before: dict[str, int] = {}
    for node in loops.in_order():
        bits = bit.get(node.name, 0)
        for tensor in node.input:
            bits |= bits_before.get(graph_lib.node_of(tensor), 0)  # none yet: the back edge of a loop
        if (ended := loops.left_by(node)) is not None:  # after all rounds
            bits |= of_loop[ended]
            for name in loops.entries[ended]:
                bits |= bits_before[name]
        bits_before[node.name] = bits
    return Counts(np.array(numbers, np.int64), bit, bits_before)
