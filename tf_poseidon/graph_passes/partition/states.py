"""The states of a tensor: what a rank holds of a tensor of the one-process graph.

The states follow GSPMD (Y. Xu et al., arXiv 2105.04663), for one mesh dimension with uneven parts.

Tests: tests/graphs/test_partition.py.
"""

import dataclasses
import typing

from tensorflow.core.framework import types_pb2


@dataclasses.dataclass(frozen=True, eq=False)  # most tensors are WHOLE, the only instance, so comparison is fast
class Whole:
    """The one-process value, with the same bits on all ranks."""

    def __str__(self) -> str:
        return "whole"


@dataclasses.dataclass(frozen=True)
class Rows:
    """The part of the one-process value that belongs to the rank's rows; contiguous if there is one block.

    Attributes:
        dimension: The dimension of the rows; its size is a multiple of their number, and rows have equal parts.
        blocks: The number of blocks, all of the same size, of which the dimension consists, such as two batches that
            were concatenated. The rank holds its part of each block, one after the other.
    """

    dimension: int
    blocks: int = 1

    def __str__(self) -> str:
        return f"rows({self.dimension})" + (f"x{self.blocks}" if self.blocks > 1 else "")


@dataclasses.dataclass(frozen=True)
class Columns:
    """The part of the one-process value that belongs to the rank's columns: of a dimension, the range that it owns.

    The range follows from the size of the dimension and the ranks alone (`DivideColumns` in columns.h), so all tensors
    of this size are divided alike. Ranks may have none.

    Attributes:
        dimension: The dimension, whose size is constant.
    """

    dimension: int

    def __str__(self) -> str:
        return f"columns({self.dimension})"


@dataclasses.dataclass(frozen=True)
class Partial:
    """A summand: the one-process value is the sum over the ranks that have rows, in rank order.

    Attributes:
        reduce: The reduction: "sum", "max", "min", "prod", "all" or "any". "held" is the sum over all ranks, with rows
            in this step or not, for what variables hold from step to step.
    """

    reduce: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.reduce})"


@dataclasses.dataclass(frozen=True)
class Own:
    """What the rank has computed from its own rows alone, until a PoseidonJoin. One process has no such value."""

    def __str__(self) -> str:
        return "own"


class Division(typing.NamedTuple):
    """How ranks divide the tensors of a layout.

    Attributes:
        layout: The path of the variable after which they are cut into KV pairs; "" if a function is to decide it.
        owner: The rank that owns all of them; -1 spreads them over the servers.
        divided: The dimension of a matrix of which each server owns a range, as where half factors travel: 0 or 1; -1
            if the servers own KV pairs.
        columns: The columns of this matrix.
    """

    layout: str
    owner: int = -1
    divided: int = -1
    columns: int = 0

    @property
    def is_of_matrix(self) -> bool:
        """Whether servers own columns or rows of a matrix."""
        return self.divided >= 0

    def along(self, dimension: int) -> "Division":
        """Returns that of the same matrix by a dimension."""
        return Division(self.layout, self.owner, dimension, self.columns)

    @property
    def attributes(self) -> dict[str, str | int]:
        """The attributes of the ops of shards that say so, apart from defaults."""
        matrix: dict[str, str | int] = {"divided": self.divided, "columns": self.columns} if self.is_of_matrix else {}
        return {"layout": self.layout, **({"owner": self.owner} if self.owner >= 0 else {}), **matrix}


@dataclasses.dataclass(frozen=True)
class Shard:
    """The elements of the one-process value that the rank owns as server, flat: its KV pairs, one after the other.

    Or its columns or rows of a matrix, as the `Division` of the layout says.

    Attributes:
        layout: The path of the variable after which its KV pairs are assigned to servers. Tensors of the same layout
            and number of elements have the same elements on a rank.
        owned: Whether one rank, the owner of the layout, has all elements, and the others none.
        divided: The dimension whose `Columns` a rank holds, flat, if the trained variable itself is divided so; else
            -1.
    """

    layout: str
    owned: bool = False
    divided: int = -1

    def __str__(self) -> str:
        what = ", owned" if self.owned else f", columns({self.divided})" if self.divided >= 0 else ""
        return f"shard({self.layout}{what})"


@dataclasses.dataclass(frozen=True)
class Owned:
    """The one-process value on the owner of a layout, which alone computes it; on other ranks its op does not run."""

    layout: str

    @property
    def shard(self) -> Shard:
        """The state in which it enters and leaves what the owner computes: all ranks have that."""
        return Shard(self.layout, owned=True)

    def __str__(self) -> str:
        return f"owned({self.layout})"


WHOLE = Whole()
OWN = Own()
SUM = Partial("sum")
HELD = Partial("held")
State = Whole | Rows | Columns | Partial | Own | Shard | Owned

# Reductions for which the one-process value, on all ranks, is a valid summand.
IDEMPOTENT = ("max", "min", "all", "any")
# The types whose rows can become whole: those that PoseidonAllGather takes.
GATHERED = frozenset((
    types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE, types_pb2.DT_INT8,
    types_pb2.DT_INT16, types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_UINT8, types_pb2.DT_UINT16,
    types_pb2.DT_UINT32, types_pb2.DT_UINT64, types_pb2.DT_BOOL, types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128))
# The types whose shards can become whole: those that PoseidonGatherShards takes.
SHARDED = GATHERED - {types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128}
