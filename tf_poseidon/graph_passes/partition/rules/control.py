"""Control flow of a flat graph: Switch, Enter, Exit.

Predicates are whole, so all ranks take the same branches, and the same number of rounds of a loop. `propagate`, which
knows the states of all rounds, handles Merge and the ops that feed it.

Tests: tests/graphs/test_partition.py.
"""

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.states import WHOLE


def switch(case: Case) -> Outcome:
    """Switch passes its data unchanged to one of two outputs."""
    return Outcome((case.states[0], WHOLE), (case.states[0],) * 2)


def passed_on(case: Case) -> Outcome:
    return Outcome(case.states, case.states)


def asserted(case: Case) -> Outcome:
    """Assert(condition, data): the condition is that of one process; a message shows what the rank has of the data."""
    return Outcome((WHOLE, *(None for _ in case.inputs[1:])), ())


RULES: dict[str, Rule] = {
    "Switch": switch,
    **dict.fromkeys(("Enter", "Exit"), passed_on),
    "Assert": asserted,
}
