"""Checks a graph before and after it is rewritten; what it finds is a mistake of ours."""

from tf_poseidon.graph_passes.graph import graph as graph_lib


class InvalidGraph(Exception):
    """A graph that TensorFlow could not run, or that does not do what the original did."""


def check_graph(graph_def):
    """Raises InvalidGraph unless names are unique, inputs exist and no cycle is without a loop."""
    names = {node.name for node in graph_def.node}
    if len(names) != len(graph_def.node):
        raise InvalidGraph("two nodes have the same name")
    for node in graph_def.node:
        sources = {graph_lib.node_of(tensor) for tensor in node.input}
        if not sources <= names:
            raise InvalidGraph(f"node '{node.name}' reads '{min(sources - names)}', which does not "
                               "exist")
    ordered = {node.name for node in graph_lib.in_order(graph_def)}
    if ordered != names:
        raise InvalidGraph(f"node '{min(names - ordered)}' depends on itself")


def check_rewrite(before, after, markers):
    """Raises InvalidGraph unless every marker is replaced and every other node is kept as it was."""
    check_graph(after)
    nodes = {node.name: node for node in after.node}
    replaced = {marker.node for marker in markers}
    sums = {marker.bundle.output for marker in markers if marker.bundle}
    for node in before.node:
        kept = nodes.get(node.name)
        if kept is None:
            raise InvalidGraph(f"node '{node.name}' is gone")
        if node.name in replaced:
            if kept.op == node.op and not graph_lib.is_planned(kept):
                raise InvalidGraph(f"the site at node '{node.name}' is not replaced")
        elif node.name in sums:
            continue
        elif kept.op != node.op or not _has_inputs_of(kept, node):
            raise InvalidGraph(f"node '{node.name}' is not what it was")


def _has_inputs_of(kept, node):
    """Whether a node still reads and waits for what it did, perhaps among others."""
    before, after = graph_lib.data_inputs(node), graph_lib.data_inputs(kept)
    return after[:len(before)] == before and (
        set(graph_lib.control_inputs(node)) <= set(graph_lib.control_inputs(kept)))
