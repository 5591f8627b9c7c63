"""Finds summands of which each rank needs its shard alone, and shards that are needed whole.

A gradient of which all readers take the same shard, as the update of a variable does, need not become whole. So does
one of which others compute something element by element, or a norm: these are then computed of shards. Where one rank
owns all elements, it can compute anything for what it owns.

Tests: tests/graphs/test_partition_shards.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.propagate.facts import Facts
from tf_poseidon.graph_passes.partition.propagate.prepared_graph import PreparedGraph
from tf_poseidon.graph_passes.partition.rules import shards
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Partial
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
    if not any(isinstance(state, (Shard, Owned)) for state in states.values()):
        return {}
    found = {}
    for summand in facts.whole_summands - facts.shards.keys():
        shard = _shard_of_readers(prepared, outcomes, summand) or _shard_of_readers(
            prepared, outcomes, summand, is_owned=True)
        if shard is not None:
            found[summand] = shard
    return found


def _shard_of_readers(prepared: PreparedGraph, outcomes: Mapping[str, Outcome], summand: str,
                      is_owned: bool = False) -> Shard | None:
    """Returns the shard that suffices all readers of a summand; None if there is none, or, if so asked, not owned."""
    shape = prepared.sizes.shape(summand)
    queue, seen, taken = [summand], set[str](), set[Shard]()
    while queue:
        tensor = queue.pop()
        if tensor in seen:
            continue
        seen.add(tensor)
        for reader in prepared.graph.consumers(graph_lib.node_of(tensor)):
            inputs, outcome = prepared.inputs[reader.name], outcomes[reader.name]
            case = Case(reader, inputs, (WHOLE,) * len(inputs), len(outcome.gives), prepared.sizes)
            for i, takes in enumerate(outcome.takes):
                if inputs[i] != tensor:
                    continue
                if isinstance(takes, Shard):
                    taken.add(takes)
                elif outcome.gives and isinstance(outcome.gives[0], Owned):
                    taken.add(outcome.gives[0].shard)
                elif reader.op == "IdentityN":
                    queue.append(tensors.tensor_of(reader.name, i))
                elif shards.is_of_all(case):
                    pass
                elif any(state != WHOLE for state in outcome.gives):
                    return None
                elif is_owned and shards.can_run_alone(case) or shards.is_elementwise(reader.op) and all(
                        prepared.sizes.shape(output) == shape for output in case.outputs):
                    queue += map(tensors.canonical, case.outputs)
                else:
                    return None
    found = taken.pop() if len(taken) == 1 else None
    return found if found is not None and (found.owned or not is_owned) else None


def made_whole(sizes: Sizes, states: Mapping[str, State], outcomes: Mapping[str, Outcome], fetches: Iterable[str],
               updates: tuple[str, ...]) -> dict[Shard, str]:
    """Returns the shards that a step makes whole for anything but the update of a variable that is whole.

    With the name of an op that needs each of them so, "" if they are what the step returns.

    Those that one rank owns do not count where they are single elements, such as norms.

    Args:
        sizes: The `Sizes` of the graph.
        states: The state in which each tensor is computed, by name, unless it is whole.
        outcomes: The `Outcome` of each node, by name.
        fetches: Names of the tensors that are whole.
        updates: Prefixes of the names of ops that update variables.
    """
    gathered = [(tensor, "") for tensor in fetches]
    for name, outcome in outcomes.items():
        node = sizes.graph.nodes[name]
        if not node.op.startswith(updates):
            gathered += [(tensor, name) for tensor, takes in zip(sizes.graph.inputs(node), outcome.takes)
                         if takes is not None and not isinstance(takes, (Shard, Owned, Columns))]
    found = dict[Shard, str]()
    for tensor, name in gathered:
        state = shards.live(states.get(tensors.canonical(tensor), WHOLE))
        if isinstance(state, Shard) and not (state.owned and _is_single(sizes, tensors.canonical(tensor))):
            found.setdefault(state, name)
    return found


def with_whole_summand(sizes: Sizes, states: Mapping[str, State], outcomes: Mapping[str, Outcome]) -> set[Shard]:
    """Returns the shards that are computed of a summand which others need whole; arguments as in `made_whole`."""
    inputs = {name: [*map(tensors.canonical, sizes.graph.inputs(sizes.graph.nodes[name]))] for name in outcomes}
    whole = {tensor for name, outcome in outcomes.items() for tensor, takes in zip(inputs[name], outcome.takes)
             if takes == WHOLE and isinstance(states.get(tensor), Partial)}
    found = set()
    for name, outcome in outcomes.items():
        for tensor, takes in zip(inputs[name], outcome.takes):
            if isinstance(takes, Shard) and not whole.isdisjoint(_made_of(sizes, tensor, inputs)):
                found.add(takes)
    return found


def _made_of(sizes: Sizes, tensor: str, inputs: Mapping[str, Sequence[str]]) -> set[str]:
    """Returns the tensors of its shape from which a tensor is computed element by element, itself included."""
    queue, seen, shape = [tensor], {tensor}, sizes.shape(tensor)
    while queue:
        node = sizes.graph.node(queue.pop())
        if shards.is_elementwise(node.op):
            new = {source for source in inputs[node.name] if sizes.shape(source) == shape} - seen
            seen |= new
            queue += new
    return seen


def _is_single(sizes: Sizes, tensor: str) -> bool:
    shape = sizes.shape(tensor)
    return row_size.is_known(shape) and row_size.product(shape).constant == 1
