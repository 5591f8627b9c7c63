"""Undoes what a rewritten graph was given: the exact inverse of `unflatten.py`."""

from tensorflow.core.framework import graph_pb2

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import unflatten


def is_rewritten(graph_def):
    """Whether a GraphDef holds what the passes insert, or any note of theirs."""
    nodes = [*graph_def.node, *(node for f in graph_def.library.function for node in f.node_def)]
    return any(note in node.attr for node in nodes for note in unflatten.NOTES)


def strip(graph_def):
    """Returns the GraphDef that a rewritten one was made of.

    Raises:
        PoseidonError: If the notes of that are damaged.
    """
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    _strip(result.node, {})
    for function in result.library.function:
        first = function.node_def[0].attr if function.node_def else {}
        if unflatten.WAS_STATELESS in first:
            function.signature.is_stateful = False
            del first[unflatten.WAS_STATELESS]
        _strip(function.node_def, function.ret)
    return result


def _strip(nodes, returns):
    inserted = {node.name: _replaced(node) for node in nodes if unflatten.INSERTED in node.attr}
    kept = [node for node in nodes if unflatten.INSERTED not in node.attr]
    for node in kept:
        inputs = [_restored(tensor, inserted) for tensor in node.input]
        node.input[:] = [tensor for tensor in inputs if tensor is not None]
        if unflatten.WAS in node.attr:
            node.op = _text(node.attr[unflatten.WAS].s, node)
            del node.attr[unflatten.WAS]
    for name, tensor in list(returns.items()):
        returns[name] = _restored(tensor, inserted)
    kept = [type(node).FromString(node.SerializeToString()) for node in kept]
    del nodes[:]
    nodes.extend(kept)


def _replaced(node):
    """Returns what was read in the place of an inserted node: tensors by its own."""
    notes = [_text(note, node).split(" ") for note in (
        node.attr[unflatten.REPLACES].list.s if unflatten.REPLACES in node.attr else ())]
    if any(len(note) != 2 for note in notes):
        raise _damaged(node.name)
    return dict(notes)


def _restored(tensor, inserted):
    """Returns the tensor that was read before; None of a control edge that was not there."""
    name = graph_lib.node_of(tensor)
    if name not in inserted:
        return tensor
    if graph_lib.is_control(tensor):
        return None
    replaces = inserted[name]
    if tensor in replaces:
        return replaces[tensor]
    if (own := tensor.removesuffix(":0")) not in replaces:
        raise _damaged(name)
    return replaces[own] + ":0"  # the same in a graph, but not the same text


def _text(note, node):
    try:
        return note.decode()
    except UnicodeDecodeError as error:
        raise _damaged(node.name) from error


def _damaged(name):
    return PoseidonError(f"What node {name!r} says about the graph that was rewritten is damaged; take that "
                         "graph, or rewrite it anew.")
