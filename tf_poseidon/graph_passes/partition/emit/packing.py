"""Packs small sums for which no rows wait into one message, such as losses and the counts of metrics.

Requires: a partitioned graph that runs as a whole, so a reader of one sum may wait for all. Ensures: the values and
names of the sums do not change. No sum waits for a value that is computed from another. Sums in branches, which may not
run, and in loops, which run several times, are left alone. What several sums have in common before and behind, such as
the weighting of moving statistics by rows, is done once, with all their elements.

Tests: tests/graphs/test_partition_packing.py.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import report as report_lib

# A message costs as much time as thousands of bytes.
_SMALL = 4096
_INT32 = types_pb2.DT_INT32


def pack(graph_def: graph_pb2.GraphDef, exchanges: Sequence[report_lib.ExchangedTensor], fetches: Iterable[str] = (),
         ) -> tuple[graph_pb2.GraphDef, Sequence[report_lib.ExchangedTensor]]:
    """Returns (GraphDef, `report.ExchangedTensor`s) with small sums exchanged together.

    Args:
        graph_def: The partitioned GraphDef.
        exchanges: Its exchanges.
        fetches: Names of the tensors that are read, which stay.
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
    fetched = set(map(graph_lib.node_of, fetches))
    written: dict[str, list[node_def_pb2.NodeDef]] = {}
    packed: dict[str, report_lib.ExchangedTensor | None] = {}
    order = {exchange.site: i for i, exchange in enumerate(exchanges)}
    for members in packs:
        members.sort(key=lambda node: order[_site(node)])
        parts = [small[_site(node)] for node in members]
        total = _together(parts)
        written |= _write([_around(graph, node, fetched) for node in members], parts, total)
        packed |= {part.site: total if part is parts[0] else None for part in parts}
    nodes = [replacement for node in graph_def.node for replacement in written.get(node.name, [node])]
    left = [packed.get(exchange.site, exchange) for exchange in exchanges]
    return graph_lib.with_nodes(graph_def, nodes), [exchange for exchange in left if exchange is not None]


def _is_small(exchange: report_lib.ExchangedTensor) -> bool:
    return (exchange.kind == "sum" and not exchange.variable and not exchange.is_waited_for and not exchange.loop
            and exchange.bytes.fixed is not None and exchange.bytes.fixed <= _SMALL
            and exchange.shape is not None and None not in exchange.shape)


def _site(node: node_def_pb2.NodeDef) -> str:
    return node.attr["site"].s.decode()


def _after(graph: graph_lib.Graph, sums: Iterable[node_def_pb2.NodeDef]) -> set[str]:
    """Returns the names of the nodes that run after a sum, or may never run."""
    frames = frames_lib.find_frames(graph.ordered)
    branches = [node for node in graph.graph_def.node if node.op in ("Switch", "RefSwitch", "_SwitchN")
                and frames[node.name] == frames_lib.ROOT]
    queue = [node.name for node in (*sums, *branches)]
    after: set[str] = set()
    while queue:
        readers = {reader.name for reader in graph.consumers(queue.pop())} - after
        after |= readers
        queue += readers
    return after


def _together(parts: Sequence[report_lib.ExchangedTensor]) -> report_lib.ExchangedTensor:
    """Returns the exchange that replaces several."""
    elements = sum(map(_elements, parts))
    return dataclasses.replace(parts[0], site=f"{parts[0].site} and {len(parts) - 1} more", shape=(elements,),
                               bytes=report_lib.Bytes.of((elements,), parts[0].dtype))


def _elements(part: report_lib.ExchangedTensor) -> int:
    count = graph_lib.num_elements(part.shape)
    assert count is not None  # `_is_small`
    return count


@dataclasses.dataclass(frozen=True)
class _Around:
    """A sum, and what happens to each of its elements before and behind it, and to nothing else.

    Attributes:
        node: The sum.
        value: The tensor that the first of the ops before it takes.
        before, behind: The ops, in the order in which they run.
    """

    node: node_def_pb2.NodeDef
    value: str
    before: tuple[node_def_pb2.NodeDef, ...]
    behind: tuple[node_def_pb2.NodeDef, ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for sums that have all of this in common."""
        return tuple(map(_effect, self.before)), tuple(map(_effect, self.behind))


def _around(graph: graph_lib.Graph, node: node_def_pb2.NodeDef, fetched: Collection[str]) -> _Around:
    """Returns the `_Around` of a sum; it ends before `fetched` nodes are gone."""
    sources, behind, value = [], [], graph.inputs(node)[0]
    while _is_of_elements(graph, source := graph.node(value)):
        sources.append(source)
        value = graph.inputs(source)[0]
    last = node
    while last.name not in fetched and len(readers := graph.consumers(last.name)) == 1 and _is_of_elements(
            graph, readers[0]) and graph_lib.node_of(readers[0].input[0]) == last.name:
        last = readers[0]
        behind.append(last)
    return _Around(node, value, tuple(reversed(sources)), tuple(behind))


def _is_of_elements(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> bool:
    """Whether a node does the same to each element of its first input, with a number of rows if it has two inputs."""
    return node.op in ("Cast", "Mul", "RealDiv") and not graph_lib.control_inputs(node) and all(
        _is_number_of_rows(graph, tensor) for tensor in node.input[1:])


def _is_number_of_rows(graph: graph_lib.Graph, tensor: str) -> bool:
    node = graph.node(tensor)
    if node.op == "Cast":
        node = graph.node(node.input[0])
    return node.op == "Unpack" and graph.node(node.input[0]).op == "PoseidonPart"


def _effect(node: node_def_pb2.NodeDef) -> tuple[object, ...]:
    return (node.op, node.device, *node.input[1:], *((key, node.attr[key].type) for key in sorted(node.attr)))


def _write(members: Sequence[_Around], parts: Sequence[report_lib.ExchangedTensor],
           total: report_lib.ExchangedTensor) -> dict[str, list[node_def_pb2.NodeDef]]:
    """Returns the nodes that replace those of several sums, by its name."""
    first = members[0].node
    dtype = first.attr["T"].type
    writer = graph_lib.Writer(f"{first.name}/packed", first.device, provenance.Provenance("sum", total.site))
    blocks: dict[tuple[object, ...], list[tuple[_Around, report_lib.ExchangedTensor]]] = collections.defaultdict(list)
    for member, part in zip(members, parts):
        blocks[member.kind].append((member, part))
    flat = [_flat(writer, f"block{i}", [member for member, _ in block]) for i, block in enumerate(blocks.values())]
    value = _joined(writer, "summands", flat, dtype)
    controls = sorted({tensor for member in members for tensor in graph_lib.control_inputs(member.node)})
    whole = writer.add("", "PoseidonSync", [value, first.input[1], *controls], T=dtype, shape=total.shape,
                       site=total.site, **{graph_lib.MEANWHILE: graph_lib.meanwhile(first)})
    begin = 0
    written: dict[str, list[node_def_pb2.NodeDef]] = {}
    for i, block in enumerate(blocks.values()):
        size = sum(_elements(part) for _, part in block)
        result, result_type, position = whole, dtype, begin
        if block[0][0].behind and len(blocks) > 1:
            result, position = _piece(writer, f"of_block{i}", whole, begin, size, dtype), 0
        for j, node in enumerate(block[0][0].behind):
            result, result_type = _again(writer, f"block{i}/behind{j}", node, result)
        begin += size
        for member, part in block:
            last = (member.node, *member.behind)[-1]
            of_member = graph_lib.Writer(last.name, last.device, provenance.Provenance("sum", total.site))
            # No node with several outputs, see `emit.GraphWriter._write_inputs`.
            piece = _piece(of_member, "piece", result, position, _elements(part), result_type)
            shape = of_member.constant("shape", np.array(part.shape, np.int32), result)
            of_member.add("", "Reshape", [piece, shape], T=result_type, Tshape=_INT32)
            position += _elements(part)
            written |= {node.name: [] for node in (member.node, *member.behind)} | {last.name: of_member.nodes}
    written[first.name] = written[first.name] + writer.nodes
    return written


def _flat(writer: graph_lib.Writer, name: str, members: Sequence[_Around]) -> str:
    """Returns the summands of sums that have everything in common, one behind the other."""
    first = (*members[0].before, members[0].node)[0]
    dtype = first.attr["SrcT" if first.op == "Cast" else "T"].type
    with writer.placed(first.device):
        flat = [writer.add(f"{name}/flat{i}", "Reshape", [member.value, writer.constant(
            f"{name}/flat{i}/shape", np.array([-1], np.int32), member.value)], T=dtype, Tshape=_INT32)
                for i, member in enumerate(members)]
        value = _joined(writer, name, flat, dtype)
    for i, node in enumerate(members[0].before):
        value, _ = _again(writer, f"{name}/before{i}", node, value)
    return value


def _joined(writer: graph_lib.Writer, name: str, parts: Sequence[str], dtype: int) -> str:
    if len(parts) == 1:
        return parts[0]
    axis = writer.constant(f"{name}/axis", np.int32(0), parts[0])
    return writer.add(name, "ConcatV2", [*parts, axis], T=dtype, Tidx=_INT32, N=len(parts))


def _again(writer: graph_lib.Writer, name: str, node: node_def_pb2.NodeDef, value: str) -> tuple[str, int]:
    """Does with a value what a node does with its first input; returns (the result, its DataType)."""
    with writer.placed(node.device):
        result = writer.add(name, node.op, [value, *node.input[1:]], **{
            key: node.attr[key].type for key in node.attr if key in ("T", "SrcT", "DstT")})
    return result, node.attr["DstT" if node.op == "Cast" else "T"].type


def _piece(writer: graph_lib.Writer, name: str, value: str, begin: int, size: int, dtype: int) -> str:
    bounds = [writer.constant(f"{name}/{bound}", np.array([number], np.int32), value)
              for bound, number in (("begin", begin), ("size", size))]
    return writer.add(name, "Slice", [value, *bounds], T=dtype, Index=_INT32)
