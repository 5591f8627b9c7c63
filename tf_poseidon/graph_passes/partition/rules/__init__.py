"""The rules: a table from each op to a function of the states of its inputs.

A rule is a function from a `Case` to an `Outcome`, or to None if its op needs whole inputs. An op without a rule has
whole inputs, and so whole outputs, on every rank: correct, but no faster than one process.

To add a rule, add a line to the table of its family, and a case to `tests/graphs/partition_cases.py` or
`partition_families.py`: CONTRIBUTING.md says which.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py.
"""

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.rules import blocks
from tf_poseidon.graph_passes.partition.rules import contractions
from tf_poseidon.graph_passes.partition.rules import control
from tf_poseidon.graph_passes.partition.rules import elementwise
from tf_poseidon.graph_passes.partition.rules import gathering
from tf_poseidon.graph_passes.partition.rules import lists
from tf_poseidon.graph_passes.partition.rules import normalisation
from tf_poseidon.graph_passes.partition.rules import own
from tf_poseidon.graph_passes.partition.rules import parsing
from tf_poseidon.graph_passes.partition.rules import reductions
from tf_poseidon.graph_passes.partition.rules import shapes
from tf_poseidon.graph_passes.partition.rules import sources
from tf_poseidon.graph_passes.partition.rules import stores
from tf_poseidon.graph_passes.partition.rules import windows

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **reductions.RULES,
    **contractions.RULES,
    **shapes.RULES,
    **windows.RULES,
    **gathering.RULES,
    **lists.RULES,
    **stores.RULES,
    **normalisation.RULES,
    **parsing.RULES,
    **control.RULES,
    **own.RULES,
    **sources.RULES,
}
# Ops whose rules also apply to whole inputs.
ALWAYS = sources.ALWAYS | lists.ALWAYS | stores.ALWAYS | own.ALWAYS
# Ops with so much arithmetic that they may divide whole inputs, see dividing.py.
DIVIDING = contractions.DIVIDING | windows.DIVIDING
# The rules of ops that make several blocks of rows, or take them apart; they come first.
BLOCKS = shapes.BLOCKS
# Ops that treat rows separately, or reduce them in any order, so that rows may be in several blocks.
_IN_BLOCKS = frozenset((
    *elementwise.RULES, *reductions.RULES, *contractions.RULES, *shapes.RULES, *windows.RULES, *gathering.RULES,
    *lists.RULES, *normalisation.RULES, *parsing.RULES, *control.RULES))


def applied(case: Case, with_blocks: bool = True) -> Outcome | None:
    """Applies the rule of a case's op.

    Args:
        case: The `Case`.
        with_blocks: Whether ops may make several blocks of rows.

    Returns:
        The `Outcome`; None if the op has no rule, or none for this case.
    """
    op = case.node.op
    if op not in RULES:
        return None
    outcome = BLOCKS[op](case) if with_blocks and op in BLOCKS else None
    return outcome or blocks.applied(RULES[op], case, op in _IN_BLOCKS)
