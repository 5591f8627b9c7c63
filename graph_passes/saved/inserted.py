"""Reads from a rewritten saved graph what its steps exchange, and what else is not as it was."""

import collections
import dataclasses

from tf_poseidon.graph_passes.write import collectives
from tf_poseidon.graph_passes.graph import functions as functions_lib
from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.saved import strip
from tf_poseidon.graph_passes.partition.write import PREFIX

# What the names of ops begin with that an original has not.
_INSERTED = ("Poseidon", "SufficientFactor", "Horovod")
# Ops with the name of a site, and what their names may have behind that of the node with the result.
_EXCHANGES = {"PoseidonSend": ("/dense_send", "/send"), "PoseidonAllGather": ("/rows",), "PoseidonBroadcast": ()}
_REDUCTIONS = ("Sum", "Max", "Min", "Prod", "All", "Any")
_FETCHED = "fetched/"


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One tensor that ranks exchange.

    Attributes:
        site: Its name.
        kind: As of `partition.report.Exchange`.
        scheme: "ps", "sfb", "gather" or "broadcast".
        rides_on: The site whose factors it is made of, None if it sends something itself.
        ops: How many inserted ops of each name are there for it.
    """

    site: str
    kind: str
    scheme: str
    rides_on: str | None
    ops: dict[str, int]

    @property
    def is_fetched(self):
        """Whether it happens only where a program fetches what the step does not need whole."""
        return self.site.startswith(_FETCHED)


@dataclasses.dataclass(frozen=True)
class Step:
    """A function, or the main graph, that was rewritten.

    Attributes:
        function: Its name, "" of the main graph.
        exchanges: Its `Exchange`s, in the order of the graph.
        before: How many nodes it had.
        after: How many it has.
    """

    function: str
    exchanges: tuple[Exchange, ...]
    before: int
    after: int


def steps(original, rewritten):
    """Returns the `Step`s of a rewritten GraphDef, given the original."""
    before = _bodies(original)
    return tuple(Step(function, tuple(_exchanges(nodes)), len(before.get(function, ())), len(nodes))
                 for function, nodes in _bodies(rewritten).items() if _is_step(nodes))


def others(original, rewritten):
    """Yields sentences on what differs between two GraphDefs, but is no part of a rewritten step.

    What leads to a step may differ: calls say that they have effects.
    """
    before, after = _bodies(original), _bodies(rewritten)
    leading = _leading_to(after)
    for function in dict.fromkeys([*before, *after]):
        where = f"function '{function}'" if function else "the main graph"
        if function not in before or function not in after:
            yield f"{where}: only one of the graphs has it"
            continue
        if function and _is_step(after[function]):
            continue
        old, new = ({node.name: _comparable(node, leading) for node in bodies[function]} for bodies in (before, after))
        new.pop(strip.NODE, None)
        free = _part_of_step(before[function], after[function]) if _is_step(after[function]) else set()
        differing = [name for name in dict.fromkeys([*old, *new])
                     if name not in free and old.get(name) != new.get(name)]
        if differing:
            yield (f"{where}: {len(differing)} nodes, the first is '{differing[0]}', "
                   f"{_line(old.get(differing[0]))} -> {_line(new.get(differing[0]))}")


def _bodies(graph_def):
    return {"": graph_def.node, **{f.signature.name: f.node_def for f in graph_def.library.function}}


def _is_step(nodes):
    return any(node.op == "PoseidonAgree" for node in nodes)


# ---- exchanges --------------------------------------------------------------------------------------


def _exchanges(nodes):
    by_name = {node.name: node for node in nodes}
    sites = {}  # by name of the node with the result
    for node in nodes:
        if node.op in _EXCHANGES:
            ends = [node.name.removesuffix(suffix) for suffix in _EXCHANGES[node.op] if node.name.endswith(suffix)]
            end = next((end for end in ends if end in by_name), node.name)
            sites[end] = node.attr["site"].s.decode()
        elif collectives.SCHEME in node.attr:
            sites[node.name] = node.attr[collectives.SITE].s.decode()
    ops = {end: collections.Counter() for end in sites}
    for node in nodes:
        if node.op.startswith(_INSERTED):
            end = node.name  # it is there for the node with the longest name that its own begins with
            while end and end not in sites:
                end = end.rpartition("/")[0]
            if end:
                ops[end][node.op] += 1
    for end, site in sites.items():
        leader = _leader(by_name, end)
        if "PoseidonBroadcast" in ops[end]:
            kind, scheme = "value", "broadcast"
        elif "PoseidonAllGather" in ops[end]:
            kind, scheme = by_name[end].op.lower() if by_name[end].op in _REDUCTIONS else "rows", "gather"
        else:
            kind, scheme = "sum", "sfb" if leader or "SufficientFactorOuterProduct" in ops[end] else "ps"
        yield Exchange(site, kind, scheme, sites[leader] if leader else None, dict(sorted(ops[end].items())))


def _leader(by_name, end):
    """Returns the node whose factors another's sum is made of, as `bias` of `send_receive` writes it; or None."""
    rows = by_name.get(f"{end}/rows")
    if rows is None or rows.op != "SufficientFactorBias":
        return None
    source = by_name[graph_lib.node_of(rows.input[0])]
    if source.op == "Switch":  # where factors may be missing
        source = by_name[graph_lib.node_of(source.input[0])]
    return source.name.rpartition("/recv")[0]


# ---- what else differs ------------------------------------------------------------------------------


def _leading_to(bodies):
    """Returns the names of the functions that are steps, or call such."""
    callers = collections.defaultdict(list)
    for function, nodes in bodies.items():
        for node in nodes:
            for called in functions_lib.called(node):
                callers[called].append(function)
    queue, found = [function for function, nodes in bodies.items() if function and _is_step(nodes)], set()
    while queue:
        function = queue.pop()
        if function not in found:
            found.add(function)
            queue += callers[function]
    return found


def _comparable(node, leading):
    """Returns a node without what follows from others: shapes, and that a function that it calls has effects."""
    changed = type(node)()
    changed.CopyFrom(node)
    if node.op == "StatefulPartitionedCall" and node.attr["f"].func.name in leading:
        changed.op = "PartitionedCall"
    changed.attr.pop("_output_shapes", None)
    return changed


def _part_of_step(before, after):
    """Returns the names of what was inserted, what reads that, and all that these need, now or in the original."""
    needs = _inputs(after)
    readers = collections.defaultdict(set)
    for name, sources in needs.items():
        for source in sources:
            readers[source].add(name)
    inserted = (node.name for node in after if node.op.startswith(_INSERTED) or node.name.startswith(f"{PREFIX}/"))
    return _closure(_closure(_closure(inserted, readers), needs), _inputs(before))


def _inputs(nodes):
    return {node.name: {graph_lib.node_of(tensor) for tensor in node.input} for node in nodes}


def _closure(names, edges):
    queue, found = list(names), set()
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue += edges.get(name, ())
    return found


def _line(node):
    return "missing" if node is None else f"{node.op}({', '.join(node.input)})"
