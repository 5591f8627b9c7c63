"""What a training graph says about its steps, in its PoseidonAgree nodes.

A graph that was unrolled has one for all its steps. A program that runs several steps in one function has one for each.

Tests: tests/graphs/test_priorities.py, tests/training/test_rewritten.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import graph_steps as steps_lib

OP = "PoseidonAgree"


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What the graph says about its step; the defaults are those of a graph that says nothing.

    Attributes:
        sites: Names of the sites in the order of the trace, as lines of text.
        rows: One rank's rows of a full batch, None if unknown.
        static_rows: The number of rows in this rank's static shapes, None if it varies.
        strict: Whether to fail if ranks have different graphs.
        steps: The steps that it makes; the other facts are those of the first one.
        global_rows: The rows of a full global batch, None if unknown.
    """

    sites: tuple[str, ...] = ()
    rows: int | None = None
    static_rows: int | None = None
    strict: bool = False
    steps: steps_lib.GraphSteps = steps_lib.GraphSteps()
    global_rows: int | None = None

    def usual_rows(self, k: int | None) -> int | None:
        """Returns K in a full batch of the rank with most rows, given K in the shapes of the graph.

        If a batch does not divide evenly and shapes are static, these differ between ranks, but all must plan alike.
        """
        if k is None or self.rows is None or self.static_rows is None or k % self.static_rows:
            return k
        return k // self.static_rows * self.rows

    def order(self) -> Callable[[str], tuple[int, int]]:
        """Returns a function that returns the place of a site, given by name, in the order of the trace."""
        places = {_name(line): i for i, line in enumerate(self.sites)}
        return lambda site: (self.steps.step_of(site), places.get(self.steps.in_first(site), len(places)))


def nodes_of(graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """Returns the PoseidonAgree nodes of a graph, that of the first step first."""
    return sorted((node for node in graph_def.node if node.op == OP), key=lambda node: _marks(_sites(node)))


def node_of(graph_def: graph_pb2.GraphDef) -> node_def_pb2.NodeDef | None:
    """Returns the PoseidonAgree of a graph's first step, None if it has none."""
    return next(iter(nodes_of(graph_def)), None)


def facts_of(graph_def: graph_pb2.GraphDef) -> StepFacts:
    """Returns what a graph says about its steps."""
    nodes = nodes_of(graph_def)
    if not nodes:
        return StepFacts()
    first = nodes[0]
    rows, static_rows, global_rows = (first.attr[key].i if key in first.attr and first.attr[key].i > 0 else None
                                      for key in ("rows", "static_rows", "global_rows"))
    return StepFacts(_sites(first), rows, static_rows, first.attr["strict"].b, _steps(nodes), global_rows)


def _steps(nodes: Sequence[node_def_pb2.NodeDef]) -> steps_lib.GraphSteps:
    """Returns the steps of a graph, one if its steps differ."""
    first = nodes[0]
    if len(nodes) == 1:
        return steps_lib.GraphSteps(first.attr["steps"].i if "steps" in first.attr else 1)
    steps = steps_lib.GraphSteps(len(nodes), _NEXT)
    for number, node in enumerate(nodes):
        if _sites(node) != tuple(_renamed(line, steps, number) for line in _sites(first)):
            return steps_lib.GraphSteps()
    return steps


_NEXT = "#"  # what a site's name has before the number of its further uses in a function


def _sites(node: node_def_pb2.NodeDef) -> tuple[str, ...]:
    return tuple(node.attr["sites"].s.decode().split("\n"))


def _marks(sites: Sequence[str]) -> int:
    """Returns the number that the names of all sites end in, 0 if they end in none."""
    number = _name(sites[0]).rpartition(_NEXT)[2]
    return int(number) if number.isdecimal() and number != _name(sites[0]) else 0


def _name(line: str) -> str:
    """Returns the name of a site in its line of text."""
    return line.rpartition("' ")[0].removeprefix("'")


def _renamed(line: str, steps: steps_lib.GraphSteps, number: int) -> str:
    name = _name(line)
    return f"'{steps.site_in(number, name)}'{line[len(name) + 2:]}"
