"""Lists what was inserted into a rewritten graph.

Tests: tests/saved/test_saved_programs.py, tests/saved/test_saved_commands.py.
"""

import dataclasses
import os

from tf_poseidon.base import tables
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.saved import inserted
from tf_poseidon.graph_passes.saved import strip
from tf_poseidon.ops import library
from tf_poseidon.saved_graphs import formats


@dataclasses.dataclass(frozen=True)
class Difference:
    """What was inserted into a graph. `print(difference)` shows it as tables.

    Attributes:
        steps: The `inserted.InsertedStep`s that were rewritten.
        others: All other differences, as sentences; empty if there are none.
    """

    steps: tuple[inserted.InsertedStep, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        lines = [line for step in self.steps for line in _lines(step)]
        if not self.others:
            return "\n".join([*lines, "nothing else differs"])
        return "\n".join([*lines, "the graphs differ otherwise:", *(f"  {other}" for other in self.others)])


def diff(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Difference:
    """Returns the `Difference` between a graph and its rewritten version.

    Args:
        source: Path of the original.
        target: Path of the rewritten graph.

    Raises:
        PoseidonError: If `target` was not rewritten.
    """
    library.load()  # the inserted ops are ours
    original, rewritten = formats.read(source).graph_def, formats.read(target).graph_def
    if not strip.is_rewritten(rewritten):
        raise GraphError(f"'{target}' was not rewritten; give the original first, and the rewritten graph second.")
    noted = strip.strip(rewritten)
    if noted.SerializeToString(deterministic=True) != original.SerializeToString(deterministic=True):
        return Difference(inserted.steps(original, rewritten), (
            f"'{target}' was made from a different graph than '{source}'", *inserted.others(original, noted)))
    return Difference(inserted.steps(original, rewritten), tuple(inserted.others(original, rewritten)))


def _lines(step: inserted.InsertedStep) -> list[str]:
    """Returns the table of a step."""
    every = [exchange for exchange in step.exchanges if not exchange.is_fetched]
    fetched = len(step.exchanges) - len(every)
    where = f"function '{step.function}'" if step.function else "the main graph"
    rows = [("kind", "scheme", "site", "inserted")]
    for exchange in every:
        rides = f" (rides on {exchange.rides_on})" if exchange.rides_on else ""
        rows.append((exchange.kind, exchange.scheme, f"{exchange.site}{rides}", ", ".join(
            f"{number} {op}" if number > 1 else op for op, number in exchange.ops.items())))
    lines = [f"{where}: {step.before:,} nodes, now {step.after:,}; {len(every)} exchanges:",
             *tables.aligned(rows, left=range(4), indent="  ")]
    if fetched:
        lines.append(f"  and {fetched} that happen only where a program fetches what the step does not need whole")
    return lines
