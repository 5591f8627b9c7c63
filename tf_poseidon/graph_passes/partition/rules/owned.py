"""Ops on what one rank owns, the owner of a layout: any op without a state of its own, which it runs alone.

The graph is the same on all ranks. What enters this part of it passes a Switch, so on other ranks its ops are dead, as
those of a branch that is not taken: they do not run. What leaves it passes a Merge, which gives an empty vector there.
Variables, and the branches and loops of the program, are outside: they get what has left, on all ranks.

Tests: tests/graphs/test_partition_shards.py.
"""

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import SHARDED
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE


def applied(case: Case) -> Outcome | None:
    """Applies the rule of an op of which some inputs are owned."""
    layouts = {state.layout for state in case.states if isinstance(state, (Owned, Shard))}
    if len(layouts) > 1:
        return None
    owned = Owned(layouts.pop())
    if case.node.op in ("Switch", "Enter", "Exit"):
        return case.all({0: owned.shard}, owned.shard) if isinstance(case.states[0], (Owned, Shard)) else None
    if not can_run_alone(case):
        return None
    takes = (owned if isinstance(state, (Owned, Shard)) or state == SUM else WHOLE for state in case.states)
    return Outcome(tuple(takes), (owned,) * case.num_outputs)


def can_run_alone(case: Case) -> bool:
    """Whether one rank can run an op that the others do not, which nothing but its outputs says."""
    op = tf_compat.op_def(case.node.op)
    types = tensors.types_of_outputs(case.node)
    return (op is not None and not op.is_stateful and case.node.op not in frames_lib.CONTROL_FLOW
            and not case.is_waited_for and SHARDED.issuperset(types)
            and all(row_size.is_constant(case.shape_of(output)) for output in case.outputs))


def live(state: State) -> State:
    """Returns the state in which all ranks have a tensor: of one that is owned, the shard."""
    return state.shard if isinstance(state, Owned) else state
