"""The minimum cut of a network, by maximum flow (Ford and Fulkerson, with Edmonds' and Karp's shortest paths).

Tests: tests/graphs/test_partition_cuts.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping

# A node of a network, and the capacities of its edges by the node to which they lead.
Node = str
Edges = Mapping[Node, Mapping[Node, int]]


def behind(edges: Edges, sources: Mapping[Node, int], sinks: Mapping[Node, int]) -> set[Node]:
    """Returns the nodes behind the minimum cut: a flow from the sources to the sinks reaches them through the cut.

    Of several minimum cuts it is the one with the fewest nodes behind it.

    It ends, since each path adds at least 1 to a flow that no cut lets exceed its capacity. The paths from one source
    are sought until there is none, and none appears later: what the source still reaches holds no sink, so a later
    path, which leads to one, does not touch it. So the time is that of each source's own part of the network.

    Args:
        edges: The capacities of the edges, integers.
        sources: The capacities with which flow enters, by node; each path from a source to a sink has an edge, or an
            end, whose capacity is not infinite.
        sinks: The capacities with which flow leaves, by node.
    """
    left: collections.defaultdict[Node, dict[Node, int]] = collections.defaultdict(dict)
    for begin, ends in edges.items():
        for end, capacity in ends.items():
            left[begin][end] = left[begin].get(end, 0) + capacity
            left[end].setdefault(begin, 0)
    out = dict(sinks)
    for source, entering in sources.items():
        while entering and (path := _path(left, out, source)):
            steps = list(zip(path, path[1:]))
            flow = min([entering, out[path[-1]], *(left[begin][end] for begin, end in steps)])
            entering -= flow
            out[path[-1]] -= flow
            for begin, end in steps:
                left[begin][end] -= flow
                left[end][begin] += flow
    return _before(left, (node for node, capacity in out.items() if capacity))


def _path(left: Edges, out: Mapping[Node, int], source: Node) -> list[Node]:
    """Returns a shortest path from a source to a sink with capacity left on it, [] if there is none."""
    came_from, queue = {source: source}, collections.deque([source])
    while queue:
        node = queue.popleft()
        if out.get(node):
            path = [node]
            while path[-1] != source:
                path.append(came_from[path[-1]])
            return path[::-1]
        for end, capacity in left.get(node, {}).items():
            if capacity and end not in came_from:
                came_from[end] = node
                queue.append(end)
    return []


def _before(left: Edges, ends: Iterable[Node]) -> set[Node]:
    """Returns the nodes from which some ends can be reached through capacity that is left, these included."""
    queue = list(ends)
    reached = set(queue)
    while queue:
        node = queue.pop()
        new = {begin for begin in left.get(node, {}) if left[begin][node] and begin not in reached}
        reached |= new
        queue += new
    return reached
