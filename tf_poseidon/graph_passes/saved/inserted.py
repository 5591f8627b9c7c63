"""Lists the exchanges of a rewritten saved graph, and other differences from the original.

The provenance of a node says why it was inserted; its name is not used.

Tests: tests/saved/test_saved_programs.py, tests/saved/test_saved_graphs.py, tests/saved/test_saved_commands.py.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.find import training_step as step_lib
from tf_poseidon.graph_passes.graph import functions
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import frames

# Prefixes of the names of ops that an original does not have.
_INSERTED = ("Poseidon", "SufficientFactor", "Horovod")
# An attribute of the PoseidonAgree of a step in the main graph: the names of the nodes that make the step.
_TARGETS = "_poseidon_targets"


@dataclasses.dataclass(frozen=True)
class InsertedExchange:
    """One tensor that ranks exchange.

    Attributes:
        site: Its name.
        kind: Same as in `partition.report.ExchangedTensor`.
        scheme: "ps", "sfb", "hfb", "gather" or "broadcast".
        rides_on: The site from whose factors it is made, None if it sends something itself.
        ops: The number of ops inserted for it, by name of the op.
        is_fetched: Whether it happens only if a program fetches a tensor that the step does not need whole.
    """

    site: str
    kind: str
    scheme: str
    rides_on: str | None
    ops: dict[str, int]
    is_fetched: bool


@dataclasses.dataclass(frozen=True)
class InsertedStep:
    """A function, or the main graph, that was rewritten.

    Attributes:
        function: Its name, "" for the main graph.
        exchanges: Its `InsertedExchange`s, in the order of the graph.
        before: Number of nodes before rewriting.
        after: Number of nodes now.
    """

    function: str
    exchanges: tuple[InsertedExchange, ...]
    before: int
    after: int


def note_targets(rewritten: graph_pb2.GraphDef, names: Iterable[str]) -> None:
    """Notes the names of the nodes that make the step in the main graph."""
    agree = step_lib.node_of(rewritten)
    assert agree is not None  # every rewritten step has one
    graph_lib.set_names(agree.attr[_TARGETS], names)


def note_step(original: graph_pb2.GraphDef, rewritten: graph_pb2.GraphDef) -> None:
    """Marks inserted nodes without an exchange as parts of a rewritten step."""
    bodies = _bodies(original)
    for function, nodes in _bodies(rewritten).items():
        ops = {node.name: node.op for node in bodies.get(function, ())}
        for node in nodes:
            if ops.get(node.name) != node.op and provenance.of(node) is None:
                provenance.Provenance(provenance.STEP).note(node)


def steps(original: graph_pb2.GraphDef, rewritten: graph_pb2.GraphDef) -> tuple[InsertedStep, ...]:
    """Returns the `InsertedStep`s of a rewritten GraphDef, given the original."""
    original_bodies = _bodies(original)
    return tuple(InsertedStep(function, tuple(_exchanges(nodes)), len(original_bodies.get(function, ())), len(nodes))
                 for function, nodes in _bodies(rewritten).items() if _is_step(nodes))


def others(original: graph_pb2.GraphDef, rewritten: graph_pb2.GraphDef) -> Iterator[str]:
    """Yields a sentence for each difference between two GraphDefs that is not part of a rewritten step.

    Functions that lead to a step may differ: their calls became stateful.
    """
    original_bodies, after = _bodies(original), _bodies(rewritten)
    leading = _leading_to(after)
    for function in dict.fromkeys([*original_bodies, *after]):
        where = f"function '{function}'" if function else "the main graph"
        if function not in original_bodies or function not in after:
            yield f"{where}: only one of the graphs has it"
            continue
        if function and _is_step(after[function]):
            continue
        old, new = ({node.name: _comparable(node, leading) for node in bodies[function]}
                    for bodies in (original_bodies, after))
        for name in _notes(after[function]):
            del new[name]
        free = set() if function else _part_of_step(original, rewritten)
        differing = [name for name in dict.fromkeys([*old, *new])
                     if name not in free and old.get(name) != new.get(name)]
        if differing:
            yield (f"{where}: {len(differing)} nodes, the first is '{differing[0]}', "
                   f"{_line(old.get(differing[0]))} -> {_line(new.get(differing[0]))}")


def _bodies(graph_def: graph_pb2.GraphDef) -> dict[str, Sequence[node_def_pb2.NodeDef]]:
    return {"": graph_def.node, **{f.signature.name: f.node_def for f in graph_def.library.function}}


def _is_step(nodes: Iterable[node_def_pb2.NodeDef]) -> bool:
    return any(node.op == step_lib.OP for node in nodes)


def _notes(nodes: Iterable[node_def_pb2.NodeDef]) -> set[str]:
    """Returns the names of the nodes that hold the original graph."""
    return {node.name for node in nodes
            if (about := provenance.of(node)) is not None and about.role == provenance.ORIGINAL}


# ---- exchanges --------------------------------------------------------------------------------------


def _exchanges(nodes: Iterable[node_def_pb2.NodeDef]) -> Iterator[InsertedExchange]:
    sites: dict[str, provenance.Provenance] = {}
    ops: collections.defaultdict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for node in nodes:
        about = provenance.of(node)
        if about is not None and about.site:
            if about.scheme:
                sites.setdefault(about.site, about)
            if node.op.startswith(_INSERTED):
                ops[about.site][node.op] += 1
    for site, about in sites.items():
        yield InsertedExchange(site, about.role, about.scheme, about.leader or None, dict(sorted(ops[site].items())),
                               about.is_fetched)


# ---- what else differs ------------------------------------------------------------------------------


def _leading_to(bodies: Mapping[str, Sequence[node_def_pb2.NodeDef]]) -> set[str]:
    """Returns the names of the functions that are steps, or call one."""
    callers = collections.defaultdict(list)
    for function, nodes in bodies.items():
        for node in nodes:
            for called in functions.called(node):
                callers[called].append(function)
    queue, leading = [function for function, nodes in bodies.items() if function and _is_step(nodes)], set()
    while queue:
        function = queue.pop()
        if function not in leading:
            leading.add(function)
            queue += callers[function]
    return leading


def _comparable(node: node_def_pb2.NodeDef, leading: Collection[str]) -> node_def_pb2.NodeDef:
    """Returns a node without properties that follow from other nodes: shapes, and stateful calls of a step."""
    changed = type(node)()
    changed.CopyFrom(node)
    if node.op == "StatefulPartitionedCall" and node.attr["f"].func.name in leading:
        changed.op = "PartitionedCall"
    changed.attr.pop("_output_shapes", None)
    return changed


def _part_of_step(original: graph_pb2.GraphDef, rewritten: graph_pb2.GraphDef) -> set[str]:
    """Returns the names of the nodes that the step in the main graph has replaced, and of those inserted for it."""
    agree = step_lib.node_of(rewritten)
    if agree is None:
        return set()
    if _TARGETS not in agree.attr:
        raise GraphError(f"Node '{agree.name}' does not say which nodes made its step; rewrite the original graph "
                         "again.")
    original_nodes = {node.name: node for node in original.node}
    targets = [name for name in map(bytes.decode, agree.attr[_TARGETS].list.s) if name in original_nodes]
    inserted = {node.name for node in rewritten.node
                if node.name not in original_nodes and provenance.of(node) is not None}
    return inserted | frames.needed(original_nodes, targets, frames.find_frames(graph_lib.in_order(original)))


def _line(node: node_def_pb2.NodeDef | None) -> str:
    return "missing" if node is None else f"{node.op}({', '.join(node.input)})"
