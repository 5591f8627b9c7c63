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
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any
from typing import TypeGuard

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import op_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import inference
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition.propagate import resource_stores as stores_lib
from tf_poseidon.graph_passes.partition.sizes import tensor_lists as lists_lib

ROWS = "PoseidonRows"
# Pairs of a number of rows and a value for other unknown sizes of inputs with rows, such as lengths of sequences.
_TRIALS = ((4091, 2039), (4099, 2053), (2, 2063))
# A trial that only refutes: there, sizes that are broadcast look like others.
_ONE_ROW = (1, _TRIALS[-1][1])
_LARGE = 2  # trials with large numbers
# Ops that limit integers by others, so sizes may depend on the rows for some numbers of rows, and not for others.
_LIMITS = ("Maximum", "Minimum", "Max", "Min", "ClipByValue", "Select", "SelectV2")
# The maximum depth to which elements of lists are followed into other lists.
_MAX_NESTING = 5
# Values with more elements are not followed.
_MAX_ELEMENTS = 256
# The most computations of values that are remembered.
_MAX_EXECUTED = 4096
# Types whose shapes say nothing about the contents of their elements.
_HANDLES = (types_pb2.DT_VARIANT, types_pb2.DT_RESOURCE)
_INTEGERS = (types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_BOOL)
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
# The input that is the shape of the output, by op.
_SHAPED = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0}
_PASS_ON = ("Identity", "StopGradient", "Switch", "Snapshot", "PreventGradient")
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
# How a value begins that is to be compared as a tuple of integers.
_AS_TEXT = ("value",)
# Ops that may return large outputs for small inputs.
_ENLARGING = ("Fill", "Range", "Tile", "BroadcastTo", "OneHot")
# Ops whose outputs may depend on more than the values of their inputs, or on which input arrives first.
_UNKNOWN = ("Merge", "NextIteration", "Exit", "Placeholder", "PlaceholderWithDefault", "_Arg", ROWS)


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a dimension, for each number of rows."""

    values: tuple[int, ...]

    @property
    def constant(self) -> int | None:
        """Its value if it depends neither on rows nor on other unknown sizes; else None."""
        return self.values[0] if len(set(self.values)) == 1 else None

    @property
    def per_row(self) -> int | None:
        """The number of elements per row; None if it depends on more, or is not an integer."""
        each = {value / rows for value, (rows, _) in zip(self.values, _TRIALS)}
        return int(min(each)) if len(each) == 1 and min(each).is_integer() and min(each) else None

    @property
    def of_rows(self) -> bool:
        """Whether it is a multiple of the number of rows."""
        if any(value % rows or not value for value, (rows, _) in zip(self.values, _TRIALS)):
            return False
        each = [value // rows for value, (rows, _) in zip(self.values, _TRIALS)]
        while len(set(each)) > 1 and all(value % unknown == 0 for value, (_, unknown) in zip(each, _TRIALS)):
            each = [value // unknown for value, (_, unknown) in zip(each, _TRIALS)]
        return len(set(each)) == 1

    @property
    def of_one_row(self) -> int | None:
        """What it is expected to be in a batch of one row; None if that is unknown."""
        if self.constant is not None or not self.of_rows:
            return self.constant
        return self.values[-1] // _TRIALS[-1][0] if len(self.values) == len(_TRIALS) else None

    def divided(self, number: int) -> "Size | None":
        """Returns its part if it is divided by a number; None if it is no multiple of it."""
        return None if any(value % number for value in self.values) else Size(
            tuple(value // number for value in self.values))

    def minus(self, other: "Size") -> "Size | None":
        """Returns a difference of sizes; None if it is negative."""
        values = tuple(value - less for value, less in zip(self.values, other.values))
        return None if min(values) < 0 else Size(values)

    def ratio(self, other: "Size") -> int | None:
        """Returns how many times it is another size, for each number of rows; None if that is not an integer."""
        if any(value < 0 or not by or value % by for value, by in zip(self.values, other.values)):
            return None
        each = {value // by for value, by in zip(self.values, other.values)}
        return each.pop() if len(each) == 1 else None


def product(sizes: Sequence[Size]) -> Size:
    """Returns the product of `Size`s, a `Size`."""
    return Size(tuple(map(math.prod, zip(*(size.values for size in sizes)))) or _ONE)


def consists_of(size: Size | None, blocks: int) -> bool:
    """Whether a size is known to be that of so many blocks, each with a multiple of the number of rows."""
    part = None if size is None else size.divided(blocks)
    return part is not None and part.of_rows


_ONE = (1,) * len(_TRIALS)
NONE = Size((0,) * len(_TRIALS))
# A tensor's shape, with None for unknown sizes.
Shape = tuple[Size | None, ...]


def is_known(shape: Shape | None) -> TypeGuard[tuple[Size, ...]]:
    """Whether all sizes of a shape are known."""
    return shape is not None and None not in shape


# An object that knows the elements of a list, a stack or a TensorArray.
_Keeper = lists_lib.Lists | stores_lib.Stores


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
        self._any = _Generic(self.graph)
        if any(node.op in stores_lib.TAKES for node in self.graph.graph_def.node):
            # TensorFlow infers nothing about elements that are taken from a stack, not even their rank.
            self._any = _with_elements(self._any, _inference(self.graph, add_shapes))
        self._generic, self._one_row = _generic_graphs(self.graph, add_shapes)
        self._shapes: dict[str, Shape | None] = {}

    def usual_elements(self, tensor: str) -> int | None:
        """Returns the number of elements of a tensor in a usual batch, None if unknown."""
        shape = self.shape(tensor)
        if not is_known(shape):
            return None
        total = product(shape)
        if total.constant is not None:
            return total.constant
        return self.usual_rows * total.per_row if self.usual_rows and total.per_row else None

    def likely_shape(self, tensor: str) -> tuple[float, ...] | None:
        """Returns about what shape a tensor has in a usual batch, or one of 128 rows; None if unknown."""
        shape, share = self.shape(tensor), (self.usual_rows or 128) / _TRIALS[0][0]
        return tuple(size.values[0] * (share if size.of_rows else 1) for size in shape) if is_known(shape) else None

    def static(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape that holds for any number of rows: a tuple with None, or None."""
        return self.graph.shape(tensor)

    def shape(self, tensor: str) -> Shape | None:
        """Returns a tuple of `Size`s, with None for unknown ones; None if the rank is unknown."""
        if tensor not in self._shapes:
            shapes = [generic.shape(tensor) for generic in self._generic]
            known = [shape for shape in shapes if shape is not None]
            has_rank = len(known) == len(shapes) and len(set(map(len, known))) == 1
            self._shapes[tensor] = tuple(
                Size(sizes) if graph_lib.is_known(sizes) else None for sizes in zip(*known)) if has_rank else None
            if self._one_row is not None:
                self._shapes[tensor] = _not_refuted(self._shapes[tensor], self._one_row.shape(tensor))
        return self._shapes[tensor]

    def bytes(self, tensor: str, dtype: int) -> report_lib.Bytes:
        """Returns the `report.Bytes` of a tensor of a `types_pb2.DataType`."""
        shape = self.shape(tensor)
        if not is_known(shape):
            return report_lib.Bytes()
        total, size = product(shape), tf.as_dtype(dtype).size or 0
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
    return tuple(None if size is None or None not in (size.of_one_row, found) and size.of_one_row != found else size
                 for size, found in zip(shape, of_one_row))


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


class _Generic:
    """The shapes and values of a graph for one number of rows, or for any."""

    def __init__(self, graph: graph_lib.Graph, markers: Collection[str] = ()) -> None:
        self.graph = graph
        self.markers = markers  # names of the PoseidonRows that placeholders replace
        self._values: dict[str, dict[int, np.ndarray] | None] = {}
        self._lists: lists_lib.Lists | None = None
        self._stores: stores_lib.Stores | None = None

    def _stands_for(self, tensor: str) -> str:
        """Returns the tensor of this graph with the shape and value of a tensor of the original graph."""
        name = graph_lib.node_of(tensor)
        if name in self.markers:
            return _placeholder(name, graph_lib.output_of(tensor))
        shown = _shown(name)
        if shown in self.graph.nodes and lists_lib.taken(self.graph.nodes[name]) == tensor:
            return shown
        return tensor

    def static(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape that TensorFlow infers for a tensor of the original graph."""
        return self.graph.shape(self._stands_for(tensor))

    def shape(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape of a tensor of the original graph: a tuple with None, or None."""
        tensor = self._stands_for(tensor)
        shape = self.graph.shape(tensor)
        return self._followed(tensor) or shape if shape is None or None in shape else shape

    def _followed(self, tensor: str) -> graph_lib.Shape | None:
        """Returns a shape that follows from integers that TensorFlow does not evaluate; None if unknown."""
        node = self.graph.node(tensor)
        inputs = self.graph.inputs(node)
        if node.op == "TensorListElementShape":
            return self._shape_of_element_shape(inputs[0])
        if node.op == "DenseBincount":
            shape, size = self.shape(inputs[0]), self.value(inputs[1])
            return shape and (*shape[:-1], None if size is None else int(size))
        if node.op in _REDUCTIONS:
            shape, axes = self.shape(inputs[0]), self.value(inputs[1])
            if shape is None or axes is None:
                return None
            reduced = {int(axis) % len(shape) for axis in axes.flatten()} if shape else set()
            return tuple(1 if d in reduced else size for d, size in enumerate(shape)
                         if d not in reduced or node.attr["keep_dims"].b)
        if node.op == "Transpose":
            shape, order = self.shape(inputs[0]), self.value(inputs[1])
            return None if shape is None or order is None else tuple(shape[int(axis)] for axis in order)
        if node.op in _SHAPED:
            sizes = self.value(inputs[_SHAPED[node.op]])
            if sizes is not None and sizes.ndim == 1 and min(sizes, default=0) >= 0:
                return tuple(map(int, sizes))
        return None

    def _shape_of_element_shape(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape of the shape of a list's elements, which was given where the list was made."""
        if self._lists is None:
            self._lists = lists_lib.Lists(self.graph)
        shapes = {self.shape(self.graph.inputs(node)[lists_lib.MAKES[node.op]]) if node.op in lists_lib.MAKES else None
                  for node in map(self.graph.node, self._lists.origins(tensor))}
        return shapes.pop() if len(shapes) == 1 else None

    def _size_of_array(self, node: node_def_pb2.NodeDef) -> str | None:
        """Returns the tensor with the size of a TensorArray, None if the array may grow."""
        if self._stores is None:
            self._stores = stores_lib.Stores(self.graph)
        return self._stores.size(node.name)

    def value(self, tensor: str) -> np.ndarray | None:
        """Returns the value of an integer tensor of the original graph, None if unknown."""
        tensor = self._stands_for(tensor)
        stack = [graph_lib.node_of(tensor)]
        while stack:  # depth-first without recursion: expressions can be deep
            node = self.graph.nodes[stack[-1]]
            missing = [] if node.name in self._values else [
                name for name in map(graph_lib.node_of, self._operands(node)) if name not in self._values]
            if missing:
                stack += missing
                continue
            stack.pop()
            if node.name not in self._values:
                self._values[node.name] = self._evaluate(node)
        return self._known(tensor)

    def _operands(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the inputs whose values determine the value of a node."""
        inputs = self.graph.inputs(node)
        if node.op in _UNKNOWN or node.op in _SHAPES or node.op == "Const":
            return []
        if node.op == "Enter":
            return inputs if node.attr["is_constant"].b else []
        if node.op in _PASS_ON:
            return inputs[:1]
        if node.op == stores_lib.SIZE:
            size = self._size_of_array(node)
            return [] if size is None else [size]
        return inputs if self._is_small_integer(node) else []

    def _is_small_integer(self, node: node_def_pb2.NodeDef) -> bool:
        op = tf_compat.op_def(node.op)
        if op is None or op.is_stateful or not op.output_arg or not self.graph.inputs(node):
            return False
        if any(_type_of(node, argument) not in _INTEGERS for argument in (*op.input_arg, *op.output_arg)):
            return False
        if node.op not in _ENLARGING:
            return True
        shape = self.graph.shape(node.name)
        return graph_lib.is_known(shape) and math.prod(shape) <= _MAX_ELEMENTS

    def _evaluate(self, node: node_def_pb2.NodeDef) -> dict[int, np.ndarray] | None:
        """Returns the known outputs of a node as arrays, by number; None if there are none."""
        if node.op == "Const":
            if node.attr["dtype"].type not in _INTEGERS:
                return None
            value = self.graph.constant(node.name)
            return {0: value} if value is not None and value.size <= _MAX_ELEMENTS else None
        inputs = self.graph.inputs(node)
        if node.op in _SHAPES:
            return {i: value for i, tensor in enumerate(inputs)
                    if (value := self._of_shape(node.op, tensor)) is not None} or None
        operands = self._operands(node)
        values = [value for tensor in operands if (value := self._known(tensor)) is not None]
        if not operands or len(values) < len(operands):
            return None
        if node.op in (*_PASS_ON, stores_lib.SIZE, "Enter"):
            return dict.fromkeys((0, 1), values[0])
        if node.op in _REDUCTIONS and not values[0].ndim and values[1].size:
            return None  # TensorFlow would log an error
        outputs = _execute(node, values)
        return None if outputs is None else dict(enumerate(outputs))

    def _known(self, tensor: str) -> np.ndarray | None:
        outputs = self._values[graph_lib.node_of(tensor)]
        return None if outputs is None else outputs.get(graph_lib.output_of(tensor))

    def _of_shape(self, op: str, tensor: str) -> np.ndarray | None:
        shape = self.shape(tensor)
        if shape is None:
            return None
        if op == "Rank":
            return np.array(len(shape))
        if not graph_lib.is_known(shape):
            return None
        return np.array(math.prod(shape) if op == "Size" else shape, np.int64)


def _type_of(node: node_def_pb2.NodeDef, argument: op_def_pb2.OpDef.ArgDef) -> int:
    """Returns the type of an argument of a node, 0 for lists of different types."""
    if argument.type:
        return argument.type
    return node.attr[argument.type_attr].type if argument.type_attr else 0


def _execute(node: node_def_pb2.NodeDef, values: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
    """Returns the outputs of a stateless op on the CPU, None if it fails."""
    op = tf_compat.op_def(node.op)
    assert op is not None  # `_is_small_integer`
    attributes: list[Any] = []
    for attribute in op.attr:
        value = node.attr[attribute.name]
        kind = value.WhichOneof("value")
        if kind not in ("type", "i", "b", "s"):
            return None
        attributes += [attribute.name, getattr(value, kind)]
    types = [_type_of(node, argument) for argument in op.input_arg
             for _ in range(node.attr[argument.number_attr].i if argument.number_attr else 1)]
    num_outputs = sum(node.attr[a.number_attr].i if a.number_attr else 1 for a in op.output_arg)
    return _executed(node.op, num_outputs, tuple(attributes), tuple(
        (value.tobytes(), value.dtype.str, value.shape, dtype) for value, dtype in zip(values, types, strict=True)))


@functools.lru_cache(_MAX_EXECUTED)  # layers that are alike compute the same
def _executed(op: str, num_outputs: int, attributes: tuple[Any, ...],
              inputs: tuple[tuple[bytes, str, tuple[int, ...], int], ...]) -> Sequence[np.ndarray] | None:
    """Returns the outputs of an op, None if it fails; inputs are (bytes, NumPy's type, shape, the op's type)."""
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            tensors = [tf.constant(np.frombuffer(value, of_value).reshape(shape), dtype)
                       for value, of_value, shape, dtype in inputs]
            return [output.numpy() for output in tf_compat.execute(op, num_outputs, tensors, attributes)]
    except Exception:  # if TensorFlow cannot compute it, its value is unknown
        return None


def rows_nodes(graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """Returns the `PoseidonRows` nodes of a graph, in its order."""
    return [node for node in graph_def.node if node.op == ROWS]


def _inference(graph: graph_lib.Graph, add_shapes: graph_lib.AddShapes) -> inference.Inference:
    has_known_rows = any(
        (shape := graph.shape(f"{marker.name}:{i}" if i else marker.name)) is not None and shape[dimension] is not None
        for marker in rows_nodes(graph.graph_def) for i, dimension in enumerate(marker.attr["dimensions"].list.i))
    return inference.Inference(graph, add_shapes, (*lists_lib.TAKES, *stores_lib.TAKES), has_known_rows)


def _inferred(graph_def: graph_pb2.GraphDef, infer: inference.Inference) -> graph_lib.Graph:
    """Returns the `Graph` of a GraphDef, with the shapes that TensorFlow infers."""
    return graph_lib.Graph(graph_def, infer(graph_def))


def _generic_graphs(graph: graph_lib.Graph, add_shapes: graph_lib.AddShapes) -> tuple[list[_Generic], _Generic | None]:
    """Returns (the `_Generic`s of a graph for several numbers of rows, the one for one row if sizes may be limited).

    A small number of rows with which the graph cannot run is left out: one process cannot run it either.
    """
    markers = frozenset(node.name for node in rows_nodes(graph.graph_def))

    without_rows, infer = _with_placeholders(graph), _inference(graph, add_shapes)

    def make(rows: int, unknown: int | None) -> _Generic:
        inferred = _inferred(_with_rows(without_rows, graph, rows, unknown), infer)
        valued = _with_values(_Generic(inferred, markers), infer)
        shown = _with_elements(valued, infer)
        return shown if shown is valued else _with_values(shown, infer)

    is_limited = any(_limits_integers(graph, node) for node in graph.graph_def.node)
    trials = (*_TRIALS, _ONE_ROW) if is_limited else _TRIALS
    found = [_or_none(make, *trial) for trial in trials]
    if None in found[:_LARGE]:  # lengths that were assumed equal are different
        found = [*(make(rows, None) for rows, _ in trials[:_LARGE]),
                 *(_or_none(make, rows, None) for rows, _ in trials[_LARGE:])]
    known = [generic for generic in found[:len(_TRIALS)] if generic is not None]
    return known, found[-1] if is_limited else None


def _or_none(make: Callable[..., _Generic], rows: int, unknown: int | None) -> _Generic | None:
    """Returns what `make` does; None if a graph cannot run with that many rows."""
    try:
        return make(rows, unknown)
    except PoseidonError:
        return None


def _limits_integers(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> bool:
    """Whether an op limits integers by others; a limit of one, as in gradients of means, matters to no batch."""
    if node.op not in _LIMITS or node.attr["T"].type not in _INTEGERS:
        return False
    if node.op not in ("Maximum", "Minimum"):
        return True
    values = map(graph.constant, graph.inputs(node))
    return not any(value is not None and value.size and np.all(value == 1) for value in values)


def _with_elements(generic: _Generic, infer: inference.Inference) -> _Generic:
    """Returns a `_Generic` in which elements taken from lists have the shapes, or values, of those put into them.

    They are read through a node that has that shape or value, named by `_shown`. An element may be computed from one
    that was taken before, so an unknown size is first assumed to be that of the other elements, and then verified.
    """
    if not any(node.op in lists_lib.TAKES or node.op in stores_lib.TAKES for node in generic.graph.graph_def.node):
        return generic
    doubted: set[str] = set()  # names of nodes for which that was wrong
    while True:
        result = _with_guessed_elements(generic, infer, doubted)
        keepers = _keepers(result.graph)
        wrong = {node.name for node in generic.graph.graph_def.node
                 if node.op in keepers and node.name not in doubted and _shown(node.name) in result.graph.nodes
                 and keepers[node.op].element(node.input[0], result.shape) is None}
        if not wrong:
            return result
        doubted |= wrong


def _with_guessed_elements(generic: _Generic, infer: inference.Inference, doubted: Collection[str]) -> _Generic:
    for _ in range(_MAX_NESTING):
        graph, known = generic.graph, {}
        keepers = _keepers(graph)
        for node in graph.graph_def.node:
            if node.op in keepers and _dtype_of_elements(node) not in _HANDLES:
                shown = _of_elements(generic, keepers[node.op], node, node.name in doubted)
                old = graph.nodes.get(_shown(node.name))
                if shown is not None and (old is None or (old.op != "Const" and (
                        shown[1] is not None or _num_known(shown[0]) > _num_known(graph.shape(old.name))))):
                    known[lists_lib.taken(node)] = shown
        if not known:
            break
        result = graph_pb2.GraphDef()
        shown_before = {_shown(graph_lib.node_of(tensor)) for tensor in known}
        for node in graph.graph_def.node:
            if node.name in shown_before:
                continue
            added = result.node.add()
            added.CopyFrom(node)
            for i, tensor in enumerate(added.input):
                if tensor in known:
                    added.input[i] = _shown(graph_lib.node_of(tensor))
        result.versions.CopyFrom(graph.graph_def.versions)
        result.library.CopyFrom(graph.graph_def.library)
        for tensor, (shape, value) in known.items():
            writer = graph_lib.Writer(_shown(graph_lib.node_of(tensor)))
            dtype = _dtype_of_elements(graph.node(tensor))
            if value is None:
                writer.add("", "EnsureShape", [tensor], T=dtype, shape=shape)
            else:
                writer.constant("", value.astype(tf.as_dtype(dtype).as_numpy_dtype))
            result.node.extend(writer.nodes)
        generic = _Generic(_inferred(result, infer), generic.markers)
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


def _with_values(generic: _Generic, infer: inference.Inference) -> _Generic:
    """Returns a `_Generic` in which known integers are constants, so that TensorFlow can infer shapes from them."""
    for _ in range(_MAX_NESTING):
        graph, known = generic.graph, {}
        unknown = [node for node in graph.graph_def.node if not graph_lib.is_known(graph.shape(node.name))]
        for node in unknown:
            for tensor in graph.inputs(node):
                if tensor not in known and graph.node(tensor).op != "Const":
                    dtype = _type_of_integers(graph.node(tensor), graph_lib.output_of(tensor))
                    value = None if dtype is None else generic.value(tensor)
                    if value is not None:
                        known[tensor] = value.astype(dtype)
        if not known or not any(_would_follow(generic, node) for node in unknown):
            break
        result = graph_pb2.GraphDef()
        result.CopyFrom(graph.graph_def)
        for node in result.node:
            for i, tensor in enumerate(node.input):
                if tensor in known:
                    node.input[i] = _valued(tensor)
        for tensor, value in known.items():
            writer = graph_lib.Writer(_valued(tensor))
            writer.constant("", value)
            result.node.extend(writer.nodes)
        generic = _Generic(_inferred(result, infer.of(graph)), generic.markers)
    return generic


def _would_follow(generic: _Generic, node: node_def_pb2.NodeDef) -> bool:
    """Whether a node has an unknown shape that may follow from values or shapes that only we know."""
    if graph_lib.is_known(generic.shape(node.name)) or generic.value(node.name) is not None:
        return False
    graph = generic.graph
    return any(generic.value(tensor) is not None or _is_better_known(graph.shape(tensor), generic.shape(tensor))
               for tensor in graph.inputs(node) if graph.node(tensor).op != "Const")


def _is_better_known(shape: graph_lib.Shape | None, other: graph_lib.Shape | None) -> bool:
    """Whether `other` is fully known and `shape` is not."""
    return not graph_lib.is_known(shape) and graph_lib.is_known(other)


def _type_of_integers(node: node_def_pb2.NodeDef, output: int) -> type[np.integer] | None:
    """Returns the NumPy type of an output, None if it is neither int32 nor int64."""
    op = tf_compat.op_def(node.op)
    if op is None or any(argument.number_attr or argument.type_list_attr for argument in op.output_arg):
        types = [node.attr["out_type"].type] * (output + 1) if node.op == "ShapeN" else []
    else:
        types = [_type_of(node, argument) for argument in op.output_arg]
    if output >= len(types) or types[output] not in (types_pb2.DT_INT32, types_pb2.DT_INT64):
        return None
    return tf.as_dtype(types[output]).as_numpy_dtype


def _valued(tensor: str) -> str:
    """Returns the name of the constant that replaces a tensor with a known value."""
    return f"poseidon/value{graph_lib.output_of(tensor)}/{graph_lib.node_of(tensor)}"


def _of_elements(generic: _Generic, lists: _Keeper, node: node_def_pb2.NodeDef,
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


def _length(generic: _Generic, lists: lists_lib.Lists, tensor: str) -> int | None:
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
        known = {size for size in sizes if size is not None}
        if len(known) > 1:
            return None
        unified.append(known.pop() if known else None)
    return tuple(unified)


def _as_text(value: np.ndarray | None) -> tuple[str | int, ...] | None:
    """Returns an array of integers as a hashable tuple; None for None."""
    return None if value is None else (*_AS_TEXT, *map(int, value.flatten()))


def _shown(name: str) -> str:
    """Returns the name of the node with the shape or value of an element that a node takes from a list."""
    return f"poseidon/elements/{name}"


def _placeholder(marker: str, output: int) -> str:
    """Returns the name of the placeholder that replaces an output of a PoseidonRows while shapes are inferred."""
    return f"{marker}/generic{output}"


def _with_placeholders(graph: graph_lib.Graph) -> graph_pb2.GraphDef:
    """Returns a GraphDef with placeholders, whose shapes are not set yet, in place of the inputs with rows."""
    result = graph_pb2.GraphDef(versions=graph.graph_def.versions)
    if graph.graph_def.HasField("library"):
        result.library.CopyFrom(graph.graph_def.library)
    named = {}
    for marker in rows_nodes(graph.graph_def):
        for i, dtype in enumerate(marker.attr["T"].list.type):
            placeholder = result.node.add(name=_placeholder(marker.name, i), op="Placeholder")
            placeholder.attr["dtype"].type = dtype
            named[f"{marker.name}:{i}"] = placeholder.name
        named[marker.name] = _placeholder(marker.name, 0)
    for node in graph.graph_def.node:
        if node.op == ROWS:
            continue
        added = result.node.add()
        added.CopyFrom(node)
        added.attr.pop("_output_shapes", None)
        for i, tensor in enumerate(node.input):
            if tensor.removeprefix("^") in named:
                added.input[i] = f"^{named[tensor[1:]]}" if graph_lib.is_control(tensor) else named[tensor]
    return result


def _with_rows(without_rows: graph_pb2.GraphDef, graph: graph_lib.Graph, rows: int,
               unknown: int | None) -> graph_pb2.GraphDef:
    """Returns a GraphDef whose placeholders have shapes.

    Args:
        without_rows: The result of `_with_placeholders`.
        graph: The `Graph` from which it was made.
        rows: The number of rows of all inputs with rows.
        unknown: The value for other unknown sizes, None if they stay unknown.
    """
    result = graph_pb2.GraphDef()
    result.CopyFrom(without_rows)
    placeholders = iter(result.node)
    for marker in rows_nodes(graph.graph_def):
        for i, dimension in enumerate(marker.attr["dimensions"].list.i):
            shape = graph.shape(f"{marker.name}:{i}" if i else marker.name)
            sizes = None if shape is None else [
                rows if d == dimension else unknown if size is None else size for d, size in enumerate(shape)]
            graph_lib.set_attribute(next(placeholders).attr["shape"], "shape", sizes)
    return result
