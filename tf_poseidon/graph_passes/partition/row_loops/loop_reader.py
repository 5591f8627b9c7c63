"""Reads the loops of a graph: what enters them and comes back, and what counts their iterations.

Requires: a flat graph. Ensures: a `CountedLoop` is outside of other loops, counts iterations from 0, and goes on while
the count is below a limit that no iteration changes.

Tests: tests/graphs/test_row_loops.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.frames import Frame

BACK = "NextIteration"


@dataclasses.dataclass(frozen=True)
class LoopVariable:
    """What an iteration of a loop gets from the one before it.

    Attributes:
        enter: Name of the Enter before the first iteration.
        first: The tensor that enters the loop.
        comes_back: The tensor that an iteration hands to the next one.
        is_changed: Whether that is another one than the iteration has got.
        increment: Name of the node that adds 1 to a count that begins at 0; "" for other variables.
    """

    enter: str
    first: str
    comes_back: str
    is_changed: bool
    increment: str


@dataclasses.dataclass(frozen=True)
class CountedLoop:
    """A loop, outside of others, that counts from 0 while the count is below limits.

    Attributes:
        frame: Its `Frame`.
        variables: Its `LoopVariable`s, by name of their Merge.
        limits: Names of the Merges, or constant Enters, of the limits.
        predicate: Names of the nodes that compare counts with limits.
    """

    frame: Frame
    variables: Mapping[str, LoopVariable]
    limits: frozenset[str]
    predicate: frozenset[str]

    @property
    def increments(self) -> set[str]:
        """Names of the nodes that add 1 to counts."""
        return {variable.increment for variable in self.variables.values() if variable.increment}


class LoopReader:
    """Reads the loops of a graph.

    Attributes:
        graph: The `Graph`.
        frames: The `Frame` of each node, by name.
        ordered: Its nodes in topological order; all nodes of a loop come before what leaves it.
    """

    def __init__(self, graph: graph_lib.Graph) -> None:
        self.graph = graph
        ordered = graph.ordered
        self.frames = frames_lib.find_frames(ordered)
        self.ordered = self._loop_by_loop(ordered)

    def _loop_by_loop(self, ordered: Iterable[node_def_pb2.NodeDef]) -> list[node_def_pb2.NodeDef]:
        backs: dict[Frame, list[str]] = {}
        for node in ordered:
            if node.op == BACK:
                backs.setdefault(self.frames[node.name], []).append(f"^{node.name}")
        waiting = graph_pb2.GraphDef()
        for node in ordered:
            waits_for = backs.get(self.frames[graph_lib.node_of(node.input[0])], ()) if node.op == "Exit" else ()
            waiting.node.add(name=node.name, op=node.op, input=[*node.input, *waits_for])
        return [self.graph.nodes[node.name] for node in graph_lib.in_order(waiting)]

    def inputs(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the names of the tensors that a node reads, without ":0"."""
        return list(map(tensors.canonical, self.graph.inputs(node)))

    def origin(self, tensor: str) -> str:
        """Returns the name of the node from which a tensor comes unchanged, whichever output of it that is."""
        node = self.graph.node(tensor)
        while node.op in ("Identity", "Switch"):
            node = self.graph.node(node.input[0])
        return node.name

    def merge_after(self, name: str) -> str | None:
        """Returns the name of the Merge that an Enter or NextIteration feeds, None for a constant Enter."""
        merges = [reader.name for reader in self.graph.consumers(name) if reader.op == "Merge"]
        return merges[0] if len(merges) == 1 else None

    def loops(self) -> dict[Frame, CountedLoop]:
        """Returns the loops that count iterations, and are outside of other loops, by frame."""
        nodes: dict[Frame, list[node_def_pb2.NodeDef]] = {}
        for node in self.ordered:
            nodes.setdefault(self.frames[node.name], []).append(node)
        loops_of_frames = {frame: self._read(frame, nodes[frame]) for frame in nodes if frame.outer == frames_lib.ROOT}
        return {frame: loop for frame, loop in loops_of_frames.items() if loop is not None}

    def _read(self, frame: Frame, nodes: Iterable[node_def_pb2.NodeDef]) -> CountedLoop | None:
        variables = {node.name: variable for node in nodes if node.op == "Merge" and (variable := self._variable(node))}
        conditions = [node for node in nodes if node.op == "LoopCond"]
        if len(conditions) != 1:
            return None
        limits, predicate, queue = set(), set(), [conditions[0].input[0]]
        while queue:
            node = self.graph.node(queue.pop())
            inputs = self.graph.inputs(node)
            if node.op == "Less" and self._is_count(inputs[0], variables) and self._is_limit(inputs[1], variables):
                limits.add(self.origin(inputs[1]))
            elif node.op in ("Identity", "LogicalAnd"):
                queue += inputs
            else:
                return None
            if node.op != "Identity":
                predicate.add(node.name)
        return CountedLoop(frame, variables, frozenset(limits), frozenset(predicate))

    def _variable(self, merge: node_def_pb2.NodeDef) -> LoopVariable | None:
        """Returns the variable of a Merge, None if it is none of a loop."""
        by_op = {self.graph.node(tensor).op: self.graph.node(tensor) for tensor in self.graph.inputs(merge)}
        if by_op.keys() != {"Enter", BACK}:
            return None
        first, comes_back = self.inputs(by_op["Enter"])[0], self.inputs(by_op[BACK])[0]
        return LoopVariable(by_op["Enter"].name, first, comes_back, self.origin(comes_back) != merge.name,
                            self._increment(merge.name, first, comes_back))

    def _increment(self, merge: str, first: str, comes_back: str) -> str:
        """Returns the name of the node that adds 1 to a count that begins at 0; "" for other variables."""
        begin, added = self.graph.constant(self.origin(first)), self.graph.nodes[self.origin(comes_back)]
        if begin is None or begin.shape or begin.dtype.kind != "i" or begin or added.op not in ("AddV2", "Add"):
            return ""
        count, increment = self.graph.inputs(added)
        step = self.graph.constant(increment)
        is_one = step is not None and not step.shape and step == 1
        return added.name if self.origin(count) == merge and is_one else ""

    def _is_count(self, tensor: str, variables: Mapping[str, LoopVariable]) -> bool:
        """Whether a tensor is the number of the iteration."""
        origin = self.origin(tensor)
        return origin in variables and bool(variables[origin].increment)

    def _is_limit(self, tensor: str, variables: Mapping[str, LoopVariable]) -> bool:
        """Whether a tensor is the same in each iteration."""
        origin = self.origin(tensor)
        return self.graph.nodes[origin].op == "Enter" or origin in variables and not variables[origin].is_changed
