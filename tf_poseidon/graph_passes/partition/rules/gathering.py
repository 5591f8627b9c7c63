"""Ops that gather and scatter by indices, or by keys: embeddings, and their gradients; tables.

Tests: tests/graphs/test_partition_families.py, tests/graphs/test_partition_tables.py.
"""

from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_SUMMED = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_INT32,
           types_pb2.DT_INT64)


def gather(case: Case) -> Outcome | None:
    """GatherV2(params, indices, axis)."""
    params, indices = case.states[:2]
    axis = case.constant(2) if len(case.inputs) > 2 else 0
    rank, index_rank = case.rank(0), case.rank(1)
    if axis is None or rank is None or index_rank is None:
        return None
    axis, batch = int(axis) % rank, case.attr("batch_dims").i
    batch += index_rank if batch < 0 else 0
    if isinstance(params, Partial) or isinstance(indices, Partial):
        return case.linear_in(0)
    for state in (params, indices):
        if isinstance(state, Rows) and state.dimension < batch:
            d = state.dimension
            if not case_lib.same_size(case.sizes(0)[d], case.sizes(1)[d]):
                return None
            return case.all({0: Rows(d), 1: Rows(d)}, Rows(d))
    if isinstance(params, Rows):
        if params.dimension == axis:
            return _of_whole(case, indices, axis, batch)
        after = index_rank - batch - 1 if params.dimension > axis else 0
        return case.all({0: params}, Rows(params.dimension + after))
    return _of_whole(case, indices, axis, batch)


def _of_whole(case: Case, indices: State, axis: int, batch: int) -> Outcome | None:
    """Gathers from whole params by rows of indices."""
    if not isinstance(indices, Rows):
        return None
    return case.all({1: indices}, Rows(axis + indices.dimension - batch))


def gather_of_variable(case: Case) -> Outcome | None:
    """ResourceGather(variable, indices)."""
    if not isinstance(case.states[1], Rows) or case.attr("batch_dims").i:
        return None
    return case.all({1: case.states[1]}, case.states[1])


def lookup(case: Case) -> Outcome | None:
    """LookupTableFindV2(table, keys, default); a value, and a key, may be several elements, the last dimensions."""
    state, out = case.states[1], case.out_shape()
    if not isinstance(state, Rows) or not out or case.rank(1) is None or state.dimension >= len(out):
        return None
    if not case_lib.same_size(case.sizes(1)[state.dimension], out[state.dimension]):
        return None
    # The default is one value, or one for each key.
    return case.all({1: state, 2: state} if case.rank(2) == len(out) else {1: state}, state)


def gather_nd(case: Case) -> Outcome | None:
    """GatherNd(params, indices): the last dimension of indices is an index."""
    rank = case.rank(1)
    if linear := case.linear_in(0):
        return linear
    if not isinstance(case.states[1], Rows) or rank is None or case.dimension(1) == rank - 1:
        return None
    return case.all({1: case.states[1]}, case.states[1])


def one_hot(case: Case) -> Outcome | None:
    """OneHot(indices, depth, on, off)."""
    state, rank = case.states[0], case.rank(0)
    if not isinstance(state, Rows) or rank is None or any(isinstance(s, Partial) for s in case.states[1:]):
        return None
    axis = case.attr("axis").i % (rank + 1)
    return case.all({0: state}, Rows(state.dimension + (axis <= state.dimension)))


_REDUCES = {"UnsortedSegmentSum": "sum", "UnsortedSegmentMax": "max", "UnsortedSegmentMin": "min",
            "UnsortedSegmentProd": "prod"}


def segments(case: Case) -> Outcome | None:
    """UnsortedSegmentSum(data, ids, n): rows with their own ids are summed."""
    data, ids = case.states[:2]
    rank, id_rank = case.rank(0), case.rank(1)
    if rank is None or id_rank is None:
        return None
    if isinstance(data, Partial) or isinstance(ids, Partial):
        return case.linear_in(0) if case.node.op == "UnsortedSegmentSum" else None
    dimension = data.dimension if isinstance(data, Rows) else ids.dimension if isinstance(ids, Rows) else None
    if dimension is None:
        return None
    if dimension >= id_rank:
        return case.all({0: Rows(dimension)}, Rows(dimension - id_rank + 1))
    if not case_lib.same_size(case.sizes(0)[dimension], case.sizes(1)[dimension]):
        return None
    return case.all({0: Rows(dimension), 1: Rows(dimension)}, Partial(_REDUCES[case.node.op]))


def segments_in_order(case: Case) -> Outcome | None:
    """SegmentSum(data, ids) and the like, along the first dimension; the ids determine the number of segments."""
    state = case.states[0]
    return case.all({0: state}, state) if isinstance(state, Rows) and state.dimension > 0 else None


def scatter(case: Case) -> Outcome | None:
    """ScatterNd(indices, updates, shape): rows with their own indices are summed."""
    if case.attr("T").type not in _SUMMED:
        return None
    if case.states[1] == SUM:
        return case.linear_in(1)
    rows = _rows_of_updates(case, 0, 1)
    outcome = None if rows is None else case.all({0: rows, 1: rows}, SUM)
    if outcome or case.states[0] != WHOLE or not isinstance(case.states[1], Rows) or None in (
            case.rank(0), case.rank(1)):
        return outcome
    dimension = _in_slices(case, 0, 1)
    return dimension if dimension is None else case.all({1: case.states[1]}, Rows(dimension), local={2: dimension})


def scatter_into(reduce: str | None) -> Rule:
    """Returns the rule of TensorScatter...(tensor, indices, updates).

    Args:
        reduce: The reduction of updates with the same index; None if the last one counts.
    """

    def rule(case: Case) -> Outcome | None:
        tensor, indices, updates = case.states
        if any(case.rank(i) is None for i in range(3)) or case.attr("T").type not in _SUMMED or indices == SUM:
            return None
        if tensor == SUM and indices == WHOLE and updates in (SUM, WHOLE) and reduce == "sum":
            return case.all({0: SUM, 2: SUM}, SUM)
        index_rank = len(case.sizes(1))
        size = case.sizes(1)[index_rank - 1]
        depth = None if size is None else size.constant
        if isinstance(tensor, Rows) and depth is not None and depth <= tensor.dimension:
            dimension = tensor.dimension - depth + index_rank - 1
            if case_lib.same_size(case.sizes(0)[tensor.dimension], case.sizes(2)[dimension]):
                return case.all({0: tensor, 2: Rows(dimension)}, tensor)
        if tensor == WHOLE and reduce:
            state = _rows_of_updates(case, 1, 2)
            return None if state is None else case.all({0: Partial(reduce), 1: state, 2: state}, Partial(reduce))
        return None

    return rule


def _rows_of_updates(case: Case, indices: int, updates: int) -> Rows | None:
    """Returns the state of updates that have rows, each with its own indices; None if there are none."""
    rank, shape = case.rank(indices), case.shape(updates)
    for state in (case.states[indices], case.states[updates]):
        if isinstance(state, Rows) and rank is not None and state.dimension < rank - 1 and case_lib.same_size(
                case.sizes(indices)[state.dimension], (shape or (None,) * rank)[state.dimension]):
            return state
    return None


def _in_slices(case: Case, indices: int, updates: int) -> int | None:
    """Returns the output dimension of the updates' rows if they lie within the slice that an index names; else None."""
    index_rank = len(case.sizes(indices))
    depth = case.sizes(indices)[index_rank - 1]
    within = case.dimension(updates) - (index_rank - 1)
    return None if within < 0 or depth is None or depth.constant is None else depth.constant + within


def reverse_sequence(case: Case) -> Outcome | None:
    """ReverseSequence(x, lengths), with one length per element of a dimension."""
    batch, state = case.attr("batch_dim").i, case.states[0]
    if case.rank(0) is None:
        return None
    batch %= case.rank(0)
    is_by_length = case.states[1] == Rows(0) and state == WHOLE
    rows = state if isinstance(state, Rows) else Rows(batch) if is_by_length else None
    if rows is None or rows.dimension == case.attr("seq_dim").i % case.rank(0):
        return None
    return case.all({0: rows, 1: Rows(0)} if rows.dimension == batch else {0: rows}, rows)


def count(case: Case) -> Outcome | None:
    """DenseBincount(x, size, weights): counts in each row of a matrix, or in all of a vector."""
    state, weights = case.states[0], case.shape(2)
    if state != Rows(0) or weights is None:
        return None
    takes = {0: state}
    if case_lib.same_size((*weights, None)[0], case.sizes(0)[0]):
        takes[2] = state
    elif len(weights) != 1 or weights[0] is None or weights[0].constant != 0:
        return None
    if case.rank(0) == 2:
        return case.all(takes, state)
    return case.all(takes, Partial("max") if case.attr("binary_output").b else SUM)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Gather", "GatherV2"), gather),
    "ResourceGather": gather_of_variable,
    **dict.fromkeys(("GatherNd", "ResourceGatherNd"), gather_nd),
    "LookupTableFindV2": lookup,
    "OneHot": one_hot,
    **dict.fromkeys(_REDUCES, segments),
    **dict.fromkeys(("SegmentSum", "SegmentMean", "SegmentMax", "SegmentMin", "SegmentProd", "SparseSegmentSum",
                     "SparseSegmentMean", "SparseSegmentSqrtN"), segments_in_order),
    "ScatterNd": scatter,
    "TensorScatterUpdate": scatter_into(None),
    "TensorScatterAdd": scatter_into("sum"),
    "TensorScatterMax": scatter_into("max"),
    "TensorScatterMin": scatter_into("min"),
    "ReverseSequence": reverse_sequence,
    "DenseBincount": count,
}
