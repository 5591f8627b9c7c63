"""Shapes and values of the elements that are taken from lists, stacks and TensorArrays.

Tests: tests/graphs/test_sizes.py.
"""

from collections.abc import Collection
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import inference
from tf_poseidon.graph_passes.partition.containers import resource_stores as stores_lib
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.sizes import inferred_graph
from tf_poseidon.graph_passes.partition.sizes.inferred_graph import InferredGraph

# The maximum depth to which elements of lists are followed into other lists.
_MAX_NESTING = 5
# Types whose shapes say nothing about the contents of their elements.
_HANDLES = (types_pb2.DT_VARIANT, types_pb2.DT_RESOURCE)
# How a value begins that is to be compared as a tuple of integers.
_AS_TEXT = ("value",)
# An object that knows the elements of a list, a stack or a TensorArray.
_Keeper = lists_lib.Lists | stores_lib.Stores


def with_elements(generic: InferredGraph, infer: inference.Inference) -> InferredGraph:
    """Returns an `InferredGraph` in which elements taken from lists have the shapes, or values, of those put into them.

    They are read through a node that has that shape or value, `inferred_graph.element_node`. An element may be computed
    from one that was taken before, so an unknown size is first assumed to be that of the other elements, then verified.
    """
    if not any(node.op in lists_lib.TAKES or node.op in stores_lib.TAKES for node in generic.graph.graph_def.node):
        return generic
    doubted: set[str] = set()  # names of nodes for which that was wrong
    while True:
        result = _with_guessed_elements(generic, infer, doubted)
        keepers = _keepers(result.graph)
        wrong = {node.name for node in generic.graph.graph_def.node
                 if node.op in keepers and node.name not in doubted
                 and inferred_graph.element_node(node.name) in result.graph.nodes
                 and keepers[node.op].element(node.input[0], result.shape) is None}
        if not wrong:
            return result
        doubted |= wrong


def _with_guessed_elements(generic: InferredGraph, infer: inference.Inference,
                           doubted: Collection[str]) -> InferredGraph:
    for _ in range(_MAX_NESTING):
        graph, elements = generic.graph, {}
        keepers = _keepers(graph)
        for node in graph.graph_def.node:
            if node.op in keepers and _dtype_of_elements(node) not in _HANDLES:
                shown = _of_elements(generic, keepers[node.op], node, node.name in doubted)
                old = graph.nodes.get(inferred_graph.element_node(node.name))
                if shown is not None and (old is None or (old.op != "Const" and (
                        shown[1] is not None or _num_known(shown[0]) > _num_known(graph.shape(old.name))))):
                    elements[lists_lib.taken(node)] = shown
        if not elements:
            break
        result = graph_pb2.GraphDef()
        shown_before = {inferred_graph.element_node(graph_lib.node_of(tensor)) for tensor in elements}
        for node in graph.graph_def.node:
            if node.name in shown_before:
                continue
            added = result.node.add()
            added.CopyFrom(node)
            for i, tensor in enumerate(added.input):
                if tensor in elements:
                    added.input[i] = inferred_graph.element_node(graph_lib.node_of(tensor))
        result.versions.CopyFrom(graph.graph_def.versions)
        result.library.CopyFrom(graph.graph_def.library)
        for tensor, (shape, value) in elements.items():
            writer = graph_lib.Writer(inferred_graph.element_node(graph_lib.node_of(tensor)))
            dtype = _dtype_of_elements(graph.node(tensor))
            if value is None:
                writer.add("", "EnsureShape", [tensor], T=dtype, shape=shape)
            else:
                writer.constant("", value.astype(tf.as_dtype(dtype).as_numpy_dtype))
            result.node.extend(writer.nodes)
        generic = InferredGraph(inferred_graph.inferred(result, infer), generic.rows_nodes)
    return generic


def _keepers(graph: graph_lib.Graph) -> dict[str, _Keeper]:
    """Returns the object that knows the elements, by op that takes some from a list, a stack or a TensorArray."""
    return {**dict.fromkeys(lists_lib.TAKES, lists_lib.Lists(graph)),
            **dict.fromkeys(stores_lib.TAKES, stores_lib.Stores(graph))}


def _dtype_of_elements(node: node_def_pb2.NodeDef) -> int:
    return stores_lib.dtype_of_elements(node) if node.op in stores_lib.TAKES else node.attr["element_dtype"].type


def _num_known(shape: graph_lib.Shape | None) -> int:
    """Returns the number of known sizes of a shape, -1 if its rank is unknown."""
    return -1 if shape is None else sum(size is not None for size in shape)


def _of_elements(generic: InferredGraph, lists: _Keeper, node: node_def_pb2.NodeDef,
                 is_doubted: bool) -> tuple[graph_lib.Shape, np.ndarray | None] | None:
    """Returns (shape, value) of the element that a node takes from a list, value None if unknown; None if both are."""
    if is_doubted:
        elements = lists.element(node.input[0], generic.shape)
    else:
        elements = _unified(lists.elements(node.input[0], generic.shape))
    if elements is None:
        return None
    if node.op in stores_lib.TAKES and stores_lib.TAKES[node.op]:
        return ((generic.shape(generic.graph.inputs(node)[1]) or (None,))[0], *elements), None
    if node.op == "TensorArrayReadV3":  # elements that were never written are zeros
        return elements, None
    if node.op in lists_lib.TAKES and lists_lib.TAKES[node.op][1]:
        count = (generic.shape(node.name) or (None,))[0]
        if count is None and node.op == "TensorListStack" and isinstance(lists, lists_lib.Lists):
            count = _length(generic, lists, node.input[0])
        return (count, *elements), None
    value = lists.element(node.input[0], lambda tensor: _as_text(generic.value(tensor)))
    if value is None or value[:1] != _AS_TEXT:  # elements that were put into it together differ
        return elements, None
    return elements, np.array(value[1:], np.int64).reshape(elements)


def _length(generic: InferredGraph, lists: lists_lib.Lists, tensor: str) -> int | None:
    """Returns the number of elements of a list, None if it is unknown."""
    if not lists.has_length_of_origins(tensor):
        return None
    lengths = set()
    for node in map(generic.graph.node, lists.origins(tensor)):
        inputs = generic.graph.inputs(node)
        if node.op == "TensorListReserve":
            value = generic.value(inputs[1])
            lengths.add(None if value is None else int(value))
        else:
            shape = generic.shape(inputs[0]) if node.op == "TensorListFromTensor" else None
            lengths.add(shape[0] if shape else None)
    return lengths.pop() if len(lengths) == 1 else None


def _unified(shapes: Iterable[graph_lib.Shape | None]) -> graph_lib.Shape | None:
    """Returns the shape that unifies all shapes, from the sizes that some of them know; None if there is none."""
    ranked = [shape for shape in shapes if shape is not None]
    if len(set(map(len, ranked))) != 1:
        return None
    unified = []
    for sizes in zip(*ranked):
        known_sizes = {size for size in sizes if size is not None}
        if len(known_sizes) > 1:
            return None
        unified.append(known_sizes.pop() if known_sizes else None)
    return tuple(unified)


def _as_text(value: np.ndarray | None) -> tuple[str | int, ...] | None:
    """Returns an array of integers as a hashable tuple; None for None."""
    return None if value is None else (*_AS_TEXT, *map(int, value.flatten()))
