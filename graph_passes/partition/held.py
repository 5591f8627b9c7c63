"""Variables that hold summands from step to step: their one-process value is the sum over all ranks.

Examples are accumulators of gradients and metrics: values that are only added to a variable need not be exchanged
before it is read. The caller decides which variables hold summands, since every function that uses one must know, and
so must readers outside functions.

A summand of this step counts only ranks that have rows in it; the others compute a padding row. A variable's summands
count on all ranks. So a selection turns summands into held ones, and linear ops keep the two apart.

Tests: tests/graphs/test_partition_held.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from collections.abc import Set
import dataclasses

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.rules.case import Outcome
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_TAKES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Ops that do not depend on the value.
_OTHERS = (*variables_lib.PASSED_ON, "VarHandleOp", "VariableShape", "VarIsInitializedOp", "DestroyResourceOp")


def outcomes(graph: graph_lib.Graph, ordered: Iterable[node_def_pb2.NodeDef], summands: Set[str]) -> dict[str, Outcome]:
    """Returns the `Outcome` of each node that reads or assigns a variable that holds summands, by name.

    Args:
        graph: The `graph.Graph`.
        ordered: Its nodes.
        summands: Names of the nodes from which the resources of these variables come.

    Raises:
        PoseidonError: If another op uses such a variable.
    """
    found = {}
    for node in ordered if summands else ():
        sources = {variables_lib.source(graph, tensor) for tensor in graph.inputs(node)} & summands
        if not sources or node.op in _OTHERS:
            continue
        if node.op == "ReadVariableOp":
            found[node.name] = Outcome((WHOLE,), (HELD,))
        elif node.op in _TAKES:
            found[node.name] = Outcome((WHOLE, HELD), ())
        else:
            raise GraphError(f"Variable '{sources.pop()}' holds summands, but is expected whole by the "
                             f"{node.op} '{node.name}': read and assign it, or let all ranks hold its value.")
    return found


def as_summands(states: Iterable[State]) -> tuple[State, ...]:
    """Returns states for rules, which do not distinguish held summands from others."""
    return tuple(SUM if state == HELD else state for state in states)


def outcome(found: Outcome | None, states: Sequence[State]) -> Outcome | None:
    """Returns the `Outcome` for `states`, given a rule's `Outcome` or None for `as_summands(states)`.

    If an op takes a held summand as a summand, all summands that it takes and gives are held.
    """
    if found is None or not any(state == HELD and takes in (None, SUM) for state, takes in zip(states, found.takes)):
        return found
    if found.wishes or found.write is not None and SUM in (*found.takes, *found.gives):
        return None
    return dataclasses.replace(
        found, takes=tuple(HELD if takes == SUM else takes for takes in found.takes),
        gives=tuple(HELD if gives == SUM else gives for gives in found.gives))
