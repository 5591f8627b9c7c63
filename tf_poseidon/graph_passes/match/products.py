"""The ops that multiply two matrices, with the factors U and V of each.

Tests: tests/graphs/test_passes.py, tests/graphs/test_partition_golden.py.
"""

import math

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.matches import Factor
from tf_poseidon.graph_passes.match.matches import Refused

# U and V, which have the same rows.
Found = tuple[Factor, Factor]


def _matmul(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> Found:
    """MatMul and its transpositions: U [K, M] is the operand that `transpose_a` transposes."""
    a, b = graph_lib.data_inputs(node)
    return (_matrix(graph, node, a, rows=0 if node.attr["transpose_a"].b else 1),
            _matrix(graph, node, b, rows=1 if node.attr["transpose_b"].b else 0))


def _matrix(graph: graph_lib.Graph, node: node_def_pb2.NodeDef, tensor: str, rows: int) -> Factor:
    """Returns the Factor of a matrix whose rows are dimension `rows`."""
    shape = graph.shape(tensor)
    if shape is None or len(shape) != 2 or (columns := shape[1 - rows]) is None:
        raise Refused(node.name, f"the shape of its input '{tensor}' is unknown")
    return Factor(tensor, (1, 0) if rows == 1 else None, columns, True)


def _batch_matmul(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> Found:
    a, b = graph_lib.data_inputs(node)
    shape_a, shape_b = graph.shape(a), graph.shape(b)
    if node.attr["adj_y"].b or not node.attr["adj_x"].b:
        raise Refused(node.name, "its rows are not the last dimension but one of both factors")
    if not shape_a or not shape_b or (m := shape_a[-1]) is None or (n := shape_b[-1]) is None:
        raise Refused(node.name, "the shapes of its inputs are unknown")
    if shape_a[:-1] != shape_b[:-1] or None in shape_a[1:-1]:
        raise Refused(node.name, "one of its factors is broadcast, or its shape is unknown")
    return Factor(a, None, m, False), Factor(b, None, n, False)


def _einsum(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> Found:
    """An Einsum of two tensors that sums over all of their common indices, which are the rows."""
    equation = node.attr["equation"].s.decode().replace(" ", "")
    terms, _, out = equation.partition("->")
    terms = terms.split(",")
    inputs = graph_lib.data_inputs(node)
    if len(terms) != 2 or "." in equation or any(len(set(t)) < len(t) for t in (*terms, out)):
        raise Refused(node.name, f"the equation {equation} is not a product of two matrices")
    rows = [i for i in terms[0] if i in terms[1]]
    if not rows or not out or set(rows) & set(out) or set(out) != set("".join(terms)) - set(rows):
        raise Refused(node.name, f"the equation {equation} is not a product of two matrices")
    pairs = sorted(zip(terms, inputs), key=lambda pair: out[0] not in pair[0])
    columns = [[i for i in out if i in term] for term, _ in pairs]
    if columns[0] + columns[1] != list(out):
        raise Refused(node.name, f"the equation {equation} mixes the dimensions of its factors")
    factors = []
    for (term, tensor), own in zip(pairs, columns):
        shape = graph.shape(tensor)
        if shape is None or len(shape) != len(term) or any(shape[term.index(i)] is None for i in own):
            raise Refused(node.name, f"the shape of its input '{tensor}' is unknown")
        order = tuple(term.index(i) for i in [*rows, *own])
        factors.append(Factor(
            tensor, None if order == tuple(range(len(order))) else order,
            math.prod(shape[term.index(i)] for i in own), len(rows) == len(own) == 1))
    u, v = factors
    return u, v


# Functions of (graph, node) that return (U, V). U^T V is the node's result after a reshape, in the type of its
# attribute T. They raise Refused with a sentence about the node, whose subject is "it" or "its". An op whose arithmetic
# should count in plans also needs a line in find/operations.py.
PRODUCTS = {"MatMul": _matmul, "Einsum": _einsum}

# The same for products that must be summed over their batch to give a gradient.
BATCH_PRODUCTS = dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _batch_matmul)
