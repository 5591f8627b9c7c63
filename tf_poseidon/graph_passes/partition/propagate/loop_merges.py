"""Merges, and the ops that hand a variable of a loop to one: they have the same state, in all rounds of the loop.

What comes back to a Merge is computed behind it. So as long as the state of the variable is unknown, it is that of what
enters, as if nothing came back. Between a Merge and an Enter or NextIteration that feeds it nothing can be converted,
so these return the state of the variable if their input can be converted to it.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py, tests/graphs/test_partition_fuzz.py.
"""

from collections.abc import Callable
from collections.abc import Iterable

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.propagate.convertible_states import ConvertibleStates
from tf_poseidon.graph_passes.partition.propagate.facts import AgreedStates
from tf_poseidon.graph_passes.partition.propagate.prepared_graph import PreparedGraph
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

MERGES = ("Merge", "RefMerge")
_BACK = ("NextIteration", "RefNextIteration")
HANDS_OVER = (*_BACK, *frames_lib.ENTERS)

# A function that returns the state in which readers see a tensor.
Seen = Callable[[str], State]


class LoopMerges:
    """Finds how Merges run, and what feeds them, given the states of loops' variables (`Facts.loops`)."""

    def __init__(self, prepared: PreparedGraph, convertible: ConvertibleStates, loops: AgreedStates[str]) -> None:
        self._prepared, self._convertible, self._loops = prepared, convertible, loops

    def fed_by(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the names of the Merges that an Enter or NextIteration feeds."""
        if node.op not in HANDS_OVER:
            return []
        return [reader.name for reader in self._prepared.graph.consumers(node.name) if reader.op in MERGES]

    def merged(self, node: node_def_pb2.NodeDef, seen: Seen) -> Outcome:
        """Returns how a Merge runs."""
        inputs = self._prepared.inputs[node.name]
        state = self._loops.get(node.name) or self._common(
            (tensor for tensor in inputs if self._prepared.op(tensor) not in _BACK), seen) or WHOLE
        return Outcome((state,) * len(inputs), (state, WHOLE))

    def handed_over(self, node: node_def_pb2.NodeDef, seen: Seen) -> Outcome:
        """Returns how an Enter or NextIteration runs that feeds a Merge."""
        tensor, = self._prepared.inputs[node.name]
        states = {self._loops.get(merge) for merge in self.fed_by(node)}
        state = states.pop() if len(states) == 1 else WHOLE
        if state is None or not self._convertible.can_become(tensor, seen(tensor), state):
            state = seen(tensor)
        return Outcome((state,), (state,))

    def note(self, node: node_def_pb2.NodeDef, seen: Seen) -> None:
        """Notes the state of a loop's variable, given the tensors that a Merge has got in all rounds."""
        inputs = self._prepared.inputs[node.name]
        if any(self._prepared.op(tensor) in HANDS_OVER for tensor in inputs):
            self._loops.see(node.name, self._common(inputs, seen))

    def may_change(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a node is a Merge, or feeds one, that may still get another state."""
        return any(self._loops.get(merge) != WHOLE for merge in (
            [node.name] if node.op in MERGES else self.fed_by(node)))

    def _common(self, inputs: Iterable[str], seen: Seen) -> State | None:
        """Returns the state that all inputs of a Merge can have; None if all are whole."""
        handed = [self._before(tensor) for tensor in inputs]
        others = {seen(tensor) for tensor in handed} - {WHOLE}
        if len(others) != 1:
            return WHOLE if others else None
        state, = others
        return state if all(self._convertible.can_become(tensor, seen(tensor), state) for tensor in handed) else WHOLE

    def _before(self, tensor: str) -> str:
        """Returns the input of an Enter or NextIteration that feeds a Merge; for other ops, the tensor itself."""
        node = self._prepared.graph.node(tensor)
        return self._prepared.inputs[node.name][0] if node.op in HANDS_OVER else tensor
