"""Finds out which tensors of a step depend on the data, or chance, of one rank.

Requires: a flat graph, whose variables are equal on all ranks when the step begins. Ensures: a tensor
that is not said to differ is the same on all ranks, once the tensors given as `summed` are.
"""

from tensorflow.python.framework import op_def_registry

from tf_poseidon.graph_passes import graph as graph_lib

# Stateful ops whose outputs depend on nothing but their inputs.
_PLAIN = {"VarHandleOp", "VariableV2", "Variable", "ReadVariableOp", "VarIsInitializedOp", "VariableShape",
          "IsVariableInitialized", "ResourceGather", "ResourceGatherNd", "Print", "PrintV2", "Assert", "NoOp",
          "PoseidonSize"}
# What only depends on the shape of its input. Ranks call a step with batches of the same shape.
_OF_SHAPE = {"Shape", "Size", "Rank", "ZerosLike", "OnesLike"}
_RESOURCE = 20  # types_pb2.DT_RESOURCE


class Dependence:
    """Which tensors differ between ranks.

    Args:
        graph: The `Graph`.
        variables: Its `Variables`.
        summed: Tensors that are equal on all ranks, since they are summed over them; or a dictionary that says
            by which nodes each is read summed, None for all.
        local: Variables that are not equal on all ranks.
        trusts_shapes: Whether to take all shapes as equal on all ranks, not only those that are known.
    """

    def __init__(self, graph, variables, summed=(), local=(), trusts_shapes=False):
        self._graph = graph
        self._summed = summed if isinstance(summed, dict) else dict.fromkeys(summed)
        self._trusts_shapes = trusts_shapes
        local = frozenset(local)
        after = {}
        for reader, updates in variables.reads_after.items():
            for update in updates:
                after.setdefault(update.node, []).append(reader)
        queue = [node.name for node in graph.graph_def.node if _is_source(node)]
        queue += [reader for variable in local for reader in variables.reads[variable]]
        self._differing = set(queue)
        while queue:
            name = queue.pop()
            for consumer in self._graph.consumers(name):
                if consumer.name not in self._differing and self._takes(consumer, name):
                    self._differing.add(consumer.name)
                    queue.append(consumer.name)
            # A variable that was assigned what differs is read again in the same step.
            for reader in after.get(name, ()):
                if reader not in self._differing:
                    self._differing.add(reader)
                    queue.append(reader)

    def __call__(self, tensor):
        """Whether a tensor differs between ranks."""
        return graph_lib.node_of(tensor) in self._differing and not (
            tensor in self._summed and self._summed[tensor] is None)

    def read_by(self, name, tensor):
        """Whether a tensor differs as a node reads it, which may read the sum."""
        return graph_lib.node_of(tensor) in self._differing and not self._is_summed(tensor, name)

    def _is_summed(self, tensor, name):
        return tensor in self._summed and (self._summed[tensor] is None or name in self._summed[tensor])

    def differs(self, name):
        """Whether a node's outputs differ, but for those that are summed."""
        return name in self._differing

    def _takes(self, consumer, name):
        """Whether what `name` has decides what a consumer makes."""
        inputs = self._graph.inputs(consumer)
        if consumer.op in _OF_SHAPE:
            is_known = graph_lib.num_elements(self._graph.shape(inputs[0])) is not None
            if is_known or self._trusts_shapes or self._is_input(inputs[0]):
                return False
        if consumer.op == "Const":
            # In a branch: which one runs can decide between two constants.
            return self._graph.nodes[name].op in ("Identity", "Switch")
        return any(graph_lib.node_of(tensor) == name and not self._is_summed(tensor, consumer.name)
                   for tensor in inputs)

    def _is_input(self, tensor):
        node = self._graph.node(tensor)
        while node.op == "Identity":
            node = self._graph.node(self._graph.inputs(node)[0])
        return node.op.startswith("Placeholder")


def _is_source(node):
    """Whether a node's outputs differ between ranks, whatever its inputs."""
    if node.op in ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault"):
        return node.attr["dtype"].type != _RESOURCE
    if node.op in _PLAIN or node.op.startswith(("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply",
                                                "Apply", "Scatter", "SparseApply")):
        return False
    if "Random" in node.op:
        return True
    op_def = op_def_registry.get(node.op)
    return op_def is None or op_def.is_stateful
