"""Ops that can compute columns of their output alone, of whole inputs or of columns of these.

A tensor of rows, whole, or a summand may be needed in columns, such as the class of each example as a number for each
class, or the gradient of a table that is a head, too. It is then computed again from smaller tensors, which costs less
than exchanging it.

Tests: tests/graphs/test_partition_columns.py.
"""

from collections.abc import Callable
import functools

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import is_inexact
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules import elementwise
from tf_poseidon.graph_passes.partition.rules.columns import column_nodes
from tf_poseidon.graph_passes.partition.rules.columns import column_shapes
from tf_poseidon.graph_passes.partition.rules.columns import extremes
from tf_poseidon.graph_passes.partition.rules.columns import like_rows
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import WHOLE

_INT32, _INT64 = types_pb2.DT_INT32, types_pb2.DT_INT64

# From a `Case` of whole inputs and a dimension of the output, which has columns.
Maker = Callable[[Case, int], Outcome | None]


def made(case: Case, dimension: int) -> Outcome | None:
    """Returns how an op computes columns of its first output; None if it cannot."""
    outcome = MAKERS[case.node.op](case, dimension) if case.node.op in MAKERS else None
    return outcome if outcome is not None and outcome.gives[0] == Columns(dimension) else None


def _elementwise(case: Case, dimension: int) -> Outcome | None:
    out = case.out_shape()
    if out is None:
        return None
    behind = len(out) - dimension
    for i in range(len(case.inputs)):
        shape = case.shape(i)
        if shape is not None and len(shape) >= behind and shape[-behind] == out[dimension]:
            return like_rows.RULES[case.node.op](case.with_states(
                [Columns(len(shape) - behind) if i == j else WHOLE for j in range(len(case.inputs))], None, None))
    return None


def _moved(case: Case, dimension: int) -> Outcome | None:
    """Reshape, Sum, ...: the dimension of the input that becomes that of the output."""
    for place in range(case.rank(0) or 0):
        size = case.sizes(0)[place]
        if size is not None and size.constant is not None:
            outcome = _MOVES[case.node.op](case.with_states(
                [Columns(place), *(WHOLE for _ in case.inputs[1:])], None, None))
            if outcome is not None and outcome.gives[0] == Columns(dimension):
                return outcome
    return None


def _broadcast(case: Case, dimension: int) -> Outcome | None:
    """BroadcastTo(x, shape), Fill(shape, x)."""
    out, given = case.out_shape(), 0 if case.node.op == "BroadcastTo" else 1
    shape = case.shape(given)
    if out is None or shape is None:
        return None
    place, columns = len(shape) - len(out) + dimension, column_shapes.constant_size(out, dimension)
    size = None if place < 0 else shape[place]
    if place >= 0 and (size is None or size.constant not in (1, columns)):
        return None
    takes = {given: Columns(place)} if size is not None and size.constant == columns else {}
    return case.all(takes, Columns(dimension), write=functools.partial(
        column_shapes.write_of_size, i=1 - given, dimension=dimension, columns=columns))


def _one_hot(case: Case, dimension: int) -> Outcome | None:
    """OneHot(numbers, depth, on, off)."""
    out = case.out_shape()
    if out is None or case.attr("axis").i % len(out) != dimension:
        return None
    columns = column_shapes.constant_size(out, dimension)
    return case.all({}, Columns(dimension), write=functools.partial(_write_one_hot, columns=columns))


def _write_one_hot(writer: NodeWriter, columns: int) -> list[str]:
    numbers, dtype = writer.inputs[0], writer.type_of_input(0)
    begin, count = writer.column_range(columns, numbers)
    own = writer.add("own", "Sub", [column_nodes.as_int64(writer, "numbers", numbers, dtype), begin], T=_INT64)
    depth = writer.add("depth", "Cast", [count], SrcT=_INT64, DstT=_INT32)
    return [writer.add("of_columns", "OneHot", [own, depth, *writer.inputs[2:]], T=writer.node.attr["T"].type,
                       TI=_INT64, axis=writer.node.attr["axis"].i)]


def _segments(case: Case, dimension: int) -> Outcome | None:
    """UnsortedSegmentSum(data, numbers, size): rows of other ranks' numbers are left out, as negative numbers are."""
    if dimension or not is_inexact(case.attr("T").type):
        return None
    columns = column_shapes.constant_size(case.out_shape(), 0)
    return case.all({}, Columns(0), write=functools.partial(_write_segments, columns=columns))


def _write_segments(writer: NodeWriter, columns: int) -> list[str]:
    data, numbers, _ = writer.inputs
    begin, count = writer.column_range(columns, numbers)
    own = writer.add("own", "Sub", [column_nodes.as_int64(
        writer, "numbers", numbers, writer.type_of_input(1)), begin], T=_INT64)
    zero, none = (writer.constant(name, np.array(value, np.int64), numbers)
                  for name, value in (("zero", 0), ("none", -1)))
    is_own = column_nodes.are_within(writer, "is_own", own, zero, count)
    own = writer.add("own_numbers", "SelectV2", [is_own, own, none], T=_INT64)
    return [writer.add("of_columns", "UnsortedSegmentSum", [data, own, count], T=writer.node.attr["T"].type,
                       Tindices=_INT64, Tnumsegments=_INT64)]


_MOVES = {"Transpose": like_rows.RULES["Transpose"], "Sum": extremes.RULES["Sum"],
                  **{op: column_shapes.RULES[op] for op in ("Reshape", "ExpandDims", "Squeeze")}}
MAKERS: dict[str, Maker] = {
    **dict.fromkeys(_MOVES, _moved),
    **dict.fromkeys((*elementwise.UNARY, *elementwise.BINARY, "Add", "AddV2", "Sub", "AddN", "Mul", "RealDiv", "Div",
                     "DivNoNan", "Neg", "Cast", "Select", "SelectV2", "Identity", "StopGradient"), _elementwise),
    **dict.fromkeys(("BroadcastTo", "Fill"), _broadcast),
    "OneHot": _one_hot,
    "UnsortedSegmentSum": _segments,
}
