"""Functions of a GraphDef: their nodes, and the names of tensors inside them.

A graph names a tensor by its index among all outputs of a node, "node:2"; a function by its index within one output
argument of the op, "node:argument:0". A function's argument is just a name.

Tests: tests/saved/test_saved_graphs.py, tests/saved/test_saved_damage.py, tests/graphs/test_partition_functions.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import re

from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import function_pb2
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import op_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9_.\\/>-]*")  # TensorFlow's rule
_OUTPUT = re.compile("0|[1-9][0-9]{0,8}")
_MAX_TENSORS = 1 << 20  # more of one node is damage, and would fill the memory


class Library:
    """The ops that a graph can use: those of TensorFlow, and its own functions."""

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        functions = graph_def.library.function
        self.functions = {f.signature.name: f for f in functions}
        for name in self.functions:
            if not name or not name.isprintable():
                raise GraphError(f"The graph has a function named {name!r}, which is not a valid function name.")
        if len(self.functions) != len(functions):
            raise GraphError("The graph has two functions of the same name.")
        self.main = MainBody(graph_def)
        self._bodies: dict[str, FunctionBody] = {}

    def op_def(self, node: node_def_pb2.NodeDef) -> op_def_pb2.OpDef:
        """Returns the OpDef of a node.

        Raises:
            PoseidonError: If the op is unknown.
        """
        if node.op in self.functions:
            return self.functions[node.op].signature
        op_def = tf_compat.op_def(node.op)
        if op_def is None:
            raise GraphError(f"Node '{node.name}' is a {node.op!r}, an op that TensorFlow does not know; "
                             "load the library that has it (tf.load_op_library) first.")
        return op_def

    def outputs(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the names of a node's outputs as functions use them: "argument:0"."""
        return [name for name, _ in self._outputs_and_types(node)]

    def types(self, node: node_def_pb2.NodeDef) -> list[int]:
        """Returns the DataTypes of the outputs of a node."""
        return [dtype for _, dtype in self._outputs_and_types(node)]

    def _outputs_and_types(self, node: node_def_pb2.NodeDef) -> list[tuple[str, int]]:
        op_def = self.op_def(node)
        outputs = []
        for argument in op_def.output_arg:
            if argument.type_list_attr:
                types = list(attribute(node, op_def, argument.type_list_attr).list.type)
            else:
                number = number_of(node, op_def, argument.number_attr) if argument.number_attr else 1
                types = [argument.type or attribute(node, op_def, argument.type_attr).type] * number
            outputs += [(f"{argument.name}:{i}", dtype) for i, dtype in enumerate(types)]
        return outputs

    def body(self, function: str) -> "FunctionBody":
        """Returns the body of a function."""
        if function not in self._bodies:
            if function not in self.functions:
                raise GraphError(f"The graph calls a function {function!r}, which it does not have.")
            self._bodies[function] = FunctionBody(self.functions[function], self)
        return self._bodies[function]


def attribute(node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef, name: str) -> attr_value_pb2.AttrValue:
    """Returns an attribute of a node, or the op's default."""
    if name in node.attr:
        return node.attr[name]
    for attr in op_def.attr:
        if attr.name == name and attr.HasField("default_value"):
            return attr.default_value
    raise GraphError(f"Node '{node.name}', a '{node.op}', lacks its attribute '{name}'.")


def number_of(node: node_def_pb2.NodeDef, op_def: op_def_pb2.OpDef, name: str) -> int:
    """Returns an attribute that is the number of tensors that a node takes or returns."""
    number = attribute(node, op_def, name).i
    if not 0 <= number < _MAX_TENSORS:
        raise GraphError(f"Attribute '{name}' of node '{node.name}', a {node.op}, is {number}, which is not a valid "
                         "number of tensors.")
    return number


class MainBody:
    """The nodes of a GraphDef.

    Attributes:
        nodes: NodeDefs by name.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef) -> None:
        self.nodes = _by_name(graph_def.node, "The graph")
        for node in graph_def.node:
            for text in node.input:
                self.parse(text)

    def parse(self, text: str) -> tuple[str, int | None]:
        """Returns (name, output) for a tensor, (name, None) for a control dependency."""
        if graph_lib.is_control(text):
            reference: tuple[str, int | None] = text[1:], None
        else:
            name, colon, output = text.partition(":")
            # Nor "name:00": the readers of an exchange are found by comparing names.
            if colon and not _OUTPUT.fullmatch(output):
                raise GraphError(f"The graph reads {text!r}, which is not a tensor of a graph.")
            reference = name, int(output or 0)
        if reference[0] not in self.nodes:
            raise GraphError(f"The graph reads {reference[0]!r}, which does not exist.")
        return reference


class FunctionBody:
    """The nodes of a FunctionDef.

    Attributes:
        function: Its name.
        nodes: NodeDefs by name.
        arguments: [(name, DataType)].
        returns: [(name, tensor, DataType)].
        control_returns: Names of nodes that run whichever outputs are read.
    """

    def __init__(self, function_def: function_pb2.FunctionDef, library: "Library") -> None:
        signature = function_def.signature
        self.function = signature.name
        self.nodes = _by_name(function_def.node_def, f"Function '{self.function}'")
        for argument in [*signature.input_arg, *signature.output_arg]:
            if not NAME.fullmatch(argument.name):
                raise GraphError(f"Function '{self.function}' has an argument named {argument.name!r}, which is "
                                 "not a valid argument name.")
            if argument.number_attr or argument.type_list_attr or argument.type_attr:
                raise GraphError(f"Function '{self.function}' has an argument '{argument.name}' whose "
                                 "type depends on the call.")
        self.arguments = [(argument.name, argument.type) for argument in signature.input_arg]
        missing = {argument.name for argument in signature.output_arg} - set(function_def.ret)
        if missing:
            raise GraphError(f"Function '{self.function}' does not say what its output "
                             f"'{min(missing)}' is.")
        self.returns = [(argument.name, function_def.ret[argument.name], argument.type)
                        for argument in signature.output_arg]
        self.control_returns = sorted(set(function_def.control_ret.values()))
        for name in self.control_returns:
            if name not in self.nodes:
                raise GraphError(f"Function '{self.function}' waits for {name!r}, which does not exist.")
        self._argument_names = {name for name, _ in self.arguments}
        self._library = library
        for name, text, dtype in self.returns:
            if self._type(text) != dtype:
                raise GraphError(f"Function '{self.function}' returns {text!r} as '{name}', which is not a "
                                 "tensor of the declared type.")

    def _type(self, text: str) -> int | None:
        """Returns the DataType of a tensor; None if the text names no tensor."""
        name, output = self.parse(text)
        if output is not None:
            return self._library.types(self.nodes[name])[output]
        return None if graph_lib.is_control(text) else dict(self.arguments)[name]

    def parse(self, text: str) -> tuple[str, int | None]:
        """Returns (name, output) for a tensor, (name, None) for a control dependency or an argument."""
        name, *output = text.removeprefix("^").split(":")
        if name in self._argument_names and not output:
            return name, None
        if name not in self.nodes:
            raise GraphError(f"Function '{self.function}' reads {name!r}, which does not exist.")
        if graph_lib.is_control(text):
            if output:
                raise GraphError(f"Function '{self.function}' waits for {text!r}, which is not a node.")
            return name, None
        outputs = self._outputs(name)
        if (argument := ":".join(output)) not in outputs:
            raise GraphError(f"Function '{self.function}' reads {text!r}, but the outputs of that "
                             f"node are {', '.join(outputs) or 'none'}.")
        return name, outputs.index(argument)

    @functools.cache  # noqa: B019, a body lives as long as its library
    def _outputs(self, name: str) -> list[str]:
        return self._library.outputs(self.nodes[name])


def _by_name(nodes: Sequence[node_def_pb2.NodeDef], where: str) -> dict[str, node_def_pb2.NodeDef]:
    by_name = {node.name: node for node in nodes}
    for name in by_name:
        if not NAME.fullmatch(name):
            raise GraphError(f"{where} has a node named {name!r}, which is not a valid node name.")
    if len(by_name) != len(nodes):
        raise GraphError(f"{where} has two nodes of the same name.")
    for node in nodes:
        if not all(called(node)):
            raise GraphError(f"Node '{node.name}' calls a function without a name.")
    return by_name


def to_graph(body: FunctionBody, graph_def: graph_pb2.GraphDef | None = None,
             describe: Callable[[str], Mapping[str, attr_value_pb2.AttrValue]] = lambda name: {}) -> graph_pb2.GraphDef:
    """Returns a function as a GraphDef in which its arguments are placeholders.

    Args:
        body: The `FunctionBody`.
        graph_def: A GraphDef that provides versions and the functions that the body calls; None to omit both.
        describe: A function that returns further attributes for the placeholder of an argument, AttrValues by name.
    """
    result = graph_pb2.GraphDef()
    if graph_def is not None:
        result.library.CopyFrom(graph_def.library)
        result.versions.CopyFrom(graph_def.versions)
    for name, dtype in body.arguments:
        node = result.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = dtype
        node.attr["shape"].shape.unknown_rank = True
        for key, value in describe(name).items():
            node.attr[key].CopyFrom(value)
    for node in body.nodes.values():
        added = result.node.add()
        added.CopyFrom(node)
        added.input[:] = [_in_graph(body, text) for text in node.input]
    return result


def add_defaults(graph_def: graph_pb2.GraphDef) -> None:
    """Adds missing attributes with their defaults: older versions of TensorFlow saved nodes without them."""
    for node in graph_def.node:
        op_def = tf_compat.op_def(node.op)
        for attr in op_def.attr if op_def else ():
            if attr.HasField("default_value") and attr.name not in node.attr:
                node.attr[attr.name].CopyFrom(attr.default_value)


def _in_graph(body: FunctionBody, text: str) -> str:
    """Returns the name in a graph for the tensor that a function names `text`."""
    name, output = body.parse(text)
    if graph_lib.is_control(text):
        return f"^{name}"
    return f"{name}:{output}" if output else name


def returned(body: FunctionBody) -> dict[str, str]:
    """Returns the tensors that a function returns, named as in its graph (`to_graph`), by name of the output."""
    return {name: _in_graph(body, text) for name, text, _ in body.returns}


def with_graph(function_def: function_pb2.FunctionDef, graph_def: graph_pb2.GraphDef, returns: Mapping[str, str],
               control_returns: Iterable[str]) -> function_pb2.FunctionDef:
    """Returns a FunctionDef with the same signature and other nodes.

    Args:
        function_def: The FunctionDef.
        graph_def: The nodes, including placeholders for the arguments; its library has the functions that they call.
        returns: The tensors, by name of the output.
        control_returns: Names of nodes that run whichever outputs are read.
    """
    library = Library(graph_def)
    arguments = {argument.name for argument in function_def.signature.input_arg}
    nodes = {node.name: node for node in graph_def.node}

    @functools.cache
    def outputs(name: str) -> list[str]:
        return library.outputs(nodes[name])

    def in_function(tensor: str) -> str:
        name = graph_lib.node_of(tensor)
        if graph_lib.is_control(tensor):
            return f"^{name}"
        return name if name in arguments else f"{name}:{outputs(name)[graph_lib.output_of(tensor)]}"

    result = function_pb2.FunctionDef()
    result.CopyFrom(function_def)
    result.signature.is_stateful = True
    del result.node_def[:]
    for node in graph_def.node:
        if node.name not in arguments:
            added = result.node_def.add()
            added.CopyFrom(node)
            added.input[:] = [in_function(tensor) for tensor in node.input
                              if not (graph_lib.is_control(tensor) and tensor[1:] in arguments)]
    for name, tensor in returns.items():
        result.ret[name] = in_function(tensor)
    result.control_ret.clear()
    del result.signature.control_output[:]
    for name in control_returns:
        result.control_ret[name] = name
        result.signature.control_output.append(name)
    return result


def with_own_functions(graph_def: graph_pb2.GraphDef, suffix: str) -> graph_pb2.GraphDef:
    """Returns a GraphDef whose library has the functions that it needs, and no others, under names of its own.

    Args:
        graph_def: The GraphDef, with the definitions of its functions.
        suffix: What comes after the name of each function, wherever it is named.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    gradients = {gradient.function_name: gradient for gradient in graph_def.library.gradient}
    needed: dict[str, None] = {}
    queue = [name for node in graph_def.node for name in called(node)]
    while queue:
        name = queue.pop()
        if name in functions and name not in needed:
            needed[name] = None
            queue += (callee for node in functions[name].node_def for callee in called(node))
            if name in gradients:
                queue.append(gradients[name].gradient_func)
    result = graph_lib.with_nodes(graph_def, graph_def.node)
    result.ClearField("library")
    for name in sorted(needed):
        result.library.function.add().CopyFrom(functions[name])
        result.library.function[-1].signature.name += suffix
        if name in gradients:
            result.library.gradient.add(function_name=f"{name}{suffix}",
                                        gradient_func=f"{gradients[name].gradient_func}{suffix}")
    for nodes in (result.node, *(function.node_def for function in result.library.function)):
        for node in nodes:
            if node.op in needed:
                node.op += suffix
            for call in _calls(node):
                if call.name in needed:
                    call.name += suffix
    return result


def _calls(node: node_def_pb2.NodeDef) -> list[attr_value_pb2.NameAttrList]:
    """Returns the functions in a node's attributes, which may be changed."""
    return [call for value in node.attr.values()
            for call in ([value.func] if value.HasField("func") else value.list.func)]


def called(node: node_def_pb2.NodeDef) -> list[str]:
    """Returns the names of the functions that a node calls: in its attributes, or as its op."""
    names = [] if tf_compat.op_def(node.op) else [node.op]
    for value in node.attr.values():
        if value.HasField("func"):
            names.append(value.func.name)
        names += [function.name for function in value.list.func]
    return names
