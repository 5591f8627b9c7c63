"""Finds the states of a graph, as `Propagation` does, and where its summands become whole: where that costs least.

Requires: a flat graph, and sizes. Ensures: of all sets of tensors whose exchange makes everything whole that must be,
one with the least cost is exchanged, if each tensor is seen in one state by all its readers, and each op runs on
summands, or on what has become whole.

Between the ops that make summands and those that need whole values lie ops that are linear in them, which may run on
either. That is a network: a node for each summand, from which an edge leads to each summand that is computed from it,
whose capacity is the cost of exchanging that one. A set of exchanges that makes everything whole is a cut of the
network, and its cost is the capacity of the cut. Edges that no cut passes keep those nodes on one side which must be:
the inputs of an op are summands together, and what it computes is a summand only if they are.

Tests: tests/graphs/test_partition_cuts.py, tests/graphs/test_partition.py, tests/graphs/test_partition_tables.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import math

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.base import minimum_cut
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.graph.tensors import canonical
from tf_poseidon.graph_passes.graph.tensors import tensor_of
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.propagate import loop_merges
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.graph_passes.partition.propagate.propagation import Propagated
from tf_poseidon.graph_passes.partition.rules import stores
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

# Ops that return a multiple of a summand, or the summand itself.
_SCALES = ("Mul", "RealDiv", "Neg", "Identity", "IdentityN")
# Ops behind which a product of rows can still be exchanged as factors: of one product, and of several.
_BEHIND_PRODUCT = (*_SCALES, "Reshape", "Cast")
_SUMS = ("Add", "AddV2", "AddN")
# The bytes that take as long as a message has to by itself.
_MESSAGE = 256
# How many iterations a loop is expected to have.
_ITERATIONS = 100
# More than any exchange costs, of which the shape is known; and more than all exchanges of a graph.
_UNKNOWN, _NEVER = 1 << 64, 1 << 128


def propagate(sizes: Sizes, held: Mapping[str, State] | None = None, fetches: Iterable[str] = (),
              kept: Iterable[str] = (), dividing: Mapping[str, Outcome] | None = None,
              row_loops: Mapping[str, Outcome] | None = None) -> Propagated:
    """Returns the `Propagated` states of a graph.

    Args:
        sizes: Its `Sizes`.
        held, dividing, row_loops: Same as in `propagation.Propagation`.
        fetches: Names of the tensors that must be whole.
        kept: Names of the nodes that may be read outside of the graph, and then must be whole.
    """
    propagation = propagate_lib.Propagation(sizes, held, dividing, row_loops)
    late = propagation.run()
    whole, gathered = _Network(sizes, late, fetches, kept).cut()
    return propagation.run(whole, gathered) if whole or gathered else late


class _Network:
    """The summands of a graph, if each becomes whole as late as possible."""

    def __init__(self, sizes: Sizes, late: Propagated, fetches: Iterable[str], kept: Iterable[str]) -> None:
        self._sizes = sizes
        self._graph = sizes.graph
        self._late = late
        self._fetched = set(map(canonical, fetches))
        self._read_outside = {*map(graph_lib.node_of, self._fetched), *map(graph_lib.node_of, kept)}
        self._edges: collections.defaultdict[str, dict[str, int]] = collections.defaultdict(dict)
        self._sources: dict[str, int] = {}
        self._sinks: dict[str, int] = {}
        self._needed: set[str] = set()  # summands that some op needs whole
        # By summand: the summands that its op takes, in the order of the graph.
        self._made_of: dict[str, list[str]] = {}
        self._gathered: set[str] = set()  # summands of rows that are cheaper to gather

    def cut(self) -> tuple[frozenset[str], frozenset[str]]:
        """Returns (the summands that become whole, the nodes that run whole because their rows are gathered).

        Both are empty if the summands that some op needs whole are the cut.
        """
        for node in self._late.ordered:
            self._add(node)
        self._add_costs()
        self._sinks.update(dict.fromkeys((*self._needed, *(self._fetched & self._made_of.keys())), _NEVER))
        behind = minimum_cut.behind(self._edges, self._sources, self._sinks)
        first = {tensor for tensor in behind & self._made_of.keys()
                 if tensor in self._sources or self._made_of[tensor] and behind.isdisjoint(self._made_of[tensor])}
        if first <= self._needed - self._gathered:
            return frozenset(), frozenset()
        gathered = first & self._gathered
        return frozenset(first - gathered), frozenset(map(graph_lib.node_of, gathered))

    def _add(self, node: node_def_pb2.NodeDef) -> None:
        """Adds the summands of a node, and what connects those that it takes."""
        outcome = self._late.outcomes[node.name]
        inputs = list(map(canonical, self._graph.inputs(node)))
        given = [tensor_of(node.name, i) for i, state in enumerate(outcome.gives) if isinstance(state, Partial)]
        taken = []
        for tensor, takes in zip(inputs, outcome.takes):
            if not isinstance(self._late.states.get(tensor), Partial):
                continue
            if takes == WHOLE or isinstance(takes, (Shard, Owned, Columns)):
                self._needed.add(tensor)
            elif given or takes is not None and outcome.gives:  # variables that hold summands take them as they are
                taken.append(tensor)
        for tensor in given:
            made_of = [inputs[graph_lib.output_of(tensor)]] if node.op == "IdentityN" else taken
            self._made_of[tensor] = list(dict.fromkeys(made_of))
        if node.op == "IdentityN":
            return
        for tensor in taken[1:]:
            self._edges[taken[0]][tensor] = self._edges[tensor][taken[0]] = _NEVER
        lists = list(filter(self._is_list, (*taken, *given)))
        if lists or node.op in stores.RULES:
            # What is in a list, a stack or a TensorArray is exchanged when it has been taken from there.
            self._sources.update(dict.fromkeys((*taken, *lists), _NEVER))
        elif taken and not given:  # it sums them over the ranks itself
            self._sinks[taken[0]] = self._sinks.get(taken[0], 0) + self._cost(node.name, self._itemsize(taken[0]))

    def _add_costs(self) -> None:
        """Adds the costs of the exchanges."""
        itemsizes, factors = self._itemsizes(), self._factors()
        for tensor, made_of in self._made_of.items():
            node = self._graph.node(tensor)
            cost = self._cost(tensor, itemsizes[tensor], factors.get(tensor))
            if node.op == "UnsortedSegmentSum" and not made_of:
                gathered = self._cost(tensor, itemsizes[tensor], self._bytes_of_rows(node, [0]))
                if gathered < cost:
                    self._gathered.add(tensor)
                    cost = gathered
            if made_of:
                self._edges[made_of[0]].setdefault(tensor, cost)
            elif node.op not in loop_merges.HANDS_OVER:  # it is no whole value that a loop begins with
                self._sources.setdefault(tensor, cost)
            for source in made_of:
                self._edges[tensor][source] = _NEVER

    def _cost(self, tensor: str, itemsize: int, other_bytes: float | None = None) -> int:
        """Returns twice the cost of an exchange in bytes, and one more where the one before a multiple is better.

        A summand is available earlier than its multiple, and a bias' gradient is the sum of a factor's rows, which
        multiples do not share.

        Args:
            tensor: The summand.
            itemsize: The bytes of each element.
            other_bytes: The bytes by another way, None if there is no other.
        """
        node, shape = self._graph.node(tensor), self._sizes.likely_shape(tensor)
        if shape is None or node.op in loop_merges.MERGES or self._is_list(tensor):
            return _UNKNOWN
        num_bytes = itemsize * math.prod(shape)
        if other_bytes is not None:
            num_bytes = min(num_bytes, other_bytes)
        iterations = _ITERATIONS ** self._late.frames[node.name].depth
        return 2 * iterations * (_MESSAGE + round(num_bytes)) + (node.op in _SCALES)

    def _itemsizes(self) -> dict[str, int]:
        """Returns the bytes of each element of each summand, in the type to which it is cast before it is whole.

        So no sum is rounded to a type narrower than that, unless the graph itself rounds it so.
        """
        itemsizes = {tensor: self._itemsize(tensor) for tensor in self._made_of}
        for tensor, made_of in reversed(self._made_of.items()):
            if not self._is_undone(self._graph.node(tensor)):
                itemsizes.update({source: max(itemsizes[source], itemsizes[tensor]) for source in made_of})
        return itemsizes

    def _itemsize(self, tensor: str) -> int:
        return tf.as_dtype(self._dtype(tensor)).size or 0

    def _is_undone(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a node is a cast from half precision that all that reads it casts back."""
        if node.op != "Cast" or node.attr["SrcT"].type not in graph_lib.HALVES or node.name in self._read_outside:
            return False
        return all(reader.op == "Cast" and reader.attr["DstT"].type == node.attr["SrcT"].type
                   for reader in self._graph.consumers(node.name))

    def _factors(self) -> dict[str, float]:
        """Returns the bytes of summands if they travel as factors, by summand: of those for which these are known."""
        factors: dict[str, float] = {}
        for tensor, made_of in self._made_of.items():
            node = self._graph.node(tensor)
            parts = [factors.get(source) for source in made_of]
            if self._late.frames[node.name] != frames_lib.ROOT:
                continue
            if not made_of:
                parts = [self._bytes_of_factors(node)]
            elif node.op not in (_SUMS if len(made_of) > 1 else _BEHIND_PRODUCT) or any(
                    self._sizes.usual_elements(source) != self._sizes.usual_elements(tensor) for source in made_of):
                continue
            known_parts = [part for part in parts if part is not None]
            if len(known_parts) == len(parts):
                factors[tensor] = sum(known_parts)
        return factors

    def _bytes_of_factors(self, node: node_def_pb2.NodeDef) -> float | None:
        """Returns the bytes of the factors of a product over rows; None if it is none, or they are unknown."""
        if node.op == "Sum":  # over the batch of a product of batches
            node = self._graph.node(node.input[0])
            is_product = node.op.startswith("BatchMatMul")
        else:
            is_product = node.op in ("MatMul", "Einsum") and len(self._graph.inputs(node)) == 2
        return self._bytes_of_rows(node, [0, 1]) if is_product else None

    def _bytes_of_rows(self, node: node_def_pb2.NodeDef, numbers: Sequence[int]) -> float | None:
        """Returns the bytes for which the rows of some inputs count in a usual batch, None if unknown.

        That is half of them: rows travel once, summands to a server and back.
        """
        tensors = [canonical(self._graph.inputs(node)[i]) for i in numbers]
        tensor_bytes = [elements * self._itemsize(tensor) for tensor in tensors
                        if self._sizes.usual_rows and isinstance(self._late.states.get(tensor), Rows)
                        and (elements := self._sizes.usual_elements(tensor)) is not None]
        return sum(tensor_bytes) / 2 if len(tensor_bytes) == len(tensors) else None

    def _is_list(self, tensor: str) -> bool:
        return lists_lib.is_list(self._dtype(tensor))

    def _dtype(self, tensor: str) -> int:
        return tensors.dtype_of(self._graph.node(tensor), graph_lib.output_of(tensor))
