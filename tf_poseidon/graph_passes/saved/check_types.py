"""Checks that nodes match the definitions of their ops; some that do not make TensorFlow end the process.

Requires: a flat graph whose inputs exist. Ensures: every node has the attributes of its op, reads the right number and
types of tensors, and calls functions with the types that it declares. Loops are entered with Enter and left with Exit.
No node has a name that is reserved for inserted nodes.

Tests: tests/saved/test_saved_damage.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
import math

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import op_def_pb2
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import functions
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import node_writer

_FIELDS = {"string": "s", "int": "i", "float": "f", "bool": "b"}  # fields of AttrValue; others are named like the type
_TYPES = frozenset(types_pb2.DataType.values())
_REFERENCE = 100  # offset of a reference's DataType from that of its value
# By op: (attributes with functions, attribute with their argument types, attribute with their result types).
_CALLS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ((("f",), "Tin", "Tout"),)),
    **dict.fromkeys(("If", "StatelessIf", "_If"), ((("then_branch", "else_branch"), "Tin", "Tout"),)),
    **dict.fromkeys(("Case", "StatelessCase"), ((("branches",), "Tin", "Tout"),)),
    **dict.fromkeys(("While", "StatelessWhile", "_While"), ((("body",), "T", "T"), (("cond",), "T", None))),
}
_MAX_RANK = 254
_MAX_ELEMENTS = 1 << 31  # of a constant; a file of fewer bytes can declare more


def check_types(graph_def: graph_pb2.GraphDef, library: functions.Library) -> None:
    """Raises PoseidonError unless TensorFlow can read every node.

    Args:
        graph_def: A flat GraphDef.
        library: The `functions.Library`.
    """
    outputs = {}
    for node in graph_def.node:
        if node.name.partition("/")[0] == node_writer.PREFIX:
            raise GraphError(f"The graph has a node named '{node.name}' already, a name that is reserved for inserted "
                             "nodes; rename it.")
        op_def = library.op_def(node)
        for attr in op_def.attr:
            _check_attribute(node, attr, functions.attribute(node, op_def, attr.name))
        if node.op == "Const":
            _check_constant(node)
        elif node.op in frames_lib.ENTERS:
            _check_name_of_loop(node)
        _check_calls(node, op_def, library)
        _check_places(node)
        outputs[node.name] = _types(node, op_def, op_def.output_arg)
    _check_loops(graph_def)
    for node in graph_def.node:
        op_def = library.op_def(node)
        expected, inputs = _types(node, op_def, op_def.input_arg), graph_lib.data_inputs(node)
        if any(graph_lib.is_control(tensor) for tensor in node.input[:len(inputs)]):
            raise GraphError(f"Node '{node.name}' has a control input before a tensor that it reads; control inputs "
                             "come last.")
        if len(inputs) != len(expected):
            raise GraphError(f"Node '{node.name}', a {node.op}, reads {len(inputs)} tensors, expected "
                             f"{len(expected)}.")
        for tensor, wanted in zip(inputs, expected):
            types, output = outputs[graph_lib.node_of(tensor)], graph_lib.output_of(tensor)
            if output >= len(types):
                raise GraphError(f"Node '{node.name}' reads '{tensor}', but that node has {len(types)} outputs.")
            if types[output] not in (wanted, wanted + _REFERENCE):
                raise GraphError(f"Node '{node.name}', a {node.op}, reads '{tensor}', which is "
                                 f"{_name(types[output])}, expected {_name(wanted)}.")


def _check_attribute(node: node_def_pb2.NodeDef, attr: op_def_pb2.OpDef.AttrDef,
                     value: attr_value_pb2.AttrValue) -> None:
    where = f"Attribute '{attr.name}' of node '{node.name}', a {node.op},"
    kind = attr.type.removeprefix("list(").removesuffix(")")
    field, is_list = _FIELDS.get(kind, kind), kind != attr.type
    if value.WhichOneof("value") != ("list" if is_list else field) or (
            is_list and any(list_field.name != field for list_field, _ in value.list.ListFields())):
        raise GraphError(f"{where} is not a valid {attr.type}.")
    values = list(getattr(value.list, field)) if is_list else [getattr(value, field)]
    if attr.has_minimum and (len(values) if is_list else value.i) < attr.minimum:
        raise GraphError(f"{where} is {len(values) if is_list else value.i}, expected at least {attr.minimum}.")
    if kind == "type":
        allowed = attr.allowed_values.list.type
        for dtype in values:
            if not 0 < dtype < _REFERENCE or dtype not in _TYPES or allowed and dtype not in allowed:
                raise GraphError(f"{where} is {_name(dtype)}, which the op does not allow.")
    elif kind == "string" and (allowed := attr.allowed_values.list.s):
        for text in values:
            if text not in allowed:
                raise GraphError(f"{where} is {text!r}, expected one of {list(allowed)}.")
    elif kind == "shape" and not all(map(_is_shape, values)):
        raise GraphError(f"{where} is not a valid shape.")


def _check_constant(node: node_def_pb2.NodeDef) -> None:
    tensor = node.attr["value"].tensor
    where = f"The value of constant '{node.name}'"
    if tensor.dtype != node.attr["dtype"].type:
        raise GraphError(f"{where} is {_name(tensor.dtype)}, expected {_name(node.attr['dtype'].type)}.")
    sizes = [dim.size for dim in tensor.tensor_shape.dim]
    if not _is_shape(tensor.tensor_shape) or tensor.tensor_shape.unknown_rank or min(sizes, default=0) < 0:
        raise GraphError(f"{where} has no valid shape.")
    if math.prod(sizes) > _MAX_ELEMENTS:
        raise GraphError(f"{where} has {math.prod(sizes):,} elements, expected at most {_MAX_ELEMENTS:,}.")


def _check_calls(node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef, library: functions.Library) -> None:
    for attributes, takes, gives in _CALLS.get(node.op, ()):
        for attribute in attributes:
            value = functions.attribute(node, op_def, attribute)
            for function in [value.func] if value.HasField("func") else value.list.func:
                _check_call(node, library.body(function.name), *(
                    None if key is None else list(functions.attribute(node, op_def, key).list.type)
                    for key in (takes, gives)))


def _check_call(node: node_def_pb2.NodeDef, body: functions.FunctionBody,
                takes: list[int] | None, gives: list[int] | None) -> None:
    """Checks the types that a function takes and returns; None stands for one tensor of any type."""
    arguments, returns = [dtype for _, dtype in body.arguments], [dtype for *_, dtype in body.returns]
    for what, types, wanted in (("takes", arguments, takes), ("returns", returns, gives)):
        if len(types) != (1 if wanted is None else len(wanted)) or wanted is not None and types != wanted:
            raise GraphError(f"Function '{body.function}' {what} {_names(types)}, but '{node.name}' calls it with "
                             f"{'one tensor' if wanted is None else _names(wanted)}.")


def _check_loops(graph_def: graph_pb2.GraphDef) -> None:
    """Checks that loops are entered only with Enter and left only with Exit."""
    if not any(node.op in frames_lib.ENTERS for node in graph_def.node):
        return
    frames = frames_lib.find_frames(graph_lib.in_order(graph_def))
    for node in graph_def.node:
        loops = {frames[graph_lib.node_of(tensor)] for tensor in node.input}
        if len(loops) > 1:
            names = sorted(f"loop '{loop.name}'" if loop != frames_lib.ROOT else "no loop" for loop in loops)
            raise GraphError(f"Node '{node.name}' reads tensors in {' and in '.join(names)}.")


def _check_places(node: node_def_pb2.NodeDef) -> None:
    """Checks the names of nodes with which a node is colocated."""
    try:
        for text in node.attr["_class"].list.s if "_class" in node.attr else ():
            text.decode()
    except UnicodeDecodeError as error:
        raise GraphError(f"Attribute '_class' of node '{node.name}', a {node.op}, is not text.") from error


def _check_name_of_loop(node: node_def_pb2.NodeDef) -> None:
    """Refuses loops whose names are not valid for nodes: nodes that are written for a loop are named after it."""
    name = node.attr["frame_name"].s
    try:
        is_name = bool(functions.NAME.fullmatch(name.decode()))
    except UnicodeDecodeError:
        is_name = False
    if not is_name:
        raise GraphError(f"Node '{node.name}' enters a loop named {name!r}, which is not a valid loop name.")


def _is_shape(shape: tensor_shape_pb2.TensorShapeProto) -> bool:
    sizes = [dim.size for dim in shape.dim]
    return (len(sizes) <= _MAX_RANK and min(sizes, default=0) >= -1
            and math.prod(size for size in sizes if size > 0) < 1 << 63)


def _types(node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef,
           arguments: Iterable[op_def_pb2.OpDef.ArgDef]) -> list[int]:
    """Returns the DataTypes of a node's inputs, or outputs, as its op defines them."""
    types_of_arguments = []
    for argument in arguments:
        if argument.type_list_attr:
            types = functions.attribute(node, op_def, argument.type_list_attr).list.type
        else:
            types = [argument.type or functions.attribute(node, op_def, argument.type_attr).type]
            if argument.number_attr:
                types *= functions.number_of(node, op_def, argument.number_attr)
        types_of_arguments += [dtype + _REFERENCE if argument.is_ref else dtype for dtype in types]
    return types_of_arguments


def _names(types: Collection[int]) -> str:
    return f"{len(types)} tensors ({', '.join(map(_name, types))})" if types else "no tensors"


def _name(dtype: int) -> str:
    try:
        return tf.as_dtype(dtype).name
    except TypeError:
        return f"{dtype}, no type,"
