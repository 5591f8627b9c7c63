"""Finds summands of which each rank needs its shard alone, and shards that are needed whole.

A gradient of which all readers take the same shard, as the update of a variable does, need not become whole. So does
one of which others compute something element by element, or a norm: these are then computed of shards.

Tests: tests/graphs/test_partition_shards.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.propagate.facts import Facts
from tf_poseidon.graph_passes.partition.propagate.prepared_graph import PreparedGraph
from tf_poseidon.graph_passes.partition.rules import shards
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE


def find(prepared: PreparedGraph, facts: Facts, outcomes: Mapping[str, Outcome],
         states: Mapping[str, State]) -> dict[str, Shard]:
    """Returns the shards that all readers take of summands that become whole, by name of the summand.

    Args:
        prepared: The `PreparedGraph`.
        facts: Its `Facts`.
        outcomes: How each node runs, by name.
        states: The state in which each tensor is computed, by name, unless it is whole.
    """
    if not any(isinstance(state, Shard) for state in states.values()):
        return {}
    found = {}
    for summand in facts.whole_summands - facts.shards.keys():
        shard = _shard_of_readers(prepared, outcomes, states, summand)
        if shard is not None:
            found[summand] = shard
    return found


def _shard_of_readers(prepared: PreparedGraph, outcomes: Mapping[str, Outcome], states: Mapping[str, State],
                      summand: str) -> Shard | None:
    """Returns the shard that suffices all readers of a summand; None if there is none."""
    shape = prepared.sizes.shape(summand)
    queue, seen, taken = [summand], set[str](), set[Shard]()
    while queue:
        tensor = queue.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        for reader in prepared.graph.consumers(graph_lib.node_of(tensor)):
            inputs = prepared.inputs[reader.name]
            for i, takes in enumerate(outcomes[reader.name].takes):
                if inputs[i] != tensor:
                    continue
                if isinstance(takes, Shard):
                    taken.add(takes)
                elif reader.op == "IdentityN":
                    queue.append(tensors.tensor_of(reader.name, i))
                elif shards.is_of_all(Case(reader, inputs, (WHOLE,) * len(inputs), 1, prepared.sizes)):
                    pass
                elif shards.is_elementwise(reader.op) and all(state == WHOLE for state in outcomes[reader.name].gives):
                    outputs = [tensors.tensor_of(reader.name, i) for i in range(prepared.num_outputs(reader.name))]
                    if any(prepared.sizes.shape(output) != shape for output in outputs):
                        return None
                    queue += outputs
                else:
                    return None
    return taken.pop() if len(taken) == 1 else None


def made_whole(graph: graph_lib.Graph, states: Mapping[str, State], outcomes: Mapping[str, Outcome],
               fetches: Iterable[str], updates: tuple[str, ...]) -> set[Shard]:
    """Returns the shards that a step makes whole for anything but the update of a variable that is whole.

    Args:
        graph: The `indexed_graph.Graph`.
        states: The state in which each tensor is computed, by name, unless it is whole.
        outcomes: The `Outcome` of each node, by name.
        fetches: Names of the tensors that are whole.
        updates: Prefixes of the names of ops that update variables.
    """
    def of(tensor: str) -> State | None:
        return states.get(tensors.canonical(tensor))

    gathered = list(map(of, fetches))
    for name, outcome in outcomes.items():
        node = graph.nodes[name]
        if not node.op.startswith(updates):
            gathered += [of(tensor) for tensor, takes in zip(graph.inputs(node), outcome.takes)
                         if takes not in (None, of(tensor))]
    return {state for state in gathered if isinstance(state, Shard)}
