"""What is known about shapes, and integers that depend on shapes, for any number of rows.

Requires: a flat graph whose inputs with rows pass through `PoseidonRows`. Ensures: sizes that depend on the number of
rows are distinguished from those that do not.

TensorFlow itself infers the graph's shapes: with an unknown number of rows, with two large primes, and with two rows. A
size that is always the same does not depend on the rows; one that is m times the number each time has m elements per
row. The small number exposes sizes that only look like that, such as a minimum with a larger constant, and so does a
single row, which is tried where integers are limited by others. When the graph runs, ops that cut tensors into rows
(`PoseidonRowRange`, `PoseidonLocalShape`) check that sizes are multiples of them.

Tests: tests/graphs/test_sizes.py, tests/graphs/test_partition.py, tests/graphs/test_partition_dividing.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import inference
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition.containers import resource_stores as stores_lib
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.sizes import inferred_graph
from tf_poseidon.graph_passes.partition.sizes import known_values
from tf_poseidon.graph_passes.partition.sizes import list_elements
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.sizes.inferred_graph import InferredGraph
from tf_poseidon.graph_passes.partition.sizes.row_size import Shape
from tf_poseidon.graph_passes.partition.sizes.row_size import Size

_LARGE = 2  # trials with large numbers
# Ops that limit integers by others, so sizes may depend on the rows for some numbers of rows, and not for others.
_LIMITS = ("Maximum", "Minimum", "Max", "Min", "ClipByValue", "Select", "SelectV2")


class Sizes:
    """Answers questions about the shapes and values of a graph's tensors.

    Attributes:
        graph: The `Graph`, with the shapes that hold for any number of rows.
        usual_rows: The usual number of rows of a batch, None if unknown.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef, add_shapes: graph_lib.AddShapes,
                 usual_rows: int | None = None) -> None:
        """Infers shapes.

        Args:
            graph_def: The GraphDef.
            add_shapes: A function that infers shapes, such as `grappler.add_shapes`.
            usual_rows: See the attribute.
        """
        self.usual_rows = usual_rows
        self.graph = graph_lib.Graph(add_shapes(graph_def))
        self._any = InferredGraph(self.graph)
        if any(node.op in stores_lib.TAKES for node in self.graph.graph_def.node):
            # TensorFlow infers nothing about elements that are taken from a stack, not even their rank.
            self._any = list_elements.with_elements(self._any, _inference(self.graph, add_shapes))
        self._generic, self._one_row = _generic_graphs(self.graph, add_shapes)
        self._shapes: dict[str, Shape | None] = {}

    def usual_elements(self, tensor: str) -> int | None:
        """Returns the number of elements of a tensor in a usual batch, None if unknown."""
        shape = self.shape(tensor)
        if not row_size.is_known(shape):
            return None
        total = row_size.product(shape)
        if total.constant is not None:
            return total.constant
        return self.usual_rows * total.per_row if self.usual_rows and total.per_row else None

    def likely_shape(self, tensor: str) -> tuple[float, ...] | None:
        """Returns about what shape a tensor has in a usual batch, or one of 128 rows; None if unknown."""
        shape, share = self.shape(tensor), (self.usual_rows or 128) / row_size.TRIALS[0][0]
        return tuple(size.values[0] * (share if size.of_rows else 1) for size in shape) if row_size.is_known(
            shape) else None

    def static(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape that holds for any number of rows: a tuple with None, or None."""
        return self.graph.shape(tensor)

    def shape(self, tensor: str) -> Shape | None:
        """Returns a tuple of `Size`s, with None for unknown ones; None if the rank is unknown."""
        if tensor not in self._shapes:
            shapes = [generic.shape(tensor) for generic in self._generic]
            known_shapes = [shape for shape in shapes if shape is not None]
            has_rank = len(known_shapes) == len(shapes) and len(set(map(len, known_shapes))) == 1
            self._shapes[tensor] = tuple(
                Size(sizes) if graph_lib.is_known(sizes) else None
                for sizes in zip(*known_shapes)) if has_rank else None
            if self._one_row is not None:
                self._shapes[tensor] = _not_refuted(self._shapes[tensor], self._one_row.shape(tensor))
        return self._shapes[tensor]

    def bytes(self, tensor: str, dtype: int) -> report_lib.Bytes:
        """Returns the `report.Bytes` of a tensor of a `types_pb2.DataType`."""
        shape = self.shape(tensor)
        if not row_size.is_known(shape):
            return report_lib.Bytes()
        total, size = row_size.product(shape), tf.as_dtype(dtype).size or 0
        if total.constant is not None:
            return report_lib.Bytes(fixed=total.constant * size)
        return report_lib.Bytes(per_row=None if total.per_row is None else total.per_row * size)

    def constant(self, tensor: str) -> np.ndarray | None:
        """Returns the value of an integer tensor as an array, if it is the same for any number of rows; else None.

        A value that is the same for all tried numbers of rows may differ for others (for example, the number of copies
        that fill a batch), so it must also follow without the number of rows. Only how shapes are broadcast is taken
        from many rows: a batch of one row gives the same sums.
        """
        likely = _same([generic.value(tensor) for generic in self._generic])
        if likely is None or self.graph.node(tensor).op == "BroadcastGradientArgs":
            return likely
        return _same([self._any.value(tensor), likely])

    def element(self, tensor: str, index: int) -> np.ndarray | None:
        """Returns a value at an index of its first dimension, if that part does not depend on rows; else None."""
        node = self.graph.node(tensor)
        if node.op == "Pack" and not node.attr["axis"].i:
            return self.constant(self.graph.inputs(node)[index])
        value = self.constant(tensor)
        return None if value is None else value[index]

    def likely_element(self, tensor: str, index: int) -> np.ndarray | None:
        """Returns the same for the tried numbers of rows alone, so it must be checked when the graph runs."""
        return _same([None if value is None else value[index]
                      for value in (generic.value(tensor) for generic in self._generic)])

    def size_at(self, tensor: str, *index: int) -> Size | None:
        """Returns an integer in a tensor, a size or a position, for each tried number of rows; None if unknown."""
        values = [generic.value(tensor) for generic in self._generic]
        return Size(tuple(int(value[index]) for value in values)) if _have(values, index) else None

    def is_one(self, tensor: str, dimension: int) -> bool:
        """Whether a dimension of a tensor has one element, for any number of rows.

        Both ways of inference must say so: TensorFlow's shape functions may unify an unknown number of rows with the
        size 1 of another input.
        """
        any_rows, many = self._any.static(tensor), self.shape(tensor)
        return any_rows is not None and any_rows[dimension] == 1 and many is not None and (
            (size := many[dimension]) is not None and size.constant == 1)


def _not_refuted(shape: Shape | None, of_one_row: graph_lib.Shape | None) -> Shape | None:
    """Returns a shape without the sizes that are not what they are expected to be in a batch of one row."""
    if shape is None or of_one_row is None or len(shape) != len(of_one_row):
        return shape
    return tuple(None if size is None or None not in (size.of_one_row, actual) and size.of_one_row != actual else size
                 for size, actual in zip(shape, of_one_row))


def _have(values: Sequence[np.ndarray | None], index: Sequence[int]) -> "TypeGuard[list[np.ndarray]]":
    """Whether all values are known, and have an element at an index."""
    return all(value is not None and value.ndim == len(index) and all(
        i < size for i, size in zip(index, value.shape)) for value in values)


def _same(values: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Returns the value of some arrays if all are equal; else None."""
    first = values[0]
    if first is None or any(value is None or not np.array_equal(value, first) for value in values):
        return None
    return first


def _inference(graph: graph_lib.Graph, add_shapes: graph_lib.AddShapes) -> inference.Inference:
    has_known_rows = any(
        (shape := graph.shape(tensors.tensor_of(rows_node.name, i))) is not None and shape[dimension] is not None
        for rows_node in poseidon_rows.find(graph.graph_def)
        for i, dimension in enumerate(rows_node.attr["dimensions"].list.i))
    return inference.Inference(graph, add_shapes, (*lists_lib.TAKES, *stores_lib.TAKES), has_known_rows)


def _generic_graphs(graph: graph_lib.Graph,
                    add_shapes: graph_lib.AddShapes) -> tuple[list[InferredGraph], InferredGraph | None]:
    """Returns (`InferredGraph`s for several numbers of rows, the one for one row if sizes may be limited).

    A small number of rows with which the graph cannot run is left out: one process cannot run it either.
    """
    rows_nodes = frozenset(node.name for node in poseidon_rows.find(graph.graph_def))

    without_rows, infer = poseidon_rows.with_placeholders(graph), _inference(graph, add_shapes)

    def make(rows: int, unknown: int | None) -> InferredGraph:
        inferred = inferred_graph.inferred(poseidon_rows.with_rows(without_rows, graph, rows, unknown), infer)
        valued = known_values.with_values(InferredGraph(inferred, rows_nodes), infer)
        shown = list_elements.with_elements(valued, infer)
        return shown if shown is valued else known_values.with_values(shown, infer)

    is_limited = any(_limits_integers(graph, node) for node in graph.graph_def.node)
    trials = (*row_size.TRIALS, row_size.ONE_ROW) if is_limited else row_size.TRIALS
    graphs = [_or_none(make, *trial) for trial in trials]
    if None in graphs[:_LARGE]:  # lengths that were assumed equal are different
        graphs = [*(make(rows, None) for rows, _ in trials[:_LARGE]),
                  *(_or_none(make, rows, None) for rows, _ in trials[_LARGE:])]
    possible_graphs = [generic for generic in graphs[:len(row_size.TRIALS)] if generic is not None]
    return possible_graphs, graphs[-1] if is_limited else None


def _or_none(make: Callable[..., InferredGraph], rows: int, unknown: int | None) -> InferredGraph | None:
    """Returns what `make` does; None if a graph cannot run with that many rows."""
    try:
        return make(rows, unknown)
    except PoseidonError:
        return None


def _limits_integers(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> bool:
    """Whether an op limits integers by others; a limit of one, as in gradients of means, matters to no batch."""
    if node.op not in _LIMITS or node.attr["T"].type not in inferred_graph.INTEGERS:
        return False
    if node.op not in ("Maximum", "Minimum"):
        return True
    values = map(graph.constant, graph.inputs(node))
    return not any(value is not None and value.size and np.all(value == 1) for value in values)
