"""What a step computes on every rank, as one process does: ops that nobody has said how to partition."""

from collections.abc import Sequence
import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class WholeOp:
    """An op whose inputs, cut into rows, are gathered, and that every rank runs for the rows of all.

    Attributes:
        node: Its name.
        op: Its op.
        bytes_per_row: How large its inputs are for each row of the batch; None if that is unknown.
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
    """Returns the `WholeOp`s of `dumps`."""
    return tuple(WholeOp(**fields) for fields in json.loads(text or "[]"))
