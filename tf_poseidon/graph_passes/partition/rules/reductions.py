"""Ops that reduce dimensions, or work along one.

Tests: tests/graphs/test_partition.py.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence

from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM

_REDUCES = {"Sum": "sum", "Max": "max", "Min": "min", "Prod": "prod", "All": "all", "Any": "any"}


def _axes(case: Case) -> set[int] | None:
    """Returns the dimensions that are reduced, None if unknown."""
    axes, rank = case.constant(1), case.rank(0)
    if axes is None or rank is None:
        return None
    return {int(axis) % rank for axis in axes.flatten()} if rank else set()


def after(dimension: int, axes: Collection[int], keeps: bool) -> int:
    """Returns the position of a dimension after others were reduced."""
    return dimension if keeps else dimension - sum(axis < dimension for axis in axes)


def reduction(case: Case) -> Outcome | None:
    """Reducing the rows gives a summand; reducing other dimensions gives rows."""
    state, axes = case.states[0], _axes(case)
    if state == SUM and case.node.op == "Sum":
        return case.all({0: SUM}, SUM)
    if not isinstance(state, Rows) or axes is None:
        return None
    if state.dimension in axes:
        return case.all({0: state}, Partial(_REDUCES[case.node.op]))
    return case.all({0: state}, Rows(after(state.dimension, axes, case.attr("keep_dims").b)))


def mean(case: Case) -> Outcome | None:
    """The mean over rows is a sum divided by the number of elements in one process. A mean of integers is rounded."""
    state, axes = case.states[0], _axes(case)
    if state == SUM and case_lib.is_inexact(case.attr("T").type):
        return case.all({0: SUM}, SUM)
    if not isinstance(state, Rows) or axes is None:
        return None
    if state.dimension not in axes:
        return case.all({0: state}, Rows(after(state.dimension, axes, case.attr("keep_dims").b)))
    if case.attr("T").type in graph_lib.HALVES or not case_lib.is_inexact(case.attr("T").type):
        return None  # sums of halves may overflow
    return case.all({0: state}, SUM, write=_write_mean)


def _write_mean(writer: NodeWriter) -> list[str]:
    """sum(x) / (elements of x / elements of the sum), with the numbers of one process."""
    node = writer.node
    dtype = node.attr["T"].type
    total = writer.add("sum", "Sum", writer.inputs, T=dtype, Tidx=node.attr["Tidx"].type,
                       keep_dims=node.attr["keep_dims"].b)
    count = writer.add("count", "RealDiv", [_elements(writer, "all", writer.global_shape(0), writer.inputs[0]),
                                            _elements(writer, "sums", writer.shape_of(total), total)],
                       T=types_pb2.DT_DOUBLE)
    count = writer.add("divisor", "Cast", [count], SrcT=types_pb2.DT_DOUBLE, DstT=dtype)
    return [writer.add("", "RealDiv", [total, count], T=dtype)]


def _elements(writer: NodeWriter, name: str, shape: str, beside: str) -> str:
    axes = writer.constant(f"{name}/axes", [0], beside)
    count = writer.add(f"{name}/count", "Prod", [shape, axes], T=types_pb2.DT_INT64, Tidx=types_pb2.DT_INT64,
                       keep_dims=False)
    return writer.add(f"{name}/elements", "Cast", [count], SrcT=types_pb2.DT_INT64, DstT=types_pb2.DT_DOUBLE)


def norm(case: Case) -> Outcome | None:
    """EuclideanNorm of each row separately."""
    state, axes = case.states[0], _axes(case)
    if not isinstance(state, Rows) or axes is None or state.dimension in axes:
        return None
    return case.all({0: state}, Rows(after(state.dimension, axes, case.attr("keep_dims").b)))


def half_of_squares(case: Case) -> Outcome | None:
    """L2Loss: a sum over everything."""
    return case.all({0: case.states[0]}, SUM) if isinstance(case.states[0], Rows) else None


def along(case: Case, axis: int, inputs: Sequence[int] = (0,)) -> Outcome | None:
    """Works along one dimension; rows are another one and stay there."""
    state, rank = case.states[inputs[0]], case.rank(inputs[0])
    if not isinstance(state, Rows) or rank is None or axis is None or axis % rank == state.dimension:
        return None
    return case.all(dict.fromkeys(inputs, state), state)


def along_last(case: Case) -> Outcome | None:
    """Works along the last dimension."""
    return along(case, -1)


def along_given(case: Case) -> Outcome | None:
    """Cumulative sums and products: the axis is input 1."""
    axis = case.constant(1)
    if case.states[0] == SUM and case.node.op == "Cumsum":
        return case.all({0: SUM}, SUM)
    return None if axis is None else along(case, int(axis))


def index_of_extreme(case: Case) -> Outcome | None:
    """ArgMax, ArgMin."""
    given, state = case.constant(1), case.states[0]
    if not isinstance(state, Rows) or given is None or case.rank(0) is None:
        return None
    axis = int(given) % len(case.sizes(0))
    if axis == state.dimension:
        return None
    return case.all({0: state}, Rows(after(state.dimension, {axis}, False)))


def top(case: Case) -> Outcome | None:
    """TopKV2 works along the last dimension; k is whole."""
    return along(case, -1)


def cross_entropy(case: Case) -> Outcome | None:
    """Returns a loss [K] and a gradient [K, C] for logits [K, C] and labels [K, C]."""
    if Rows(0) not in case.states or any(
            not case.rank(i) or not case_lib.of_rows(case.sizes(i)[0]) for i in (0, 1)):
        return None
    return Outcome((Rows(0), Rows(0)), (Rows(0), Rows(0)))


def inner(dimensions: Mapping[int, int]) -> Rule:
    """Returns the rule of an op that works on its inputs' last dimensions, separately for each index of the others.

    Args:
        dimensions: The number of last dimensions, by number of an input; inputs that it does not name are whole.
    """

    def rule(case: Case) -> Outcome | None:
        if any(case.rank(i) is None for i in dimensions):
            return None
        # The outer dimensions, which are aligned at their last one.
        outer = {i: len(case.sizes(i)) - number for i, number in dimensions.items()}
        leading = next((i for i in case.rows_inputs() if i in outer and case.dimension(i) < outer[i]), None)
        if leading is None:
            return None
        position = case.dimension(leading) - outer[leading]
        size, takes = case.sizes(leading)[case.dimension(leading)], {}
        for i, number in outer.items():
            if number >= -position and not case.is_one(i, number + position):
                if not case_lib.same_size(case.sizes(i)[number + position], size):
                    return None
                takes[i] = Rows(number + position)
        return case.all(takes, Rows(max(outer.values()) + position))

    return rule


def diagonal(case: Case) -> Outcome | None:
    """MatrixDiagV3(diagonal, k, ...): several diagonals are two dimensions, a single one is one."""
    bands = case.constant(1)
    if bands is None:
        return None
    return inner({0: 1 if len(set(bands.flatten())) == 1 else 2})(case)


def set_diagonal(case: Case) -> Outcome | None:
    """MatrixSetDiagV3(matrix, diagonal, k)."""
    bands = case.constant(2)
    if bands is None or len(set(bands.flatten())) > 1:
        return None
    return inner({0: 2, 1: 1})(case)


RULES: dict[str, Rule] = {
    **dict.fromkeys(_REDUCES, reduction),
    "Mean": mean,
    "EuclideanNorm": norm,
    "L2Loss": half_of_squares,
    **dict.fromkeys(("Softmax", "LogSoftmax"), along_last),
    **dict.fromkeys(("Cumsum", "Cumprod", "CumulativeLogsumexp"), along_given),
    **dict.fromkeys(("ArgMax", "ArgMin"), index_of_extreme),
    "TopKV2": top,
    "SoftmaxCrossEntropyWithLogits": cross_entropy,
    **dict.fromkeys(("Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant",
                     "MatrixSquareRoot", "MatrixDiagPart", "MatrixDiagPartV3", "MatrixBandPart", "SelfAdjointEigV2",
                     "Svd", "Qr", "FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), inner({0: 2})),
    **dict.fromkeys(("CholeskyGrad", "MatrixSolve", "MatrixTriangularSolve"), inner({0: 2, 1: 2})),
    **dict.fromkeys(("FFT", "IFFT", "RFFT", "IRFFT", "MatrixDiag"), inner({0: 1})),
    "MatrixDiagV3": diagonal,
    "Cross": inner({0: 1, 1: 1}),
    "MatrixSetDiagV3": set_diagonal,
}
