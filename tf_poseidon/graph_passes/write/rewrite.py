"""Replaces each marker with the nodes that carry out its decision.

Requires: a plan with a decision for each marker. Ensures: no undecided marker is left; every other node keeps its name
and its inputs, but for gradients that become shards and travel as they were before a cast; and readers of a marker read
its sum, or have what they take of it.

Tests: tests/graphs/test_passes.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes import plan_sites
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.find import training_step
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import check
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.matches import NarrowGradient
from tf_poseidon.graph_passes.write import bundles as bundles_lib
from tf_poseidon.graph_passes.write import horovod_ops
from tf_poseidon.graph_passes.write import writers
from tf_poseidon.graph_passes.write.send_receive import SendReceive
from tf_poseidon.graph_passes.write.site_writer import PlannedGraph
from tf_poseidon.graph_passes.write.site_writer import SiteWriter


class Write(passes.Pass):
    """Writes the graph that follows the plan."""

    def __init__(self, writer: type[SiteWriter] = SendReceive) -> None:
        """Makes the pass; `writer` is the class that writes the ops of the engine."""
        self._writer = writer

    def requires(self, training: passes.TrainingGraph) -> str:
        if training.plan is None:
            return "there is no plan"
        decided = {decision.site for decision in plan_sites.of_all_steps(training).decisions}
        missing = {marker.site for marker in training.markers} - decided
        return f"the plan decides nothing about '{min(missing)}'" if missing else ""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        assert training.plan is not None
        plan = plan_sites.of_all_steps(training)
        rewritten = rewrite(PlannedGraph.of(dataclasses.replace(training, plan=plan)), self._writer)
        for agree in training_step.nodes_of(rewritten):
            agree.attr["plan"].s = training.plan.agreement_text().encode()
        return dataclasses.replace(training, rewritten=rewritten)

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        return problem_of(training.graph.graph_def, result.rewritten, training.markers, training.narrow)


def rewrite(planned: PlannedGraph, writer: type[SiteWriter]) -> graph_pb2.GraphDef:
    """Returns the rewritten GraphDef.

    Args:
        planned: The `PlannedGraph`.
        writer: Same as in `Write`.
    """
    graph, plan = planned.training.graph, planned.plan
    nodes: list[node_def_pb2.NodeDef] = []
    groups: dict[str, list[str]] = {}
    bundles: dict[str, list[Marker]] = {}
    waits: dict[str, str] = {}  # by name of a node that computes a gradient: the node for which it must wait
    for marker in planned.training.markers:
        if marker.bundle is not None:
            bundles.setdefault(marker.node, []).append(marker)
        site = writers.write(planned, marker, writer)
        waits |= site.waits
        nodes += site.writer.nodes
        if site.decision.group:
            groups.setdefault(site.decision.group, []).extend(
                node.name for node in site.writer.nodes if node.op == "HorovodAllreduce")
    for of_bundle in bundles.values():
        nodes += bundles_lib.open_bundle(graph, of_bundle, planned.decisions)
    replaced = {marker.node for marker in planned.training.markers} | {node.name for node in nodes}
    grouped = {exchange.site: exchange.group for exchange in plan.exchanges if exchange.group}
    others = (_narrowed(graph_lib.with_controls(node, filter(None, [waits.get(node.name)])), planned.training.narrow)
              for node in graph.graph_def.node if node.name not in replaced)
    kept = [_with_priority(_in_group(node, grouped, planned.group_sizes), planned.training.priorities)
            for node in others]
    return horovod_ops.grouped(graph_lib.with_nodes(graph.graph_def, kept + nodes), groups)


def _narrowed(node: node_def_pb2.NodeDef, narrow: Mapping[str, NarrowGradient]) -> node_def_pb2.NodeDef:
    """Returns a node that sums the gradient as it was before its cast, if it makes shards of one that is cast."""
    before_cast = narrow.get(node.attr["site"].s.decode()) if node.op == poseidon_markers.SCATTER else None
    if before_cast is None:
        return node
    changed = type(node)()
    changed.CopyFrom(node)
    changed.input[0] = before_cast.tensor
    changed.attr["T"].type = before_cast.dtype
    return changed


def _in_group(node: node_def_pb2.NodeDef, grouped: Mapping[str, str],
              sizes: Mapping[str | None, int]) -> node_def_pb2.NodeDef:
    """Returns a node with its group of messages, if it makes an exchange besides gradients that has one."""
    group = grouped.get(node.attr["site"].s.decode()) if graph_lib.meanwhile(node) else None
    if group is None:
        return node
    changed = type(node)()
    changed.CopyFrom(node)
    graph_lib.set_attribute(changed.attr["group"], "group", group)
    graph_lib.set_attribute(changed.attr["group_size"], "group_size", sizes[group])
    return changed


def _with_priority(node: node_def_pb2.NodeDef, priorities: Mapping[str, int]) -> node_def_pb2.NodeDef:
    """Returns a node with its priority, if it exchanges shards."""
    priority = priorities.get(node.attr["site"].s.decode()) if node.op in exchanges.OF_SHARDS else None
    if priority is None:
        return node
    changed = type(node)()
    changed.CopyFrom(node)
    graph_lib.set_attribute(changed.attr["priority"], "priority", priority)
    return changed


def problem_of(original: graph_pb2.GraphDef, after: graph_pb2.GraphDef, markers: Iterable[Marker],
               narrow: Mapping[str, NarrowGradient]) -> str:
    """Returns "" if every marker is replaced and every other node is kept; else the problem, without a full stop."""
    if problem := check.problem_of(graph_lib.Graph(after)):
        return problem
    nodes = {node.name: node for node in after.node}
    replaced = {marker.node for marker in markers}
    sums = {marker.bundle.output for marker in markers if marker.bundle} | {
        marker.kept.node for marker in markers if marker.kept and not marker.kept.is_verified}
    for node in original.node:
        kept = nodes.get(node.name)
        if kept is None:
            return f"node '{node.name}' is gone"
        if node.name in replaced:
            if kept.op == node.op and not graph_lib.is_decided(kept):
                return f"the site at node '{node.name}' is not replaced"
        elif node.name not in sums and (kept.op != node.op or not _has_inputs_of(kept, _narrowed(node, narrow))):
            return f"node '{node.name}' is not what it was"
    return ""


def _has_inputs_of(kept: node_def_pb2.NodeDef, node: node_def_pb2.NodeDef) -> bool:
    """Whether a node still has the same inputs, perhaps among others."""
    inputs, after = graph_lib.data_inputs(node), graph_lib.data_inputs(kept)
    return after[:len(inputs)] == inputs and (
        set(graph_lib.control_inputs(node)) <= set(graph_lib.control_inputs(kept)))
