"""Lists of tensors, in which loops keep what they read and write. A list has the state of its elements.

A list of lists, which a nested loop keeps for its gradient, has the state of their elements.

A list is empty, or full of zeros, when it is made; its state follows from what is put into it. So an op that puts rows
into a whole list requests a list of rows (`Outcome.wishes`).

Tests: tests/graphs/test_partition_families.py.
"""

from collections.abc import Mapping

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE


def _outcome(case: Case, takes: Mapping[int, State], gives: tuple[State, ...], shape: int,
             state: State) -> Outcome | None:
    """Returns the Outcome of an op whose input `shape` is the shape of elements in a state."""
    local = {}
    if isinstance(state, Rows) and not lists_lib.holds_lists(case.node):
        if case.rank(shape) is None:
            return None
        if case.rank(shape) == 1:  # otherwise it is a number that stands for any shape
            local = {shape: state.dimension}
    return Outcome(tuple(takes.get(i, WHOLE) for i in range(len(case.inputs))), gives, local=local)


def made(shape: int) -> Rule:
    """Returns the rule of an op that makes a list; input `shape` is the shape of its elements."""

    def rule(case: Case) -> Outcome | None:
        state = WHOLE if case.wish is None else case.wish
        return _outcome(case, {}, (state,), shape, state)

    return rule


def put(tensor: int) -> Rule:
    """Returns the rule of an op that puts input `tensor` into a list, input 0."""

    def rule(case: Case) -> Outcome | None:
        holds, item = case.states[0], case.states[tensor]
        state = item if holds == WHOLE else holds
        if state == WHOLE:
            return None
        return case.all({0: state, tensor: state}, state, wishes={0: state if item in (state, WHOLE) else WHOLE})

    return rule


def taken(shape: int, shift: int = 0) -> Rule:
    """Returns the rule of an op that takes elements; if it stacks them, `shift` dimensions come before theirs."""

    def rule(case: Case) -> Outcome | None:
        state = case.states[0]
        if state == WHOLE or (shift and lists_lib.holds_lists(case.node)):
            return None
        gives = Rows(state.dimension + shift) if isinstance(state, Rows) else state
        return _outcome(case, {0: state}, (gives,) * case.num_outputs, shape, state)

    return rule


def unstacked(shape: int) -> Rule:
    """Returns the rule of an op that makes a list from a tensor's parts along its first dimension."""

    def rule(case: Case) -> Outcome | None:
        if lists_lib.holds_lists(case.node):
            return None
        state, element = case.states[0], case.wish
        if element is None:
            if state == Rows(0):
                return None
            element = Rows(state.dimension - 1) if isinstance(state, Rows) else state
        state = Rows(element.dimension + 1) if isinstance(element, Rows) else element
        return None if element == WHOLE else _outcome(case, {0: state}, (element,), shape, element)

    return rule


def length(case: Case) -> Outcome:
    return Outcome((None,) * len(case.inputs), (WHOLE,))


def shape_of_elements(case: Case) -> Outcome | None:
    """TensorListElementShape: a vector, if elements are not lists; or a number that stands for any shape."""
    state, shape = case.states[0], case.out_shape()
    if not isinstance(state, Rows):
        return Outcome((None,), (WHOLE,))
    if not row_size.is_known(shape):
        return None
    is_whole = not shape or shape[0].constant == 0
    return Outcome((None,), (WHOLE,), write=None if is_whole else _write_shape)


def _write_shape(writer: NodeWriter) -> list[str]:
    state = writer.states[0]
    assert isinstance(state, Rows)
    return [writer.made_global(writer.same("here"), state.dimension, writer.node.attr["shape_type"].type)]


def kept(case: Case) -> Outcome:
    """Returns the same list, or one like it."""
    return case.all({0: case.states[0]}, case.states[0])


def added(case: Case) -> Outcome | None:
    """AddN, AddV2 of lists, element by element: all lists hold the same rows, or summands."""
    states = {state for state in case.states if state != WHOLE}
    if len(states) != 1:
        return None
    state, = states
    return case.all(dict.fromkeys(range(len(case.inputs)), state), state)


RULES: dict[str, Rule] = {
    "EmptyTensorList": made(0),
    "TensorListReserve": made(0),
    "TensorListSetItem": put(2),
    "TensorListPushBack": put(1),
    "TensorListGetItem": taken(2),
    "TensorListPopBack": taken(1),
    "TensorListStack": taken(1, shift=1),
    "TensorListGather": taken(2, shift=1),
    "TensorListFromTensor": unstacked(1),
    "TensorListScatterV2": unstacked(2),
    "TensorListLength": length,
    "TensorListElementShape": shape_of_elements,
    "TensorListResize": kept,
}
# Ops whose rules also apply to whole inputs: what is put into a list later may need rows.
ALWAYS = frozenset(("EmptyTensorList", "TensorListReserve", "TensorListFromTensor", "TensorListScatterV2"))
