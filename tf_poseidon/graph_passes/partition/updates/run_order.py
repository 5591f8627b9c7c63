"""Which nodes of a graph run after others, and which may not run.

Tests: tests/graphs/test_partition_shards.py, tests/graphs/test_partition_columns.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

ENTERS, BRANCHES = ("Enter", "RefEnter"), ("Switch", "RefSwitch")


def behind(graph: graph_lib.Graph, names: Iterable[str],
           added: Mapping[str, Collection[str]] | None = None) -> set[str]:
    """Returns the names of some nodes, and of those that run after them.

    Args:
        graph: The `indexed_graph.Graph`.
        names: The names of the nodes.
        added: By name of a node: others that are to wait for it.
    """
    queue, seen = [*names], set[str]()
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += [reader.name for reader in graph.consumers(name)]
            queue += (added or {}).get(name, ())
    return seen
