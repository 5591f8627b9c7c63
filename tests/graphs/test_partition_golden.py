"""The partitioner sums the same tensors that programs synchronise explicitly: the graphs of tiny_graphs.py.

Each is used as one process would write it, with PoseidonRows on its inputs and nothing on its gradients. Partitioned,
and rewritten by the passes, it has the same factors, riders and sums as the golden texts of tests/graphs/golden.
"""

import collections

import pytest
from tensorflow.core.framework import graph_pb2
from test_passes import graph_def_of
from test_passes import rewrite
import tiny_graphs
from tiny_graphs import K
from tiny_graphs import M
from tiny_graphs import N

from tf_poseidon import grappler
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import partitioner as partition_lib

# Graphs that give other sites than the golden text of their name: (sites, why).
OTHER = {"unknown_rows": (
    collections.Counter({("sfb", False, (M, N), (M, N, K, 4)): 1}),
    "inputs with rows say how many are planned for")}


def one_process(graph_def):
    """Returns (GraphDef, fetches): the graph without its synchronisation, whose inputs have rows."""
    result = graph_pb2.GraphDef(versions=graph_def.versions, library=graph_def.library)
    fetches, marked = [], []
    for node in graph_def.node:
        if node.op == "PoseidonVerify":
            continue
        added = result.node.add()
        added.CopyFrom(node)
        if node.op == "PoseidonSync":
            added.op = "Identity"
            del added.input[1:]
            for key in [key for key in added.attr if key != "T"]:
                del added.attr[key]
            fetches.append(added.name)
        if node.op == "Placeholder":
            sizes = _sizes(node)
            dimension = next((d for d, size in enumerate(sizes) if size in (K, -1)), _first_of_two(sizes))
            if dimension is not None:
                added.attr["shape"].shape.dim[dimension].size = -1
                marked.append((added, dimension))
    writer = graph_lib.Writer("rows")
    writer.add("", "PoseidonRows", [node.name for node, _ in marked],
               T=[node.attr["dtype"].type for node, _ in marked])
    writer.nodes[0].attr["dimensions"].list.i.extend(dimension for _, dimension in marked)
    graph_lib.set_names(writer.nodes[0].attr["names"], [node.name for node, _ in marked])
    outputs = {node.name: f"rows:{i}" for i, (node, _) in enumerate(marked)}
    for node in result.node:
        node.input[:] = [outputs.get(tensor.removesuffix(":0"), tensor) for tensor in node.input]
    result.node.extend(writer.nodes)
    return result, fetches


def _first_of_two(sizes):
    """Returns the dimension of a batch of two sequences of three: K is 2 * 3 then."""
    return sizes.index(2) if len(sizes) > 2 and 3 in sizes and 2 in sizes else None


def _sizes(node):
    return [dim.size for dim in node.attr["shape"].shape.dim] if node.op == "Placeholder" else []


def summary(result):
    """Returns how often each kind of site occurs."""
    if result.plan is None:
        return collections.Counter()
    sites = {site.name: site for site in result.sites}
    return collections.Counter(
        (d.scheme, bool(d.leader), sites[d.site].shape, sites[d.site].factors and (
            sites[d.site].factors.m, sites[d.site].factors.n, sites[d.site].factors.k,
            sites[d.site].factors.itemsize)) for d in result.plan.decisions)


@pytest.mark.parametrize("name", [b.__name__ for b in tiny_graphs.RECOGNISED])
def test_partitioned_has_the_sites_of_the_golden_text(name):
    before = graph_def_of(name)
    graph_def, fetches = one_process(before)
    partitioned = partition_lib.partition(graph_def, fetches, grappler.add_shapes)
    rows = 2 if any(_first_of_two(_sizes(node)) is not None for node in before.node) else K
    writer = graph_lib.Writer("agree")
    writer.add("", "PoseidonAgree", [], sites="", rows=rows, strict=False)
    graph_def = graph_lib.with_nodes(partitioned.graph_def, [*partitioned.graph_def.node, *writer.nodes])
    found = summary(rewrite(graph_def, add_shapes=grappler.add_shapes))
    assert found == (OTHER[name][0] if name in OTHER else summary(rewrite(before)))
