"""The loops that may be loops over rows: which nodes are in them, lead into them or leave them, and their directions.

Tests: tests/graphs/test_row_loops.py.
"""

from collections.abc import Mapping

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.frames import Frame
from tf_poseidon.graph_passes.partition.row_loops.loop_reader import CountedLoop
from tf_poseidon.graph_passes.partition.row_loops.loop_reader import LoopReader


class CandidateLoops:
    """Says how nodes lie to some loops; all other loops are as if they were none.

    Attributes:
        reader: The `LoopReader` of the graph.
        is_forward: By frame: whether the loop takes the rows in their order; None if it is no loop over rows.
    """

    def __init__(self, reader: LoopReader, loops: Mapping[Frame, CountedLoop]) -> None:
        self.reader, self._loops = reader, loops
        self.is_forward = {frame: self._goes_forward(loop, frozenset()) for frame, loop in loops.items()}

    def around(self, node: node_def_pb2.NodeDef) -> CountedLoop | None:
        """Returns the loop that a node is in, or in a loop inside that one."""
        frame = self.reader.frames[node.name]
        while frame.outer is not None and frame.outer != frames_lib.ROOT:
            frame = frame.outer
        return self._loops.get(frame)

    def left_by(self, node: node_def_pb2.NodeDef) -> CountedLoop | None:
        """Returns the loop that a node leaves."""
        return self._loops.get(self.reader.frames[graph_lib.node_of(node.input[0])]) if node.op == "Exit" else None

    def entered_by(self, node: node_def_pb2.NodeDef) -> CountedLoop | None:
        """Returns the loop into which a node leads."""
        return self._loops.get(self.reader.frames[node.name]) if node.op == "Enter" else None

    def that_read(self, name: str) -> list[CountedLoop]:
        """Returns the loops into which a list leads unchanged, or one like it."""
        loops, queue = [], [name]
        while queue:
            for node in self.reader.graph.consumers(queue.pop()):
                if node.op in ("Identity", "ZerosLike"):
                    queue.append(node.name)
                elif loop := self.entered_by(node):
                    loops.append(loop)
        return loops

    def _goes_forward(self, loop: CountedLoop, seen: frozenset[Frame]) -> bool | None:
        """Whether a loop takes the rows in their order; None if it is no loop over rows.

        One that takes from stacks takes rows in the opposite order of the loop that has filled these.
        """
        directions = set()
        for variable in loop.variables.values():
            if self.reader.graph.nodes[self.reader.origin(variable.comes_back)].op == "TensorListPopBack":
                filler = self._filler(variable.first)
                directions.add(None if filler is None or filler.frame in seen else
                               self._goes_forward(filler, seen | {loop.frame}))
        if None in directions or len(directions) > 1:
            return None
        return not directions.pop() if directions else True

    def _filler(self, stack: str) -> CountedLoop | None:
        """Returns the loop that has filled a stack, None if there is none; others may pass it on unchanged."""
        node = self.reader.graph.nodes[self.reader.origin(stack)]
        while loop := self.left_by(node):  # ends, since loops come one after the other
            variable = loop.variables.get(self.reader.origin(node.input[0]))
            if variable is None or variable.is_changed:
                return loop
            node = self.reader.graph.nodes[self.reader.origin(variable.first)]
        return None
