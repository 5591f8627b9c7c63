"""What rules of columns write: which columns are the rank's, and what of all ranks follows one another.

Tests: tests/graphs/test_partition_columns.py.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition.node_writer import NodeWriter

_INT32, _INT64 = types_pb2.DT_INT32, types_pb2.DT_INT64


def as_int64(writer: NodeWriter, name: str, tensor: str, dtype: int) -> str:
    """Casts integers to int64."""
    return tensor if dtype == _INT64 else writer.add(f"{name}/int64", "Cast", [tensor], SrcT=dtype, DstT=_INT64)


def are_within(writer: NodeWriter, name: str, numbers: str, first: str, end: str) -> str:
    """Whether each of some numbers of int64 is at least `first`, and less than `end`."""
    return writer.add(name, "LogicalAnd", [
        writer.add(f"{name}/from", "GreaterEqual", [numbers, first], T=_INT64),
        writer.add(f"{name}/until", "Less", [numbers, end], T=_INT64)])


def checked(writer: NodeWriter, name: str, numbers: str, dtype: int, columns: int) -> str:
    """Returns numbers of columns as int64, which fails where there is no such column: every rank would ignore it."""
    wide = as_int64(writer, name, numbers, dtype)
    bounds = [writer.constant(f"{name}/{bound}", np.array(value, np.int64), wide)
              for bound, value in (("none", 0), ("columns", columns))]
    axis = writer.constant(f"{name}/all_of", np.array([-1], np.int32), wide)
    flat = writer.add(f"{name}/flat", "Reshape", [wide, axis], T=_INT64, Tshape=_INT32)
    zero = writer.constant(f"{name}/axis", np.array([0], np.int32), wide)
    are_columns = writer.add(f"{name}/are_columns", "All", [
        are_within(writer, f"{name}/is_column", flat, *bounds), zero], Tidx=_INT32, keep_dims=False)
    text = writer.constant(f"{name}/text", (
        f"The {writer.node.op} '{writer.node.name}' has a {name} that is not in [0, {columns}): see which of these is "
        "not."), wide)
    check = writer.add(f"{name}/check", "Assert", [are_columns, text, flat], T=[types_pb2.DT_STRING, _INT64],
                       summarize=20)
    return writer.add(f"{name}/checked", "Identity", [wide, f"^{check}"], T=_INT64)


def mask(writer: NodeWriter, name: str, numbers: str, columns: int) -> str:
    """Returns which of the rank's columns has the number of each row.

    Args:
        writer: The writer.
        name: What the numbers are.
        numbers: [K] of int64.
        columns: The columns of all ranks.

    Returns:
        The name of a tensor of bool, [K, n] for n columns of the rank.
    """
    begin, count = writer.column_range(columns, numbers)
    own = writer.add(f"{name}/own", "Sub", [numbers, begin], T=_INT64)
    depth = writer.add(f"{name}/depth", "Cast", [count], SrcT=_INT64, DstT=_INT32)
    on, off = (writer.constant(f"{name}/{value}", np.array(value), numbers) for value in (True, False))
    return writer.add(f"{name}/mask", "OneHot", [own, depth, on, off], T=types_pb2.DT_BOOL, TI=_INT64, axis=-1)


def column_numbers(writer: NodeWriter, tensor: str, columns: int, dimension: int, rank: int) -> str:
    """Returns the numbers of the rank's columns, of int64, with dimensions of size 1 around them.

    Args:
        writer: The writer.
        tensor: A tensor of the same loop.
        columns: The columns of all ranks.
        dimension: Their dimension.
        rank: The number of dimensions.
    """
    begin, count = writer.column_range(columns, tensor)
    one = writer.constant("places/one", np.array(1, np.int64), tensor)
    end = writer.add("places/end", "AddV2", [begin, count], T=_INT64)
    numbers = writer.add("places/numbers", "Range", [begin, end, one], Tidx=_INT64)
    sizes = np.ones(rank, np.int32)
    sizes[dimension] = -1  # so that the other sizes are known when shapes are inferred
    return writer.add("places", "Reshape", [numbers, writer.constant("places/sizes", sizes, tensor)], T=_INT64,
                      Tshape=_INT32)


def joined(writer: NodeWriter, name: str, tensor: str, dtype: int, rank: int) -> str:
    """Returns what all ranks have of a tensor, one after the other along the last dimension."""
    to_first = [rank - 1, *range(rank - 1)]
    first = _transposed(writer, f"{name}/first", tensor, to_first, dtype)
    return _transposed(writer, name, writer.rows_of_all_ranks(f"{name}/of_all", first, dtype),
                       [*range(1, rank), 0], dtype)


def _transposed(writer: NodeWriter, name: str, tensor: str, order: Sequence[int], dtype: int) -> str:
    by = writer.constant(f"{name}/order", np.array(order, np.int32), tensor)
    return writer.add(name, "Transpose", [tensor, by], T=dtype, Tperm=_INT32)


def element(writer: NodeWriter, name: str, shape: str, dtype: int, dimension: int) -> str:
    """Returns an element of a shape."""
    begin, end, stride = (writer.constant(f"{name}/{bound}", np.array([value], np.int32), shape) for bound, value in (
        ("begin", dimension), ("end", dimension + 1), ("stride", 1)))
    return writer.add(f"{name}/size", "StridedSlice", [shape, begin, end, stride], T=dtype, Index=_INT32, begin_mask=0,
                      end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=1)


def with_element(writer: NodeWriter, name: str, shape: str, dtype: int, dimension: int, size: str) -> str:
    """Returns a shape with another size in a dimension, a scalar; by ops that shape inference sees through."""
    sizes = writer.add(f"{name}/sizes", "Pack", [size], T=dtype, N=1, axis=0)
    axis = writer.constant(f"{name}/axis", np.array(0, np.int32), shape)
    before = _elements(writer, f"{name}/before", shape, dtype, 0, dimension)
    after = _elements(writer, f"{name}/after", shape, dtype, dimension + 1, None)
    return writer.add(f"{name}/changed", "ConcatV2", [before, sizes, after, axis], T=dtype, N=3, Tidx=_INT32)


def _elements(writer: NodeWriter, name: str, shape: str, dtype: int, begin: int, end: int | None) -> str:
    """Returns the elements of a shape from one on, up to another one, or all that follow."""
    bounds = [writer.constant(f"{name}/{bound}", np.array([value], np.int32), shape)
              for bound, value in (("begin", begin), ("end", end or 0), ("stride", 1))]
    return writer.add(name, "StridedSlice", [shape, *bounds], T=dtype, Index=_INT32, begin_mask=0,
                      end_mask=int(end is None), ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)


def number(writer: NodeWriter, name: str, value: float, dtype: int, beside: str) -> str:
    """Returns a scalar."""
    return writer.constant(name, np.array(value, tf.as_dtype(dtype).as_numpy_dtype), beside)
