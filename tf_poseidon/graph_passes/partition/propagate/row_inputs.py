"""Finds the inputs with rows on which a tensor depends, if several PoseidonRows have their own numbers of rows.

Requires: the outcomes of a graph. Ensures: tensors that are computed from rows or summands have the marker of these, so
a rank with a padding row for one input discards the results of that row, and nothing else.

Tests: tests/graphs/test_partition_markers.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.containers.resource_stores import Stores
from tf_poseidon.graph_passes.partition.sizes import row_markers
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE


def together(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Returns a GraphDef in which one PoseidonRows stands for all: their inputs have the same number of rows."""
    markers = row_markers.find(graph_def)
    if len(markers) < 2:
        return graph_def
    joined, moved = type(markers[0])(name=markers[0].name, op=row_markers.ROWS, device=markers[0].device), {}
    for marker in markers:
        for i, tensor in enumerate(graph_lib.data_inputs(marker)):
            name, outputs = f"{marker.name}:{i}", len(joined.input)
            moved[name] = f"{joined.name}:{outputs}" if outputs else joined.name
            joined.input.append(tensor)
        for key in ("dimensions", "names", "T"):
            joined.attr[key].MergeFrom(marker.attr[key])
    moved.update({marker.name: moved[f"{marker.name}:0"] for marker in markers},
                 **{f"^{marker.name}": f"^{joined.name}" for marker in markers})
    others = (node for node in graph_def.node if node.op != row_markers.ROWS)
    result = graph_lib.with_nodes(graph_def, [joined, *others])
    for node in result.node:
        node.input[:] = [moved.get(tensor, tensor) for tensor in node.input]
    return result


def find(ordered: Sequence[node_def_pb2.NodeDef], inputs: Mapping[str, Sequence[str]], seen: Callable[[str], State],
         outcomes: Mapping[str, Outcome], stores: Stores) -> dict[str, str | None]:
    """Returns the name of a PoseidonRows for each node, None for nodes that depend on none.

    It is that of the inputs that the node takes as rows or summands, or else the first one on which it depends: only
    those inputs must be fed to compute it.

    Args:
        ordered: The nodes in topological order.
        inputs: The tensors that each node reads, by name.
        seen: A function that returns the state in which readers see a tensor.
        outcomes: How each node runs, by name.
        stores: The `resource_stores.Stores` of the graph.
    """
    markers = {node.name: i for i, node in enumerate(node for node in ordered if node.op == row_markers.ROWS)}
    if len(markers) == 1:
        return dict.fromkeys((node.name for node in ordered), next(iter(markers)))
    sources = {}
    for node in ordered:
        by_rows = _cut(inputs[node.name], seen, outcomes[node.name])
        sources[node.name] = [*map(graph_lib.node_of, by_rows or inputs[node.name]), *stores.puts_into_what(node)]
    markers_of_nodes: dict[str, str | None] = {}
    last_round = None
    while markers_of_nodes != last_round:  # again, with the values that come back in loops
        last_round = dict(markers_of_nodes)
        for node in ordered:
            markers_of_sources = (markers_of_nodes.get(name) for name in sources[node.name])
            markers_of_nodes[node.name] = node.name if node.name in markers else min(
                (name for name in markers_of_sources if name), key=markers.__getitem__, default=None)
    return markers_of_nodes


def _cut(inputs: Iterable[str], seen: Callable[[str], State], outcome: Outcome) -> list[str]:
    """Returns the inputs that a node takes as rows, or as summands."""
    return [tensor for tensor, takes in zip(inputs, outcome.takes) if takes != WHOLE and seen(tensor) != WHOLE]


def mixing(ordered: Sequence[node_def_pb2.NodeDef], inputs: Mapping[str, Sequence[str]], seen: Callable[[str], State],
           outcomes: Mapping[str, Outcome], markers: Mapping[str, str | None]) -> set[str]:
    """Returns the names of the nodes that would add summands of different markers: a rank may have rows of only one.

    Held summands are from all ranks.
    """
    names: set[str] = set()
    if len(set(markers.values())) == 1:
        return names
    for node in ordered:
        summands = [tensor for tensor in _cut(inputs[node.name], seen, outcomes[node.name])
                    if isinstance(seen(tensor), Partial) and seen(tensor) != HELD]
        if len({markers[graph_lib.node_of(tensor)] for tensor in summands}) > 1:
            names.add(node.name)
    return names
