"""Values that each rank computes from its own rows alone, between the ops PoseidonOwn and PoseidonJoin.

For example, the moments of a batch normalisation that is not synchronised, forwards and backwards. All nodes in between
run unchanged, on the rank's values; inputs without a PoseidonOwn are the same on all ranks. So gradients of variables
leave as summands, through the PoseidonJoin that is the gradient of their PoseidonOwn.

Tests: tests/graphs/test_partition_own.py.
"""

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.frames import CONTROL_FLOW
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

BEGINS, ENDS = "PoseidonOwn", "PoseidonJoin"


def outcome(node: node_def_pb2.NodeDef, states: tuple[State, ...], num_outputs: int) -> Outcome | None:
    """Returns the `Outcome` of a node with own inputs; None if it cannot run on them."""
    op = tf_compat.op_def(node.op)
    is_local = op is not None and not op.is_stateful and node.op not in (*CONTROL_FLOW, BEGINS, ENDS)
    if not is_local or any(state not in (OWN, WHOLE) for state in states):
        return None
    return Outcome(states, (OWN,) * num_outputs)


def refusal(tensor: str) -> PoseidonError:
    """Returns the `PoseidonError` for an own tensor that is needed whole."""
    return PoseidonError(f"'{tensor}' is computed from each rank's own rows, expected to leave by a {ENDS} before "
                         "anything else needs it whole; use tf_poseidon.ops.join.")
