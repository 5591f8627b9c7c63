"""What a partitioned step exchanges, and what it computes on every rank.

Tests: tests/saved/test_saved_programs.py, tests/graphs/test_partition_packing.py.
"""

import dataclasses
import math

import tensorflow as tf

from tf_poseidon.base import tables
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The size of a one-process tensor.

    Attributes:
        fixed: Bytes, if they do not depend on the number of rows; None otherwise, or if unknown.
        per_row: Bytes per row of the batch, if they depend on nothing else; None otherwise, or if unknown.
    """

    fixed: int | None = None
    per_row: int | None = None

    @classmethod
    def of(cls, shape: graph_lib.Shape | None, dtype: int) -> "Bytes":
        """Returns the size for a shape that does not depend on rows, and a `types_pb2.DataType`."""
        return cls() if not graph_lib.is_known(shape) else cls(fixed=math.prod(shape) * (tf.as_dtype(dtype).size or 0))

    def __str__(self) -> str:
        if self.fixed is not None:
            return f"{self.fixed:,} B"
        return "? B" if self.per_row is None else f"{self.per_row:,} B a row"


@dataclasses.dataclass(frozen=True)
class ExchangedTensor:
    """One tensor that ranks exchange in every step, or in every round of a loop.

    Attributes:
        site: Its name.
        kind: "sum", or another reduction; "rows" that are gathered; "value" of rank 0.
        tensor: The tensor of the one-process graph.
        shape: Its one-process shape, None for unknown sizes and those that depend on rows; None if unknown.
        dtype: Its `types_pb2.DataType`.
        bytes: Its one-process size, `Bytes`.
        loop: Name of the loop that it is in, "" if in none.
        variable: The variable that is trained with it, "" if none or unknown.
        is_waited_for: Whether rows are computed from it, so that nothing hides it. Tensors that only updates of
            variables need travel during backpropagation.
    """

    site: str
    kind: str
    tensor: str
    shape: tuple[int | None, ...] | None
    dtype: int
    bytes: Bytes = Bytes()
    loop: str = ""
    variable: str = ""
    is_waited_for: bool = False

    def agreement_text(self) -> str:
        """Returns the text that must be the same on all ranks."""
        return f"'{self.site}' {self.kind} {self.dtype} {self.shape}"


@dataclasses.dataclass(frozen=True)
class UndividedOp:
    """An op that every rank runs as one process would, on inputs that were cut into rows.

    Attributes:
        node: Its name.
        op: Its op.
        bytes: The total size of its inputs with rows, `Bytes`.
    """

    node: str
    op: str
    bytes: Bytes = Bytes()


@dataclasses.dataclass(frozen=True)
class PartitionReport:
    """The result of partitioning a graph.

    Attributes:
        exchanges: The `ExchangedTensor`s, in the order of the graph.
        whole: The `UndividedOp`s: those without a rule for their inputs.
        partitioned: Number of nodes that run on the rank's rows or return summands.
        nodes: Number of nodes of the graph.
    """

    exchanges: tuple[ExchangedTensor, ...]
    whole: tuple[UndividedOp, ...]
    partitioned: int
    nodes: int

    @property
    def gradient_sites(self) -> frozenset[str]:
        """The sites of variables' gradients."""
        return frozenset(exchange.site for exchange in self.exchanges if exchange.variable)

    def agreement_text(self) -> str:
        """Returns the text that must be the same on all ranks to run this graph: a line per exchange."""
        return "\n".join(exchange.agreement_text() for exchange in self.exchanges)

    def __str__(self) -> str:
        lines = [f"{self.partitioned} of {self.nodes} nodes run on each rank's rows; {len(self.exchanges)} exchanges:"]
        rows = [(e.kind, _shape_text(e.shape), str(e.bytes), e.site + (", waited for" if e.is_waited_for else "")
                 + (f" (in loop '{e.loop}')" if e.loop else "")) for e in self.exchanges]
        lines += tables.aligned(rows, left=range(4), indent="  ")
        for loop in dict.fromkeys(e.loop for e in self.exchanges if e.loop and e.variable):
            lines.append(f"The iterations of loop '{loop}' do not overlap: each waits for the gradients of the one "
                         "before. Steps do that follow each other in a graph without a loop.")
        if self.whole:
            lines.append(f"{len(self.whole)} nodes run whole on every rank, since there is no rule for them:")
            lines += [f"  {op.op} '{op.node}', whose inputs have {op.bytes}" for op in self.whole]
        return "\n".join(lines)


def _shape_text(shape: graph_lib.Shape | None) -> str:
    if shape is None:
        return "?"
    return "x".join("rows" if size is None else str(size) for size in shape) or "scalar"
