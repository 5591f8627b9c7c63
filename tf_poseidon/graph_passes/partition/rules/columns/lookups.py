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
    numbers = column_nodes.checked(writer, "number", numbers, id_type, columns)
    begin, count = writer.column_range(columns, table)
    own = writer.add("own", "Sub", [numbers, begin], T=_INT64)
    zero = writer.constant("zero", np.array(0, np.int64), table)
    is_own = column_nodes.are_within(writer, "is_own", own, zero, count)
    places = writer.add("places", "Where", [is_own], T=types_pb2.DT_BOOL)
    own_numbers = writer.add("own_numbers", "GatherNd", [own, places], Tparams=_INT64, Tindices=_INT64)
    axis = writer.constant("axis", np.array(0, np.int32), table)
    found = writer.add("found", "GatherV2", [table, own_numbers, axis], Tparams=dtype, Tindices=_INT64, Taxis=_INT32,
                       batch_dims=0)
    shape_of_numbers, shape_of_table = (writer.add(name, "Shape", [tensor], T=of_type, out_type=_INT64)
                                        for name, tensor, of_type in (("shape_of_numbers", numbers, _INT64),
                                                                      ("shape_of_table", table, dtype)))
    one, all_of_it = (writer.constant(name, np.array([value], np.int64), table)
                      for name, value in (("one", 1), ("all", np.iinfo(np.int64).max)))
    row = writer.add("row", "StridedSlice", [shape_of_table, one, all_of_it, one], T=_INT64, Index=_INT64,
                     begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    shape = writer.add("shape", "ConcatV2", [shape_of_numbers, row, axis], T=_INT64, Tidx=_INT32, N=2)
    summand = writer.add("summand" if has_rows else "", "ScatterNd", [places, found, shape], T=dtype, Tindices=_INT64)
    return [writer.own_rows_of_sum(summand) if has_rows else summand]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Gather", "GatherV2"), gather),
}
