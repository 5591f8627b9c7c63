"""The shapes that tensors have on one rank in a usual batch: what exchanges and arithmetic cost depends on them.

They hold for no other batch and, where a rank has fewer rows, for no other rank, so no result may depend on them.
They exist in two places only: in the copy of a graph that `with_sizes` returns, which cannot run, since its op
`PoseidonUsualRows` has no kernel; and in the `Graph` that `with_shapes` makes of this copy's shapes, which `session.py`
hands to the passes that describe costs, and to no other.

Tests: tests/graphs/test_pipeline_fuzz.py, tests/training/test_explaining.py, tests/training/test_verify.py.
"""

from collections.abc import Iterable

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.find import training_step
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import inference

_ROWS = "PoseidonRows"
# The op that stands for PoseidonRows in the copy: its shapes have the usual number of rows.
_USUAL_ROWS = "PoseidonUsualRows"
# Of a partitioned graph: there, arguments are global batches.
_PART = "PoseidonPart"
_DATA = ("IteratorGetNext", "OptionalGetValue")
# Says which columns are a rank's: whole blocks of so many, see kColumnsTogether in columns.h.
_COLUMNS, _TOGETHER = "PoseidonColumnRange", 16
_GATHER = "PoseidonAllGather"


def with_shapes(graph: graph_lib.Graph, add_shapes: graph_lib.AddShapes,
                facts: training_step.StepFacts) -> graph_lib.Graph:
    """Returns a `Graph` of the same nodes with the shapes of a usual batch; the graph itself if that is unknown.

    Args:
        graph: A flat `Graph`, with the shapes that hold for every batch.
        add_shapes: A function that infers shapes, such as `grappler.add_shapes`.
        facts: What the graph says about its step.
    """
    if facts.rows is None:
        return graph
    try:
        return graph.with_shapes(inference.Inference(graph, add_shapes)(with_sizes(graph.graph_def, facts)))
    except GraphError:  # the graph itself fixes another number of rows
        return graph


def with_sizes(graph_def: graph_pb2.GraphDef, facts: training_step.StepFacts) -> graph_pb2.GraphDef:
    """Returns a copy of a flat GraphDef, for shape inference alone, with the numbers of rows of a usual batch.

    Args:
        graph_def: The GraphDef.
        facts: What it says about its step, with `rows`.
    """
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    is_partitioned = any(node.op == _PART for node in result.node)
    of_data = facts.global_rows if is_partitioned else facts.rows
    for node in result.node:
        if node.op == _ROWS:
            node.op = _USUAL_ROWS
            node.attr["rows"].i = facts.rows or -1
        elif node.op == _GATHER and graph_lib.ELEMENTS in node.attr and facts.global_rows:
            _set_usual_rows(node, facts.global_rows)
        else:
            for shape in _shapes_of_data(node, is_partitioned) if of_data else ():
                if shape.dim and shape.dim[0].size == -1:
                    shape.dim[0].size = of_data or -1
    if facts.rows and facts.global_rows:
        _set_columns(result, max(1, round(facts.global_rows / facts.rows)))
    return result


def _set_usual_rows(node: node_def_pb2.NodeDef, rows: int) -> None:
    """Gives what is gathered from all ranks the rows of a global batch."""
    dtype, elements = node.attr["T"].type, node.attr[graph_lib.ELEMENTS].i
    node.op = _USUAL_ROWS
    node.input[:] = [node.input[0], *graph_lib.control_inputs(node)]
    node.attr.clear()
    node.attr["T"].list.type.append(dtype)
    node.attr["dimensions"].list.i.append(0)
    node.attr["elements"].list.i.append(elements)
    node.attr["names"].list.s.append(b"gathered")
    node.attr["rows"].i = rows


def _set_columns(graph_def: graph_pb2.GraphDef, ranks: int) -> None:
    """Gives a graph the number of columns of the rank that has most, where a rank computes with some."""
    usual = {}
    for node in [node for node in graph_def.node if node.op == _COLUMNS]:
        columns = node.attr["columns"].i
        count = min(columns, -(-columns // (ranks * _TOGETHER)) * _TOGETHER)
        for tensor, number in ((node.name, 0), (f"{node.name}:1", count)):
            usual[tensor] = f"{node.name}/{number}"
            const = graph_def.node.add(name=usual[tensor], op="Const", input=node.input)
            const.attr["dtype"].type = types_pb2.DT_INT64
            const.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(number, tf.int64))
    if usual:
        for node in graph_def.node:
            node.input[:] = [usual.get(tensor, tensor) for tensor in node.input]


def _shapes_of_data(node: node_def_pb2.NodeDef, is_partitioned: bool) -> Iterable[tensor_shape_pb2.TensorShapeProto]:
    """Returns the shapes of the batches that a node gives to a graph; none for other nodes."""
    if node.op == "Placeholder" and is_partitioned and "shape" in node.attr:  # an argument, before it is a function
        return (node.attr["shape"].shape,)
    key = "output_shapes" if node.op in _DATA else "_output_shapes" if node.op == "_Arg" else ""
    return node.attr[key].list.shape if key in node.attr else ()
