"""How systems look in all figures: one colour each, and lines that can be seen where they lie upon each other.

Those behind are broader, and ours is in front, so that each shows beside those before it.
"""

from collections.abc import Iterable
from typing import Any

# Ours are blue and green.
COLOURS = {"poseidon": "C0", "horovod": "C1", "mwms": "C2", "pytorch": "C3", "jax": "C4",
           "poseidon-paper": "C5", "wfbp": "C6", "ps": "C7", "tensorflow": "C8", "adam": "C9",
           "poseidon+columns": "navy", "poseidon-hfb": "teal", "poseidon-sfb": "mediumseagreen",
           "poseidon-ps": "lightsteelblue"}
_FRONT = "poseidon+columns", "poseidon"
_THIN, _BROADER = 1.4, 1.5  # points


def styles(systems: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns {system: what matplotlib's `plot` takes}, those behind first."""
    systems = list(systems)
    in_front = [system for system in _FRONT if system in systems]
    order = [*(system for system in reversed(systems) if system not in in_front), *reversed(in_front)]
    return {system: {"color": COLOURS[system], "linewidth": _THIN + _BROADER * (len(order) - 1 - place),
                     "zorder": 2 + place / 10, "solid_capstyle": "butt"} for place, system in enumerate(order)}


def in_order(ax: Any, labels: Iterable[str]) -> tuple[list[Any], list[str]]:
    """Returns the lines of a panel and their labels for its legend, in the order of some labels."""
    lines = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    found = [label for label in labels if label in lines]
    return [lines[label] for label in found], found
