"""Replaces each marker by the nodes that its decision asks for.

Requires: markers and matches of this graph, and a plan with a decision for each of them. Ensures:
no undecided marker is left; every other node keeps its name, and what read a marker reads its sum.
"""

import collections

from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import send_receive


def rewrite(graph, markers, matches, plan, digest, strict=False):
    """Returns the rewritten GraphDef.

    Args:
        graph: The `Graph`.
        markers: Its `Marker`s.
        matches: What was found out about each gradient, by site.
        plan: The `Plan`.
        digest: A function that returns a text for tensors that are equal on all ranks.
        strict: Whether the graph shall fail where ranks do not have the same factors.
    """
    decisions = {decision.site: decision for decision in plan.decisions}
    by_site = {marker.site: marker for marker in markers}
    riders = {}
    for decision in plan.decisions:
        if decision.rides_on:
            rider = f"{decision.site} from {matches[decision.site].factor}"
            riders.setdefault(decision.rides_on, []).append(rider)
    verifiers = {node.attr["site"].s.decode(): node for node in graph.graph_def.node
                 if node.op == "PoseidonVerify"}
    group_sizes = collections.Counter(decision.group for decision in plan.decisions)
    nodes = []
    waits = {}  # by node that computes a gradient: what it has to wait for
    for marker in markers:
        decision = decisions[marker.site]
        group = (decision.group, group_sizes[decision.group]) if decision.group else ("", 1)
        site = send_receive.SendReceive(graph, marker, strict, verifiers.get(marker.site), group)
        if decision.scheme == "sparse":
            site.slices()
        elif marker.indices is not None:
            site.dense_slices()
        elif decision.scheme == "ps":
            site.dense()
        else:
            leader = by_site[decision.rides_on or marker.site].node
            if decision.rides_on:
                site.bias(leader, matches[marker.site], matches[decision.rides_on])
            else:
                site.factors(matches[marker.site], riders.get(marker.site, ()), digest)
            waits |= site.waits(leader, matches[marker.site])
        nodes += site.writer.nodes
    replaced = {marker.node for marker in markers} | {node.name for node in nodes}
    kept = [_waiting(node, waits.get(node.name)) for node in graph.graph_def.node
            if node.name not in replaced]
    return graph_lib.with_nodes(graph.graph_def, kept + nodes)


def _waiting(node, control):
    if control is None:
        return node
    changed = type(node)()
    changed.CopyFrom(node)
    changed.input.append(f"^{control}")
    return changed
