"""Says what a rewritten graph has that the original has not, a line for each variable."""

import collections
import dataclasses

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import inserted
from tf_poseidon.graph_passes import strip
from tf_poseidon.ops import library
from tf_poseidon.saved_graphs import formats


@dataclasses.dataclass(frozen=True)
class Difference:
    """What was inserted into a graph. `print(difference)` shows it as a table.

    Attributes:
        sites: The `inserted.InsertedSite`s.
        others: What else differs, sentences; empty if nothing does.
    """

    sites: tuple
    others: tuple[str, ...]

    def __str__(self):
        rows = [("variable", "scheme", "rule", "function", "tensor", "inserted")]
        for site in self.sites:
            ops = collections.Counter(node.op for node in site.nodes)
            shown = [f"{number} {op}" if number > 1 else op for op, number in sorted(ops.items())
                     if op.startswith(("Poseidon", "SufficientFactor"))]
            rest = sum(ops.values()) - sum(n for op, n in ops.items()
                                           if op.startswith(("Poseidon", "SufficientFactor")))
            rows.append((site.name, site.scheme, site.rule, site.function or "(main graph)", site.before[-1],
                         ", ".join(shown) + (f" and {rest} others" if rest else "")))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths)).rstrip() for row in rows]
        number = sum(len(site.nodes) for site in self.sites)
        lines.append(f"{number} nodes for {len(self.sites)} sites; " + (
            "without them the graphs are the same, node for node" if not self.others
            else "and the graphs differ otherwise:"))
        return "\n".join([*lines, *(f"  {other}" for other in self.others)])


def diff(source, target):
    """Returns the `Difference` between a graph and the one that it was rewritten to.

    Args:
        source: Path of the original.
        target: Path of the rewritten graph.

    Raises:
        PoseidonError: If the second was not rewritten.
    """
    library.load()  # what was inserted are ops of ours
    original, rewritten = formats.read(source), formats.read(target)
    if not strip.is_rewritten(rewritten.graph_def):
        raise PoseidonError(f"'{target}' was not rewritten; give the original first, and what was made of it second.")
    stripped = strip.strip(rewritten.graph_def)
    return Difference(tuple(inserted.sites(rewritten.graph_def)),
                      tuple(_others(original.graph_def, stripped)))


def _others(a, b):
    """Yields how two GraphDefs differ, function by function."""
    bodies = [{"(main graph)": g.node, **{f.signature.name: f.node_def for f in g.library.function}} for g in (a, b)]
    for name in dict.fromkeys([*bodies[0], *bodies[1]]):
        nodes = [{node.name: node for node in body.get(name, ())} for body in bodies]
        differing = [n for n in dict.fromkeys([*nodes[0], *nodes[1]]) if nodes[0].get(n) != nodes[1].get(n)]
        if differing:
            yield (f"{name}: {len(differing)} nodes, the first is '{differing[0]}', "
                   f"{_line(nodes[0].get(differing[0]))} -> {_line(nodes[1].get(differing[0]))}")
        elif (name in bodies[0]) != (name in bodies[1]):
            yield f"{name}: only one of the graphs has it"


def _line(node):
    return "missing" if node is None else f"{node.op}({', '.join(node.input)})"
