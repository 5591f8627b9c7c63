"""The rules of ops on columns: a layer that is divided by its outputs, up to where these are reduced.

Whole rows go in, and each rank computes its columns of them. What becomes of columns is as with rows, in another
dimension, so most ops have the rules that they have for rows (`like_rows.py`). Where a dimension is reduced that is
divided, ranks exchange what each has found in its columns. An op without a rule gets whole columns.

Tests: tests/graphs/test_partition_columns.py.
"""

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.rules.columns import column_shapes
from tf_poseidon.graph_passes.partition.rules.columns import extremes
from tf_poseidon.graph_passes.partition.rules.columns import like_rows
from tf_poseidon.graph_passes.partition.rules.columns import lookups
from tf_poseidon.graph_passes.partition.rules.columns import makers
from tf_poseidon.graph_passes.partition.rules.columns import normalisers
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

RULES: dict[str, Rule] = {
    **like_rows.RULES,
    **column_shapes.RULES,
    **extremes.RULES,
    **normalisers.RULES,
    **lookups.RULES,
}


def applied(case: Case) -> Outcome | None:
    """Applies the rule of an op of which some inputs are columns, or shards of them.

    Returns:
        The `Outcome`; None if the op has no rule, or none for this case.
    """
    if case.node.op == "IdentityN":
        return Outcome(case.states, case.states)
    if case.node.op not in RULES:
        return None
    return RULES[case.node.op](case.with_states([_as_columns(state) for state in case.states], None, None))


made = makers.made


def is_divided(state: State) -> bool:
    """Whether a tensor is in columns, or a shard of them."""
    return isinstance(state, Columns) or isinstance(state, Shard) and state.divided >= 0


def _as_columns(state: State) -> State:
    """Returns the state in which these rules see a tensor: all others are whole."""
    if isinstance(state, Shard) and state.divided >= 0:
        return Columns(state.divided)
    return state if isinstance(state, Columns) else WHOLE
