"""A GraphDef with indexes, as passes read it, and a writer of nodes.

Tests: tests/graphs/test_passes.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import copy
import functools
import math
from typing import Any
from typing import Literal
from typing import overload
from typing import Protocol
from typing import TYPE_CHECKING
from typing import TypeGuard

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import GraphError

if TYPE_CHECKING:
    from tf_poseidon.graph_passes.graph.provenance import Provenance

# The attributes of a marker that a pass has decided to keep.
DECIDED: dict[str, Any] = {"_poseidon_planned": True}
# An attribute of nodes that exchange something in a partitioned graph: what the step does meanwhile. It "computes" or
# "waits" during an exchange that happens once in a step; an exchange in a loop "repeats" in each round.
MEANWHILE = "_poseidon_meanwhile"
# One of those that gather the rows of all ranks: how many elements of the first dimension belong to one row.
ELEMENTS = "_poseidon_elements"

# The types of half precision, with which kernels compute in float.
HALVES = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16)

# The shape of a tensor, None for unknown sizes.
Shape = tuple[int | None, ...]
# The shapes of a node's outputs, by its name; None if the rank is unknown.
Shapes = Mapping[str, Sequence[Shape | None]]
# The value of an attribute; its name and the op determine its type.
Attribute = Any


class AddShapes(Protocol):
    """Infers the shapes of a flat GraphDef's tensors, as `grappler.add_shapes` does."""

    @overload
    def __call__(self, graph_def: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
        """Returns the GraphDef with shapes."""

    @overload
    def __call__(self, graph_def: graph_pb2.GraphDef, alone: Literal[True]) -> Shapes:
        """Returns the shapes alone."""


@functools.lru_cache(1 << 20)  # asked several times of each tensor
def node_of(tensor: str) -> str:
    """Returns the name of an input's node: "a" for "a", "a:1" and "^a"."""
    return tensor.lstrip("^").partition(":")[0]


@functools.lru_cache(1 << 20)
def output_of(tensor: str) -> int:
    """Returns the number of a tensor among the outputs of its node: 1 for "a:1", 0 for "a"."""
    return int(tensor.partition(":")[2] or 0)


def is_control(tensor: str) -> bool:
    """Whether an input is a control dependency."""
    return tensor.startswith("^")


class Graph:
    """A read-only view of a GraphDef.

    Attributes:
        graph_def: The GraphDef.
        nodes: Its nodes by name.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef, shapes: Shapes | None = None) -> None:
        """Makes a view.

        Args:
            graph_def: The GraphDef.
            shapes: The shapes of a node's outputs, by its name: each a tuple with None for unknown sizes, or None; by
                default those in `_output_shapes`.
        """
        self.graph_def = graph_def
        self.nodes = {node.name: node for node in graph_def.node}
        self._consumers: collections.defaultdict[str, list[node_def_pb2.NodeDef]] = collections.defaultdict(list)
        self._inputs: dict[str, list[str]] = {}
        self._shapes: dict[str, Shape | None] = {}
        self._given_shapes = shapes
        for node in graph_def.node:
            for name in dict.fromkeys(map(node_of, node.input)):
                self._consumers[name].append(node)

    @functools.cached_property
    def ordered(self) -> list[node_def_pb2.NodeDef]:
        """The nodes in the order of `in_order`."""
        return in_order(self.graph_def)

    def node(self, tensor: str) -> node_def_pb2.NodeDef:
        """Returns the node that produces a tensor."""
        return self.nodes[node_of(tensor)]

    def inputs(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the inputs of a node of this graph that are tensors."""
        if node.name not in self._inputs:  # asked often, and slow to read from a protocol buffer
            self._inputs[node.name] = data_inputs(node)
        return self._inputs[node.name]

    def consumers(self, name: str) -> list[node_def_pb2.NodeDef]:
        """Returns the nodes that read a node's outputs or wait for it."""
        return self._consumers[name]

    def shape(self, tensor: str) -> Shape | None:
        """Returns the shape of a tensor: a tuple with None for unknown sizes, or None."""
        if tensor not in self._shapes:  # asked often, and slow to read from a protocol buffer
            self._shapes[tensor] = self._shape(tensor)
        return self._shapes[tensor]

    def _shape(self, tensor: str) -> Shape | None:
        if self._given_shapes is not None:
            shapes = self._given_shapes[node_of(tensor)]
            return shapes[output_of(tensor)] if output_of(tensor) < len(shapes) else None
        attributes = self.node(tensor).attr
        shapes = attributes["_output_shapes"].list.shape if "_output_shapes" in attributes else ()
        if len(shapes) <= output_of(tensor) or shapes[output_of(tensor)].unknown_rank:
            return None
        return tuple(d.size if d.size >= 0 else None for d in shapes[output_of(tensor)].dim)

    def shapes(self, name: str) -> list[Shape | None]:
        """Returns the shapes of all outputs of a node; none if they were never inferred."""
        if self._given_shapes is not None:
            return list(self._given_shapes[name])
        attributes = self.nodes[name].attr
        number = len(attributes["_output_shapes"].list.shape) if "_output_shapes" in attributes else 0
        return [self.shape(f"{name}:{i}" if i else name) for i in range(number)]

    def with_shapes(self, shapes: Shapes) -> "Graph":
        """Returns a view of the same nodes with other shapes."""
        result = copy.copy(self)
        result._shapes, result._given_shapes = {}, shapes
        return result

    def constant(self, tensor: str) -> np.ndarray | None:
        """Returns the value of a Const as an array; None if the tensor is not a Const."""
        node = self.node(tensor)
        if node.op != "Const":
            return None
        try:
            return tf.make_ndarray(node.attr["value"].tensor)
        except (TypeError, ValueError, OverflowError) as error:
            raise GraphError(f"The value of constant '{node.name}' cannot be read: "
                             f"{str(error).strip().splitlines()[0]}; the graph is damaged.") from error


def in_order(graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes in topological order, without those that depend on themselves.

    NextIteration closes loops: the Merge that it feeds does not wait for it.
    """
    backs = {node.name for node in graph_def.node if node.op in ("NextIteration", "RefNextIteration")}
    readers, missing, ready, ordered = collections.defaultdict(list), {}, [], []
    for node in graph_def.node:
        sources = {node_of(tensor) for tensor in node.input}
        if node.op in ("Merge", "RefMerge"):
            sources -= backs
        missing[node.name] = len(sources)
        for source in sources:
            readers[source].append(node)
        if not sources:
            ready.append(node)
    while ready:
        ordered.append(ready.pop())
        for reader in readers[ordered[-1].name]:
            missing[reader.name] -= 1
            if missing[reader.name] == 0:
                ready.append(reader)
    return ordered


def data_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    """Returns the inputs of a node that are tensors."""
    return [tensor for tensor in node.input if not is_control(tensor)]


def control_inputs(node: node_def_pb2.NodeDef) -> list[str]:
    """Returns the inputs of a node that are control dependencies."""
    return [tensor for tensor in node.input if is_control(tensor)]


def with_controls(node: node_def_pb2.NodeDef, names: Iterable[str]) -> node_def_pb2.NodeDef:
    """Returns a node that waits for others, too, given by name; the node itself if there are none."""
    controls = [f"^{name}" for name in names]
    if not controls:
        return node
    changed = node_def_pb2.NodeDef()
    changed.CopyFrom(node)
    changed.input.extend(controls)
    return changed


def is_decided(node: node_def_pb2.NodeDef) -> bool:
    """Whether a pass has decided to keep a marker."""
    return DECIDED.keys() <= node.attr.keys()


def meanwhile(node: node_def_pb2.NodeDef) -> str:
    """Returns what the step does while a node exchanges something, see MEANWHILE; "" if unknown."""
    return node.attr[MEANWHILE].s.decode() if MEANWHILE in node.attr else ""


def is_known(shape: Shape | None) -> TypeGuard[tuple[int, ...]]:
    """Whether all sizes of a shape are known."""
    return shape is not None and None not in shape


def num_elements(shape: Shape | None) -> int | None:
    """Returns the number of elements of a shape, None if it is unknown."""
    return math.prod(shape) if is_known(shape) else None


class Writer:
    """Writes nodes that belong together: under one prefix, and on one device unless `placed` elsewhere."""

    def __init__(self, prefix: str, device: str = "", provenance: "Provenance | None" = None) -> None:
        """Makes a writer.

        Args:
            prefix: The prefix of its nodes' names.
            device: The device of the nodes.
            provenance: The `Provenance` that the nodes carry, None for none.
        """
        self._prefix = prefix
        self._device = device
        self._provenance = provenance
        self.nodes: list[node_def_pb2.NodeDef] = []

    @contextlib.contextmanager
    def placed(self, device: str) -> Iterator[None]:
        """A context in which nodes are placed on another device."""
        outer, self._device = self._device, device
        try:
            yield
        finally:
            self._device = outer

    def add(self, suffix: str, op: str, inputs: Iterable[str], **attributes: Attribute) -> str:
        """Adds a node.

        Args:
            suffix: Its name below the prefix; "" for the prefix itself.
            op: Its op.
            inputs: Names of tensors, then control dependencies.
            **attributes: Python values. DataTypes are `types_pb2.DT_...` ints, or lists of them, under names that begin
                or end with T or are in _TYPES.

        Returns:
            The name of its first output.
        """
        name = f"{self._prefix}/{suffix}" if suffix else self._prefix
        node = node_def_pb2.NodeDef(name=name, op=op, input=inputs, device=self._device)
        for key, value in attributes.items():
            set_attribute(node.attr[key], key, value)
        if self._provenance is not None:
            self._provenance.note(node)
        self.nodes.append(node)
        return name

    def copy(self, node: node_def_pb2.NodeDef, inputs: Iterable[str] | None = None, device: str | None = None,
             **attributes: Attribute) -> None:
        """Adds a copy of a node, with other values of some attributes and, if given, other inputs or another device."""
        self.nodes.append(node_def_pb2.NodeDef())
        self.nodes[-1].CopyFrom(node)
        if inputs is not None:
            self.nodes[-1].input[:] = inputs
        if device is not None:
            self.nodes[-1].device = device
        for key, value in attributes.items():
            set_attribute(self.nodes[-1].attr[key], key, value)
        if self._provenance is not None:
            self._provenance.note(self.nodes[-1])

    def constant(self, suffix: str, value: npt.ArrayLike, beside: str | None = None) -> str:
        """Adds a Const; inside a loop, `beside` is a tensor of that loop, for which it waits."""
        value = np.asarray(value)
        dtype = tf.as_dtype(value.dtype).as_datatype_enum
        name = self.add(suffix, "Const", [f"^{node_of(beside)}"] if beside else [], dtype=dtype)
        self.nodes[-1].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        return name


def copy_attributes(node: node_def_pb2.NodeDef, other: node_def_pb2.NodeDef, **attributes: Attribute) -> None:
    """Copies attributes from `other` to `node`, with other values of some."""
    for key, value in other.attr.items():
        node.attr[key].CopyFrom(value)
    for key, value in attributes.items():
        set_attribute(node.attr[key], key, value)


_TYPES = ("dtype", "F", "Index", "out_idx", "out_type", "type")


def set_attribute(attribute: attr_value_pb2.AttrValue, key: str, value: Attribute) -> None:
    is_type = key.startswith("T") or key.endswith("T") or key in _TYPES
    if isinstance(value, bool):
        attribute.b = value
    elif is_type and isinstance(value, int):
        attribute.type = value
    elif is_type:
        attribute.list.type.extend(value)
    elif isinstance(value, int):
        attribute.i = value
    elif isinstance(value, float):
        attribute.f = value
    elif isinstance(value, str):
        attribute.s = value.encode()
    elif key == "shape":
        _set_shape(attribute.shape, value)
    elif key == "shapes":
        for shape in value:
            _set_shape(attribute.list.shape.add(), shape)
    else:
        raise TypeError(f"attribute {key}={value!r}")


def set_names(attribute: attr_value_pb2.AttrValue, names: Iterable[str]) -> None:
    """Sets an attribute to a list of strings."""
    attribute.list.s[:] = [name.encode() for name in names]


def _set_shape(proto: tensor_shape_pb2.TensorShapeProto, shape: Iterable[int | None] | None) -> None:
    proto.unknown_rank = shape is None
    for size in shape or ():
        proto.dim.add().size = -1 if size is None else size


def with_nodes(graph_def: graph_pb2.GraphDef, nodes: Iterable[node_def_pb2.NodeDef]) -> graph_pb2.GraphDef:
    """Returns a GraphDef of these nodes, with the library and versions of `graph_def`."""
    result = graph_pb2.GraphDef(node=nodes, versions=graph_def.versions)
    if graph_def.HasField("library"):
        result.library.CopyFrom(graph_def.library)
    return result


def to_text(graph_def: graph_pb2.GraphDef) -> str:
    """Returns the graph as text, one node per line, sorted by name: name = Op(inputs) [site, scheme]."""
    lines = []
    for node in sorted(graph_def.node, key=lambda node: node.name):
        shown = [node.attr[key].s.decode() for key in ("site", "scheme") if key in node.attr]
        lines.append(f"{node.name} = {node.op}({', '.join(node.input)})"
                     + (f" [{', '.join(shown)}]" if shown else ""))
    return "\n".join(lines)
