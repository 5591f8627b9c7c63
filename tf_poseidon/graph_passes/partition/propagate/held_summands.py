"""Variables that hold summands from step to step: their one-process value is the sum over all ranks.

Examples are accumulators of gradients and metrics: values that are only added to a variable need not be exchanged
before it is read. The caller decides which variables hold summands, since every function that uses one must know, and
so must readers outside functions.

A summand of this step counts only ranks that have rows in it; the others compute a padding row. A variable's summands
count on all ranks. So a selection turns summands into held ones, and linear ops keep the two apart.

Tests: tests/graphs/test_partition_held.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_ADD = ("Add", "AddV2", "Sub", "AddN")
# The ops that assign a variable as a whole.
TAKES = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Ops that do not depend on the value.
_OTHERS = (*variables_lib.PASSED_ON, "VarHandleOp", "VariableShape", "VarIsInitializedOp", "DestroyResourceOp")


def outcomes(graph: graph_lib.Graph, ordered: Iterable[node_def_pb2.NodeDef],
             held: Mapping[str, State]) -> dict[str, Outcome]:
    """Returns the `Outcome` of each node that reads or assigns a variable that holds summands or shards, by name.

    Args:
        graph: The `indexed_graph.Graph`.
        ordered: Its nodes.
        held: What these variables hold, HELD or a `Shard`, by name of the node from which the resource comes.

    Raises:
        PoseidonError: If another op uses such a variable.
    """
    outcomes_of_held = {}
    for node in ordered if held else ():
        sources = {variables_lib.source(graph, tensor) for tensor in graph.inputs(node)} & held.keys()
        if not sources or node.op in _OTHERS:
            continue
        source = sources.pop()
        if node.op == "ReadVariableOp":
            outcomes_of_held[node.name] = Outcome((WHOLE,), (held[source],))
        elif node.op in TAKES:
            outcomes_of_held[node.name] = Outcome((WHOLE, held[source]), ())
        else:
            what = "a shard" if isinstance(held[source], Shard) else "summands"
            raise GraphError(f"Variable '{source}' holds {what}, but is expected whole by the "
                             f"{node.op} '{node.name}': read and assign it, or let all ranks hold its value.")
    return outcomes_of_held


def candidates(graph: graph_lib.Graph, names: Iterable[str]) -> set[str]:
    """Returns those of some variables that a graph changes, and that may hold summands as far as the ops say.

    Args:
        graph: The `indexed_graph.Graph`.
        names: Names of the nodes from which the resources of variables come.
    """
    used: dict[str, set[str]] = {name: set() for name in names}
    for node in graph.graph_def.node:
        for tensor in graph.inputs(node):
            used.get(variables_lib.source(graph, tensor), set()).add(node.op)
    return {name for name, ops in used.items()
            if ops & set(TAKES) and ops <= {"ReadVariableOp", *TAKES, *_OTHERS}}


def made_whole(graph: graph_lib.Graph, states: Mapping[str, State], outcomes: Mapping[str, Outcome],
               fetches: Iterable[str]) -> set[str]:
    """Returns the names of the nodes from which the resources of variables come whose summands a step makes whole.

    Args:
        graph: The `indexed_graph.Graph`.
        states: The state in which each tensor is computed, by name, unless it is whole.
        outcomes: The `Outcome` of each node, by name.
        fetches: Names of the tensors that are whole.
    """
    inputs = {name: [tensor.removesuffix(":0") for tensor in graph.inputs(graph.nodes[name])] for name in outcomes}
    queue = [*(fetch.removesuffix(":0") for fetch in fetches), *(
        tensor for name, outcome in outcomes.items() for tensor, takes in zip(inputs[name], outcome.takes)
        if takes == WHOLE)]
    seen, resources = set(), set()
    while queue:
        tensor = queue.pop()
        if tensor in seen or states.get(tensor) != HELD:
            continue
        seen.add(tensor)
        node = graph.node(tensor)
        queue += inputs[node.name]
        if node.op == "ReadVariableOp":
            resources.add(variables_lib.source(graph, graph.inputs(node)[0]))
    return resources


def as_summands(states: Iterable[State]) -> tuple[State, ...]:
    """Returns states for rules, which do not distinguish held summands from others."""
    return tuple(SUM if state == HELD else state for state in states)


def added(op: str, states: Sequence[State]) -> Outcome | None:
    """Returns the `Outcome` of an op that adds something to what a variable holds; None for others.

    Whole terms and columns are held summands then: nothing says that the sum must be whole soon.
    """
    if op in _ADD and HELD in states and all(
            state in (HELD, SUM, WHOLE) or isinstance(state, Columns) for state in states):
        return Outcome((HELD,) * len(states), (HELD,))
    return None


def outcome(of_rule: Outcome | None, case: Case, states: Sequence[State]) -> Outcome | None:
    """Returns the `Outcome` for `states`, given a rule's `Outcome` or None for `as_summands(states)`.

    If an op takes a held summand as a summand, all summands that it takes and gives are held.

    Args:
        of_rule: The `Outcome`.
        case: The `Case` of `as_summands(states)`.
        states: The states.
    """
    if of_rule is None or not any(state == HELD and takes in (None, SUM)
                                  for state, takes in zip(states, of_rule.takes)):
        return of_rule
    if of_rule.wishes or of_rule.write is not None and SUM in (*of_rule.takes, *of_rule.gives):
        return None
    return dataclasses.replace(
        of_rule, takes=tuple(HELD if takes == SUM else takes for takes in of_rule.takes),
        gives=tuple(HELD if gives == SUM else gives for gives in of_rule.gives))
