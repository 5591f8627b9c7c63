"""Finds the loop of each node of a flat graph.

Requires: loops of Enter, Exit and NextIteration. A tensor enters a loop only through an Enter.

Tests: tests/graphs/test_partition_stores.py, tests/graphs/test_partition_dividing.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

ENTERS = ("Enter", "RefEnter")
EXITS = ("Exit", "RefExit")
# The ops of branches and loops.
CONTROL_FLOW = ("Switch", "Merge", "Enter", "Exit", "NextIteration", "LoopCond")


@dataclasses.dataclass(frozen=True)
class Frame:
    """A loop.

    Attributes:
        name: Its name; "" outside loops.
        outer: The `Frame` around it; None outside loops.
    """

    name: str = ""
    outer: "Frame | None" = None

    @property
    def depth(self) -> int:
        """The number of loops that it is in, itself included."""
        return 0 if self.outer is None else 1 + self.outer.depth

    def within(self, other: "Frame") -> bool:
        """Whether this is the other frame, or inside it."""
        frame: Frame | None = self
        while frame is not None:
            if frame == other:
                return True
            frame = frame.outer
        return False


ROOT = Frame()


def find_frames(ordered: Iterable[node_def_pb2.NodeDef]) -> dict[str, Frame]:
    """Returns the `Frame` of each node's outputs, by name; `ordered` has the nodes in topological order."""
    frames: dict[str, Frame] = {}
    for node in ordered:
        inputs = [frames[name] for name in map(graph_lib.node_of, node.input) if name in frames]
        frame = max(inputs, key=lambda frame: frame.depth, default=ROOT)
        if node.op in ENTERS:
            frame = Frame(node.attr["frame_name"].s.decode(), frame)
        elif node.op in EXITS:
            frame = frame.outer or ROOT
        frames[node.name] = frame
    return frames


def needed(nodes: Mapping[str, node_def_pb2.NodeDef], names: Iterable[str], frames: Mapping[str, Frame]) -> set[str]:
    """Returns the names of the nodes that some nodes need; loops stay complete.

    Args:
        nodes: The nodes of the graph, by name.
        names: Names of nodes.
        frames: The `Frame`s of `find_frames`.
    """
    by_loop: dict[str, list[str]] = {}
    for name, frame in frames.items():
        if frame != ROOT:
            by_loop.setdefault(frame.name, []).append(name)
    queue, needed_names = list(names), set()
    while queue:
        name = queue.pop()
        if name in needed_names:
            continue
        needed_names.add(name)
        queue += map(graph_lib.node_of, nodes[name].input)
        if frames.get(name, ROOT) != ROOT:
            queue += by_loop.pop(frames[name].name, ())
    return needed_names


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a node runs, and which rows it depends on.

    Attributes:
        frame: The `Frame` of the node.
        rows_node: Name of the PoseidonRows on which it depends, see `propagate/row_inputs.py`.
    """

    frame: Frame
    rows_node: str | None


def inside(graph_def: graph_pb2.GraphDef) -> set[str]:
    """Returns the names of the nodes that may not run, or run several times."""
    nodes = graph_lib.in_order(graph_def)
    frames = find_frames(nodes)
    branches: dict[str, int] = {}  # by node: in how many branches it is, loops apart
    at_entry: dict[str, int] = {}  # by loop: in how many branches it is
    for node in nodes:
        depth = max((branches.get(name, 0) for name in map(graph_lib.node_of, node.input)), default=0)
        if node.op in ENTERS:
            frame = node.attr["frame_name"].s.decode()
            at_entry[frame] = max(depth, at_entry.get(frame, 0))
        elif node.op in EXITS:
            depth = at_entry[frames[graph_lib.node_of(node.input[0])].name]
        elif frames[node.name] == ROOT:
            depth += (node.op in ("Switch", "RefSwitch", "_SwitchN")) - (node.op in ("Merge", "RefMerge"))
        branches[node.name] = max(depth, 0)
    return {node.name for node in nodes if branches[node.name] or frames[node.name] != ROOT}
