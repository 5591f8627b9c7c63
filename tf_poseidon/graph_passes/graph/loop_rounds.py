"""How often the nodes of loops run, by the conditions of these loops, as far as the graph says it.

TensorFlow lowers a loop to Enter, Merge, LoopCond, Switch, NextIteration and Exit (its white paper, M. Abadi et al.,
2016, section 3.4). Keras' recurrent layers, `tf.map_fn` and other loops with `maximum_iterations` count rounds from 0
to a constant; their gradients count to what the loop has counted.

Tests: tests/graphs/test_priorities.py.
"""

import collections
import graphlib

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

_ENTERS, _EXITS, _MERGES = ("Enter", "RefEnter"), ("Exit", "RefExit"), ("Merge", "RefMerge")
_BACK = ("NextIteration", "RefNextIteration")
_SAME = ("Identity", "Switch", "RefIdentity", "RefSwitch")
_PASSES_ON = (*_ENTERS, *_MERGES, *_SAME)
_MOST_ROUNDS = 1_000_000  # a limit beyond says nothing, also by loops in loops


class LoopRounds:
    """The loops of a graph, and how many rounds they have at most.

    Attributes:
        loop_of: By the name of each node in a loop, the innermost one, as its Enters name it.
        entries: By loop, the names of its Enters.
    """

    def __init__(self, graph: graph_lib.Graph) -> None:
        self._graph = graph
        self.loop_of: dict[str, str] = {}
        self.entries: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
        self._outer: dict[str, str | None] = {}
        self._conditions: dict[str, str] = {}
        self._known_rounds: dict[str, int] = {}
        for node in graph.ordered:
            loops = [self.loop_of[name] for name in map(graph_lib.node_of, node.input) if name in self.loop_of]
            loop = loops[0] if loops else None
            if node.op in _ENTERS:
                name = node.attr["frame_name"].s.decode()
                self._outer[name], loop = loop, name
                self.entries[name].append(node.name)
            elif node.op in _EXITS:
                loop = self._outer[loop] if loop is not None else None
            elif node.op == "LoopCond" and loop is not None:
                self._conditions[loop] = graph.inputs(node)[0]
            if loop is not None:
                self.loop_of[node.name] = loop

    def of(self, name: str) -> int:
        """Returns how often a node runs in a step, at most: 1 outside of loops, and 0 if that is unknown."""
        return self._of_loop(self.loop_of.get(name))

    def loops_of(self, name: str) -> list[str]:
        """Returns the loops that a node is in, the innermost first."""
        loops, loop = [], self.loop_of.get(name)
        while loop is not None and loop not in loops:  # a damaged graph may enter a loop from itself
            loops.append(loop)
            loop = self._outer[loop]
        return loops

    def left_by(self, node: node_def_pb2.NodeDef) -> str | None:
        """Returns the loop that an Exit ends; None for other nodes."""
        return self.loop_of.get(graph_lib.node_of(node.input[0])) if node.op in _EXITS else None

    def in_order(self) -> list[node_def_pb2.NodeDef]:
        """Returns the nodes in topological order, so that what leaves a loop comes after all that enters it."""
        if not self.entries:
            return self._graph.ordered
        sources: dict[str, set[str]] = {}
        for node in self._graph.ordered:
            sources[node.name] = set(map(graph_lib.node_of, node.input))
            if node.op in _MERGES:  # does not wait for the back edge of a loop
                sources[node.name] -= {name for name in sources[node.name]
                                       if self._graph.node(name).op in _BACK}
            if (ended := self.left_by(node)) is not None:
                sources[node.name].update(self.entries[ended])
        return [self._graph.node(name) for name in graphlib.TopologicalSorter(sources).static_order()]

    def shape(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape of a tensor, also of one that a loop's gradient takes from the list the loop has filled."""
        shape, node = self._graph.shape(tensor), self._graph.node(tensor)
        if graph_lib.is_known(shape) or node.op != "TensorListPopBack" or graph_lib.output_of(tensor) != 1:
            return shape
        pushed = self._pushed(self._graph.inputs(node)[0])
        return shape if pushed is None else self._graph.shape(pushed)

    def _of_loop(self, loop: str | None) -> int:
        if loop is None:
            return 1
        if loop not in self._known_rounds:
            self._known_rounds[loop] = 0  # should its condition depend on itself
            condition = self._conditions.get(loop)
            rounds = 0 if condition is None else (self._most(condition) or 0) * self._of_loop(self._outer[loop])
            self._known_rounds[loop] = rounds if 0 < rounds <= _MOST_ROUNDS else 0
        return self._known_rounds[loop]

    def _most(self, condition: str) -> int | None:
        """Returns how often a condition holds at most; None if that is unknown."""
        node = self._source(condition, ("Identity",))
        inputs = self._graph.inputs(node)
        if node.op == "LogicalAnd":
            return min((most for most in map(self._most, inputs) if most is not None), default=None)
        return self._value(inputs[1]) if node.op == "Less" and self._counts(inputs[0]) else None

    def _counts(self, tensor: str) -> bool:
        """Returns whether a tensor of a loop counts its rounds from 0."""
        merge = self._source(tensor, _SAME)
        if merge.op not in _MERGES:
            return False
        backs, begins = self._ends(merge)
        if len(backs) != 1 or len(begins) != 1 or self._constant(begins[0]) != 0:
            return False
        added = self._source(self._graph.inputs(self._graph.node(backs[0]))[0], ("Identity",))
        summands = self._graph.inputs(added)
        return added.op in ("Add", "AddV2") and any(
            self._constant(one) == 1 and self._source(other, _SAME) is merge
            for one, other in (summands, reversed(summands)))

    def _ends(self, merge: node_def_pb2.NodeDef) -> tuple[list[str], list[str]]:
        """Returns by which tensors a Merge comes back into a loop, and by which it begins."""
        backs: list[str] = []
        begins: list[str] = []
        for name in self._graph.inputs(merge):
            (backs if self._graph.node(name).op in _BACK else begins).append(name)
        return backs, begins

    def _value(self, tensor: str) -> int | None:
        """Returns the value of a number that does not change within a loop; None if it is unknown."""
        node = self._source(tensor, (*_ENTERS, *_SAME))
        while node.op in _MERGES:  # ends: each time, it goes on outside of a loop
            backs, begins = self._ends(node)
            if len(backs) != 1 or len(begins) != 1 or self._source(backs[0], (*_BACK, *_SAME)) is not node:
                return None
            node = self._source(begins[0], (*_ENTERS, *_SAME))
        if node.op not in _EXITS:
            return self._constant(node.name)
        loop = self.left_by(node)
        if loop is None or self._outer[loop] is not None or not self._counts(self._graph.inputs(node)[0]):
            return None
        return self._of_loop(loop) or None

    def _constant(self, tensor: str) -> int | None:
        node = self._source(tensor, (*_ENTERS, *_SAME))
        value = self._graph.constant(node.name)
        return int(value) if value is not None and value.ndim == 0 and value.dtype.kind in "iu" else None

    def _pushed(self, handle: str) -> str | None:
        """Returns a tensor that a loop before this one appends to a list in each round; None if there is none."""
        ended = self._source(handle, _PASSES_ON)
        if ended.op not in _EXITS:
            return None
        merge = self._source(self._graph.inputs(ended)[0], _SAME)
        for name in self._graph.inputs(merge):
            node = self._graph.node(name)
            if node.op in _BACK:
                appended = self._source(self._graph.inputs(node)[0], ("Identity",))
                if appended.op == "TensorListPushBack":
                    return self._graph.inputs(appended)[1]
        return None

    def _source(self, tensor: str, ops: tuple[str, ...]) -> node_def_pb2.NodeDef:
        """Returns the node from which a tensor comes through nodes of some ops; into a loop, that is from before it."""
        node = self._graph.node(tensor)
        while node.op in ops:  # ends: without NextIteration, there are no cycles
            names = [name for name in self._graph.inputs(node) if self._graph.node(name).op not in _BACK]
            if not names:  # a Merge that nothing enters
                break
            node = self._graph.node(names[0])
        return node
