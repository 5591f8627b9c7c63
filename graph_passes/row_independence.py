"""Finds out whether rows of a batch are trained independently of each other.

Requires: a flat graph with `_output_shapes` in which the number of rows is unknown. Ensures: if nothing
is found, the gradient of a joined batch is the mean, or sum, of those of its parts.
"""

from tf_poseidon.graph_passes import dependence as dependence_lib
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import variables as variables_lib

_MIXING = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")


def why_not(graph, gradients):
    """Returns why rows may depend on each other, a sentence; empty if they do not.

    Args:
        graph: The `Graph`.
        gradients: The tensors that are taken over all ranks.
    """
    inputs = [node for node in graph.graph_def.node if node.op == "Placeholder" and node.attr["dtype"].type != 20]
    shapes = [graph.shape(node.name) for node in inputs]
    if not any(shape and shape[0] is None for shape in shapes):
        return "the graph fixes the number of its rows, so it cannot be told"
    differs = dependence_lib.Dependence(graph, variables_lib.Variables(graph), trusts_shapes=True)
    queue, seen = [graph_lib.node_of(tensor) for tensor in gradients], set()
    while queue:
        node = graph.nodes[queue.pop()]
        if node.name in seen:
            continue
        seen.add(node.name)
        if "Random" in node.op:
            return f"node '{node.name}' draws random numbers"
        if node.op in _MIXING and node.attr["is_training"].b:
            return f"node '{node.name}' normalizes over rows"
        operands = [t for t in graph.inputs(node) if differs(t)]
        queue += map(graph_lib.node_of, operands)
        of_rows = [t for t in operands if graph.shape(t) is None or None in graph.shape(t)]
        others = [t for t in operands if t not in of_rows]
        # What was made of all rows, and then meets each.
        if of_rows and others and node.op not in ("Switch", "Merge", "Reshape", "BroadcastGradientArgs", "Tile",
                                                  "Fill", "BroadcastTo", "StridedSlice", "Slice"):
            return f"node '{node.name}' combines rows with '{others[0]}', which is made of all of them"
    return ""
