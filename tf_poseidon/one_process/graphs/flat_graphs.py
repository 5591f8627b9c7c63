"""ConcreteFunctions as flat GraphDefs, with names that are the same on all ranks.

Tests: tests/graphs/test_partition_functions.py, tests/unit/test_graph_texts.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.one_process.graphs import graph_texts
from tf_poseidon.ops import sites


def flat(traced: tf.types.experimental.ConcreteFunction) -> tuple[
        graph_pb2.GraphDef, list[str], dict[str, tf.Variable]]:
    """Returns (flat GraphDef, names of its outputs, variables by name of their resource) of a ConcreteFunction."""
    graph = traced.graph
    names = names_of_captures(graph)
    graph_def = _renamed(graph.as_graph_def(), names)
    _describe_variables(graph_def, graph.captures, names)
    outputs = [full_name(names.get(tensor.op.name, tensor.name)) for tensor in graph.outputs]
    controls = [operation.name for operation in graph.control_outputs]
    inputs = [names.get(tensor.op.name, tensor.op.name) for tensor in graph.inputs]
    inlined = inline.inline(graph_def, [*outputs, *controls, *inputs])
    _describe_tables(inlined, {names[internal.op.name]: external for external, internal in graph.captures})
    return inlined, outputs, {names[name]: variable for name, variable in variables_of(graph)}


def updated(function: tf.types.experimental.ConcreteFunction) -> list[str]:
    """Returns a line per variable that a ConcreteFunction updates."""
    graph_def, _, variables = flat(function)
    graph = graph_lib.Graph(graph_def)
    updated = {variables_lib.source(graph, graph.inputs(node)[0]) for node in graph_def.node
               if node.op.startswith(propagate_lib.UPDATES)}
    return sorted(f"'{sites.variable_path(v)}' {v.dtype.name}{list(v.shape)}" for name, v in variables.items()
                  if name in updated)


def lines_of(function: tf.types.experimental.ConcreteFunction) -> list[str]:
    """Returns lines that differ where ConcreteFunctions do: of each node itself, then of each with its inputs."""
    graph = function.graph
    graph_def = _renamed(graph.as_graph_def(), names_of_captures(graph))
    return [*graph_texts.lines(graph_def, with_inputs=False), *graph_texts.lines(graph_def)]


def variables_of(graph: tf.Graph) -> list[tuple[str, tf.Variable]]:
    """Returns (name of its placeholder, variable) per captured variable, in the order of their capture."""
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    return [(internal.op.name, by_handle[id(external)]) for external, internal in graph.captures
            if id(external) in by_handle]


def names_of_captures(graph: tf.Graph) -> dict[str, str]:
    """Returns names for captured inputs that are the same on all ranks, unlike TensorFlow's process-wide numbers."""
    return {internal.op.name: f"capture{i}" for i, (_, internal) in enumerate(graph.captures)}


def _renamed(graph_def: graph_pb2.GraphDef, names: Mapping[str, str]) -> graph_pb2.GraphDef:
    """Returns a GraphDef with renamed placeholders."""
    for node in graph_def.node:
        node.name = names.get(node.name, node.name)
        for i, tensor in enumerate(node.input):
            name = graph_lib.node_of(tensor)
            if name in names:
                node.input[i] = f"^{names[name]}" if graph_lib.is_control(tensor) else names[name]
        if "_class" in node.attr:
            del node.attr["_class"]
    return graph_def


def _describe_variables(graph_def: graph_pb2.GraphDef, captures: Iterable[tuple[tf.Tensor, tf.Tensor]],
                        names: Mapping[str, str]) -> None:
    """Notes the dtypes and shapes of captured variables, which a GraphDef does not have."""
    nodes = {node.name: node for node in graph_def.node}
    for _, internal in captures:
        described = internal.dtype == tf.resource and tf_compat.handle_data(internal)
        if described and described.is_set:
            attributes = nodes[names[internal.op.name]].attr
            for value in described.shape_and_type:
                attributes["_handle_dtypes"].list.type.append(value.dtype)
                attributes["_handle_shapes"].list.shape.append(value.shape)


def _describe_tables(graph_def: graph_pb2.GraphDef, captured: Mapping[str, tf.Tensor]) -> None:
    """Notes that captured tables have single keys and values, where they do: TensorFlow does not know it.

    Args:
        graph_def: A flat GraphDef.
        captured: What is captured, by name of its placeholder.
    """
    graph = graph_lib.Graph(graph_def)
    for node in graph_def.node:
        if node.op == "LookupTableFindV2":
            name = variables_lib.source(graph, graph.inputs(node)[0])
            attributes, types = graph.nodes[name].attr, [node.attr[end].type for end in ("Tin", "Tout")]
            if name in captured and "_handle_shapes" not in attributes and _has_scalars(captured[name], *types):
                attributes["_handle_dtypes"].list.type.extend(types)
                for _ in types:
                    attributes["_handle_shapes"].list.shape.add()


def _has_scalars(table: tf.Tensor, key_type: int, value_type: int) -> bool:
    """Whether a table has single keys and values: then it finds no values for no keys."""
    if tf.is_symbolic_tensor(table):
        return False
    with tf.init_scope():
        try:
            found = tf.raw_ops.LookupTableFindV2(
                table_handle=table, keys=tf.zeros([0], key_type), default_value=tf.zeros([], value_type))
        except tf.errors.OpError:
            return False
        return bool(found.shape == [0])


def without_placeholders(graph_def: graph_pb2.GraphDef, inputs: Iterable[str]) -> graph_pb2.GraphDef:
    """Returns a GraphDef without the placeholders that already exist, and without references to them by name."""
    names = {name.partition(":")[0] for name in inputs}
    result = graph_lib.with_nodes(graph_def, [node for node in graph_def.node if node.name not in names])
    for node in result.node:
        if any(tensor[1:] in names for tensor in node.input if graph_lib.is_control(tensor)):
            node.input[:] = [tensor for tensor in node.input
                             if not (graph_lib.is_control(tensor) and tensor[1:] in names)]
        if "_class" in node.attr and any(text.decode().removeprefix("loc:@") in names
                                         for text in node.attr["_class"].list.s):
            del node.attr["_class"]
    return result


def full_name(tensor: str) -> str:
    """Returns the name of a tensor with the number of its output."""
    return tensor if ":" in tensor else f"{tensor}:0"
