"""What a training graph says about its step, in its PoseidonAgree node."""

import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

OP = "PoseidonAgree"


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What the graph says about its step; the defaults are those of a graph that says nothing.

    Attributes:
        sites: Names of the sites in the order of the trace, as lines of text.
        rows: One rank's rows of a full batch, None if unknown.
        static_rows: The number of rows in this rank's static shapes, None if it varies.
        strict: Whether to fail if ranks have different graphs.
    """

    sites: tuple[str, ...] = ()
    rows: int | None = None
    static_rows: int | None = None
    strict: bool = False

    def planned(self, k: int | None) -> int | None:
        """Returns K in a full batch of the rank with most rows, given K in the shapes of the graph.

        If a batch does not divide evenly and shapes are static, these differ between ranks, but all must plan alike.
        """
        if k is None or self.rows is None or self.static_rows is None or k % self.static_rows:
            return k
        return k // self.static_rows * self.rows

    def order(self) -> dict[str, int]:
        """Returns the position of each site in the order of the trace, by name."""
        return {line.rpartition("' ")[0].removeprefix("'"): i for i, line in enumerate(self.sites)}


def node_of(graph_def: graph_pb2.GraphDef) -> node_def_pb2.NodeDef | None:
    """Returns the PoseidonAgree of a graph, None if it has none."""
    return next((node for node in graph_def.node if node.op == OP), None)


def facts_of(graph_def: graph_pb2.GraphDef) -> StepFacts:
    """Returns what a graph says about its step."""
    node = node_of(graph_def)
    if node is None:
        return StepFacts()
    rows, static_rows = (node.attr[key].i if node.attr[key].i > 0 else None for key in ("rows", "static_rows"))
    return StepFacts(tuple(node.attr["sites"].s.decode().split("\n")), rows, static_rows, node.attr["strict"].b)
