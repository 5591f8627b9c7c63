"""Rows of a table by their numbers, of which each rank has a part: a rank looks its own up, and the others are zeros.

Tests: tests/graphs/test_partition_columns.py.
"""

import functools

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules.columns import column_nodes
from tf_poseidon.graph_passes.partition.rules.columns.column_shapes import size_of
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Rows

_INT32, _INT64 = types_pb2.DT_INT32, types_pb2.DT_INT64


def gather(case: Case) -> Outcome | None:
    """GatherV2(table, numbers, axis): of a table whose rows are divided; or of other rows, whose columns are."""
    state, rank, id_rank = case.states[0], case.rank(0), case.rank(1)
    axis = case.constant(2) if case.node.op == "GatherV2" else np.array(0)
    if not isinstance(state, Columns) or axis is None or None in (rank, id_rank) or case.attr("batch_dims").i or (
            isinstance(case.states[1], Columns)):
        return None
    along = int(axis) % len(case.sizes(0))
    if along != state.dimension:
        shift = len(case.sizes(1)) - 1 if along < state.dimension else 0
        return case.all({0: state}, Columns(state.dimension + shift))
    if along or case.node.op != "GatherV2":
        return None
    out = case.out_shape()
    has_rows = bool(out) and out is not None and case_lib.of_rows(out[0])
    return case.all({0: state}, Rows(0) if has_rows else HELD, write=functools.partial(
        _write_gathered, columns=size_of(case, 0), has_rows=has_rows))


def _write_gathered(writer: NodeWriter, columns: int, has_rows: bool) -> list[str]:
    table, numbers, _ = writer.inputs
    dtype, id_type = writer.node.attr["Tparams"].type, writer.type_of_input(1)
    axis, zero = (writer.constant(name, np.array(0, of_type), table)
                  for name, of_type in (("axis", np.int32), ("zero", np.int64)))
    one, any_size, all_of_it = (writer.constant(name, np.array([value], np.int64), table)
                                for name, value in (("one", 1), ("any", -1), ("all", np.iinfo(np.int64).max)))
    numbers = column_nodes.checked(writer, "number", numbers, id_type, columns)
    # A number may be a scalar, which has no places.
    flat = writer.add("flat", "Reshape", [numbers, any_size], T=_INT64, Tshape=_INT64)
    begin, count = writer.column_range(columns, table)
    own = writer.add("own", "Sub", [flat, begin], T=_INT64)
    is_own = column_nodes.are_within(writer, "is_own", own, zero, count)
    places = writer.add("places", "Where", [is_own], T=types_pb2.DT_BOOL)
    own_numbers = writer.add("own_numbers", "GatherNd", [own, places], Tparams=_INT64, Tindices=_INT64)
    found = writer.add("found", "GatherV2", [table, own_numbers, axis], Tparams=dtype, Tindices=_INT64, Taxis=_INT32,
                       batch_dims=0)
    shape_of_flat, shape_of_numbers, shape_of_table = (
        writer.add(f"shape_of_{name}", "Shape", [tensor], T=of_type, out_type=_INT64) for name, tensor, of_type in (
            ("flat", flat, _INT64), ("numbers", numbers, _INT64), ("table", table, dtype)))
    row = writer.add("row", "StridedSlice", [shape_of_table, one, all_of_it, one], T=_INT64, Index=_INT64,
                     begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    rows, shape = (writer.add(name, "ConcatV2", [of_numbers, row, axis], T=_INT64, Tidx=_INT32, N=2)
                   for name, of_numbers in (("rows", shape_of_flat), ("shape", shape_of_numbers)))
    between_zeros = writer.add("between_zeros", "ScatterNd", [places, found, rows], T=dtype, Tindices=_INT64)
    summand = writer.add("summand" if has_rows else "", "Reshape", [between_zeros, shape], T=dtype, Tshape=_INT64)
    return [writer.own_rows_of_sum(summand) if has_rows else summand]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Gather", "GatherV2"), gather),
}
