"""The nodes that mark inputs with rows, and placeholders with a number of rows in their place.

Tests: tests/graphs/test_sizes.py.
"""

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

ROWS = "PoseidonRows"


def find(graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
    """Returns the `PoseidonRows` nodes of a graph, in its order."""
    return [node for node in graph_def.node if node.op == ROWS]


def values(rows_node: node_def_pb2.NodeDef) -> list[str]:
    """Returns the inputs of a PoseidonRows that have rows."""
    return graph_lib.data_inputs(rows_node)[:len(rows_node.attr["T"].list.type)]


def given_part(rows_node: node_def_pb2.NodeDef) -> str | None:
    """Returns the input of a PoseidonRows that says which rows its values are; None if they are the global batch."""
    return next(iter(graph_lib.data_inputs(rows_node)[len(rows_node.attr["T"].list.type):]), None)


def placeholder(rows_node: str, output: int) -> str:
    """Returns the name of the placeholder that replaces an output of a PoseidonRows while shapes are inferred."""
    return f"{rows_node}/generic{output}"


def with_placeholders(graph: graph_lib.Graph) -> graph_pb2.GraphDef:
    """Returns a GraphDef with placeholders, whose shapes are not set yet, in place of the inputs with rows."""
    result = graph_pb2.GraphDef(versions=graph.graph_def.versions)
    if graph.graph_def.HasField("library"):
        result.library.CopyFrom(graph.graph_def.library)
    named = {}
    for rows_node in find(graph.graph_def):
        for i, dtype in enumerate(rows_node.attr["T"].list.type):
            node = result.node.add(name=placeholder(rows_node.name, i), op="Placeholder")
            node.attr["dtype"].type = dtype
            named[f"{rows_node.name}:{i}"] = node.name
        named[rows_node.name] = placeholder(rows_node.name, 0)
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


def with_rows(without_rows: graph_pb2.GraphDef, graph: graph_lib.Graph, rows: int,
              unknown: int | None) -> graph_pb2.GraphDef:
    """Returns a GraphDef whose placeholders have shapes.

    Args:
        without_rows: The result of `with_placeholders`.
        graph: The `Graph` from which it was made.
        rows: The number of rows of all inputs with rows.
        unknown: The value for other unknown sizes, None if they stay unknown.
    """
    result = graph_pb2.GraphDef()
    result.CopyFrom(without_rows)
    placeholders = iter(result.node)
    for rows_node in find(graph.graph_def):
        for i, dimension in enumerate(rows_node.attr["dimensions"].list.i):
            shape = graph.shape(f"{rows_node.name}:{i}" if i else rows_node.name)
            sizes = None if shape is None else [
                rows if d == dimension else unknown if size is None else size for d, size in enumerate(shape)]
            graph_lib.set_attribute(next(placeholders).attr["shape"], "shape", sizes)
    return result
