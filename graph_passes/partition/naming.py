"""Names exchanged summands after the variables that are trained with them.

Requires: a flat graph. Ensures: a name is the path of a variable only where one variable alone fits.
"""

import collections

from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes.partition import propagate as propagate_lib
from tf_poseidon.graph_passes.partition.states import WHOLE

_PASSED_ON = ("Identity", "Switch", "Enter", "Merge", "Exit", "NextIteration")


def variables_of(propagated, sizes, paths):
    """Returns {tensor: path of the variable that is trained with it}.

    Args:
        propagated: The `Propagated` states.
        sizes: The `Sizes`.
        paths: The path of each variable, by the name of the node that its resource comes from. Of nodes that are
            not in it, the name of the node.
    """
    graph, found = sizes.graph, collections.defaultdict(set)
    used = _used(graph, propagated)
    for node in propagated.ordered:
        if not node.op.startswith(propagate_lib.UPDATES) or not graph.inputs(node):
            continue
        resource = _source(graph, graph.inputs(node)[0])
        if resource not in used:
            continue  # the slot of an optimizer
        for tensor in _behind(graph, sizes, node):
            found[tensor].add(paths.get(resource, resource))
    return {tensor: names.pop() for tensor, names in found.items() if len(names) == 1}


def _used(graph, propagated):
    """Returns the names of the resources that are read for what depends on rows."""
    used = set()
    for node in propagated.ordered:
        inputs = graph.inputs(node)
        if node.op == "ResourceGather" and propagated.states.get(node.name, WHOLE) != WHOLE:
            used.add(_source(graph, inputs[0]))
        if node.op != "ReadVariableOp":
            continue
        queue, seen = [node], set()
        while queue:
            reader = queue.pop()
            if reader.name in seen:
                continue
            seen.add(reader.name)
            if any(state != WHOLE for state in propagated.outcomes[reader.name].gives):
                used.add(_source(graph, inputs[0]))
                break
            if reader.op in ("ReadVariableOp", "Cast", "Reshape", "ExpandDims", *_PASSED_ON):
                queue += graph.consumers(reader.name)
    return used


def _source(graph, tensor):
    """Returns the name of the node that a resource comes from."""
    node, seen = graph.node(tensor), set()
    while node.op in _PASSED_ON and node.name not in seen:
        seen.add(node.name)
        node = graph.node(graph.inputs(node)[0])
    return node.name


def _behind(graph, sizes, update):
    """Returns the tensors of a variable's shape from which its new value is computed, element by element."""
    values = [t for t in graph.inputs(update)[1:]
              if propagate_lib.dtype_of(graph.node(t), graph_lib.output_of(t)) != types_pb2.DT_RESOURCE]
    shapes = {sizes.shape(tensor) for tensor in values if sizes.shape(tensor)}
    queue, seen = list(values), set()
    while queue:
        tensor = propagate_lib.canonical(queue.pop())
        if tensor in seen or sizes.shape(tensor) not in shapes:
            continue
        seen.add(tensor)
        queue += graph.inputs(graph.node(tensor))
    return seen
