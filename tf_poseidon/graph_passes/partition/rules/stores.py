"""Stacks and TensorArrays, in which loops of TensorFlow 1 keep what they read and write.

Each has the state of its elements (`Case.stored`), which `propagate` finds from everything that is put into it. It is
whole if no rule gives or takes that state.

Tests: tests/graphs/test_partition_families.py, tests/graphs/test_partition_stores.py.
"""

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.containers import resource_stores as stores_lib
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE


def _shifted(state: State, by: int) -> State:
    return Rows(state.dimension + by) if isinstance(state, Rows) else state


def put(tensor: int, shift: int = 0, passes_on: bool = False) -> Rule:
    """Returns the rule of an op that puts input `tensor` in.

    Args:
        tensor: Number of the input.
        shift: The number of dimensions before those of an element.
        passes_on: Whether the op returns that tensor; otherwise it returns a number that orders ops.
    """

    def rule(case: Case) -> Outcome | None:
        state = case.states[tensor] if case.stored is None else _shifted(case.stored, shift)
        is_taken_apart = shift and state == Rows(0)
        if state == WHOLE or is_taken_apart or case.attr("T").type in stores_lib.NO_NUMBERS:
            return None
        return case.all({tensor: state}, state if passes_on else WHOLE)

    return rule


def taken(shift: int = 0) -> Rule:
    """Returns the rule of an op that takes elements; if it stacks them, `shift` dimensions come before theirs."""

    def rule(case: Case) -> Outcome | None:
        state, shape = case.stored, stores_lib.element_shape(case.node)
        if state in (None, WHOLE) or stores_lib.dtype_of_elements(case.node) in stores_lib.NO_NUMBERS:
            return None
        if isinstance(state, Rows) and shape is not None and not (
                state.dimension < len(shape) and shape[state.dimension] is None):
            return None
        return case.all({}, _shifted(state, shift))

    return rule


RULES: dict[str, Rule] = {
    "StackPushV2": put(1, passes_on=True),
    "StackPopV2": taken(),
    "TensorArrayWriteV3": put(2),
    "TensorArrayScatterV3": put(2, shift=1),
    "TensorArrayReadV3": taken(),
    "TensorArrayGatherV3": taken(shift=1),
}
# The state of a stack or array also applies to whole inputs.
ALWAYS = frozenset(RULES)
