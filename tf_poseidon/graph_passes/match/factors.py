"""Recognises gradients that are products of factors, U^T V.

Requires: markers in a flat graph with `_output_shapes`. Ensures: a `Match` or a `Refusal` for each gradient that is not
slices. Whatever the rows of U and V mean, the sum of such gradients over the ranks is the product with the rows of all
ranks.

Tests: tests/graphs/test_passes.py, tests/graphs/test_partition_golden.py.
"""

from collections.abc import Callable
import dataclasses

import numpy as np
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match import rank_independence
from tf_poseidon.graph_passes.match.matches import Match
from tf_poseidon.graph_passes.match.matches import Product
from tf_poseidon.graph_passes.match.matches import Refusal
from tf_poseidon.graph_passes.match.matches import Refused
from tf_poseidon.graph_passes.match.matches import Scalar
from tf_poseidon.graph_passes.match.matches import Scale
from tf_poseidon.graph_passes.match.matches import Term
from tf_poseidon.graph_passes.match.products import BATCH_PRODUCTS
from tf_poseidon.graph_passes.match.products import PRODUCTS

# Ops that return the elements of their input in the same order.
PASS_ON = ("Identity", "Snapshot", "PreventGradient")
# Ops that may lie between a product, or a sum of rows, and the marker.
BETWEEN = (*PASS_ON, "Reshape", "Cast", "Neg", "RealDiv", "Mul", "AddN", "Add", "AddV2", "Sum")

# The number of products is that of the paths to them: it doubles each time a gradient is added to itself.
_MAX_STEPS = 300
_LOOPS = ("Exit", "RefExit", "Merge", "Switch")
_FLOATS = {types_pb2.DT_HALF: 2, types_pb2.DT_BFLOAT16: 2, types_pb2.DT_FLOAT: 4,
           types_pb2.DT_DOUBLE: 8}

# Tensors by which a gradient is multiplied element by element.
Masks = tuple[str, ...]


class MatchFactors(passes.Pass):
    """Finds the factors of gradients."""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        graph = training.graph
        # Whether tensors are equal on all ranks depends on the whole graph.
        independent = rank_independence.RankIndependence(graph, any(m.is_foreign for m in training.markers))
        matches = {marker.site: _gatherable(graph, match(graph, marker, independent), marker)
                   for marker in training.markers if marker.indices is None}
        return dataclasses.replace(training, matches={**training.matches, **matches}, digest=independent.digest)

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        missing = [m.site for m in training.markers if m.indices is None and m.site not in result.matches]
        return f"nothing was found out about '{missing[0]}'" if missing else ""


def _gatherable(graph: graph_lib.Graph, match: Match | Refusal, marker: Marker) -> Match | Refusal:
    """Returns the match, or a Refusal if the collectives of another library cannot gather its types."""
    if not marker.is_foreign or not isinstance(match, Match):
        return match
    dtype = match.products[0].dtype
    if match.terms and dtype != marker.dtype:
        return Refusal(marker.node, "what is added to its factors has another type than these")
    if dtype == types_pb2.DT_BFLOAT16 and graph.nodes[marker.node].op in foreign.TENSORFLOW:
        return Refusal(marker.node, "TensorFlow's collectives do not gather bfloat16")
    return match


def match(graph: graph_lib.Graph, marker: Marker, is_rank_independent: Callable[[str], bool]) -> Match | Refusal:
    """Returns the `Match` of a gradient, or a `Refusal`.

    Args:
        graph: The `Graph`.
        marker: The gradient's `Marker`.
        is_rank_independent: A function that returns whether a tensor is equal on all ranks.
    """
    if marker.refusal:
        return Refusal(marker.node, marker.refusal)
    if marker.shape is not None and len(marker.shape) < 2:
        return Refusal(graph_lib.node_of(marker.gradient), "only a matrix has factors")
    try:
        match = _Matcher(graph, is_rank_independent).match(marker.gradient, (), ())
        _check(match, marker)
        return match
    except Refused as refused:
        return refused.args[0]


def _check(match: Match, marker: Marker) -> None:
    """Refuses a match that does not give a gradient of the marker's shape and type."""
    if not match.products:
        raise Refused(marker.gradient, "it holds no product of two matrices")
    first = match.products[0]
    if {(p.u.columns, p.v.columns, p.dtype) for p in match.products} != {
            (first.u.columns, first.v.columns, first.dtype)}:
        raise Refused(marker.gradient, "its products have factors of different sizes or types")
    if marker.dtype not in _FLOATS or _FLOATS[marker.dtype] < _FLOATS[first.dtype]:
        raise Refused(marker.gradient, "its type is narrower than that of its factors")
    size = first.u.columns * first.v.columns
    if size == 0 or graph_lib.num_elements(marker.shape) != size:
        raise Refused(marker.gradient, "its product is reduced further, or its shape is unknown")


def scalar_of(graph: graph_lib.Graph, tensor: str) -> Scalar | None:
    """Returns the Scalar to which all elements of a tensor are equal; None if there is none."""
    node = graph.node(tensor)
    while node.op in ("Reshape", "Tile", "BroadcastTo", "ExpandDims", "Identity", "Fill"):
        if graph.shape(tensor) in ((), (1,)):
            break
        tensor = node.input[1 if node.op == "Fill" else 0]
        node = graph.node(tensor)
    if node.op == "Const":
        value = graph.constant(tensor)
        if value is not None and node.attr["dtype"].type in _FLOATS and value.size and np.all(value == value.flat[0]):
            return Scalar(value=float(value.flat[0]))
        return None
    shape = graph.shape(tensor)
    return Scalar(tensor) if graph_lib.num_elements(shape) == 1 else None


class _Matcher:
    """Follows a gradient back to its products."""

    def __init__(self, graph: graph_lib.Graph, is_rank_independent: Callable[[str], bool]) -> None:
        self._graph = graph
        self._is_rank_independent = is_rank_independent
        self._steps = 0

    def _count(self, tensor: str) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise Refused(tensor, f"its products lie behind more than {_MAX_STEPS} operations")

    def match(self, tensor: str, scale: Scale, masks: Masks) -> Match:
        """Returns the Match of scale * masks * tensor."""
        self._count(tensor)
        node = self._graph.node(tensor)
        inputs = graph_lib.data_inputs(node)
        if node.op in (*PASS_ON, "Reshape"):  # elements keep their order
            return self.match(inputs[0], scale, masks)
        if node.op == "Cast":
            return self._cast(node, scale, masks)
        if node.op == "Neg":
            return self.match(inputs[0], (*scale, Scalar(value=-1.0)), masks)
        if node.op == "RealDiv" and (scalar := scalar_of(self._graph, inputs[1])):
            divisor = dataclasses.replace(scalar, divides=True)
            return self.match(inputs[0], (*scale, divisor), masks)
        if node.op == "Mul":
            return self._mul(tensor, inputs, scale, masks)
        if node.op in ("AddN", "Add", "AddV2"):
            return self._sum(tensor, inputs, scale, masks)
        if node.op in PRODUCTS:
            return self._product(node, scale, masks)
        if node.op == "Sum":
            return self._batch_product(node, inputs, scale, masks)
        if node.op in _LOOPS:
            raise Refused(tensor, "it is accumulated in a loop, or depends on a condition")
        raise Refused(tensor, f"a {node.op} is not a product of two matrices")

    def _cast(self, node: node_def_pb2.NodeDef, scale: Scale, masks: Masks) -> Match:
        source, target = node.attr["SrcT"].type, node.attr["DstT"].type
        if _FLOATS.get(source, 9) > _FLOATS.get(target, 0):
            raise Refused(node.name, "a narrowing Cast rounds it")
        if source != target and (scale or masks):
            raise Refused(node.name, "it is multiplied after a Cast from a narrower type")
        match = self.match(node.input[0], scale, masks)
        if source != target and (match.masks or match.terms):
            raise Refused(node.name, "a mask or a term is added before a Cast from a narrower type")
        return match

    def _mul(self, tensor: str, inputs: list[str], scale: Scale, masks: Masks) -> Match:
        shape = self._graph.shape(tensor)
        for factor, other in (inputs, inputs[::-1]):
            scalar = scalar_of(self._graph, factor)
            # Multiplying by a scalar that was expanded to a matrix must not broadcast the other operand.
            if scalar and (self._graph.shape(factor) == () or self._graph.shape(other) == shape):
                return self.match(other, (*scale, scalar), masks)
        if graph_lib.num_elements(shape) and all(self._graph.shape(i) == shape for i in inputs):
            for factor, other in (inputs, inputs[::-1]):
                if self._is_rank_independent(factor):
                    return self.match(other, scale, (*masks, factor))
        raise Refused(tensor, "it is multiplied with a tensor that may differ between ranks, or one of "
                      "the two is broadcast")

    def _sum(self, tensor: str, inputs: list[str], scale: Scale, masks: Masks) -> Match:
        products: list[Product] = []
        terms: list[Term] = []
        product_masks: set[Masks] = set()
        shape = self._graph.shape(tensor)
        for part in inputs:
            if graph_lib.num_elements(shape) is None or self._graph.shape(part) != shape:
                raise Refused(tensor, "it adds tensors of different or unknown shapes")
            if self._holds_product(part):
                match = self.match(part, scale, masks)
                products += match.products
                terms += match.terms
                product_masks.add(match.masks)
            else:
                terms.append(self._term(part, scale, masks))
        if len(product_masks) > 1:
            raise Refused(tensor, "it adds products with different masks")
        return Match(tuple(products), next(iter(product_masks), masks), tuple(terms))

    def _holds_product(self, tensor: str) -> bool:
        """Whether a tensor is computed from a product through ops that `match` knows."""
        queue, seen = [tensor], set()
        while queue:
            self._count(tensor)
            node = self._graph.node(queue.pop())
            if node.name in seen:
                continue
            seen.add(node.name)
            if node.op in PRODUCTS or (node.op == "Sum" and self._behind(node.input[0]).op in BATCH_PRODUCTS):
                return True
            if node.op in BETWEEN:
                queue += [t for t in graph_lib.data_inputs(node) if not scalar_of(self._graph, t)]
        return False

    def _behind(self, tensor: str) -> node_def_pb2.NodeDef:
        """Returns the node that computes a tensor, which others may pass on."""
        node = self._graph.node(tensor)
        while node.op in PASS_ON:
            node = self._graph.node(node.input[0])
        return node

    def _term(self, tensor: str, scale: Scale, masks: Masks) -> Term:
        """Returns a Term for a part of a sum without a product, such as a regularizer's."""
        coefficient, tensors, queue = list(scale), list(masks), [tensor]
        while queue:
            self._count(tensor)
            part = queue.pop()
            node = self._graph.node(part)
            inputs = graph_lib.data_inputs(node)
            same_shape = len({self._graph.shape(t) for t in [part, *inputs]}) == 1
            if scalar := scalar_of(self._graph, part):
                coefficient.append(scalar)
            elif (self._is_rank_independent(part)
                  and self._graph.shape(part) == self._graph.shape(tensor)):
                tensors.append(part)
            elif node.op == "Mul" and (same_shape or any(scalar_of(self._graph, t) for t in inputs)):
                queue += inputs
            elif node.op == "Neg":
                coefficient.append(Scalar(value=-1.0))
                queue += inputs
            elif node.op == "RealDiv" and (scalar := scalar_of(self._graph, inputs[1])):
                coefficient.append(dataclasses.replace(scalar, divides=True))
                queue.append(inputs[0])
            elif node.op in PASS_ON:
                queue += inputs
            else:
                raise Refused(part, f"a {node.op} that may differ between ranks is added to it")
        if not tensors:
            raise Refused(tensor, "a scalar is added to it")
        return Term(tuple(coefficient), tuple(tensors))

    def _product(self, node: node_def_pb2.NodeDef, scale: Scale, masks: Masks) -> Match:
        u, v = PRODUCTS[node.op](self._graph, node)
        dtype = node.attr["T"].type
        if dtype not in _FLOATS:
            raise Refused(node.name, "its factors are not floating-point numbers")
        return Match((Product(node.name, u, v, scale, dtype),), masks)

    def _batch_product(self, node: node_def_pb2.NodeDef, inputs: list[str], scale: Scale, masks: Masks) -> Match:
        """Matches a BatchMatMul that is summed over its batch: a layer whose inputs have several dimensions."""
        inner = self._behind(inputs[0])
        if inner.op not in BATCH_PRODUCTS:
            raise Refused(node.name, f"a sum over a {inner.op} is not a product of two matrices")
        u, v = BATCH_PRODUCTS[inner.op](self._graph, inner)
        axes, shape = self._graph.constant(inputs[1]), self._graph.shape(u.tensor)
        assert shape is not None  # else the product was refused
        rank = len(shape)
        if axes is not None:
            if sorted(a % rank for a in axes.flatten().tolist()) != list(range(rank - 2)):
                raise Refused(node.name, "it is not summed over the batch, and only that")
        elif self._graph.node(inputs[1]).op != "BroadcastGradientArgs":
            raise Refused(node.name, "the dimensions that it is summed over are not constant")
        elif {graph_lib.num_elements(s) for s in self._shapes_of_sum(node)} != {u.columns * v.columns}:
            raise Refused(node.name, "it is summed over more than the batch, or its shape is unknown")
        return Match((Product(inner.name, u, v, scale, inner.attr["T"].type),), masks)

    def _shapes_of_sum(self, node: node_def_pb2.NodeDef) -> list[graph_lib.Shape | None]:
        """Returns the shape of a sum; if that is unknown, the shapes to which it is reshaped."""
        if self._graph.shape(node.name) is not None:
            return [self._graph.shape(node.name)]
        return [self._graph.shape(consumer.name) if consumer.op == "Reshape" else None
                for consumer in self._graph.consumers(node.name)]
