"""Weights of which each rank has some columns, or rows, and computes with these alone: the scheme "columns".

A function of one process reads such a weight as any other. Each rank holds its columns as a shard
(`sharded_variables.py`), with its slots for them, and the partitioner runs the layer on columns (`rules/columns/`). So
the weight is never whole in a step; outside of steps, any rank can read it (`shard_service.py`).

Tests: tests/training/test_divided_weights.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.preparation import table_rows
from tf_poseidon.graph_passes.partition.propagate import held_summands
from tf_poseidon.graph_passes.partition.rules import shards
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


def in_pairs(graph_def: graph_pb2.GraphDef, weights: Mapping[str, Division]) -> dict[str, Division]:
    """Returns how some weights are divided of which one may take what another gives.

    A layer that takes columns of the one before is divided by its inputs, which need not be gathered, and its outputs
    are a sum over ranks. The next one is divided by its outputs again.

    Args:
        graph_def: The flat GraphDef of a function.
        weights: How each of them would be divided alone, by name of their resource.
    """
    graph, found = graph_lib.Graph(graph_def), dict(weights)
    of_products = {product: name for name in weights for product in _products(graph, name)}
    for node in graph.ordered:
        name = of_products.get(node.name)
        if name is not None and found[name].divided == _outputs(node):
            for product in _next_products(graph, node.name, of_products):
                taking = of_products[product]
                if taking != name and found[taking] == weights[taking]:
                    inputs = 1 - _outputs(graph.nodes[product])
                    found[taking] = weights[taking].along(inputs)
    return found


def layouts(variables: Iterable[ShardedVariable]) -> set[str]:
    """Returns the layouts of those of some variables that are weights of which each rank holds columns."""
    return {variable.division.layout for variable in master_weights.among(variables)
            if variable.holds_shard and variable.copy is None}


def _dimension(graph: graph_lib.Graph, name: str, shape: list[int]) -> int:
    """Returns the dimension of a matrix that is a layer's outputs, or a table's rows; else the larger one."""
    for reader, read in _readers(graph, name):
        if _is_product(graph, reader, read):
            return _outputs(reader)
        if reader.op in ("Gather", "GatherV2") and graph_lib.node_of(graph.inputs(reader)[0]) == read:
            return 0
    return int(shape[1] >= shape[0])


def _readers(graph: graph_lib.Graph, name: str) -> Iterator[tuple[node_def_pb2.NodeDef, str]]:
    """Yields (node, what it takes) of each node that takes what is read from a variable, cast or not."""
    queue = [node.name for node in graph.graph_def.node
             if node.op == _READ and variables_lib.source(graph, graph.inputs(node)[0]) == name]
    while queue:  # ends, since only loops have cycles, which Merges close
        read = queue.pop()
        for reader in graph.consumers(read):
            if reader.op in _ON:
                queue.append(reader.name)
            elif read in map(graph_lib.node_of, graph.inputs(reader)):
                yield reader, read


def _is_product(graph: graph_lib.Graph, node: node_def_pb2.NodeDef, weight: str) -> bool:
    """Whether a node is the product of a layer's inputs and a weight."""
    return node.op == "MatMul" and graph_lib.node_of(graph.inputs(node)[1]) == weight and not (
        node.attr["transpose_a"].b)


def _outputs(product: node_def_pb2.NodeDef) -> int:
    """Returns the dimension of a layer's outputs in its weight."""
    return 0 if product.attr["transpose_b"].b else 1


def _products(graph: graph_lib.Graph, name: str) -> list[str]:
    return [reader.name for reader, read in _readers(graph, name) if _is_product(graph, reader, read)]


def _next_products(graph: graph_lib.Graph, product: str, products: Collection[str]) -> set[str]:
    """Returns those of some products whose inputs are computed element by element from what another one gives."""
    queue, seen, found = [product], set[str](), set[str]()
    while queue:
        name = queue.pop()
        for reader in graph.consumers(name):
            if reader.name in seen:
                continue
            seen.add(reader.name)
            taken = list(map(graph_lib.node_of, graph.inputs(reader)))
            if reader.name in products and taken[0] == name:
                found.add(reader.name)
            elif name in taken and (shards.is_elementwise(reader.op) or reader.op == "BiasAdd"):
                queue.append(reader.name)
    return found
