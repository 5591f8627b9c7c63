"""Which inputs with rows a tensor depends on, where several PoseidonRows have a number of rows each.

Requires: the outcomes of a graph. Ensures: what is made of rows, or of summands, has the marker of these; so a rank
that has no row of one input, and borrows one, leaves out what comes of that, and nothing else.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.partition import sizes as sizes_lib
from tf_poseidon.graph_passes.partition.rules.case import Outcome
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE
from tf_poseidon.graph_passes.partition.stores import Stores


def find(ordered: Sequence[node_def_pb2.NodeDef], inputs: Mapping[str, Sequence[str]], seen: Callable[[str], State],
         outcomes: Mapping[str, Outcome], stores: Stores) -> dict[str, str | None]:
    """Returns the name of a PoseidonRows for each node, None of what depends on none.

    It is that of what the node takes as rows or summands, or else the first one that it depends on: only those inputs
    need be fed to compute it.

    Args:
        ordered: The nodes, each after its inputs.
        inputs: The tensors that each node reads, by name.
        seen: A function that returns the state in which readers see a tensor.
        outcomes: By node: how it runs.
        stores: The `stores.Stores` of the graph.
    """
    markers = {node.name: i for i, node in enumerate(node for node in ordered if node.op == sizes_lib.ROWS)}
    if len(markers) == 1:
        return dict.fromkeys((node.name for node in ordered), next(iter(markers)))
    sources = {}
    for node in ordered:
        by_rows = _cut(inputs[node.name], seen, outcomes[node.name])
        sources[node.name] = [*map(graph_lib.node_of, by_rows or inputs[node.name]), *stores.puts_into_what(node)]
    found: dict[str, str | None] = {}
    before = None
    while found != before:  # again, with what comes back in loops
        before = dict(found)
        for node in ordered:
            known = (found.get(name) for name in sources[node.name])
            found[node.name] = node.name if node.name in markers else min(
                (name for name in known if name), key=markers.__getitem__, default=None)
    return found


def _cut(inputs: Iterable[str], seen: Callable[[str], State], outcome: Outcome) -> list[str]:
    """Returns the inputs that a node takes as rows, or as summands."""
    return [tensor for tensor, takes in zip(inputs, outcome.takes) if takes != WHOLE and seen(tensor) != WHOLE]


def mixing(ordered: Sequence[node_def_pb2.NodeDef], inputs: Mapping[str, Sequence[str]], seen: Callable[[str], State],
           outcomes: Mapping[str, Outcome], found: Mapping[str, str | None]) -> set[str]:
    """Returns the names of the nodes that would add up summands of different markers: a rank may have one only.

    Held summands are those of all ranks.
    """
    names: set[str] = set()
    if len(set(found.values())) == 1:
        return names
    for node in ordered:
        summands = [tensor for tensor in _cut(inputs[node.name], seen, outcomes[node.name])
                    if isinstance(seen(tensor), Partial) and seen(tensor) != HELD]
        if len({found[graph_lib.node_of(tensor)] for tensor in summands}) > 1:
            names.add(node.name)
    return names
