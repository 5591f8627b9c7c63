"""Names exchanged summands after the variables that are trained with them, or that accumulate them, as in metrics.

Requires: a flat graph. Ensures: a name is the path of a variable only if exactly one variable fits.

Tests: tests/graphs/test_partition.py, tests/saved/test_saved_graphs.py.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.propagate import own_values
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import WHOLE

_READS = ("ReadVariableOp",)
_RESHAPED = ("Cast", "Reshape", "ExpandDims", "Squeeze")
_REFERENCES = ("VariableV2", "Variable")  # of TensorFlow 1


def variables_of(propagated: propagate_lib.Propagated, sizes: Sizes,
                 paths: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns (trained, accumulated), by tensor: the path of the variable that it trains, or that accumulates it.

    Args:
        propagated: The `Propagated` states.
        sizes: The `Sizes`.
        paths: The path of each variable, by the name of the node from which its resource comes. Others are named
            after their node.
    """
    graph = sizes.graph
    trained: collections.defaultdict[str, set[str]] = collections.defaultdict(set)
    accumulated: collections.defaultdict[str, set[str]] = collections.defaultdict(set)
    used = _used(graph, propagated)
    updates = collections.defaultdict(list)
    for node in propagated.ordered:
        if _is_update(node) and graph.inputs(node):
            updates[variables_lib.source(graph, graph.inputs(node)[0])].append(node)
    for resource, nodes in updates.items():
        names = trained if resource in used else accumulated  # an optimizer's slot leads to its variable's tensor
        for tensor in _behind(graph, sizes, nodes, updates, used):
            names[tensor].add(paths.get(resource, resource))
    return _of_one(trained), {tensor: name for tensor, name in _of_one(accumulated).items() if tensor not in trained}


def _of_one(names: Mapping[str, set[str]]) -> dict[str, str]:
    """Returns the names of the tensors that have exactly one."""
    return {tensor: min(paths) for tensor, paths in names.items() if len(paths) == 1}


def _is_update(node: node_def_pb2.NodeDef) -> bool:
    return node.op.startswith(propagate_lib.UPDATES)


def _used(graph: graph_lib.Graph, propagated: propagate_lib.Propagated) -> set[str]:
    """Returns the names of the resources whose values are combined with rows."""
    used = set()
    for node in propagated.ordered:
        inputs = graph.inputs(node)
        if node.op == "ResourceGather" and propagated.states.get(node.name, WHOLE) != WHOLE:
            used.add(variables_lib.source(graph, inputs[0]))
        if node.op not in (*_READS, *_REFERENCES):
            continue
        source = variables_lib.source(graph, inputs[0]) if node.op in _READS else node.name
        queue, seen = [node], set()
        while queue:
            reader = queue.pop()
            if reader.name in seen:
                continue
            seen.add(reader.name)
            if any(state != WHOLE and not isinstance(state, (Shard, Owned))
                   for state in propagated.outcomes[reader.name].gives):
                used.add(source)
                break
            if reader.op in (*_READS, *_REFERENCES, *_RESHAPED, *variables_lib.PASSED_ON, own_values.BEGINS):
                queue += graph.consumers(reader.name)
    return used


def _behind(graph: graph_lib.Graph, sizes: Sizes, nodes: Iterable[node_def_pb2.NodeDef],
            updates: Mapping[str, Sequence[node_def_pb2.NodeDef]], used: Collection[str]) -> set[str]:
    """Returns the tensors from which the new value of a variable is computed element by element.

    Args:
        graph: The `indexed_graph.Graph`.
        sizes: Its `Sizes`.
        nodes: The updates of the variable.
        updates: The updates of all variables, by name of the resource.
        used: The resources that are not slots. A value that is read from a slot leads to the slot's updates.
    """
    values = [tensor for node in nodes for tensor in _values(graph, node)]
    shapes = {sizes.shape(tensor) for tensor in values} - {None}
    queue, seen = list(values), set()
    while queue:
        tensor = tensors.canonical(queue.pop())
        node = graph.node(tensor)
        if tensor in seen:
            continue
        if node.op in _READS or node.op.startswith("Assign"):
            seen.add(tensor)
            source = variables_lib.source(graph, graph.inputs(node)[0])
            queue += [value for update in (() if source in used else updates.get(source, ()))
                      for value in _values(graph, update)]
        elif sizes.shape(tensor) in shapes:
            seen.add(tensor)
            inputs = graph.inputs(node)
            queue += [inputs[graph_lib.output_of(tensor)]] if node.op == "IdentityN" else inputs
            if node.op == "UnsortedSegmentSum":  # the gradient of an embedding
                seen.add(tensors.canonical(inputs[0]))
    return seen


def _values(graph: graph_lib.Graph, update: node_def_pb2.NodeDef) -> list[str]:
    """Returns the inputs of an update that are not variables."""
    return [tensor for tensor in graph.inputs(update)[1:] if tensors.dtype_of(
        graph.node(tensor), graph_lib.output_of(tensor)) != types_pb2.DT_RESOURCE
            and graph.node(tensor).op not in _REFERENCES]
