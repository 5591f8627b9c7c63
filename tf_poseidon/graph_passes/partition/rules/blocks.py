"""Tensors that consist of several blocks of rows, one after the other, such as two batches that were concatenated.

A rank holds its part of each block. So ops that treat rows separately, or reduce them in any order, do with blocks what
they do with rows, and their rules are applied to blocks too. No other rule sees blocks: they are whole for it. Ops that
make blocks, or take them apart, have rules of their own (`shapes.BLOCKS`).

Tests: tests/graphs/test_partition.py.
"""

from collections.abc import Iterable
import dataclasses
from typing import Any
from typing import TypeGuard

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import of_rows
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE


def applied(rule: Rule, case: Case, are_separate: bool) -> Outcome | None:
    """Applies a rule that knows rows, not blocks, to a case that may have both.

    Args:
        rule: The rule.
        case: The `Case`.
        are_separate: Whether the op treats rows separately, or reduces them in any order.
    """
    states: list[State | None] = [*case.states, case.wish, case.stored]
    number = max((state.blocks for state in states if isinstance(state, Rows)), default=1)
    if number == 1:
        return rule(case)
    # Of another number of blocks, a rank has other rows: such a tensor must be made whole in between.
    shown = number if are_separate else 0
    outcome = rule(case.with_states([_shown(state, shown) for state in case.states],
                                    case.wish and _shown(case.wish, shown), case.stored and _shown(case.stored, shown)))
    if outcome is None or not are_separate:
        return outcome
    tensors = [*zip(outcome.takes, case.inputs), *zip(outcome.gives, case.outputs)]
    if any(isinstance(state, Rows) and not _consists(case.shape_of(tensor), state, number)
           for state, tensor in tensors):
        return None
    return dataclasses.replace(
        outcome, takes=tuple(_in_blocks(state, number) for state in outcome.takes),
        gives=tuple(_in_blocks(state, number) for state in outcome.gives),
        wishes={i: _in_blocks(state, number) for i, state in outcome.wishes.items()})


def _shown(state: State, number: int) -> State:
    """Returns the state that a rule sees: of so many blocks, rows; of others, whole."""
    if not isinstance(state, Rows):
        return state
    return Rows(state.dimension) if state.blocks == number else WHOLE


def _in_blocks(state: Any, number: int) -> Any:
    return Rows(state.dimension, number) if isinstance(state, Rows) else state


def _consists(shape: row_size.Shape | None, state: Rows, number: int) -> bool:
    """Whether a tensor can consist of so many blocks; a list without dimensions has the state of its elements."""
    if shape is None or not shape:
        return shape is not None
    return state.dimension < len(shape) and row_size.consists_of(shape[state.dimension], number)


def has_blocks(state: State | None) -> TypeGuard[Rows]:
    """Whether a state is that of several blocks of rows."""
    return isinstance(state, Rows) and state.blocks > 1


def size_of_block(case: Case, i: int) -> row_size.Size | None:
    """Returns the size of each block of an input with rows and a known rank; None if unknown."""
    state = case.states[i]
    assert isinstance(state, Rows)
    size = case.sizes(i)[state.dimension]
    block = None if size is None else size.divided(state.blocks)
    return block if of_rows(block) else None


def number_in(size: row_size.Size | None, case: Case, i: int) -> int | None:
    """Returns how many blocks of an input a size, or a position, is; None if it is no number of whole blocks."""
    block = size_of_block(case, i)
    return None if size is None or block is None else size.ratio(block)


def all_known(numbers: Iterable[int | None]) -> list[int] | None:
    """Returns numbers of blocks if each is known, and not 0; else None."""
    all_numbers = list(numbers)
    known_numbers = [number for number in all_numbers if number]
    return known_numbers if len(known_numbers) == len(all_numbers) else None


def number_taken(case: Case, begin: row_size.Size | None, size: row_size.Size | None) -> int | None:
    """Returns how many blocks of input 0 a range of its rows is; None if it is not one of whole blocks, or all."""
    state = case.states[0]
    assert isinstance(state, Rows)
    first, number = number_in(begin, case, 0), number_in(size, case, 0)
    if first is None or not number or first + number > state.blocks or number == state.blocks:
        return None
    return number
