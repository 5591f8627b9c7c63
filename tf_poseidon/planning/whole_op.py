"""Ops of a step that run whole on every rank, as in one process, because they have no partitioning rule.

Tests: tests/training/test_explaining.py, tests/unit/test_plan.py.
"""

from collections.abc import Sequence
import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class WholeOp:
    """An op whose inputs are gathered from all ranks, and that every rank runs for the rows of all ranks.

    Attributes:
        node: Name of its node.
        op: Name of the op.
        bytes_per_row: Bytes of its inputs per row of the batch; None if unknown.
    """

    node: str
    op: str
    bytes_per_row: int | None = None

    def __str__(self) -> str:
        size = "?" if self.bytes_per_row is None else f"{self.bytes_per_row:,}"
        return f"{self.op} '{self.node}', with {size} bytes a row"


def dumps(ops: Sequence[WholeOp]) -> str:
    """Returns `WholeOp`s as text; "" for none."""
    return json.dumps([dataclasses.asdict(op) for op in ops]) if ops else ""


def loads(text: str) -> tuple[WholeOp, ...]:
    """Returns the `WholeOp`s in a text of `dumps`."""
    return tuple(WholeOp(**fields) for fields in json.loads(text or "[]"))
