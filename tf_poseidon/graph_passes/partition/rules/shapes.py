"""Ops that read shapes, or change them.

Tests: tests/graphs/test_partition.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import typing

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules import blocks
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE


def shape_of(case: Case) -> Outcome:
    """Shape, ShapeN and Size: the sizes of one process."""
    return Outcome(tuple(None for _ in case.inputs), (WHOLE,) * case.num_outputs, write=_write_shapes)


def _write_shapes(writer: NodeWriter) -> list[str]:
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


def _same_rows(case: Case, out: row_size.Shape | None = None) -> int | None:
    """Returns the output dimension of input 0's rows, if these are cut into the same parts; else None.

    Elements keep their order, so it is the dimension with the same number of elements before it, and a size of rows.
    """
    dimension, shape = case.dimension(0), case.shape(0)
    out = case.out_shape() if out is None else out
    if shape is None or out is None:
        return None
    leading = shape[:dimension]
    if not row_size.is_known(leading) or not case_lib.of_rows(shape[dimension]):
        return None
    count = row_size.product(leading)
    for i, size in enumerate(out):
        until = out[:i]
        if not row_size.is_known(until):
            return None
        if case_lib.of_rows(size) and row_size.product(until) == count:
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
        return case.linear_in(0)
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
    if state == SUM:
        return case.linear_in(0)
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


class _Kept(typing.NamedTuple):
    """A dimension that a StridedSlice keeps.

    Attributes:
        position: Its number in the tensor.
        out: Its number in the slice.
        is_all: Whether all of it is taken.
        given: The number of its range; None if it has none.
    """

    position: int
    out: int
    is_all: bool
    given: int | None = None


def _strided(case: Case, tensor_rank: int) -> list[_Kept] | None:
    """Returns what a StridedSlice does to the dimensions that it keeps; None if its strides are unknown.

    Args:
        case: The `Case`, of a StridedSlice or its gradient.
        tensor_rank: Number of dimensions of the tensor that is sliced.
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
                pairs.append(_Kept(position, out, True))
                position, out = position + 1, out + 1
        elif masks["new_axis"] & bit:
            out += 1
        elif masks["shrink_axis"] & bit:
            position += 1
        else:
            from_first = masks["begin"] & bit or begin is not None and begin[i] == 0
            is_all = bool(from_first and masks["end"] & bit and strides[i] == 1)
            pairs.append(_Kept(position, out, is_all, i))
            position, out = position + 1, out + 1
    if not masks["ellipsis"]:
        for _ in range(hidden):
            pairs.append(_Kept(position, out, True))
            position, out = position + 1, out + 1
    return pairs


def _range(case: Case, index: int,
           whole: row_size.Size | None) -> tuple[row_size.Size | None, row_size.Size | None]:
    """Returns (begin, size) of a range of a StridedSlice, or of its gradient, None where unknown.

    Args:
        case: The `Case`.
        index: The number of the range.
        whole: The size of the dimension that it is taken from.
    """
    begins, ends = (case.attr(f"{name}_mask").i >> index & 1 for name in ("begin", "end"))
    begin = row_size.NONE if begins else case.size_at(1, index)
    end, strides = whole if ends else case.size_at(2, index), case.constant(3)
    if begin is None or end is None or whole is None or strides is None or strides[index] != 1 or (
            whole.minus(end) is None):
        return begin, None
    return begin, end.minus(begin)


def strided_slice(case: Case) -> Outcome | None:
    """x[...]: takes all rows, with a range from the first without an end, or without a range."""
    state = case.states[0]
    if state == SUM:
        return case.all({0: SUM}, SUM)
    shape = case.shape(0)
    if not isinstance(state, Rows) or shape is None:
        return None
    for kept in _strided(case, len(shape)) or ():
        if kept.position == state.dimension:
            return case.all({0: state}, Rows(kept.out)) if kept.is_all else None
    return None


def strided_slice_gradient(case: Case) -> Outcome | None:
    """StridedSliceGrad(shape, begin, end, strides, dy): dy within zeros of that shape."""
    state, out = case.states[4], case.out_shape()
    if state == SUM:
        return case.linear_in(4)
    if not isinstance(state, Rows) or out is None:
        return None
    for kept in _strided(case, len(out)) or ():
        if kept.out == state.dimension:
            if not kept.is_all:
                return None
            return case.all({4: state}, Rows(kept.position), local={0: kept.position})
    return None


# ---- blocks of rows -------------------------------------------------------------------------


def reshape_of_blocks(case: Case) -> Outcome | None:
    """Merges a dimension before the rows with them, whose size is then the number of blocks; or splits these again."""
    state, shape, out = case.states[0], case.shape(0), case.out_shape()
    if not isinstance(state, Rows) or shape is None or out is None:
        return None
    leading = shape[:state.dimension]
    if not row_size.is_known(leading):
        return None
    leading_size = row_size.product(leading)
    for i in range(len(out)):
        until = out[:i]
        if not row_size.is_known(until):
            return None
        after = row_size.product(until)
        merged, split = leading_size.ratio(after), after.ratio(leading_size)
        number = state.blocks * merged if merged else state.blocks // split if split and not (
            state.blocks % split) else None
        if number and number != state.blocks and row_size.consists_of(out[i], number):
            return case.all({0: state}, Rows(i, number), local={1: i})
    return None


def tile_of_blocks(case: Case) -> Outcome | None:
    """Tile(x, multiples) repeats all rows, one after the other."""
    state = case.states[0]
    if not isinstance(state, Rows) or case.rank(0) is None or blocks.size_of_block(case, 0) is None:
        return None
    times = case.element(1, state.dimension)
    if times is None or np.asarray(times).size != 1 or int(times) < 2:
        return None
    return case.all({0: state}, Rows(state.dimension, state.blocks * int(times)))


def concat_of_blocks(case: Case) -> Outcome | None:
    """Joins tensors along their rows: those of each become one block, or several."""
    given, inputs = case.constant(len(case.inputs) - 1), range(len(case.inputs) - 1)
    if given is None or any(case.rank(i) is None for i in inputs):
        return None
    axis = int(given) % len(case.sizes(0))
    sizes = [case.sizes(i)[axis] for i in inputs]
    leading = next((i for i in inputs if isinstance(state := case.states[i], Rows) and state.dimension == axis), None)
    block = None if leading is None else blocks.size_of_block(case, leading)
    numbers = blocks.all_known(None if size is None or block is None else size.ratio(block) for size in sizes)
    if numbers is None or any(isinstance(case.states[i], Partial) for i in inputs):
        return None
    takes = {i: Rows(axis, number) for i, number in zip(inputs, numbers)}
    if any(isinstance(state, Rows) and state != takes[i] for i, state in zip(inputs, case.states)):
        return None
    return case.all(takes, Rows(axis, sum(numbers)))


def split_of_blocks(which: int, value: int) -> Rule:
    """Returns the rule of an op that splits input `value` along the dimension in input `which`, that of the rows."""

    def rule(case: Case) -> Outcome | None:
        axis, state = case.constant(which), case.states[value]
        if not blocks.has_blocks(state) or axis is None or case.rank(value) is None or (
                int(axis) % len(case.sizes(value)) != state.dimension):
            return None
        shapes = [case.out_shape(i) for i in range(case.num_outputs)]
        numbers = blocks.all_known(
            blocks.number_in(shape[state.dimension] if shape else None, case, value) for shape in shapes)
        if numbers is None or sum(numbers) != state.blocks:
            return None
        return Outcome(tuple(state if i == value else WHOLE for i in range(len(case.inputs))),
                       tuple(Rows(state.dimension, number) for number in numbers),
                       write=None if case.node.op == "Split" else _write_split)

    return rule


def _write_split(writer: NodeWriter) -> list[str]:
    """SplitV(x, sizes, axis): the size of each part becomes that of this rank's rows."""
    x, sizes, axis = writer.inputs
    count, dtype = writer.node.attr["num_split"].i, writer.node.attr["Tlen"].type
    for i in range(count):
        sizes = writer.made_local(sizes, i, dtype, f"size{i}")
    name = writer.add("", "SplitV", [x, sizes, axis], T=writer.node.attr["T"].type, Tlen=dtype, num_split=count)
    return [f"{name}:{i}" if i else name for i in range(count)]


def padded_blocks(case: Case) -> Outcome | None:
    """Pad(x, paddings) with zeros in place of other blocks: the gradient of a Slice."""
    state = case.states[0]
    if not isinstance(state, Rows) or case.rank(0) is None:
        return None
    begin, after = (blocks.number_in(case.size_at(1, state.dimension, side), case, 0) for side in (0, 1))
    if begin is None or after is None or not begin + after:
        return None
    return case.all({0: state}, Rows(state.dimension, begin + state.blocks + after),
                    write=lambda writer: _write_padded(writer, state.dimension))


def _write_padded(writer: NodeWriter, dimension: int) -> list[str]:
    """The zeros on both sides become as many as belong to this rank's rows."""
    (x, paddings), dtype = writer.inputs, writer.node.attr["Tpaddings"].type
    flat, pairs = (writer.constant(name, np.array(shape, np.int32), paddings)
                   for name, shape in (("flat", [-1]), ("pairs", [-1, 2])))
    paddings = writer.add("flattened", "Reshape", [paddings, flat], T=dtype, Tshape=types_pb2.DT_INT32)
    for side in (0, 1):
        paddings = writer.made_local(paddings, 2 * dimension + side, dtype, f"side{side}")
    paddings = writer.add("paddings", "Reshape", [paddings, pairs], T=dtype, Tshape=types_pb2.DT_INT32)
    return [writer.add("", "Pad", [x, paddings], T=writer.node.attr["T"].type, Tpaddings=dtype)]


def cut_of_blocks(case: Case) -> Outcome | None:
    """Slice(x, begin, size) of some blocks."""
    state, out = case.states[0], case.out_shape()
    if not blocks.has_blocks(state) or out is None:
        return None
    d = state.dimension
    number = blocks.number_taken(case, case.size_at(1, d), out[d])
    return case.all({0: state}, Rows(d, number), local={1: d, 2: d}) if number else None


def strided_slice_of_blocks(case: Case) -> Outcome | None:
    """x[begin:end] of some blocks."""
    state, shape = case.states[0], case.shape(0)
    if not blocks.has_blocks(state) or shape is None:
        return None
    for position, out, _, index in _strided(case, len(shape)) or ():
        if position == state.dimension and index is not None:
            number = blocks.number_taken(case, *_range(case, index, shape[position]))
            return case.all({0: state}, Rows(out, number), local={1: index, 2: index}) if number else None
    return None


def strided_slice_gradient_of_blocks(case: Case) -> Outcome | None:
    """StridedSliceGrad(shape, begin, end, strides, dy): zeros in place of the blocks that were not taken."""
    state, out = case.states[4], case.out_shape()
    if not isinstance(state, Rows) or out is None or case.rank(4) is None:
        return None
    for position, sliced, _, index in _strided(case, len(out)) or ():
        if sliced == state.dimension and index is not None:
            begin, size = _range(case, index, out[position])
            first, taken, number = (blocks.number_in(part, case, 4) for part in (begin, size, out[position]))
            if first is None or taken != state.blocks or not number or number == taken:
                return None
            return case.all({4: state}, Rows(position, number), local={0: position, 1: index, 2: index})
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
# The rules of ops that make blocks of rows, or take them apart.
BLOCKS: dict[str, Rule] = {
    "Reshape": reshape_of_blocks,
    "Tile": tile_of_blocks,
    "ConcatV2": concat_of_blocks,
    "Split": split_of_blocks(0, 1),
    "SplitV": split_of_blocks(2, 0),
    "Pad": padded_blocks,
    "Slice": cut_of_blocks,
    "StridedSlice": strided_slice_of_blocks,
    "StridedSliceGrad": strided_slice_gradient_of_blocks,
}
