"""Ops that read shapes, or change them."""

from collections.abc import Callable
from collections.abc import Sequence
import typing

import numpy as np

from tf_poseidon.graph_passes.partition import sizes as sizes_lib
from tf_poseidon.graph_passes.partition.rules import case as case_lib
from tf_poseidon.graph_passes.partition.rules.case import Case
from tf_poseidon.graph_passes.partition.rules.case import Outcome
from tf_poseidon.graph_passes.partition.rules.case import Rule
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

if typing.TYPE_CHECKING:  # it imports the rules
    from tf_poseidon.graph_passes.partition.write import NodeWriter


def shape_of(case: Case) -> Outcome:
    """Shape, ShapeN and Size: the sizes of one process."""
    return Outcome(tuple(None for _ in case.inputs), (WHOLE,) * case.num_outputs, write=_write_shapes)


def _write_shapes(writer: "NodeWriter") -> list[str]:
    node = writer.node
    outputs = []
    for i in range(len(writer.inputs)):
        if isinstance(writer.states[i], Rows):
            outputs.append(writer.global_shape(i, node.attr["out_type"].type, is_size=node.op == "Size"))
        else:
            op = "Size" if node.op == "Size" else "Shape"
            outputs.append(writer.add(f"of{i}", op, [writer.inputs[i]], T=writer.type_of_input(i),
                                      out_type=node.attr["out_type"].type))
    return outputs


def rank_of(case: Case) -> Outcome:
    return Outcome((None,), (WHOLE,))


def _same_rows(case: Case, out: sizes_lib.Shape | None = None) -> int | None:
    """Returns the output dimension of input 0's rows, if these are cut into the same parts; else None.

    Elements keep their order, so it is the dimension with the same number of elements before it, and a size of rows.
    """
    dimension, shape = case.dimension(0), case.shape(0)
    out = case.out_shape() if out is None else out
    if shape is None or out is None:
        return None
    before = shape[:dimension]
    if not sizes_lib.is_known(before) or not case_lib.of_rows(shape[dimension]):
        return None
    count = sizes_lib.product(before)
    for i, size in enumerate(out):
        until = out[:i]
        if not sizes_lib.is_known(until):
            return None
        if case_lib.of_rows(size) and sizes_lib.product(until) == count:
            return i
    return None


def reshape(case: Case) -> Outcome | None:
    """Rows stay rows if all elements of a row stay together."""
    state = case.states[0]
    if isinstance(state, Partial):
        return case.all({0: state}, state)
    if not isinstance(state, Rows):
        return None
    dimension = _same_rows(case)
    return None if dimension is None else case.all({0: state}, Rows(dimension), local={1: dimension})


def squeeze(case: Case) -> Outcome | None:
    """Removes dimensions of size 1, which must be named, since one process may have a single row."""
    state = case.states[0]
    if isinstance(state, Partial):
        return case.all({0: state}, state)
    dimension = _same_rows(case) if isinstance(state, Rows) else None
    if dimension is None:
        return None
    named = case.attr("squeeze_dims" if "squeeze_dims" in case.node.attr else "axis").list.i
    return case.all({0: state}, Rows(dimension)) if named else None


def expand(case: Case) -> Outcome | None:
    state = case.states[0]
    if isinstance(state, Partial):
        return case.all({0: state}, state)
    dimension = _same_rows(case) if isinstance(state, Rows) else None
    return None if dimension is None else case.all({0: state}, Rows(dimension))


def transpose(case: Case) -> Outcome | None:
    """Permutes dimensions."""
    state, order = case.states[0], case.constant(1)
    if isinstance(state, Partial):
        return case.all({0: state}, state)
    if not isinstance(state, Rows) or order is None:
        return None
    return case.all({0: state}, Rows([int(d) for d in order].index(state.dimension)))


def _together(case: Case, inputs: Sequence[int], dimension_of: Callable[[int], int | None]) -> Outcome | None:
    """Joins tensors, all of which have the same rows, or are summands.

    Args:
        case: The `Case`.
        inputs: The numbers of the inputs that are joined.
        dimension_of: A function from the dimension of rows in an input to that in the output, or to None if the rows do
            not stay together.
    """
    states = [case.states[i] for i in inputs]
    if any(isinstance(state, Partial) for state in states):
        if all(state in (SUM, WHOLE) for state in states):
            return case.all(dict.fromkeys(inputs, SUM), SUM)
        return None
    state = next((state for state in states if isinstance(state, Rows)), None)
    if state is None:
        return None
    leading = case.shape(inputs[states.index(state)])
    dimension = None if leading is None else dimension_of(state.dimension)
    if leading is None or dimension is None:
        return None
    for i in inputs:
        shape = case.shape(i)
        if shape is None or len(shape) <= state.dimension or not case_lib.same_size(
                shape[state.dimension], leading[state.dimension]):
            return None
    return case.all(dict.fromkeys(inputs, state), Rows(dimension))


def pack(case: Case) -> Outcome | None:
    rank = case.rank(0)
    if rank is None:
        return None
    axis = case.attr("axis").i % (rank + 1)
    return _together(case, range(len(case.inputs)), lambda d: d + (axis <= d))


def unpack(case: Case) -> Outcome | None:
    state, rank = case.states[0], case.rank(0)
    if isinstance(state, Partial):
        return case.all({0: state}, state)
    if not isinstance(state, Rows) or rank is None:
        return None
    axis = case.attr("axis").i % rank
    if axis == state.dimension:
        return None
    return case.all({0: state}, Rows(state.dimension - (axis < state.dimension)))


def concat(case: Case) -> Outcome | None:
    given, rank = case.constant(len(case.inputs) - 1), case.rank(0)
    if given is None or rank is None:
        return None
    axis = int(given) % rank
    return _together(case, range(len(case.inputs) - 1), lambda d: None if d == axis else d)


def split(which: int, value: int) -> Rule:
    """Returns the rule of an op that splits input `value` along the dimension in input `which`."""

    def rule(case: Case) -> Outcome | None:
        axis, state = case.constant(which), case.states[value]
        if isinstance(state, Partial):
            return case.all({value: state}, state)
        if not isinstance(state, Rows) or axis is None or case.rank(value) is None:
            return None
        if int(axis) % len(case.sizes(value)) == state.dimension:
            return None
        return case.all({value: state}, state)

    return rule


def untouched(case: Case) -> Outcome | None:
    """Changes other dimensions than the rows, whose number stays the same."""
    state, out = case.states[0], case.out_shape()
    if state == SUM and case.node.op in ("Tile", "Pad"):
        return None if case.enlarges([0]) else case.all({0: SUM}, SUM)
    if not isinstance(state, Rows) or out is None or case.rank(0) != len(out):
        return None
    if not case_lib.same_size(case.sizes(0)[state.dimension], out[state.dimension]):
        return None
    # The repetitions of each row, or the number of added rows: for any number of rows, not only for the tried ones.
    expected = 1 if case.node.op == "Tile" else 0
    if _is_all(case.element(1, state.dimension), expected):
        return case.all({0: state}, state)
    if not case.is_packed(1) and _is_all(case.likely_element(1, state.dimension), expected):
        return case.all({0: state}, state, checks={1: (state.dimension, expected)})
    return None


def _is_all(value: np.ndarray | None, expected: int) -> bool:
    """Whether integers are known, and all equal a value."""
    return value is not None and bool((np.asarray(value) == expected).all())


def cut(case: Case) -> Outcome | None:
    """Slice(x, begin, size): all rows are taken."""
    if case.states[0] == SUM:
        return case.all({0: SUM}, SUM)
    state, out = case.states[0], case.out_shape()
    if not isinstance(state, Rows) or out is None or not _is_all(case.likely_element(1, state.dimension), 0):
        return None
    if not case_lib.same_size(case.sizes(0)[state.dimension], out[state.dimension]):
        return None
    return case.all({0: state}, state, local={2: state.dimension}, checks={1: (state.dimension, 0)})


def broadcast(case: Case) -> Outcome | None:
    """BroadcastTo(x, shape): dimensions are aligned at the last one."""
    state, out = case.states[0], case.out_shape()
    if not isinstance(state, Rows) or out is None or case.rank(0) is None:
        return None
    dimension = state.dimension + len(out) - len(case.sizes(0))
    if not case_lib.same_size(case.sizes(0)[state.dimension], out[dimension]):
        return None
    return case.all({0: state}, Rows(dimension), local={1: dimension})


def ensure_shape(case: Case) -> Outcome | None:
    """EnsureShape: the shape leaves the number of rows open."""
    state, sizes = case.states[0], case.attr("shape").shape
    if isinstance(state, Rows) and (len(sizes.dim) <= state.dimension or sizes.dim[state.dimension].size >= 0):
        return None
    return case.all({0: state}, state)


def along_others(case: Case) -> Outcome | None:
    """ReverseV2, Roll: along given dimensions other than the rows."""
    which = {"ReverseV2": 1, "Roll": 2}[case.node.op]
    axes, state = case.constant(which), case.states[0]
    if state == SUM:
        return case.all({0: SUM}, SUM)
    if not isinstance(state, Rows) or axes is None or case.rank(0) is None:
        return None
    if state.dimension in {int(axis) % len(case.sizes(0)) for axis in axes.flatten()}:
        return None
    return case.all({0: state}, state)


def _strided(case: Case, tensor_rank: int) -> list[tuple[int, int, bool]] | None:
    """Returns what a StridedSlice does to the dimensions that it keeps; None if its strides are unknown.

    Args:
        case: The `Case`, of a StridedSlice or its gradient.
        tensor_rank: Number of dimensions of the tensor that is sliced.

    Returns:
        [(dimension of the tensor, dimension of the slice, whether all of it is taken), ...].
    """
    begin, strides = case.constant(1), case.constant(3)
    if strides is None:
        return None
    masks = {name: case.attr(f"{name}_mask").i for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    specified, pairs, position, out = len(strides), [], 0, 0
    hidden = tensor_rank - sum(not (masks["new_axis"] >> i & 1 or masks["ellipsis"] >> i & 1)
                               for i in range(specified))
    for i in range(specified):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            for _ in range(hidden):
                pairs.append((position, out, True))
                position, out = position + 1, out + 1
        elif masks["new_axis"] & bit:
            out += 1
        elif masks["shrink_axis"] & bit:
            position += 1
        else:
            from_first = masks["begin"] & bit or begin is not None and begin[i] == 0
            is_all = bool(from_first and masks["end"] & bit and strides[i] == 1)
            pairs.append((position, out, is_all))
            position, out = position + 1, out + 1
    if not masks["ellipsis"]:
        for _ in range(hidden):
            pairs.append((position, out, True))
            position, out = position + 1, out + 1
    return pairs


def strided_slice(case: Case) -> Outcome | None:
    """x[...]: takes all rows, with a range from the first without an end, or without a range."""
    state = case.states[0]
    if state == SUM:
        return case.all({0: SUM}, SUM)
    shape = case.shape(0)
    if not isinstance(state, Rows) or shape is None:
        return None
    for position, out, is_all in _strided(case, len(shape)) or ():
        if position == state.dimension:
            return case.all({0: state}, Rows(out)) if is_all else None
    return None


def strided_slice_gradient(case: Case) -> Outcome | None:
    """StridedSliceGrad(shape, begin, end, strides, dy): dy within zeros of that shape."""
    state, out = case.states[4], case.out_shape()
    if state == SUM:
        return None if case.enlarges([4]) else case.all({4: SUM}, SUM)
    if not isinstance(state, Rows) or out is None:
        return None
    for position, sliced, is_all in _strided(case, len(out)) or ():
        if sliced == state.dimension:
            if not is_all:
                return None
            return case.all({4: state}, Rows(position), local={0: position})
    return None


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Shape", "ShapeN", "Size"), shape_of),
    "Rank": rank_of,
    "Reshape": reshape,
    "Squeeze": squeeze,
    "ExpandDims": expand,
    "Transpose": transpose,
    "ConjugateTranspose": transpose,
    "Pack": pack,
    "Unpack": unpack,
    "ConcatV2": concat,
    "Split": split(0, 1),
    "SplitV": split(2, 0),
    **dict.fromkeys(("Tile", "Pad", "PadV2", "MirrorPad", "MirrorPadGrad"), untouched),
    "Slice": cut,
    "EnsureShape": ensure_shape,
    "BroadcastTo": broadcast,
    **dict.fromkeys(("ReverseV2", "Roll"), along_others),
    "StridedSlice": strided_slice,
    "StridedSliceGrad": strided_slice_gradient,
}
