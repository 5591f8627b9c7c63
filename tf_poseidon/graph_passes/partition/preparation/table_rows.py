"""Lets a step read and assign whole tables where it looks rows of them up, or changes some.

A table that ranks are to divide has to be read and assigned as a tensor (`held_summands.py`). Each rank then looks up,
or changes, those rows that are its own (`rules/columns/`); changes of the same row are added up before.

Requires: a flat graph. Ensures: the same results, up to the order in which changes of the same row are added.

Tests: tests/training/test_divided_weights.py.
"""

from collections.abc import Mapping

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib

_GATHER = "ResourceGather"
_ASSIGNS = {"ResourceScatterAdd": "AssignAddVariableOp", "ResourceScatterSub": "AssignSubVariableOp"}


def of_whole_tables(graph_def: graph_pb2.GraphDef, tables: Mapping[str, int]) -> graph_pb2.GraphDef:
    """Returns a flat GraphDef that reads and assigns some tables whole.

    Args:
        graph_def: The GraphDef.
        tables: How many rows each of them has, by name of the node from which its resource comes.
    """
    graph, nodes = graph_lib.Graph(graph_def), list[node_def_pb2.NodeDef]()
    for node in graph_def.node:
        is_of_rows = node.op in (_GATHER, *_ASSIGNS) and not node.attr["batch_dims"].i
        rows = tables.get(variables_lib.source(graph, graph.inputs(node)[0])) if is_of_rows else None
        if rows is None:
            nodes.append(node)
        else:
            nodes += _looked_up(graph, node) if node.op == _GATHER else _changed(graph, node, rows)
    return graph_lib.with_nodes(graph_def, nodes)


def _looked_up(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> list[node_def_pb2.NodeDef]:
    writer = graph_lib.Writer(node.name, node.device)
    dtype, (table, numbers) = node.attr["dtype"].type, graph.inputs(node)
    read = writer.add("read", "ReadVariableOp", [table, *graph_lib.control_inputs(node)], dtype=dtype)
    axis = writer.constant("axis", np.array(0, np.int32), read)
    writer.add("", "GatherV2", [read, numbers, axis], Tparams=dtype, Tindices=node.attr["Tindices"].type,
               Taxis=types_pb2.DT_INT32, batch_dims=0)
    return writer.nodes


def _changed(graph: graph_lib.Graph, node: node_def_pb2.NodeDef, rows: int) -> list[node_def_pb2.NodeDef]:
    writer = graph_lib.Writer(node.name, node.device)
    dtype, (table, numbers, changes) = node.attr["dtype"].type, graph.inputs(node)
    size = writer.constant("rows", np.array(rows, np.int32), numbers)
    sums = writer.add("sums", "UnsortedSegmentSum", [changes, numbers, size], T=dtype,
                      Tindices=node.attr["Tindices"].type, Tnumsegments=types_pb2.DT_INT32)
    writer.add("", _ASSIGNS[node.op], [table, sums, *graph_lib.control_inputs(node)], dtype=dtype)
    return writer.nodes
