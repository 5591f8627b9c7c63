"""Lists of tensors: their origins and their elements.

Requires: a flat graph. If two lists have an origin in common, what is put into either counts for both.

Tests: tests/graphs/test_partition_families.py, tests/graphs/test_row_loops.py.
"""

import collections
from collections.abc import Callable
from typing import TypeVar

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

# Ops that return a list that they take, changed or not: any of their inputs, or the first one.
_OF_ALL = ("Merge", "RefMerge", "AddN", "AddV2")
_OF_FIRST = ("TensorListSetItem", "TensorListPushBack", "TensorListPopBack", "TensorListResize", "Identity", "Switch",
             "Enter", "Exit", "NextIteration", "ZerosLike")
_OF_OTHER_LENGTH = ("TensorListPushBack", "TensorListPopBack", "TensorListResize", "TensorListScatterV2")
# What an op puts into the list that it returns: (number of the input, whether it stacks the elements).
PUTS = {"TensorListSetItem": (2, False), "TensorListPushBack": (1, False), "TensorListFromTensor": (0, True),
        "TensorListScatterV2": (0, True)}
# The input with the shape of the elements, by op that makes a list.
MAKES = {"EmptyTensorList": 0, "TensorListReserve": 0, "TensorListFromTensor": 1, "TensorListScatterV2": 2}
# By op that takes elements: (number of the input with their shape, whether it stacks them).
TAKES = {"TensorListGetItem": (2, False), "TensorListPopBack": (1, False), "TensorListStack": (1, True),
         "TensorListGather": (2, True)}

T = TypeVar("T")


class Lists:
    """Answers questions about the lists of one graph."""

    def __init__(self, graph: graph_lib.Graph) -> None:
        self._graph = graph
        self._origins: dict[str, tuple[tuple[str, ...], bool]] = {}
        self._puts = collections.defaultdict(list)  # by node that makes a list
        for node in graph.graph_def.node:
            if node.op in PUTS:
                tensor, is_together = PUTS[node.op]
                for origin in self.origins(node.name):
                    self._puts[origin].append((graph.inputs(node)[tensor], is_together, holds_lists(node)))

    def origins(self, tensor: str) -> tuple[str, ...]:
        """Returns the names of the nodes that make a list."""
        return self._found(tensor)[0]

    def has_length_of_origins(self, tensor: str) -> bool:
        """Whether a list has the length with which its origins made it."""
        return self._found(tensor)[1]

    def _found(self, tensor: str) -> tuple[tuple[str, ...], bool]:
        start = graph_lib.node_of(tensor)
        if start not in self._origins:
            queue, seen, origins, keeps_length = [start], set(), [], True
            while queue:
                node = self._graph.nodes[queue.pop()]
                if node.name in seen:
                    continue
                seen.add(node.name)
                may_grow = "resize_if_index_out_of_bounds"
                keeps_length &= node.op not in _OF_OTHER_LENGTH and not (
                    may_grow in node.attr and node.attr[may_grow].b)
                if node.op in _OF_ALL or node.op in _OF_FIRST or node.op == "TensorListGetItem" and holds_lists(node):
                    inputs = self._graph.inputs(node)
                    queue += map(graph_lib.node_of, inputs if node.op in _OF_ALL else inputs[:1])
                else:
                    origins.append(node.name)
            self._origins[start] = tuple(origins), keeps_length
        return self._origins[start]

    def element(self, tensor: str, of: Callable[[str], tuple[T, ...] | None]) -> tuple[T, ...] | None:
        """Returns the property that all elements put into a list share; None if they differ, or there are none.

        Args:
            tensor: The list.
            of: A function that returns a property of a tensor, such as its shape or value, as a tuple; or None.
        """
        elements = set(self.elements(tensor, of))
        return elements.pop() if len(elements) == 1 else None

    def elements(self, tensor: str, of: Callable[[str], tuple[T, ...] | None]) -> list[tuple[T, ...] | None]:
        """Returns the property of each tensor that is put into a list, or into a list in it; see `element`."""
        elements, queue, seen = [], list(self.origins(tensor)), set()
        while queue:
            origin = queue.pop()
            if origin in seen:
                continue
            seen.add(origin)
            for put, is_together, is_list_itself in self._puts[origin]:
                if is_list_itself:
                    queue += self.origins(put)
                    continue
                what = of(put)
                elements.append(what[1:] if what and is_together else what)
        return elements


def holds_lists(node: node_def_pb2.NodeDef) -> bool:
    """Whether an op works on lists of lists."""
    return "element_dtype" in node.attr and is_list(node.attr["element_dtype"].type)


def taken(node: node_def_pb2.NodeDef) -> str:
    """Returns the element that a node takes from a list."""
    return f"{node.name}:1" if node.op == "TensorListPopBack" else node.name


def is_list(dtype: int) -> bool:
    """Whether a `types_pb2.DataType` is that of lists."""
    return dtype == types_pb2.DT_VARIANT
