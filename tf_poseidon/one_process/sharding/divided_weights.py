"""Weights of which each rank has some columns, or rows, and computes with these alone: the scheme "columns".

A function of one process reads such a weight as any other. Each rank holds its columns as a shard
(`sharded_variables.py`), with its slots for them, and the partitioner runs the layer on columns (`rules/columns/`). So
the weight is never whole in a step; outside of steps, any rank can read it (`shard_service.py`).

Tests: tests/training/test_divided_weights.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.preparation import table_rows
from tf_poseidon.graph_passes.partition.propagate import held_summands
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.one_process.sharding import master_weights
from tf_poseidon.one_process.sharding.sharded_variables import ShardedVariable

_READ = "ReadVariableOp"
_ON = ("Identity", "Cast")


def prepared(graph_def: graph_pb2.GraphDef, tables: Mapping[str, tf.Variable]) -> graph_pb2.GraphDef:
    """Returns the flat GraphDef of a function as `candidates` takes it, given tables to divide, by their resource."""
    return table_rows.of_whole_tables(graph_def, {
        name: table.shape[0] for name, table in tables.items() if table.shape.rank == 2})


def candidates(graph_def: graph_pb2.GraphDef, variables: Mapping[str, tf.Variable],
               planned: Mapping[str, str]) -> dict[str, Division]:
    """Returns how weights would be divided that a function updates, by name of their resource.

    Vectors among them, such as biases, are divided only with the columns that they meet.

    Args:
        graph_def: The flat GraphDef of the function.
        variables: Its variables, by name of their resource.
        planned: The paths of others that a function updates which never runs, by the same names.
    """
    possible = {name: variable for name, variable in variables.items() if name in planned or (
        isinstance(variable, master_weights.MasterWeight) and variable.may_hold_shard)}
    graph, found = graph_lib.Graph(graph_def), {}
    for name in sorted(held_summands.candidates(graph, possible)):
        shape = possible[name].shape.as_list()
        if len(shape) in (1, 2):
            divided = _dimension(graph, name, shape) if len(shape) == 2 else 0
            found[name] = Division(planned.get(name) or possible[name].path, divided=divided, columns=(*shape, 1)[1])
    return found


def layouts(variables: Iterable[ShardedVariable]) -> set[str]:
    """Returns the layouts of those of some variables that are weights of which each rank holds columns."""
    return {variable.division.layout for variable in master_weights.among(variables)
            if variable.holds_shard and variable.copy is None}


def _dimension(graph: graph_lib.Graph, name: str, shape: list[int]) -> int:
    """Returns the dimension of a matrix that is a layer's outputs, or a table's rows; else the larger one."""
    queue = [node.name for node in graph.graph_def.node
             if node.op == _READ and variables_lib.source(graph, graph.inputs(node)[0]) == name]
    while queue:  # ends, since only loops have cycles, which Merges close
        read = queue.pop()
        for reader in graph.consumers(read):
            operands = [graph_lib.node_of(tensor) for tensor in graph.inputs(reader)]
            if reader.op in _ON:
                queue.append(reader.name)
            elif reader.op == "MatMul" and operands.index(read) == 1 and not reader.attr["transpose_a"].b:
                return 0 if reader.attr["transpose_b"].b else 1
            elif reader.op in ("Gather", "GatherV2") and operands[0] == read:
                return 0
    return int(shape[1] >= shape[0])
