"""Recognises gradients that are products of factors, U^T V.

Requires: a flat graph with `_output_shapes`. Ensures: a `Match`, in which the gradient is exactly

    reshape(sum of scale * U^T V over the products) * masks + sum of coefficient * term

or a `Refusal`. Whatever the rows of U and V stand for, the sum of such gradients over ranks is the
same with the rows of all ranks. Masks and terms have to be equal on all ranks; scales and
coefficients are scalars, and may differ.
"""

import dataclasses
import math

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes import graph as graph_lib

_PASS_ON = ("Identity", "Snapshot", "PreventGradient")
# Ops that may lie between a product, or a sum of rows, and the marker.
BETWEEN = (*_PASS_ON, "Reshape", "Cast", "Neg", "RealDiv", "Mul", "AddN", "Add", "AddV2", "Sum")
_LOOPS = ("Exit", "RefExit", "Merge", "Switch")
_FLOATS = {types_pb2.DT_HALF: 2, types_pb2.DT_BFLOAT16: 2, types_pb2.DT_FLOAT: 4,
           types_pb2.DT_DOUBLE: 8}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a gradient is not a product of factors.

    Attributes:
        node: The node that it fails at.
        reason: A sentence without its end.
    """

    node: str
    reason: str

    def __str__(self):
        return f"{self.reason} (node '{self.node}')"


@dataclasses.dataclass(frozen=True)
class Factor:
    """One factor: a tensor, and how it becomes a matrix with its rows first.

    Attributes:
        tensor: The tensor.
        transpose: The order of its dimensions with which the rows come first, None if they do.
        columns: Size of the matrix' second dimension.
        is_matrix: Whether it is a matrix, once transposed; else it has to be reshaped.
    """

    tensor: str
    transpose: tuple[int, ...] | None
    columns: int
    is_matrix: bool


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One scalar of a scale or coefficient.

    Attributes:
        tensor: A tensor with one element, or None for a constant.
        value: The constant.
        divides: Whether it is divided by.
    """

    tensor: str | None = None
    value: float | None = None
    divides: bool = False


@dataclasses.dataclass(frozen=True)
class Product:
    """scale * U^T V.

    Attributes:
        node: The node that computes U^T V.
        u: U, [K, M].
        v: V, [K, N].
        scale: Scalars to multiply with, or divide by.
        k: K, None where it is unknown.
        dtype: Type of the factors, a `types_pb2.DataType`.
    """

    node: str
    u: Factor
    v: Factor
    scale: tuple[Scalar, ...]
    k: int | None
    dtype: int


@dataclasses.dataclass(frozen=True)
class Term:
    """coefficient * a product, element by element, of tensors that are equal on all ranks."""

    coefficient: tuple[Scalar, ...]
    tensors: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Match:
    """A gradient as a sum of products and terms; see the head of this file."""

    products: tuple[Product, ...]
    masks: tuple[str, ...] = ()
    terms: tuple[Term, ...] = ()


@dataclasses.dataclass(frozen=True)
class BiasMatch:
    """A gradient that is the sum of the rows of a factor of another site.

    Attributes:
        leader: Name of the other site.
        factor: Which factor of its: "u" or "v".
        nodes: The nodes that add up the rows.
    """

    leader: str
    factor: str
    nodes: tuple[str, ...] = ()


class _Refused(Exception):
    """Carries a Refusal out of the recursion below."""

    def __init__(self, tensor, reason):
        super().__init__(Refusal(graph_lib.node_of(tensor), reason))


def match_factors(graph, marker, is_rank_independent):
    """Returns the `Match` of a gradient, or a `Refusal`.

    Args:
        graph: The `Graph`.
        marker: The gradient's `Marker`.
        is_rank_independent: A function that says of a tensor whether it is equal on all ranks.
    """
    if marker.shape is not None and len(marker.shape) < 2:
        return Refusal(graph_lib.node_of(marker.gradient), "it is not a matrix")
    try:
        match = _Matcher(graph, is_rank_independent).match(marker.gradient, (), ())
        _check(match, marker)
        return match
    except _Refused as refused:
        return refused.args[0]


def match_biases(graph, markers, matches):
    """Finds gradients that are sums of the rows of a factor: those of biases of dense layers.

    Args:
        graph: The `Graph`.
        markers: All `Marker`s.
        matches: Result of `match_factors` for each site.

    Returns:
        `BiasMatch`es by site.
    """
    leaders = {}
    for marker in markers:
        match = matches[marker.site]
        if not isinstance(match, Match):
            continue
        for which in ("v", "u"):
            parts = [(_root(graph, getattr(p, which)), p.scale) for p in match.products]
            if all(root for root, _ in parts):
                leaders.setdefault(_unordered(parts), BiasMatch(marker.site, which))
    found = {}
    for marker in markers:
        if isinstance(matches[marker.site], Match) or marker.shape is None:
            continue
        try:
            sums = _row_sums(graph, marker.gradient, ())
        except _Refused:
            continue
        leader = leaders.get(_unordered([(root, scale) for _, root, scale in sums]))
        if leader and len(marker.shape) == 1:
            nodes = tuple(node for node, _, _ in sums)
            found[marker.site] = dataclasses.replace(leader, nodes=nodes)
    return found


def _unordered(parts):
    return frozenset((part, parts.count(part)) for part in parts)


def _check(match, marker):
    """Refuses a match that does not make a gradient of the marker's shape and type."""
    if not match.products:
        raise _Refused(marker.gradient, "it holds no product of two matrices")
    first = match.products[0]
    if {(p.u.columns, p.v.columns, p.dtype) for p in match.products} != {
            (first.u.columns, first.v.columns, first.dtype)}:
        raise _Refused(marker.gradient, "its products have factors of different sizes or types")
    if marker.dtype not in _FLOATS or _FLOATS[marker.dtype] < _FLOATS[first.dtype]:
        raise _Refused(marker.gradient, "its type is narrower than that of its factors")
    if graph_lib.num_elements(marker.shape) != first.u.columns * first.v.columns:
        raise _Refused(marker.gradient, "its product is reduced further, or its shape is unknown")


class _Matcher:
    """Follows a gradient back to its products."""

    def __init__(self, graph, is_rank_independent):
        self._graph = graph
        self._is_rank_independent = is_rank_independent

    def match(self, tensor, scale, masks):
        """Returns the Match of scale * masks * tensor."""
        node = self._graph.node(tensor)
        inputs = graph_lib.data_inputs(node)
        if node.op in (*_PASS_ON, "Reshape"):  # elements keep their order
            return self.match(inputs[0], scale, masks)
        if node.op == "Cast":
            return self._cast(node, scale, masks)
        if node.op == "Neg":
            return self.match(inputs[0], (*scale, Scalar(value=-1.0)), masks)
        if node.op == "RealDiv" and (scalar := self.scalar(inputs[1])):
            divisor = dataclasses.replace(scalar, divides=True)
            return self.match(inputs[0], (*scale, divisor), masks)
        if node.op == "Mul":
            return self._mul(tensor, inputs, scale, masks)
        if node.op in ("AddN", "Add", "AddV2"):
            return self._sum(tensor, inputs, scale, masks)
        if node.op in _PRODUCTS:
            return self._product(node, scale, masks)
        if node.op == "Sum":
            return self._batch_product(node, inputs, scale, masks)
        if node.op in _LOOPS:
            raise _Refused(tensor, "it is accumulated in a loop, or depends on a condition")
        raise _Refused(tensor, f"a {node.op} is not a product of two matrices")

    def _cast(self, node, scale, masks):
        source, target = node.attr["SrcT"].type, node.attr["DstT"].type
        if _FLOATS.get(source, 9) > _FLOATS.get(target, 0):
            raise _Refused(node.name, "a narrowing Cast rounds it")
        if source != target and (scale or masks):
            raise _Refused(node.name, "it is multiplied after a Cast from a narrower type")
        return self.match(node.input[0], scale, masks)

    def _mul(self, tensor, inputs, scale, masks):
        for factor, other in (inputs, inputs[::-1]):
            if scalar := self.scalar(factor):
                return self.match(other, (*scale, scalar), masks)
        for factor, other in (inputs, inputs[::-1]):
            shape = self._graph.shape(tensor)
            if (shape is not None and self._graph.shape(factor) == shape
                    and self._is_rank_independent(factor)):
                return self.match(other, scale, (*masks, factor))
        raise _Refused(tensor, "it is multiplied with a tensor that may differ between ranks")

    def _sum(self, tensor, inputs, scale, masks):
        products, terms, product_masks = [], [], set()
        shape = self._graph.shape(tensor)
        for part in inputs:
            if graph_lib.num_elements(shape) is None or self._graph.shape(part) != shape:
                raise _Refused(tensor, "it adds tensors of different or unknown shapes")
            if self._holds_product(part):
                match = self.match(part, scale, masks)
                products += match.products
                terms += match.terms
                product_masks.add(match.masks)
            else:
                terms.append(self._term(part, scale, masks))
        if len(product_masks) > 1:
            raise _Refused(tensor, "it adds products with different masks")
        return Match(tuple(products), *product_masks or [masks], tuple(terms))

    def _holds_product(self, tensor):
        """Whether a product is behind a tensor, through ops that `match` knows."""
        queue, seen = [tensor], set()
        while queue:
            node = self._graph.node(queue.pop())
            if node.name in seen:
                continue
            seen.add(node.name)
            if node.op in _PRODUCTS:
                return True
            if node.op in BETWEEN:
                queue += [t for t in graph_lib.data_inputs(node) if not self.scalar(t)]
        return False

    def _term(self, tensor, scale, masks):
        """Returns a Term for a part of a sum that holds no product, such as a regularizer's."""
        coefficient, tensors, queue = list(scale), list(masks), [tensor]
        while queue:
            part = queue.pop()
            node = self._graph.node(part)
            inputs = graph_lib.data_inputs(node)
            same_shape = len({self._graph.shape(t) for t in [part, *inputs]}) == 1
            if scalar := self.scalar(part):
                coefficient.append(scalar)
            elif (self._is_rank_independent(part)
                  and self._graph.shape(part) == self._graph.shape(tensor)):
                tensors.append(part)
            elif node.op == "Mul" and (same_shape or any(self.scalar(t) for t in inputs)):
                queue += inputs
            elif node.op == "Neg":
                coefficient.append(Scalar(value=-1.0))
                queue += inputs
            elif node.op in _PASS_ON:
                queue += inputs
            else:
                raise _Refused(part, f"a {node.op} that may differ between ranks is added to it")
        if not tensors:
            raise _Refused(tensor, "a scalar is added to it")
        return Term(tuple(coefficient), tuple(tensors))

    def scalar(self, tensor):
        """Returns the Scalar that all elements of a tensor are equal to, or None."""
        node = self._graph.node(tensor)
        while node.op in ("Reshape", "Tile", "BroadcastTo", "ExpandDims", "Identity", "Fill"):
            if self._graph.shape(tensor) in ((), (1,)):
                break
            tensor = node.input[1 if node.op == "Fill" else 0]
            node = self._graph.node(tensor)
        if node.op == "Const":
            value = self._graph.constant(tensor)
            if value.size and value.dtype.kind == "f" and np.all(value == value.flat[0]):
                return Scalar(value=float(value.flat[0]))
            return None
        shape = self._graph.shape(tensor)
        return Scalar(tensor) if shape is not None and math.prod(s or 0 for s in shape) == 1 else None

    def _product(self, node, scale, masks):
        u, v, k = _PRODUCTS[node.op](self._graph, node)
        dtype = node.attr["T"].type
        if dtype not in _FLOATS:
            raise _Refused(node.name, "its factors are not floating-point numbers")
        return Match((Product(node.name, u, v, scale, k, dtype),), masks)

    def _batch_product(self, node, inputs, scale, masks):
        """A BatchMatMul that is summed over its batch: a layer on inputs with several dimensions."""
        inner = self._graph.node(inputs[0])
        while inner.op in _PASS_ON:
            inner = self._graph.node(inner.input[0])
        if inner.op not in _BATCH_PRODUCTS:
            raise _Refused(node.name, f"a sum over a {inner.op} is not a product of two matrices")
        shape = self._graph.shape(inner.name)
        axes = self._graph.constant(inputs[1])
        if axes is not None:
            rank = None if shape is None else len(shape)
            if rank is None or sorted(a % rank for a in axes.flatten().tolist()) != list(range(rank - 2)):
                raise _Refused(node.name, "it is not summed over the batch, and only that")
        elif self._graph.node(inputs[1]).op != "BroadcastGradientArgs":
            raise _Refused(node.name, "the dimensions that it is summed over are not constant")
        u, v, k = _batch_matmul(self._graph, inner)
        return Match((Product(inner.name, u, v, scale, k, inner.attr["T"].type),), masks)


def _matmul(graph, node):
    """MatMul and its transpositions: [K, M] is what `transpose_a` transposes."""
    a, b = graph_lib.data_inputs(node)
    u = _matrix(graph, node, a, rows=0 if node.attr["transpose_a"].b else 1)
    v = _matrix(graph, node, b, rows=1 if node.attr["transpose_b"].b else 0)
    return u[0], v[0], u[1] if u[1] is not None else v[1]


def _matrix(graph, node, tensor, rows):
    """Returns (Factor, rows) of a matrix whose rows are dimension `rows`."""
    shape = graph.shape(tensor)
    if shape is None or shape[1 - rows] is None:
        raise _Refused(node.name, f"the shape of its input '{tensor}' is unknown")
    return Factor(tensor, (1, 0) if rows == 1 else None, shape[1 - rows], True), shape[rows]


def _batch_matmul(graph, node):
    a, b = graph_lib.data_inputs(node)
    shape_a, shape_b = graph.shape(a), graph.shape(b)
    if node.attr["adj_y"].b or not node.attr["adj_x"].b:
        raise _Refused(node.name, "its rows are not the last dimension but one of both factors")
    if shape_a is None or shape_b is None or None in (shape_a[-1], shape_b[-1]):
        raise _Refused(node.name, "the shapes of its inputs are unknown")
    if shape_a[:-1] != shape_b[:-1] or None in shape_a[1:-1]:
        raise _Refused(node.name, "one of its factors is broadcast, or its shape is unknown")
    return (Factor(a, None, shape_a[-1], False), Factor(b, None, shape_b[-1], False),
            graph_lib.num_elements(shape_a[:-1]))


def _einsum(graph, node):
    """An Einsum of two tensors whose common indices are all summed over: those are the rows."""
    equation = node.attr["equation"].s.decode().replace(" ", "")
    terms, _, out = equation.partition("->")
    terms = terms.split(",")
    inputs = graph_lib.data_inputs(node)
    if len(terms) != 2 or "." in equation or any(len(set(t)) < len(t) for t in (*terms, out)):
        raise _Refused(node.name, f"the equation {equation} is not a product of two matrices")
    rows = [i for i in terms[0] if i in terms[1]]
    if set(rows) & set(out) or not rows or set(out) != set("".join(terms)) - set(rows):
        raise _Refused(node.name, f"the equation {equation} is not a product of two matrices")
    pairs = sorted(zip(terms, inputs), key=lambda pair: out[0] not in pair[0])
    columns = [[i for i in out if i in term] for term, _ in pairs]
    if columns[0] + columns[1] != list(out):
        raise _Refused(node.name, f"the equation {equation} mixes the dimensions of its factors")
    factors, k = [], None
    for (term, tensor), own in zip(pairs, columns):
        shape = graph.shape(tensor)
        if shape is None or any(shape[term.index(i)] is None for i in own):
            raise _Refused(node.name, f"the shape of its input '{tensor}' is unknown")
        order = tuple(term.index(i) for i in [*rows, *own])
        factors.append(Factor(
            tensor, None if order == tuple(range(len(order))) else order,
            math.prod(shape[term.index(i)] for i in own), len(rows) == len(own) == 1))
        k = k or graph_lib.num_elements(tuple(shape[term.index(i)] for i in rows))
    return (*factors, k)


_PRODUCTS = {"MatMul": _matmul, "Einsum": _einsum}
_BATCH_PRODUCTS = ("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


# ---- biases -----------------------------------------------------------------------------------


def _root(graph, factor):
    """Returns the tensor whose rows a factor's are, before it was reshaped to a matrix."""
    return None if factor.transpose else _before_reshapes(graph, factor.tensor)


def _before_reshapes(graph, tensor):
    columns = graph.shape(tensor)
    while (node := graph.node(tensor)).op in (*_PASS_ON, "Reshape"):
        before = graph.shape(node.input[0])
        if node.op == "Reshape" and not (before and columns and before[-1] == columns[-1] is not None):
            break
        tensor = node.input[0]
    return tensor.removesuffix(":0")


def _row_sums(graph, tensor, scale):
    """Returns [(node, root, scale)] of a gradient that adds up the rows of tensors."""
    node = graph.node(tensor)
    inputs = graph_lib.data_inputs(node)
    if node.op in (*_PASS_ON, "Reshape"):
        return _row_sums(graph, inputs[0], scale)
    if node.op == "Cast" and not scale:
        return _row_sums(graph, inputs[0], scale)
    if node.op in ("AddN", "AddV2"):
        return [part for i in inputs for part in _row_sums(graph, i, scale)]
    if node.op == "Mul":
        matcher = _Matcher(graph, lambda _: False)
        for factor, other in (inputs, inputs[::-1]):
            if scalar := matcher.scalar(factor):
                return _row_sums(graph, other, (*scale, scalar))
    if node.op == "BiasAddGrad" and node.attr["data_format"].s in (b"", b"NHWC"):
        return [(node.name, _before_reshapes(graph, inputs[0]), scale)]
    if node.op == "Sum":
        axes, shape = graph.constant(inputs[1]), graph.shape(inputs[0])
        if axes is not None and shape and sorted(
                a % len(shape) for a in axes.flatten().tolist()) == list(range(len(shape) - 1)):
            return [(node.name, _before_reshapes(graph, inputs[0]), scale)]
    raise _Refused(tensor, "it is not a sum of rows")
