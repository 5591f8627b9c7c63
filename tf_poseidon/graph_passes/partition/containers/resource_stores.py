"""Stacks and TensorArrays of TensorFlow 1: which one an op works on, and what is put into it.

Requires: a flat graph. Ensures: a handle that may be one of several, or that an unknown op takes, counts as unknown.

Loops keep in stacks what their gradient needs, and read and write TensorArrays. Both are resources, whose state is that
of everything put into them. The gradient of a TensorArray is a TensorArray too; for elements that are not written, it
returns zeros in the shape of the array's own element. So an array and its gradients all have rows, or none has.

Tests: tests/graphs/test_partition_stores.py, tests/graphs/test_partition_families.py.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import dataclasses
from typing import TypeVar

from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_MAKES = ("StackV2", "TensorArrayV3")
_GRADIENT, _PUSH, _POP = "TensorArrayGradV3", "StackPushV2", "StackPopV2"
# What an op puts in: (number of the input, whether it stacks the elements).
PUTS = {_PUSH: (1, False), "TensorArrayWriteV3": (2, False), "TensorArrayScatterV3": (2, True)}
# Whether an op stacks the elements that it takes.
TAKES = {_POP: False, "TensorArrayReadV3": False, "TensorArrayGatherV3": True}
SIZE = "TensorArraySizeV3"
# Ops that use no elements, and ops that do but have no rule: stacks and arrays of the latter are whole.
_UNSEEING = (_GRADIENT, SIZE, "StackCloseV2", "TensorArrayCloseV3")
_WITHOUT_RULE = ("TensorArrayConcatV3", "TensorArraySplitV3", "TensorArrayGradWithShape")
# All ops that work on a stack or array, which is their first input.
_ON = (*PUTS, *TAKES, *_UNSEEING, *_WITHOUT_RULE)
_HANDS_ON = ("Enter", "Exit", "Identity", "Switch", "Merge", "NextIteration")
# Elements of these types are whole: handles and lists have no rows of their own, and strings cannot be gathered.
NO_NUMBERS = (types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT, types_pb2.DT_STRING)
# How many nested gradients of an array are followed.
_MAX_GRADIENTS = 2

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Store:
    """A stack, a TensorArray, or a gradient of one.

    Attributes:
        origin: Name of the node that makes the stack or array.
        sources: The calls of a gradient function that made it: () for the array itself, ("gradients",).
    """

    origin: str
    sources: tuple[str, ...] = ()


class Stores:
    """Answers questions about the stacks and TensorArrays of one graph.

    Attributes:
        unknown: Names of the nodes that make stacks and arrays with unknown uses.
        nodes: The names of all nodes that work on a stack or array, by name of the node that makes it.
    """

    def __init__(self, graph: graph_lib.Graph) -> None:
        self._graph = graph
        # The `Store`s on which a node may work, by node.
        self._on: collections.defaultdict[str, set[Store]] = collections.defaultdict(set)
        # The `Store`s whose handles a stack holds, by stack.
        self._held: collections.defaultdict[Store, set[Store]] = collections.defaultdict(set)
        # The `Store`s whose handles a node may return, by node.
        self._carried: collections.defaultdict[str, set[Store]] = collections.defaultdict(set)
        self.unknown: set[str] = set()
        self.nodes: dict[str, list[str]] = {}
        makers = [node.name for node in graph.graph_def.node if node.op in _MAKES]
        if makers:
            self._follow(makers)

    def of(self, name: str) -> Store | None:
        """Returns the `Store` on which a node works; None if it works on none, or on an unknown one."""
        stores = self._on.get(name, ())
        return next(iter(stores)) if len(stores) == 1 else None

    @property
    def all(self) -> set[Store]:
        """All `Store`s on which some node works."""
        return set().union(*self._on.values())

    def states(self, seen: Callable[[str], State]) -> dict[Store, State]:
        """Returns the state of each `Store`, which follows from what is put into it.

        Stores of whole values only are not in the result. Values in conflicting states must be whole.

        Args:
            seen: A function that returns the state in which readers see a tensor.
        """
        put: dict[str, dict[Store, set[State | None]]] = {}  # by origin, by `Store`: states
        for name, stores in self._on.items():
            node = self._graph.nodes[name]
            for store in stores:
                states = put.setdefault(store.origin, {}).setdefault(store, set())
                if node.op in PUTS:
                    states.add(state_put(node, list(map(seen, self._graph.inputs(node)))))
        result: dict[Store, State | None] = {}
        for origin, by_store in put.items():
            is_unknown = origin in self.unknown
            result.update(dict.fromkeys(by_store, WHOLE) if is_unknown else self._agreed(origin, by_store))
        return {store: state for store, state in result.items() if state is not None}

    def _agreed(self, origin: str, put: Mapping[Store, set[State | None]]) -> Mapping[Store, State | None]:
        """Returns the common states of an array and its gradients, by `Store`, given the states of their elements."""
        together = set().union(*put.values()) - {WHOLE}
        rows = {state for state in together if isinstance(state, Rows)}
        if not rows and None not in together:
            return {store: _of_summands(store, states - {WHOLE}) for store, states in put.items()}
        if len(together) > 1 or None in together or not self._can_hold(origin, *rows):
            return dict.fromkeys(put, WHOLE)
        return dict.fromkeys(put, *rows)

    def _can_hold(self, origin: str, rows: Rows) -> bool:
        """Whether the shape that is given for elements, if any, leaves the number of rows open."""
        shape = element_shape(self._graph.nodes[origin])
        return shape is None or rows.dimension < len(shape) and shape[rows.dimension] is None

    def elements(self, tensor: str, of: Callable[[str], tuple[T, ...] | None]) -> list[tuple[T, ...] | None]:
        """Returns the property of each tensor that is put into a stack or array, or gradients of it.

        Args:
            tensor: The handle.
            of: A function that returns a property of a tensor, such as its shape or value, as a tuple; or None.
        """
        origins = {store.origin for store in self._carried.get(graph_lib.node_of(tensor), ())}
        if len(origins) != 1 or origins & self.unknown:
            return []
        elements = []
        for node in self._putting(origins):
            put, is_together = PUTS[node.op]
            what = of(self._graph.inputs(node)[put])
            elements.append(what[1:] if what and is_together else what)
        return elements

    def _putting(self, origins: Iterable[str]) -> list[node_def_pb2.NodeDef]:
        """Returns the nodes that put something into stacks or arrays, or gradients of them."""
        nodes = [self._graph.nodes[name] for origin in origins for name in self.nodes[origin]]
        return [node for node in nodes if node.op in PUTS]

    def element(self, tensor: str, of: Callable[[str], tuple[T, ...] | None]) -> tuple[T, ...] | None:
        """Returns the property that all elements share; None if they differ, or there are none."""
        elements = set(self.elements(tensor, of))
        return elements.pop() if len(elements) == 1 else None

    def puts_into_what(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the names of the nodes that put elements into the stack or array from which a node takes some."""
        if node.op not in TAKES:
            return []
        return [node.name for node in self._putting({store.origin for store in self._on.get(node.name, ())})]

    def size(self, name: str) -> str | None:
        """Returns the tensor with the size of a node's array; None if there is none, or the array may grow."""
        store = self.of(name)
        if store is None or store.origin in self.unknown:
            return None
        node = self._graph.nodes[store.origin]
        return None if node.op not in _MAKES[1:] or node.attr["dynamic_size"].b else self._graph.inputs(node)[0]

    def _follow(self, makers: Sequence[str]) -> None:
        """Follows handles from their origins to the ops that work on them."""
        queue, are_all_unknown = [], False

        def carry(name: str, stores: Set[Store]) -> None:
            for store in stores - self._carried[name]:
                self._carried[name].add(store)
                queue.append((name, store))

        for maker in makers:
            carry(maker, {Store(maker)})
        while queue:
            name, store = queue.pop()
            for reader, i in self._readers(name):
                if reader.op in _ON and i == 0:
                    self._on[reader.name].add(store)
                if reader.op in _HANDS_ON:
                    carry(reader.name, {store})
                elif reader.op == _PUSH:  # loops within loops keep handles in stacks, too
                    if i == 1:
                        carry(reader.name, {store})
                    for stack in self._on[reader.name]:
                        if self._carried[reader.name] - self._held[stack]:
                            self._held[stack] |= self._carried[reader.name]
                            for pop in [name for name, stores in self._on.items() if stack in stores]:
                                if self._graph.nodes[pop].op == _POP:
                                    carry(pop, self._held[stack])
                elif reader.op == _POP:
                    carry(reader.name, self._held[store])
                elif reader.op == _GRADIENT and len(store.sources) < _MAX_GRADIENTS:
                    carry(reader.name, {Store(store.origin, (*store.sources, reader.attr["source"].s.decode()))})
                elif reader.op == _GRADIENT or reader.op in _WITHOUT_RULE:
                    self.unknown.add(store.origin)
                elif reader.op not in _ON:
                    are_all_unknown = True  # it may return any handle
        self.nodes = {maker: [] for maker in makers}
        for name, stores in self._on.items():
            for origin in {store.origin for store in stores}:
                self.nodes[origin].append(name)
            if len(stores) > 1:
                self.unknown |= {store.origin for store in stores}
        if are_all_unknown:
            self.unknown = set(makers)

    def _readers(self, name: str) -> list[tuple[node_def_pb2.NodeDef, int]]:
        """Returns (node, number of the input) for each reader of a node's handle."""
        has_others = self._graph.nodes[name].op != "Switch"  # a flow, or a number
        return [(reader, i) for reader in self._graph.consumers(name)
                for i, tensor in enumerate(self._graph.inputs(reader))
                if graph_lib.node_of(tensor) == name and not (has_others and graph_lib.output_of(tensor))]


def state_put(node: node_def_pb2.NodeDef, states: Sequence[State | None]) -> State | None:
    """Returns the state of an element that a node puts in, given those of its inputs; None if it must be whole."""
    tensor, is_together = PUTS[node.op]
    state = states[tensor]
    if not (is_together and isinstance(state, Rows)):
        return state
    return Rows(state.dimension - 1, state.blocks) if state.dimension else None


def _of_summands(store: Store, states: set[State | None]) -> State | None:
    """Returns the state of a `Store` of summands, None if nothing is put into it."""
    if not states:
        return None
    # Elements that are put into the same place of a gradient are added.
    return states.pop() if len(states) == 1 and (states == {SUM} or not store.sources) else WHOLE


def element_shape(node: node_def_pb2.NodeDef) -> graph_lib.Shape | None:
    """Returns the shape that a node requires of elements: a tuple with None for any size; None for any shape."""
    if "element_shape" not in node.attr or node.attr["element_shape"].shape.unknown_rank:
        return None
    return tuple(None if d.size < 0 else d.size for d in node.attr["element_shape"].shape.dim)


def dtype_of_elements(node: node_def_pb2.NodeDef) -> int:
    """Returns the `types_pb2.DataType` of the elements that a node takes."""
    return node.attr["elem_type" if node.op == _POP else "dtype"].type
