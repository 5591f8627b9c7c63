"""Ops that read or change the shape of columns.

Tests: tests/graphs/test_partition_columns.py.
"""

import functools

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules.columns import column_nodes
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import WHOLE

_INT64 = types_pb2.DT_INT64


def shape_of(case: Case) -> Outcome | None:
    """Shape, ShapeN and Size: the sizes of one process."""
    sizes = {}
    for i, state in enumerate(case.states):
        if isinstance(state, Columns):
            sizes[i] = size_of(case, i)
    takes = tuple(case.states)
    return Outcome(takes, (WHOLE,) * case.num_outputs, write=functools.partial(_write_shapes, sizes=sizes))


def size_of(case: Case, i: int) -> int:
    """Returns the size of the dimension of an input that is divided."""
    state = case.states[i]
    assert isinstance(state, Columns)
    return constant_size(case.sizes(i), state.dimension)


def constant_size(shape: row_size.Shape | None, dimension: int) -> int:
    """Returns the size of a dimension that is divided."""
    size = None if shape is None else shape[dimension]
    assert size is not None and size.constant is not None
    return size.constant


def _write_shapes(writer: NodeWriter, sizes: dict[int, int]) -> list[str]:
    dtype, outputs = writer.node.attr["out_type"].type, []
    for i, tensor in enumerate(writer.inputs):
        shape = writer.add(f"of{i}", "Shape", [tensor], T=writer.type_of_input(i), out_type=dtype)
        if i in sizes:
            state = writer.states[i]
            assert isinstance(state, Columns)
            size = column_nodes.number(writer, f"of{i}/columns", sizes[i], dtype, shape)
            shape = column_nodes.with_element(writer, f"of{i}", shape, dtype, state.dimension, size)
        if writer.node.op == "Size":
            axis = writer.constant(f"of{i}/all", np.zeros(1, np.int32), shape)
            shape = writer.add(f"of{i}/size", "Prod", [shape, axis], T=dtype, Tidx=types_pb2.DT_INT32, keep_dims=False)
        outputs.append(shape)
    return outputs


def rank_of(case: Case) -> Outcome:
    """Rank."""
    return Outcome((None,), (WHOLE,))


def rearranged(case: Case) -> Outcome | None:
    """Reshape, ExpandDims, Squeeze: columns stay columns if their dimension stays one, and elements behind it, too."""
    state, shape, out = case.states[0], case.shape(0), case.out_shape()
    if not isinstance(state, Columns) or shape is None or out is None:
        return None
    behind = shape[state.dimension + 1:]
    for dimension, size in enumerate(out):
        after = out[dimension + 1:]
        if size == shape[state.dimension] and row_size.is_known(after) and row_size.is_known(behind) and (
                row_size.product(after) == row_size.product(behind)):
            # Several may fit if others have one element: then the order of elements is the same in all.
            write = functools.partial(_write_reshaped, dimension=dimension) if case.node.op == "Reshape" else None
            return case.all({0: state}, Columns(dimension), write=write)
    return None


def _write_reshaped(writer: NodeWriter, dimension: int) -> list[str]:
    tensor, shape = writer.inputs
    dtype, state = writer.type_of_input(1), writer.states[0]
    assert isinstance(state, Columns)
    of_own = writer.add("own", "Shape", [tensor], T=writer.type_of_input(0), out_type=dtype)
    own = column_nodes.element(writer, "own", of_own, dtype, state.dimension)
    # What -1 stands for does not follow from a tensor that has no columns, and no rows: one column is reshaped instead.
    one, zero = (column_nodes.number(writer, name, value, dtype, shape) for name, value in (("one", 1), ("zero", 0)))
    column = writer.add("column", "BroadcastTo", [
        zero, column_nodes.with_element(writer, "of_column", of_own, dtype, state.dimension, one)], T=dtype, Tidx=dtype)
    column = writer.add("of_one/reshaped", "Reshape", [
        column, column_nodes.with_element(writer, "of_one", shape, dtype, dimension, one)], T=dtype, Tshape=dtype)
    shape = writer.add("of_one/shape", "Shape", [column], T=dtype, out_type=dtype)
    shape = column_nodes.with_element(writer, "shape", shape, dtype, dimension, own)
    return [writer.add("", "Reshape", [tensor, shape], T=writer.type_of_input(0), Tshape=dtype)]


def broadcast(case: Case) -> Outcome | None:
    """BroadcastTo(x, shape): dimensions are aligned at the last one."""
    state, shape, out = case.states[0], case.shape(0), case.out_shape()
    if not isinstance(state, Columns) or shape is None or out is None:
        return None
    dimension = state.dimension + len(out) - len(shape)
    return case.all({0: state}, Columns(dimension), write=functools.partial(
        write_of_size, i=1, dimension=dimension, columns=size_of(case, 0)))


def write_of_size(writer: NodeWriter, i: int, dimension: int, columns: int) -> list[str]:
    """Writes an op whose input `i` is a shape, in which the columns are the rank's."""
    dtype = writer.type_of_input(i)
    _, count = writer.column_range(columns, writer.inputs[i])
    size = count if dtype == _INT64 else writer.add("count", "Cast", [count], SrcT=_INT64, DstT=dtype)
    shape = column_nodes.with_element(writer, "shape", writer.inputs[i], dtype, dimension, size)
    return [writer.same("of_columns", [shape if j == i else tensor for j, tensor in enumerate(writer.inputs)])]


def repeated(case: Case) -> Outcome | None:
    """Tile(x, multiples), along other dimensions."""
    state, multiples = case.states[0], case.constant(1)
    if not isinstance(state, Columns) or multiples is None or multiples[state.dimension] != 1:
        return None
    return case.all({0: state}, state)


def same_shape(case: Case) -> Outcome | None:
    """ZerosLike, OnesLike."""
    return case.all({0: case.states[0]}, case.states[0])


def bias_added(case: Case) -> Outcome | None:
    """BiasAdd(x, bias): along the last dimension."""
    rank = case.rank(0)
    if rank is None or case.attr("data_format").s.startswith(b"NC"):
        return None
    state = case.states[0] if isinstance(case.states[0], Columns) else Columns(rank - 1)
    takes = {0: state, 1: Columns(0)} if state.dimension == rank - 1 else {0: state}
    return case.all(takes, state)


def bias_gradient(case: Case) -> Outcome | None:
    """BiasAddGrad: the sum over all dimensions but the last."""
    rank = case.rank(0)
    if rank is None or case.attr("data_format").s.startswith(b"NC") or case.states[0] != Columns(rank - 1):
        return None
    return case.all({0: case.states[0]}, Columns(0))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Shape", "ShapeN", "Size"), shape_of),
    "Rank": rank_of,
    **dict.fromkeys(("Reshape", "ExpandDims", "Squeeze"), rearranged),
    "BroadcastTo": broadcast,
    "Tile": repeated,
    **dict.fromkeys(("ZerosLike", "OnesLike"), same_shape),
    "BiasAdd": bias_added,
    "BiasAddGrad": bias_gradient,
}
