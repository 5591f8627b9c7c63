"""Finds the states of a graph, as `cuts` does, but divides products of whole tensors among the ranks.

Requires: a flat graph, and sizes. Ensures: products and convolutions whose inputs are whole, but have a size for each
row, such as noise that a step draws, or what an op without a rule has made, take this rank's part of the rows, unless
what follows needs so many of their rows on all ranks that computing all of them there is likely to be faster.

Tests: tests/graphs/test_partition_dividing.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import math

import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import rules
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import of_rows
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.propagate import cuts
from tf_poseidon.graph_passes.partition.propagate.propagation import Propagated
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

# A divided region must have so many additions and multiplications for each byte that is gathered from it: those of
# a rank of 1 TFLOP/s, in the time of a byte at 10 Gbit/s, the defaults of `planning.Cluster`.
_OPERATIONS_PER_BYTE = 800
# How often the graph is propagated at most; each time, fewer nodes divide.
_ROUNDS = 5


def propagate(sizes: Sizes, held: Mapping[str, State] | None = None, fetches: Iterable[str] = (),
              kept: Iterable[str] = (), row_loops: Mapping[str, Outcome] | None = None) -> Propagated:
    """Returns the `Propagated` states of a graph; the arguments are those of `cuts.propagate`."""
    fetches, kept, row_loops = list(fetches), list(kept), row_loops or {}
    whole = cuts.propagate(sizes, held, fetches, kept, row_loops=row_loops)
    dividing = {name: outcome for name, outcome in _candidates(sizes, whole).items() if name not in row_loops}
    for _ in range(_ROUNDS):
        if not dividing:
            break
        divided = cuts.propagate(sizes, held, fetches, kept, dividing, row_loops)
        worse = set(_Regions(sizes, whole, divided, dividing).that_do_not_pay((*fetches, *kept)))
        if not worse:
            return divided
        dividing = {name: outcome for name, outcome in dividing.items() if name not in worse}
    return whole


def _candidates(sizes: Sizes, whole: Propagated) -> dict[str, Outcome]:
    """Returns how nodes run that may divide whole inputs, by name."""
    candidates: dict[str, Outcome] = {}
    rows_nodes = poseidon_rows.find(sizes.graph.graph_def)
    if len(rows_nodes) > 1:  # whole tensors do not say whose number of rows is theirs
        return candidates
    home = whole.frames[rows_nodes[0].name]
    for node in whole.ordered:
        inputs = sizes.graph.inputs(node)
        if node.op in rules.DIVIDING and whole.frames[node.name].within(home) and all(
                _state(whole, tensor) == WHOLE for tensor in inputs):
            outcome = _divided(sizes, node, list(map(tensors.canonical, inputs)))
            if outcome:
                candidates[node.name] = outcome
    return candidates


def _divided(sizes: Sizes, node: node_def_pb2.NodeDef, inputs: Sequence[str]) -> Outcome | None:
    """Returns how a node runs on rows of one of its inputs, or of several; None if it cannot, or gives no rows."""
    for i, dimension in ((i, d) for i, tensor in enumerate(inputs) for d in range(len(sizes.shape(tensor) or ()))):
        if not _has_rows(sizes, inputs[i], dimension):
            continue
        states = tuple(Rows(dimension) if j == i else WHOLE for j in range(len(inputs)))
        outcome = rules.RULES[node.op](Case(node, inputs, states, 1, sizes))
        if outcome and isinstance(outcome.gives[0], Rows) and all(
                _has_rows(sizes, tensor, takes.dimension)
                for tensor, takes in zip(inputs, outcome.takes) if isinstance(takes, Rows)):
            return outcome
    return None


def _has_rows(sizes: Sizes, tensor: str, dimension: int) -> bool:
    """Whether a whole tensor can be divided along a dimension."""
    shape = sizes.shape(tensor)
    return shape is not None and dimension < len(shape) and of_rows(shape[dimension])


def _state(propagated: Propagated, tensor: str) -> object:
    return propagated.states.get(tensors.canonical(tensor), WHOLE)


class _Regions:
    """The parts of a graph that are computed by rows because some nodes divide.

    A region ends at a tensor that is made whole, by a gather or a sum, and begins where whole tensors are divided.
    """

    def __init__(self, sizes: Sizes, whole: Propagated, divided: Propagated, dividing: Collection[str]) -> None:
        """Makes the regions.

        Args:
            sizes: The `Sizes`.
            whole: The states if nothing divides.
            divided: The states if some nodes do.
            dividing: The names of these nodes.
        """
        self._sizes = sizes
        self._whole = whole
        self._found = divided
        self._dividing = dividing
        self._inputs = {node.name: sizes.graph.inputs(node) for node in divided.ordered}
        self._home = divided.frames[poseidon_rows.find(sizes.graph.graph_def)[0].name]

    def that_do_not_pay(self, fetches: Iterable[str]) -> Iterator[str]:
        """Yields the names of the nodes that should not divide; `fetches` are the tensors that must be whole, too."""
        # Whole, or made whole on the way to other rows.
        exchanged = {tensors.canonical(tensor): node.name for node in self._found.ordered
                     for tensor, takes in zip(self._inputs[node.name], self._found.outcomes[node.name].takes)
                     if takes not in (None, HELD, _state(self._found, tensor))}
        exchanged |= {tensor: graph_lib.node_of(tensor) for tensor in map(tensors.canonical, fetches)}
        for tensor, reader in exchanged.items():
            state = _state(self._found, tensor)
            if state == WHOLE:
                continue
            # No node needs its own values whole, unless it was given rows, or summands, besides.
            region = self._region(self._inputs[reader] if state == OWN else [tensor])
            divided = region & set(self._dividing)
            if divided and not self._pays(tensor, region):
                yield from divided

    def _region(self, tensors: Iterable[str]) -> set[str]:
        """Returns the names of the nodes from which tensors are computed without making anything whole in between."""
        queue, region = [t for t in tensors if _state(self._found, t) not in (WHOLE, OWN)], set()
        while queue:
            name = graph_lib.node_of(queue.pop())
            if name not in region:
                region.add(name)
                queue += [tensor for tensor, takes in zip(self._inputs[name], self._found.outcomes[name].takes)
                          if takes in (None, _state(self._found, tensor)) and takes != WHOLE
                          and _state(self._found, tensor) != WHOLE]
        return region

    def _pays(self, tensor: str, region: Iterable[str]) -> bool:
        """Whether dividing a region saves more time than making its result whole costs."""
        state = _state(self._found, tensor)
        if state == OWN or self._found.frames[graph_lib.node_of(tensor)] != self._home:
            return False  # own values cannot be whole; and in a loop, each iteration would wait for the other ranks
        if not isinstance(state, Rows):
            # As for any other gradient; but no sum with a size for each row, as of products of all pairs of rows.
            shape = self._sizes.shape(tensor)
            return row_size.is_known(shape) and row_size.product(shape).constant is not None
        likely = self._sizes.likely_shape(tensor)
        node = self._sizes.graph.node(tensor)
        size = tf.as_dtype(tensors.dtype_of(node, graph_lib.output_of(tensor))).size
        if likely is None or not size:
            return False
        operations = sum(self._operations(name) for name in region
                         if self._whole.outcomes[name].gives[:1] == (WHOLE,))
        return operations >= _OPERATIONS_PER_BYTE * size * math.prod(likely)

    def _operations(self, name: str) -> float:
        """Returns about how many additions and multiplications a product or convolution has in a usual batch.

        [m, k] times [k, n] has m k n multiplications, the root of the product of the three sizes; a batch of products
        as many times, and a convolution some more.
        """
        node = self._sizes.graph.nodes[name]
        if node.op not in rules.DIVIDING:
            return 0
        operands = [tensor for tensor in self._inputs[name]
                    if tensors.dtype_of(self._sizes.graph.node(tensor), graph_lib.output_of(tensor))
                    == tensors.dtype_of(node, 0)]
        shapes = [self._sizes.likely_shape(tensors.canonical(tensor)) for tensor in (*operands[:2], name)]
        known_shapes = [shape for shape in shapes if shape is not None]
        if len(known_shapes) < 3:
            return 0
        if node.op == "Einsum":
            terms = node.attr["equation"].s.decode().replace(" ", "").partition("->")[0].split(",")
            if any(len(term) != len(shape) for term, shape in zip(terms, known_shapes)):
                return 0
            return 2 * math.prod({label: size for term, shape in zip(terms, known_shapes)
                                  for label, size in zip(term, shape)}.values())
        is_batch = node.op.startswith("Batch") and min(map(len, known_shapes)) > 2
        batch = math.prod(known_shapes[2][:-2]) if is_batch else 1
        return 2 * math.sqrt(math.prod(map(math.prod, known_shapes)) / batch) if batch else 0
