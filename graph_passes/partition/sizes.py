"""What is known of shapes, and of integers that depend on shapes, for any number of rows.

Requires: a flat graph with one `PoseidonRows`. Ensures: sizes that are functions of the number of rows are
told apart from those that are not.

TensorFlow infers the graph's shapes itself, thrice: with an unknown number of rows, and with two large prime
numbers of rows. A size that has the same value twice does not depend on the rows; one that is m times each
prime has m elements for each row. A function of the rows that only looks like a multiple of them at the
primes (a minimum with a larger constant) is caught when the graph runs: whatever is cut into rows
(`PoseidonRowRange`, `PoseidonLocalShape`) checks that it is such a multiple.
"""

import dataclasses

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager import execute
from tensorflow.python.framework import constant_op
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework import ops

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes.partition import lists as lists_lib

ROWS = "PoseidonRows"
# Of rows, and of what else is unknown about inputs with rows: the lengths of sequences, say.
_PRIMES = ((4091, 2039), (4099, 2053))
# How often elements of lists are put into other lists.
_MAX_NESTING = 5
# Values of more elements are not followed.
_MAX_ELEMENTS = 256
_INTEGERS = (types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_BOOL)
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
# Which input is the shape of the output.
_SHAPED = {"Reshape": 1, "BroadcastTo": 1, "Fill": 0}
_PASS_ON = ("Identity", "StopGradient", "Switch", "Snapshot", "PreventGradient")
_SHAPES = ("Shape", "ShapeN", "Size", "Rank")
# Of small inputs they may make large outputs.
_ENLARGING = ("Fill", "Range", "Tile", "BroadcastTo", "OneHot")
# Their output may depend on more than their inputs' values, or on which input was there first.
_UNKNOWN = ("Merge", "NextIteration", "Exit", "Placeholder", "PlaceholderWithDefault", "_Arg", ROWS)


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a dimension, for both numbers of rows."""

    values: tuple[int, int]

    @property
    def constant(self):
        """Its value if it does not depend on rows, nor on anything unknown; else None."""
        return self.values[0] if self.values[0] == self.values[1] else None

    @property
    def of_rows(self):
        """Whether it is a multiple of the number of rows."""
        (first, second), ((p, t), (q, u)) = self.values, _PRIMES
        if first % p or second % q or not first:
            return False
        first, second = first // p, second // q
        while first != second and first % t == 0 and second % u == 0:
            first, second = first // t, second // u
        return first == second


ONE = Size((1, 1))


class Sizes:
    """Answers what is known of the shapes and values of a graph's tensors.

    Attributes:
        graph: The `Graph`, with the shapes that hold for any number of rows.
    """

    def __init__(self, graph_def, add_shapes):
        """Infers shapes.

        Args:
            graph_def: The GraphDef.
            add_shapes: A function that returns a GraphDef with `_output_shapes`, as `grappler.add_shapes`.
        """
        self.graph = graph_lib.Graph(add_shapes(graph_def))
        self._marker = rows_node(self.graph.graph_def)
        self._generic = [_generic(self.graph, add_shapes, *primes) for primes in _PRIMES]
        self._shapes = {}
        self._values = {}

    def static(self, tensor):
        """Returns the shape that holds for any number of rows: a tuple with None, or None."""
        return self.graph.shape(tensor)

    def shape(self, tensor):
        """Returns a tuple of `Size`s, None where one is unknown; None if the rank is."""
        if tensor not in self._shapes:
            self._shapes[tensor] = self._shape(tensor)
        return self._shapes[tensor]

    def _shape(self, tensor):
        if graph_lib.node_of(tensor) == self._marker.name:
            tensor = _placeholder(self._marker, graph_lib.output_of(tensor))
        first, second = (generic.shape(tensor) for generic in self._generic)
        if first is not None and second is not None and len(first) == len(second):
            if None not in first and None not in second:
                return tuple(map(Size, zip(first, second)))
        followed = self._followed(tensor) if graph_lib.node_of(tensor) in self.graph.nodes else None
        if followed is not None or first is None or second is None or len(first) != len(second):
            return followed
        return tuple(None if None in pair else Size(pair) for pair in zip(first, second))

    def _followed(self, tensor):
        """Returns a shape that follows from integers whose values TensorFlow does not follow; None if unknown."""
        node = self.graph.node(tensor)
        inputs = self.graph.inputs(node)
        if node.op in _REDUCTIONS:
            shape, axes = self.shape(inputs[0]), self.constant(inputs[1])
            if shape is None or axes is None:
                return None
            axes = {int(axis) % len(shape) for axis in axes.flatten()} if shape else set()
            kept = [ONE if d in axes else size for d, size in enumerate(shape)
                    if d not in axes or node.attr["keep_dims"].b]
            return tuple(kept)
        if node.op in _SHAPED:
            sizes = self.value(inputs[_SHAPED[node.op]])
            if sizes is not None and min(map(np.min, sizes), default=0) >= 0:
                return tuple(Size((int(a), int(b))) for a, b in zip(*sizes))
        return None

    def value(self, tensor):
        """Returns a pair of arrays: the value of an integer tensor for both numbers of rows; None if unknown."""
        stack = [graph_lib.node_of(tensor)]
        while stack:  # depth first without recursion: expressions can be deep
            node = self.graph.nodes[stack[-1]]
            missing = [] if node.name in self._values else [
                name for name in map(graph_lib.node_of, self._operands(node)) if name not in self._values]
            if missing:
                stack += missing
                continue
            stack.pop()
            if node.name not in self._values:
                self._values[node.name] = self._evaluate(node)
        outputs = self._values[graph_lib.node_of(tensor)]
        return None if outputs is None else outputs.get(graph_lib.output_of(tensor))

    def constant(self, tensor):
        """Returns the value of an integer tensor as an array, if it does not depend on rows; else None."""
        pair = self.value(tensor)
        if pair is None or not np.array_equal(*pair):
            return None
        return pair[0]

    def _operands(self, node):
        """Returns the inputs whose values decide about the value of a node."""
        inputs = self.graph.inputs(node)
        if node.op in _UNKNOWN or node.op in _SHAPES or node.op == "Const":
            return []
        if node.op == "Enter":
            return inputs if node.attr["is_constant"].b else []
        if node.op in _PASS_ON:
            return inputs[:1]
        return inputs if self._is_small_integer(node) else []

    def _is_small_integer(self, node):
        op = op_def_registry.get(node.op)
        if op is None or op.is_stateful or not op.output_arg or not self.graph.inputs(node):
            return False
        if any(_type_of(node, argument) not in _INTEGERS for argument in (*op.input_arg, *op.output_arg)):
            return False
        if node.op not in _ENLARGING:
            return True
        shape = self.shape(node.name)
        return shape is not None and len(shape) <= 2 and None not in shape and max(
            np.prod([size.values[i] for size in shape]) for i in (0, 1)) <= _MAX_ELEMENTS

    def _evaluate(self, node):
        """Returns the known outputs of a node: pairs of arrays by number; None if there are none."""
        if node.op == "Const":
            if node.attr["dtype"].type not in _INTEGERS:
                return None
            value = self.graph.constant(node.name)
            return {0: (value, value)} if value.size <= _MAX_ELEMENTS else None
        inputs = self.graph.inputs(node)
        if node.op in _SHAPES:
            return {i: value for i, tensor in enumerate(inputs)
                    if (value := self._of_shape(node.op, tensor)) is not None} or None
        operands = self._operands(node)
        values = [self._known(tensor) for tensor in operands]
        if not operands or any(value is None for value in values):
            return None
        if node.op in _PASS_ON or node.op == "Enter":
            return dict.fromkeys((0, 1), values[0])
        outputs = [_execute(node, [value[i] for value in values]) for i in (0, 1)]
        return None if None in outputs else dict(enumerate(zip(*outputs)))

    def _known(self, tensor):
        outputs = self._values[graph_lib.node_of(tensor)]
        return None if outputs is None else outputs.get(graph_lib.output_of(tensor))

    def _of_shape(self, op, tensor):
        shape = self.shape(tensor)
        if shape is None:
            return None
        if op == "Rank":
            return (np.array(len(shape)),) * 2
        if None in shape:
            return None
        pair = [np.array([size.values[i] for size in shape], np.int64) for i in (0, 1)]
        return tuple(np.prod(each) for each in pair) if op == "Size" else tuple(pair)


def _type_of(node, argument):
    """Returns the type of an argument of a node, 0 for lists of different types."""
    if argument.type:
        return argument.type
    return node.attr[argument.type_attr].type if argument.type_attr else 0


def _execute(node, values):
    """Returns the outputs of a stateless op on the CPU, None if it fails."""
    op = op_def_registry.get(node.op)
    attributes, inputs, rest = [], [], list(values)
    for attribute in op.attr:
        value = node.attr[attribute.name]
        kind = value.WhichOneof("value")
        if kind not in ("type", "i", "b", "s"):
            return None
        attributes += [attribute.name, getattr(value, kind)]
    outputs = sum(node.attr[a.number_attr].i if a.number_attr else 1 for a in op.output_arg)
    try:
        with ops.init_scope(), ops.device("CPU:0"):
            for argument in op.input_arg:
                count = node.attr[argument.number_attr].i if argument.number_attr else 1
                inputs += [constant_op.constant(value, _type_of(node, argument)) for value in rest[:count]]
                rest = rest[count:]
            return [output.numpy() for output in execute.execute(
                node.op.encode(), outputs, inputs, tuple(attributes), context.context())]
    except Exception:  # of whatever TensorFlow cannot compute, nothing is known
        return None


def rows_node(graph_def):
    """Returns the `PoseidonRows` node of a graph, None if it has none.

    Raises:
        PoseidonError: If it has several.
    """
    found = [node for node in graph_def.node if node.op == ROWS]
    if len(found) > 1:
        raise PoseidonError(
            f"The graph has inputs with rows in {len(found)} places, '{found[0].name}' and '{found[1].name}', where "
            "one is expected; mark all inputs of a step by one PoseidonRows.")
    return found[0] if found else None


def _generic(graph, add_shapes, rows, unknown):
    """Returns the Graph with its shapes for a number of rows."""
    for fill in (unknown, None):
        try:
            return _with_elements(graph_lib.Graph(add_shapes(_with_rows(graph, rows, fill))), add_shapes)
        except PoseidonError:
            if fill is None:
                raise
    return None


def _with_elements(graph, add_shapes):
    """Returns a Graph in which what is taken out of lists has the shape of what is put into them."""
    for _ in range(_MAX_NESTING):
        lists, known = lists_lib.Lists(graph), {}
        for node in graph.graph_def.node:
            if node.op in lists_lib.TAKES:
                number, is_together = lists_lib.TAKES[node.op]
                output = f"{node.name}:1" if node.op == "TensorListPopBack" else node.name
                shape = graph.shape(output)
                if shape is None or None in (shape[1:] if is_together else shape):
                    elements = lists.element_shape(node.input[0], graph.shape)
                    if elements is not None and None not in elements and f"{node.name}/elements" not in graph.nodes:
                        known[node.name] = number, elements
        if not known:
            break
        result = graph_pb2.GraphDef()
        result.CopyFrom(graph.graph_def)
        for node in list(result.node):
            if node.name in known:
                number, elements = known[node.name]
                node.input[number] = f"{node.name}/elements"
                writer = graph_lib.Writer(node.name)
                writer.constant("elements", np.array(elements, np.int32))
                if "shape_type" in node.attr:
                    node.attr["shape_type"].type = types_pb2.DT_INT32
                result.node.extend(writer.nodes)
        graph = graph_lib.Graph(add_shapes(result))
    return graph


def _placeholder(marker, output):
    """Returns the name of what stands for an output of PoseidonRows while shapes are inferred."""
    return f"{marker.name}/generic{output}"


def _with_rows(graph, rows, unknown):
    """Returns a GraphDef with placeholders of known shapes in the place of the inputs with rows."""
    marker = rows_node(graph.graph_def)
    result = graph_pb2.GraphDef(versions=graph.graph_def.versions)
    if graph.graph_def.HasField("library"):
        result.library.CopyFrom(graph.graph_def.library)
    dimensions = marker.attr["dimensions"].list.i
    types = marker.attr["T"].list.type
    named = {}
    for i, (dimension, dtype) in enumerate(zip(dimensions, types)):
        shape = graph.shape(f"{marker.name}:{i}" if i else marker.name)
        placeholder = node_def_pb2.NodeDef(name=_placeholder(marker, i), op="Placeholder")
        placeholder.attr["dtype"].type = dtype
        sizes = None if shape is None else [
            rows if d == dimension else unknown if size is None else size for d, size in enumerate(shape)]
        graph_lib.set_attribute(placeholder.attr["shape"], "shape", sizes)
        result.node.append(placeholder)
        named[f"{marker.name}:{i}"] = placeholder.name
    named[marker.name] = _placeholder(marker, 0)
    for node in graph.graph_def.node:
        if node.name == marker.name:
            continue
        added = result.node.add()
        added.CopyFrom(node)
        if "_output_shapes" in added.attr:
            del added.attr["_output_shapes"]
        for i, tensor in enumerate(added.input):
            if graph_lib.node_of(tensor) == marker.name:
                added.input[i] = f"^{named[marker.name]}" if graph_lib.is_control(tensor) else named[tensor]
    return result
