"""Ops that reduce columns, or choose some of them: each rank does so with its own, and all with what these found.

What ranks have found is in rank order on all of them, so of equal columns the first one counts, as in one process.

Tests: tests/graphs/test_partition_columns.py.
"""

import functools

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import is_inexact
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules import reductions
from tf_poseidon.graph_passes.partition.rules.columns import column_nodes
from tf_poseidon.graph_passes.partition.rules.columns import like_rows
from tf_poseidon.graph_passes.partition.rules.columns.column_shapes import size_of
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import WHOLE

_INT32, _INT64 = types_pb2.DT_INT32, types_pb2.DT_INT64
_REAL = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE)


def reduction(case: Case) -> Outcome | None:
    """Sum, Max, ...: a reduction of what each rank gets of its columns; others reduce other dimensions."""
    state, axes, rank = case.states[0], case.constant(1), case.rank(0)
    if not isinstance(state, Columns) or axes is None or rank is None:
        return None
    reduced = {int(axis) % rank for axis in axes.flatten()}
    if state.dimension not in reduced:
        keeps = case.attr("keep_dims").b
        return case.all({0: state}, Columns(reductions.after(state.dimension, reduced, keeps)))
    op, out = case.node.op, case.out_shape()
    if op == "Mean" and (case.attr("T").type in graph_lib.HALVES or not is_inexact(case.attr("T").type)):
        return None  # sums of halves may overflow
    elements = size_of(case, 0) if op == "Mean" else 1
    if op in ("Sum", "Mean") and row_size.is_constant(out):
        return case.all({0: state}, HELD, write=functools.partial(_write_summand, columns=elements))
    return case.all({0: state}, WHOLE, write=functools.partial(_write_reduced, columns=elements))


def _write_summand(writer: NodeWriter, columns: int) -> list[str]:
    """The sum of a rank's columns, or its part of the mean."""
    return [_own(writer, columns)]


def _write_reduced(writer: NodeWriter, columns: int) -> list[str]:
    op = writer.node.op
    own = _own(writer, columns)
    found = writer.of_all_ranks("found", own, _type(writer))
    axis = writer.constant("ranks", np.array(0, np.int32), found)
    types = {} if op in ("All", "Any") else {"T": writer.node.attr["T"].type}
    return [writer.add("", "Sum" if op == "Mean" else op, [found, axis], Tidx=_INT32, keep_dims=False, **types)]


def _own(writer: NodeWriter, columns: int) -> str:
    """The reduction of a rank's columns; of a mean, the means of other dimensions are added up, and divided."""
    if writer.node.op != "Mean":
        return writer.same("own")
    dtype = writer.node.attr["T"].type
    state = writer.states[0]
    assert isinstance(state, Columns)
    along = writer.constant("along", np.array([state.dimension], np.int32), writer.inputs[0])
    total = writer.add("total", "Sum", [writer.inputs[0], along], T=dtype, Tidx=_INT32, keep_dims=True)
    count = writer.constant("count", np.array(columns, np.float64), total)
    count = writer.add("divisor", "Cast", [count], SrcT=types_pb2.DT_DOUBLE, DstT=dtype)
    return writer.same("own", [writer.add("part", "RealDiv", [total, count], T=dtype), *writer.inputs[1:]])


def _type(writer: NodeWriter) -> int:
    return types_pb2.DT_BOOL if writer.node.op in ("All", "Any") else writer.node.attr["T"].type


def half_of_squares(case: Case) -> Outcome | None:
    """L2Loss."""
    return case.all({0: case.states[0]}, HELD)


def index_of_extreme(case: Case) -> Outcome | None:
    """ArgMax, ArgMin: of the columns that have the extreme value of all ranks, the first."""
    given, state, rank = case.constant(1), case.states[0], case.rank(0)
    if not isinstance(state, Columns) or given is None or rank is None or case.attr("T").type not in _REAL:
        return None
    if int(given) % rank != state.dimension:
        return like_rows.RULES[case.node.op](case)
    return case.all({0: state}, WHOLE, write=functools.partial(
        _write_index, columns=size_of(case, 0), rank=rank))


def _write_index(writer: NodeWriter, columns: int, rank: int) -> list[str]:
    """Ranks without columns have the value that no other is beyond, and the last index."""
    node, x = writer.node, writer.inputs[0]
    state = writer.states[0]
    assert isinstance(state, Columns)
    dtype, out_type = node.attr["T"].type, node.attr["output_type"].type if "output_type" in node.attr else _INT64
    reduce, limit = ("Max", -np.inf) if node.op == "ArgMax" else ("Min", np.inf)
    # What is not a number is no extreme in one process.
    x = writer.add("numbers", "SelectV2", [
        writer.add("is_nan", "IsNan", [x], T=dtype), column_nodes.number(writer, "limit", limit, dtype, x), x], T=dtype)
    axis = writer.constant("axis", np.array(state.dimension, np.int32), x)
    ranks = writer.constant("ranks", np.array(0, np.int32), x)
    own = writer.add("own", reduce, [x, axis], T=dtype, Tidx=_INT32, keep_dims=True)
    extreme = writer.add("extreme", reduce, [writer.of_all_ranks("extremes", own, dtype), ranks], T=dtype, Tidx=_INT32,
                         keep_dims=False)
    is_extreme = writer.add("is_extreme", "Equal", [x, extreme], T=dtype)
    places = column_nodes.column_numbers(writer, x, columns, state.dimension, rank)
    last = writer.constant("last", np.array(columns, np.int64), x)
    found = writer.add("found", "SelectV2", [is_extreme, places, last], T=_INT64)
    first = writer.add("first", "Min", [found, axis], T=_INT64, Tidx=_INT32, keep_dims=False)
    first = writer.add("of_all", "Min", [writer.of_all_ranks("firsts", writer.add("limited", "Minimum", [
        first, last], T=_INT64), _INT64), ranks], T=_INT64, Tidx=_INT32, keep_dims=False)
    return [writer.add("", "Cast", [first], SrcT=_INT64, DstT=out_type)]


def top(case: Case) -> Outcome | None:
    """TopKV2(x, k): the largest of what each rank has found among its columns."""
    state, rank = case.states[0], case.rank(0)
    if not isinstance(state, Columns) or rank is None or case.attr("T").type not in _REAL:
        return None
    if state.dimension != rank - 1:
        return like_rows.RULES["TopKV2"](case)
    return case.all({0: state}, WHOLE, write=functools.partial(_write_top, columns=size_of(case, 0), rank=rank))


def _write_top(writer: NodeWriter, columns: int, rank: int) -> list[str]:
    """Where a rank has fewer columns than k, the rest is below all others, and has no index."""
    node, (x, k) = writer.node, writer.inputs
    dtype, k_type = node.attr["T"].type, node.attr["Tk"].type if "Tk" in node.attr else _INT32
    index_type = node.attr["index_type"].type if "index_type" in node.attr else _INT32
    begin, count = writer.column_range(columns, x)
    own_k = writer.add("own_k", "Minimum", [writer.add("k", "Cast", [k], SrcT=k_type, DstT=_INT32), writer.add(
        "count", "Cast", [count], SrcT=_INT64, DstT=_INT32)], T=_INT32)
    own = writer.add("own", "TopKV2", [x, own_k], T=dtype, Tk=_INT32, sorted=True)
    indices = writer.add("indices", "AddV2", [writer.add("places", "Cast", [f"{own}:1"], SrcT=_INT32, DstT=_INT64),
                                              begin], T=_INT64)
    values = column_nodes.joined(writer, "values", own, dtype, rank)
    indices = column_nodes.joined(writer, "all_indices", indices, _INT64, rank)
    best = writer.add("best", "TopKV2", [values, k], T=dtype, Tk=k_type, sorted=True)
    axis = writer.constant("axis", np.array(rank - 1, np.int32), x)
    chosen = writer.add("chosen", "GatherV2", [indices, f"{best}:1", axis], Tparams=_INT64, Tindices=_INT32,
                        Taxis=_INT32, batch_dims=rank - 1)
    return [best, writer.add("", "Cast", [chosen], SrcT=_INT64, DstT=index_type)]


def is_in_top(case: Case) -> Outcome | None:
    """InTopKV2(predictions, targets, k): whether fewer than k columns are beyond the target's; not if one is nan."""
    if case.states[0] != Columns(1) or case.states[1:] != (WHOLE, WHOLE):
        return None
    return case.all({0: Columns(1)}, WHOLE, write=functools.partial(_write_in_top, columns=size_of(case, 0)))


def _write_in_top(writer: NodeWriter, columns: int) -> list[str]:
    x, targets, k = writer.inputs
    target_type = writer.node.attr["T"].type if "T" in writer.node.attr else _INT32
    real, boolean = types_pb2.DT_FLOAT, types_pb2.DT_BOOL
    target = column_nodes.as_int64(writer, "target", targets, target_type)
    mask = column_nodes.mask(writer, "target", target, columns)
    zero = writer.constant("zero", np.array(0, np.float32), x)
    ranks, last = (writer.constant(name, np.array(value, np.int32), x) for name, value in (("ranks", 0), ("last", 1)))
    own = writer.add("own", "Sum", [writer.add("masked", "SelectV2", [mask, x, zero], T=real), last], T=real,
                     Tidx=_INT32, keep_dims=True)
    value = writer.add("value", "Sum", [writer.of_all_ranks("values", own, real), ranks], T=real, Tidx=_INT32,
                       keep_dims=False)  # [K, 1]
    is_beyond = writer.add("is_beyond", "Greater", [x, value], T=real)
    is_finite = writer.add("is_finite", "IsFinite", [x], T=real)
    beyond = writer.add("beyond", "Cast", [is_beyond], SrcT=boolean, DstT=_INT64)
    many = writer.constant("many", np.array(np.iinfo(np.int32).max, np.int64), x)
    counted = writer.add("counted", "SelectV2", [is_finite, beyond, many], T=_INT64)
    count = writer.add("count", "Sum", [counted, last], T=_INT64, Tidx=_INT32, keep_dims=False)
    count = writer.add("of_all", "Sum", [writer.of_all_ranks("counts", count, _INT64), ranks], T=_INT64, Tidx=_INT32,
                       keep_dims=False)
    k64 = k if target_type == _INT64 else writer.add("k", "Cast", [k], SrcT=target_type, DstT=_INT64)
    is_top = writer.add("is_top", "Less", [count, k64], T=_INT64)
    bounds = [writer.constant(name, np.array(bound, np.int64), x) for name, bound in (("none", 0), ("all", columns))]
    is_class = column_nodes.are_within(writer, "is_class", target, *bounds)
    return [writer.add("", "LogicalAnd", [is_top, is_class])]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm"), reduction),
    "L2Loss": half_of_squares,
    **dict.fromkeys(("ArgMax", "ArgMin"), index_of_extreme),
    "TopKV2": top,
    "InTopKV2": is_in_top,
}
