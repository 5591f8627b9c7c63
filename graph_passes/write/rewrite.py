"""Replaces each marker by the nodes that its decision asks for.

Requires: markers and matches of this graph, and a plan with a decision for each of them. Ensures:
no undecided marker is left; every other node keeps its name, and what read a marker reads its sum.
"""

import collections

from tf_poseidon.graph_passes.write import bundles as bundles_lib
from tf_poseidon.graph_passes.write import collectives
from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.write import horovod_ops
from tf_poseidon.graph_passes.write import send_receive
from tf_poseidon.graph_passes.write import tensorflow_ops


def rewrite(graph, markers, matches, plan, digest, strict=False, collective_ops=None):
    """Returns the rewritten GraphDef.

    Args:
        graph: The `Graph`.
        markers: Its `Marker`s.
        matches: What was found out about each gradient, by site.
        plan: The `Plan`.
        digest: A function that returns a text for tensors that are equal on all ranks.
        strict: Whether the graph shall fail where ranks do not have the same factors.
        collective_ops: What writes our own markers' exchanges, as of `engines.Engine`.
    """
    decisions = {decision.site: decision for decision in plan.decisions}
    by_site = {marker.site: marker for marker in markers}
    riders = {}
    for decision in plan.decisions:
        if decision.leader:
            rider = f"{decision.site} from {matches[decision.site].factor}"
            riders.setdefault(decision.leader, []).append(rider)
    verifiers = {node.attr["site"].s.decode(): node for node in graph.graph_def.node
                 if node.op == "PoseidonVerify"}
    group_sizes = collections.Counter(each.group for each in (*plan.decisions, *plan.exchanges))
    nodes, groups, bundles = [], {}, {}
    waits = {}  # by node that computes a gradient: what it has to wait for
    for marker in markers:
        decision = decisions[marker.site]
        group = (decision.group, group_sizes[decision.group]) if decision.group else ("", 1)
        if marker.bundle is not None:
            bundles.setdefault(marker.node, []).append(marker)
        if marker.is_foreign or collective_ops is not None:
            site = (collective_ops or _ops_of(graph, marker))(graph, marker, plan,
                                                              verifiers.get(marker.site))
        else:
            site = send_receive.SendReceive(graph, marker, strict, verifiers.get(marker.site), group)
        if decision.scheme == "sparse":
            site.slices()
        elif marker.indices is not None:
            site.dense_slices()
        elif decision.scheme == "ps":
            site.dense()
        else:
            leader = by_site[decision.leader or marker.site].prefix
            if decision.leader:
                site.bias(leader, matches[marker.site], matches[decision.leader])
            else:
                site.factors(matches[marker.site], riders.get(marker.site, ()), digest)
            waits |= site.waits(leader, matches[marker.site])
        if isinstance(site, collectives.Collectives):
            site.note()
        nodes += site.writer.nodes
        if decision.group:
            groups.setdefault(decision.group, []).extend(
                node.name for node in site.writer.nodes if node.op == "HorovodAllreduce")
    for of_bundle in bundles.values():
        nodes += bundles_lib.open_bundle(graph, of_bundle, decisions)
    replaced = {marker.node for marker in markers} | {node.name for node in nodes}
    grouped = {exchange.site: exchange.group for exchange in plan.exchanges if exchange.group}
    kept = [_in_group(_waiting(node, waits.get(node.name)), grouped, group_sizes) for node in graph.graph_def.node
            if node.name not in replaced]
    return horovod_ops.grouped(graph_lib.with_nodes(graph.graph_def, kept + nodes), groups)


def _ops_of(graph, marker):
    """Returns what writes in the place of a program's own all-reduce."""
    is_horovod = graph.nodes[marker.node].op in foreign.HOROVOD
    return horovod_ops.HorovodOps if is_horovod else tensorflow_ops.TensorFlowOps


def _in_group(node, grouped, sizes):
    """Returns a node that exchanges something beside gradients with the group that it travels with."""
    group = grouped.get(node.attr["site"].s.decode()) if graph_lib.meanwhile(node) else None
    if group is None:
        return node
    changed = type(node)()
    changed.CopyFrom(node)
    graph_lib.set_attribute(changed.attr["group"], "group", group)
    graph_lib.set_attribute(changed.attr["group_size"], "group_size", sizes[group])
    return changed


def _waiting(node, control):
    if control is None:
        return node
    changed = type(node)()
    changed.CopyFrom(node)
    changed.input.append(f"^{control}")
    return changed
