"""Graphs as texts that ranks compare: line by line, to name what differs, and as a digest that no name changes.

Names say where two graphs differ, but those of layers, functions and captured inputs have numbers that count what a
process has made before. So ranks may have the same function under other names: the digest tells.

Tests: tests/unit/test_graph_texts.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import hashlib
import re

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import function_pb2
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import encoded
from tf_poseidon.errors import shown

# What TensorFlow adds to the names of functions: where they come from, and numbers that count process-wide.
_ADDED = re.compile(r"^__inference_|_\d+")
_FEW = 8  # elements of a constant that a line shows
_UNCOUNTED = (tf.resource, tf.variant)  # whose values are not numbers


def lines(graph_def: graph_pb2.GraphDef, with_inputs: bool = True) -> list[str]:
    """Returns a line per node of a graph and of its functions, sorted, with a digest of its attributes and inputs.

    Args:
        graph_def: The graph.
        with_inputs: Whether digests say what nodes read: then one that differs makes those differ that read it.
    """
    result = [_line(node, "", with_inputs) for node in graph_def.node]
    for function in graph_def.library.function:
        where = f" of the function '{_ADDED.sub('', function.signature.name).strip('_')}'"
        result += [_line(node, where, with_inputs) for node in function.node_def]
    return sorted(result)


def captured_values(function: tf.types.experimental.ConcreteFunction) -> list[str]:
    """Returns a line per tensor that a function has captured, whose values are no part of its graph; not variables."""
    result = []
    for number, (external, _) in enumerate(function.graph.captures):
        if hasattr(external, "numpy") and external.dtype not in _UNCOUNTED:
            value = np.asarray(external.numpy())
            data = encoded(repr(value.tolist())) if value.dtype == object else np.ascontiguousarray(value).tobytes()
            result.append(f"the captured tensor {number} is {external.dtype.name}{list(external.shape)}"
                          f"{_few(value)} ({_digest([data])})")
    return result


def structure(function: tf.types.experimental.ConcreteFunction) -> str:
    """Returns a digest of what a function computes, in which no name has a part; nor have the values it has captured.

    Functions that differ in an op, an attribute, a constant, or in what an op reads have other digests.
    """
    graph = function.graph
    graph_def = graph.as_graph_def()
    library = _Library(graph_def.library.function)
    given = {tensor.op.name: f"input {number}" for number, tensor in enumerate(graph.inputs)}
    digests = library.nodes(graph_def.node, given)
    ends = [f"{digests[tensor.op.name]}:{tensor.value_index}" for tensor in graph.outputs]
    controls = sorted(digests[operation.name] for operation in graph.control_outputs)
    return _digest([*ends, "controls", *controls, "nodes", *sorted(digests.values())])


class _Library:
    """Digests of functions and of their nodes, which do not depend on names."""

    def __init__(self, functions: Iterable[function_pb2.FunctionDef]) -> None:
        self._functions = {function.signature.name: function for function in functions}
        self._found: dict[str, str] = {}

    def nodes(self, nodes: Iterable[node_def_pb2.NodeDef], given: Mapping[str, str]) -> dict[str, str]:
        """Returns the digest of each node, by its name: of its op, its attributes, and the digests of what it reads.

        Args:
            nodes: The nodes of a graph, or of a function.
            given: Texts for the inputs of the graph or function, by their names.
        """
        digests, waiting = dict(given), [node for node in nodes if node.name not in given]
        while waiting:
            left = [node for node in waiting if not self._add(node, digests)]
            if len(left) == len(waiting):  # a cycle: the flat loops of TensorFlow 1
                digests[left[0].name] = _digest([left[0].op, "in a cycle"])
            waiting = [node for node in left if node.name not in digests]
        return digests

    def _add(self, node: node_def_pb2.NodeDef, digests: dict[str, str]) -> bool:
        """Adds the digest of a node, if those of all its inputs are known; returns whether they are."""
        inputs, controls = [], []
        for tensor in node.input:
            name, _, output = tensor.removeprefix("^").partition(":")
            if name not in digests:
                return False
            if tensor.startswith("^"):
                controls.append(digests[name])
            else:
                inputs.append(f"{digests[name]}:{output.removesuffix(':0') or 0}")
        attributes = [f"{key}={_digest([self._attribute(value)])}" for key, value in sorted(_plain(node).attr.items())]
        digests[node.name] = _digest([node.op, node.device, *attributes, *inputs, "controls", *sorted(controls)])
        return True

    def _attribute(self, value: attr_value_pb2.AttrValue) -> bytes:
        functions = _functions_of(value)
        if not functions:
            return value.SerializeToString(deterministic=True)
        return encoded(" ".join(self._function(function.name) for function in functions))

    def _function(self, name: str) -> str:
        if name not in self._functions:
            return _ADDED.sub("", name)
        if name not in self._found:
            self._found[name] = "recursive"
            function = self._functions[name]
            given = {parameter.name: f"input {i}" for i, parameter in enumerate(function.signature.input_arg)}
            digests = self.nodes(function.node_def, given)
            ends = []
            for argument in function.signature.output_arg:
                node, _, output = function.ret[argument.name].partition(":")
                ends.append(f"{digests[node]}:{output}")
            controls = sorted(digests[node] for node in function.control_ret.values())
            self._found[name] = _digest([*ends, "controls", *controls, "nodes", *sorted(digests.values())])
        return self._found[name]


def _line(node: node_def_pb2.NodeDef, where: str, with_inputs: bool) -> str:
    plain = _plain(node)
    if not with_inputs:
        plain.ClearField("input")
    for attribute in plain.attr.values():
        for function in _functions_of(attribute):
            function.name = _ADDED.sub("", function.name)
    digest = _digest([plain.SerializeToString(deterministic=True)])
    value = ""
    if node.op == "Const" and node.attr["dtype"].type not in (types_pb2.DT_VARIANT, types_pb2.DT_RESOURCE):
        tensor = node.attr["value"].tensor
        if all(dimension.size <= _FEW for dimension in tensor.tensor_shape.dim):
            value = _few(tf.make_ndarray(tensor))
    return f"the node '{node.name}'{where} is a {node.op}{value} ({digest})"


def _few(value: np.ndarray) -> str:
    return f" of {shown(value.tolist())}" if value.size <= _FEW else ""


def _plain(node: node_def_pb2.NodeDef) -> node_def_pb2.NodeDef:
    """Returns a copy of a node without what counts process-wide, or only describes."""
    plain = node_def_pb2.NodeDef()
    plain.CopyFrom(node)
    plain.ClearField("experimental_debug_info")
    for key in [key for key in plain.attr if key.startswith("_")]:
        del plain.attr[key]
    if "token" in plain.attr:  # of tf.py_function
        del plain.attr["token"]
    return plain


def _functions_of(attribute: attr_value_pb2.AttrValue) -> Sequence[attr_value_pb2.NameAttrList]:
    return [attribute.func] if attribute.HasField("func") else attribute.list.func


def _digest(parts: Iterable[str | bytes]) -> str:
    data = [part if isinstance(part, bytes) else encoded(part) for part in parts]
    lengths = ",".join(str(len(part)) for part in data).encode()
    return hashlib.sha256(b"\0".join([lengths, *data])).hexdigest()[:12]
