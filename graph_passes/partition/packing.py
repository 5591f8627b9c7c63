"""Packs small sums for which no rows wait into one message, such as losses and the counts of metrics.

Requires: a partitioned graph that runs as a whole, so a reader of one sum may wait for all. Ensures: the values and
names of the sums do not change. No sum waits for a value that is computed from another. Sums in branches, which may not
run, and in loops, which run several times, are left alone.

Tests: tests/graphs/test_partition_packing.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import report as report_lib

# A message costs as much time as thousands of bytes.
_SMALL = 4096
_INT32 = types_pb2.DT_INT32


def pack(graph_def: graph_pb2.GraphDef,
         exchanges: Sequence[report_lib.Exchange]) -> tuple[graph_pb2.GraphDef, Sequence[report_lib.Exchange]]:
    """Returns (GraphDef, `report.Exchange`s) with small sums exchanged together.

    Args:
        graph_def: The partitioned GraphDef.
        exchanges: Its exchanges.
    """
    small = {exchange.site: exchange for exchange in exchanges if _is_small(exchange)}
    if len(small) < 2:
        return graph_def, exchanges
    graph = graph_lib.Graph(graph_def)
    sums = [node for node in graph_def.node if node.op == "PoseidonSync" and _site(node) in small]
    after = _after(graph, sums)
    together = collections.defaultdict(list)
    for node in sums:
        if node.name not in after:
            together[node.attr["T"].type, node.input[1], node.device].append(node)
    packs = [members for members in together.values() if len(members) > 1]
    if not packs:
        return graph_def, exchanges
    written: dict[str, list[node_def_pb2.NodeDef]] = {}
    packed: dict[str, report_lib.Exchange | None] = {}
    order = {exchange.site: i for i, exchange in enumerate(exchanges)}
    for members in packs:
        members.sort(key=lambda node: order[_site(node)])
        parts = [small[_site(node)] for node in members]
        total = _together(parts)
        written |= _write(members, parts, total)
        packed |= {part.site: total if part is parts[0] else None for part in parts}
    nodes = [replacement for node in graph_def.node for replacement in written.get(node.name, [node])]
    left = [packed.get(exchange.site, exchange) for exchange in exchanges]
    return graph_lib.with_nodes(graph_def, nodes), [exchange for exchange in left if exchange is not None]


def _is_small(exchange: report_lib.Exchange) -> bool:
    return (exchange.kind == "sum" and not exchange.variable and not exchange.is_waited_for and not exchange.loop
            and exchange.bytes.fixed is not None and exchange.bytes.fixed <= _SMALL
            and exchange.shape is not None and None not in exchange.shape)


def _site(node: node_def_pb2.NodeDef) -> str:
    return node.attr["site"].s.decode()


def _after(graph: graph_lib.Graph, sums: Iterable[node_def_pb2.NodeDef]) -> set[str]:
    """Returns the names of the nodes that run after a sum, or may never run."""
    frames = frames_lib.find_frames(graph_lib.in_order(graph.graph_def))
    branches = [node for node in graph.graph_def.node if node.op in ("Switch", "RefSwitch", "_SwitchN")
                and frames[node.name] == frames_lib.ROOT]
    queue = [node.name for node in (*sums, *branches)]
    after: set[str] = set()
    while queue:
        found = {reader.name for reader in graph.consumers(queue.pop())} - after
        after |= found
        queue += found
    return after


def _together(parts: Sequence[report_lib.Exchange]) -> report_lib.Exchange:
    """Returns the exchange that replaces several."""
    elements = sum(map(_elements, parts))
    return dataclasses.replace(parts[0], site=f"{parts[0].site} and {len(parts) - 1} more", shape=(elements,),
                               bytes=report_lib.Bytes.of((elements,), parts[0].dtype))


def _elements(part: report_lib.Exchange) -> int:
    count = graph_lib.num_elements(part.shape)
    assert count is not None  # `_is_small`
    return count


def _write(members: Sequence[node_def_pb2.NodeDef], parts: Sequence[report_lib.Exchange],
           total: report_lib.Exchange) -> dict[str, list[node_def_pb2.NodeDef]]:
    """Returns the nodes that replace each of several sums, by its name."""
    first, dtype = members[0], members[0].attr["T"].type
    writer = graph_lib.Writer(f"{first.name}/packed", first.device, provenance.Provenance("sum", total.site))
    flat = [writer.add(f"flat{i}", "Reshape", [node.input[0], writer.constant(
        f"flat{i}/shape", np.array([-1], np.int32), node.input[0])], T=dtype, Tshape=_INT32)
            for i, node in enumerate(members)]
    controls = sorted({tensor for node in members for tensor in graph_lib.control_inputs(node)})
    axis = writer.constant("axis", np.int32(0), flat[0])
    value = writer.add("summands", "ConcatV2", [*flat, axis], T=dtype, Tidx=_INT32, N=len(flat))
    whole = writer.add("", "PoseidonSync", [value, first.input[1], *controls], T=dtype, shape=total.shape,
                       site=total.site, **{graph_lib.MEANWHILE: graph_lib.meanwhile(first)})
    shared, written, begin = writer.nodes, {}, 0
    for node, part in zip(members, parts):
        writer = graph_lib.Writer(node.name, node.device, provenance.Provenance("sum", total.site))
        # No node with several outputs, see `write.GraphWriter._write_inputs`.
        bounds = [writer.constant(name, np.array([value], np.int32), whole)
                  for name, value in (("begin", begin), ("size", _elements(part)))]
        begin += _elements(part)
        piece = writer.add("piece", "Slice", [whole, *bounds], T=dtype, Index=_INT32)
        shape = writer.constant("shape", np.array(part.shape, np.int32), whole)
        writer.add("", "Reshape", [piece, shape], T=dtype, Tshape=_INT32)
        written[node.name] = writer.nodes
    written[first.name] += shared
    return written
