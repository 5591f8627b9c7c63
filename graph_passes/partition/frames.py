"""Which loop each node of a flat graph is in.

Requires: loops of Enter, Exit and NextIteration. A tensor from outside of a loop comes in through an Enter only.
"""

from collections.abc import Iterable
import dataclasses

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import graph as graph_lib

ENTERS = ("Enter", "RefEnter")
EXITS = ("Exit", "RefExit")


@dataclasses.dataclass(frozen=True)
class Frame:
    """A loop.

    Attributes:
        name: Its name; "" of what is in none.
        outer: The `Frame` around it, None of what is in none.
    """

    name: str = ""
    outer: "Frame | None" = None

    def within(self, other: "Frame") -> bool:
        """Whether this is a frame, or in it."""
        frame: Frame | None = self
        while frame is not None:
            if frame == other:
                return True
            frame = frame.outer
        return False


ROOT = Frame()


def find_frames(ordered: Iterable[node_def_pb2.NodeDef]) -> dict[str, Frame]:
    """Returns the `Frame` of the outputs of each node, by name; nodes are given each after its inputs."""
    frames: dict[str, Frame] = {}
    for node in ordered:
        inputs = [frames[name] for name in map(graph_lib.node_of, node.input) if name in frames]
        frame = max(inputs, key=_depth, default=ROOT)
        if node.op in ENTERS:
            frame = Frame(node.attr["frame_name"].s.decode(), frame)
        elif node.op in EXITS:
            frame = frame.outer or ROOT
        frames[node.name] = frame
    return frames


def _depth(frame: Frame) -> int:
    depth = 0
    while frame.outer is not None:
        frame, depth = frame.outer, depth + 1
    return depth
