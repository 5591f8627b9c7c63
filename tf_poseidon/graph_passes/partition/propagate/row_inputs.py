"""Finds the inputs with rows on which a tensor depends, if several PoseidonRows have their own numbers of rows.

Requires: the outcomes of a graph. Ensures: tensors that are computed from rows or summands have the PoseidonRows of
these, so a rank with a padding row for one input discards the results of that row, and nothing else.

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
from tf_poseidon.graph_passes.partition.rules import columns
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE


def together(graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
    """Returns a GraphDef in which one PoseidonRows stands for all: their inputs have the same number of rows.

    Ranks were given their own rows of all of them, or of none.
    """
    rows_nodes = poseidon_rows.find(graph_def)
    if len(rows_nodes) < 2:
        return graph_def
    joined, moved = type(rows_nodes[0])(name=rows_nodes[0].name, op=poseidon_rows.ROWS, device=rows_nodes[0].device), {}
    for rows_node in rows_nodes:
        for i, tensor in enumerate(poseidon_rows.values(rows_node)):
            name, outputs = f"{rows_node.name}:{i}", len(joined.input)
            moved[name] = f"{joined.name}:{outputs}" if outputs else joined.name
            joined.input.append(tensor)
        for key in ("dimensions", "names", "T"):
            joined.attr[key].MergeFrom(rows_node.attr[key])
    if part := poseidon_rows.given_part(rows_nodes[0]):
        joined.input.append(part)
        joined.attr["M"].i = 1
    moved.update({rows_node.name: moved[f"{rows_node.name}:0"] for rows_node in rows_nodes},
                 **{f"^{rows_node.name}": f"^{joined.name}" for rows_node in rows_nodes})
    others = (node for node in graph_def.node if node.op != poseidon_rows.ROWS)
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
    rows_nodes = {node.name: i for i, node in enumerate(node for node in ordered if node.op == poseidon_rows.ROWS)}
    if len(rows_nodes) == 1:
        return dict.fromkeys((node.name for node in ordered), next(iter(rows_nodes)))
    sources = {}
    for node in ordered:
        by_rows = _cut(inputs[node.name], seen, outcomes[node.name])
        sources[node.name] = [*map(graph_lib.node_of, by_rows or inputs[node.name]), *stores.puts_into_what(node)]
    rows_of_nodes: dict[str, str | None] = {}
    last_round = None
    while rows_of_nodes != last_round:  # again, with the values that come back in loops
        last_round = dict(rows_of_nodes)
        for node in ordered:
            rows_of_sources = (rows_of_nodes.get(name) for name in sources[node.name])
            rows_of_nodes[node.name] = node.name if node.name in rows_nodes else min(
                (name for name in rows_of_sources if name), key=rows_nodes.__getitem__, default=None)
    return rows_of_nodes


def _cut(inputs: Iterable[str], seen: Callable[[str], State], outcome: Outcome) -> list[str]:
    """Returns the inputs that a node takes as rows, or as summands."""
    return [tensor for tensor, takes in zip(inputs, outcome.takes)
            if takes != WHOLE and seen(tensor) != WHOLE and not columns.is_divided(seen(tensor))]


def mixing(ordered: Sequence[node_def_pb2.NodeDef], inputs: Mapping[str, Sequence[str]], seen: Callable[[str], State],
           outcomes: Mapping[str, Outcome], rows_nodes: Mapping[str, str | None]) -> set[str]:
    """Returns the names of the nodes that would add summands of different PoseidonRows.

    A rank may have rows of only one of them. Held summands are from all ranks.
    """
    names: set[str] = set()
    if len(set(rows_nodes.values())) == 1:
        return names
    for node in ordered:
        summands = [tensor for tensor in _cut(inputs[node.name], seen, outcomes[node.name])
                    if isinstance(seen(tensor), Partial) and seen(tensor) != HELD]
        if len({rows_nodes[graph_lib.node_of(tensor)] for tensor in summands}) > 1:
            names.add(node.name)
    return names
