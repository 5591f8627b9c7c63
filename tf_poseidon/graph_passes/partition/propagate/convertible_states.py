"""To which states a tensor can be converted between the op that computes it and one that reads it.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py.
"""

from collections.abc import Sequence

from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.propagate.facts import AgreedStates
from tf_poseidon.graph_passes.partition.propagate.prepared_graph import PreparedGraph
from tf_poseidon.graph_passes.partition.rules.shards import live
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import GATHERED
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import IDEMPOTENT
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import SHARDED
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE


class ConvertibleStates:
    """Says which conversions are possible in a `PreparedGraph`, given the states of its lists (`Facts.lists`)."""

    def __init__(self, prepared: PreparedGraph, lists: AgreedStates[str]) -> None:
        self._prepared, self._lists = prepared, lists

    def can_become(self, tensor: str, state: State, target: State) -> bool:
        """Whether a tensor in a state can be converted to another one."""
        if state == target:
            return True
        if self._prepared.is_list(tensor):  # a list cannot be converted, only made in another state
            return target == WHOLE or state == WHOLE and all(
                self._lists.get(origin) in (None, target) for origin in self._prepared.lists.origins(tensor))
        if target == WHOLE:
            return True
        if OWN in (state, target):
            return False
        if isinstance(target, Owned) and not (self._prepared.dtype_of(tensor) in SHARDED and row_size.is_constant(
                self._prepared.sizes.shape(tensor))):
            return False
        if isinstance(target, (Shard, Owned)):
            return live(state) == live(target) or not isinstance(state, (Shard, Owned))
        if target == HELD:
            return state in (WHOLE, SUM) or isinstance(state, Columns)
        if isinstance(target, Partial):
            return state == WHOLE and (target == SUM or target.reduce in IDEMPOTENT)
        shape = self._prepared.sizes.shape(tensor)
        if isinstance(target, Columns):
            size = shape[target.dimension] if shape is not None and target.dimension < len(shape) else None
            return size is not None and size.constant is not None
        assert isinstance(target, Rows)
        return shape is not None and target.dimension < len(shape) and row_size.consists_of(
            shape[target.dimension], target.blocks)

    def can_be_taken(self, inputs: Sequence[str], states: Sequence[State], outcome: Outcome) -> bool:
        """Whether each input can be converted to the state in which a node takes it."""
        return all(takes is None or self.can_become(tensor, state, takes)
                   for tensor, state, takes in zip(inputs, states, outcome.takes))

    def can_be_gathered(self, tensor: str, state: Rows | Columns) -> bool:
        """Whether rows or columns can be made whole; rows of inputs that all ranks have whole are not gathered."""
        node = self._prepared.graph.node(tensor)
        if node.op == poseidon_rows.ROWS and poseidon_rows.given_part(node) is None:
            return True
        # Gathering along another dimension than the first needs the rank.
        return self._prepared.dtype_of(tensor) in GATHERED and (
            state == Rows(0) or self._prepared.sizes.shape(tensor) is not None)
