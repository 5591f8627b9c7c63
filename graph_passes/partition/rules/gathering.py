"""Ops that gather and scatter by indices: embeddings, and their gradients."""

from tf_poseidon.graph_passes.partition.rules import case as case_lib
from tf_poseidon.graph_passes.partition.rules.case import Outcome
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE


def gather(case):
    """GatherV2(params, indices, axis)."""
    params, indices = case.states[:2]
    axis = case.constant(2) if len(case.inputs) > 2 else 0
    rank, index_rank = case.rank(0), case.rank(1)
    if axis is None or rank is None or index_rank is None:
        return None
    axis, batch = int(axis) % rank, case.attr("batch_dims").i % (index_rank + 1)
    if params == SUM and indices == WHOLE and not case.enlarges([0]):
        return case.all({0: SUM}, SUM)
    if isinstance(params, Partial) or isinstance(indices, Partial):
        return None
    for i, state in ((0, params), (1, indices)):
        if isinstance(state, Rows) and state.dimension < batch:
            d = state.dimension
            if not case_lib.same_size(case.shape(0)[d], case.shape(1)[d]):
                return None
            return case.all({0: Rows(d), 1: Rows(d)}, Rows(d))
    if isinstance(params, Rows):
        if params.dimension == axis:
            return _of_whole(case, indices, axis, batch)
        after = index_rank - batch - 1 if params.dimension > axis else 0
        return case.all({0: params}, Rows(params.dimension + after))
    return _of_whole(case, indices, axis, batch)


def _of_whole(case, indices, axis, batch):
    """What rows of indices take from whole params."""
    if not isinstance(indices, Rows):
        return None
    return case.all({1: indices}, Rows(axis + indices.dimension - batch))


def gather_of_variable(case):
    """ResourceGather(variable, indices)."""
    if not isinstance(case.states[1], Rows) or case.attr("batch_dims").i:
        return None
    return case.all({1: case.states[1]}, case.states[1])


def gather_nd(case):
    """GatherNd(params, indices): the last dimension of indices is an index."""
    rank = case.rank(1)
    if not isinstance(case.states[1], Rows) or rank is None or case.states[1].dimension == rank - 1:
        return None
    return case.all({1: case.states[1]}, case.states[1])


def one_hot(case):
    """OneHot(indices, depth, on, off)."""
    state, rank = case.states[0], case.rank(0)
    if not isinstance(state, Rows) or rank is None or any(isinstance(s, Partial) for s in case.states[1:]):
        return None
    axis = case.attr("axis").i % (rank + 1)
    return case.all({0: state}, Rows(state.dimension + (axis <= state.dimension)))


_REDUCES = {"UnsortedSegmentSum": "sum", "UnsortedSegmentMax": "max", "UnsortedSegmentMin": "min",
            "UnsortedSegmentProd": "prod"}


def segments(case):
    """UnsortedSegmentSum(data, ids, n): rows that have ids of their own are summed."""
    data, ids = case.states[:2]
    rank, id_rank = case.rank(0), case.rank(1)
    if rank is None or id_rank is None:
        return None
    is_sum = case.node.op == "UnsortedSegmentSum"
    if data == SUM and ids == WHOLE and is_sum and not case.enlarges([0]):
        return case.all({0: SUM}, SUM)
    if isinstance(data, Partial) or isinstance(ids, Partial):
        return None
    dimension = data.dimension if isinstance(data, Rows) else ids.dimension if isinstance(ids, Rows) else None
    if dimension is None:
        return None
    if dimension >= id_rank:
        return case.all({0: Rows(dimension)}, Rows(dimension - id_rank + 1))
    if not case_lib.same_size(case.shape(0)[dimension], case.shape(1)[dimension]):
        return None
    return case.all({0: Rows(dimension), 1: Rows(dimension)}, Partial(_REDUCES[case.node.op]))


def scatter(case):
    """ScatterNd(indices, updates, shape): rows that have indices of their own are summed."""
    rank = case.rank(0)
    for state in case.states[:2]:
        if isinstance(state, Rows) and rank is not None and state.dimension < rank - 1 and case_lib.same_size(
                case.shape(0)[state.dimension], (case.shape(1) or (None,) * rank)[state.dimension]):
            return Outcome((state, state, WHOLE), (SUM,))
    return None


RULES = {
    **dict.fromkeys(("Gather", "GatherV2"), gather),
    "ResourceGather": gather_of_variable,
    "GatherNd": gather_nd,
    "OneHot": one_hot,
    **dict.fromkeys(_REDUCES, segments),
    "ScatterNd": scatter,
}
