"""What a rank holds of a tensor of the one-process graph.

The states follow GSPMD (Y. Xu et al., arXiv 2105.04663), for one mesh dimension that has uneven parts.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, eq=False)  # there is one, WHOLE: what most tensors are is compared fast
class Whole:
    """The one-process value, with the same bits on all ranks."""

    def __str__(self) -> str:
        return "whole"


@dataclasses.dataclass(frozen=True)
class Rows:
    """The contiguous part of the one-process value, along a dimension, that belongs to the rank's rows.

    Attributes:
        dimension: Which; its size is a multiple of the number of rows, and each row has an equal part.
    """

    dimension: int

    def __str__(self) -> str:
        return f"rows({self.dimension})"


@dataclasses.dataclass(frozen=True)
class Partial:
    """A summand: the one-process value is the sum over the ranks that have rows, in rank order.

    Attributes:
        reduce: What takes the place of the sum: "sum", "max", "min", "prod", "all" or "any". "held" is the sum over
            all ranks, with rows in this step or not: what variables hold from step to step.
    """

    reduce: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.reduce})"


@dataclasses.dataclass(frozen=True)
class Own:
    """What the rank has computed of its own rows alone. One process has no such value; it leaves by a PoseidonJoin."""

    def __str__(self) -> str:
        return "own"


WHOLE = Whole()
OWN = Own()
SUM = Partial("sum")
HELD = Partial("held")
State = Whole | Rows | Partial | Own

# Of which the one-process value, on all ranks, is a summand that gives that value again.
IDEMPOTENT = ("max", "min", "all", "any")
