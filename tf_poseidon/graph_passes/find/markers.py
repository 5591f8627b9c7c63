"""Markers: where gradients are synchronised, in our programs and in others.

Tests: tests/graphs/test_passes.py, tests/engines/test_drop_in.py.
"""

import dataclasses

from tf_poseidon.graph_passes.partition.states import Division


@dataclasses.dataclass(frozen=True)
class Marker:
    """Where a gradient is synchronised, or another summand like one.

    Attributes:
        site: Name of the site.
        node: Name of the node that synchronises it.
        gradient: This rank's gradient, a tensor; for slices, their values.
        contributes: Whether this rank has rows of its own, a tensor.
        shape: The gradient's shape, None if it is unknown.
        dtype: The gradient's `types_pb2.DataType`.
        indices: The indices of slices, a tensor; None for a dense gradient.
        wire_dtype: The `types_pb2.DataType` to which a wider gradient is rounded for the wire; None for its own.
        is_foreign: Whether another library synchronises the program; then `contributes` is None.
        is_flat: Whether its sum is a vector, whatever shape the gradient has.
        bundle: The `Bundle` that it is in, None if in none.
        part: The number of the gradient in the bundle.
        refusal: Why factors cannot replace it, whatever the gradient is; None if they could.
        meanwhile: What the step does meanwhile, see `indexed_graph.MEANWHILE`; "" if unknown.
        kept: The `KeptPart` that is all that the step needs of its sum; None if it needs more.
    """

    site: str
    node: str
    gradient: str
    contributes: str | None
    shape: tuple[int | None, ...] | None
    dtype: int
    indices: str | None = None
    wire_dtype: int | None = None
    is_foreign: bool = False
    is_flat: bool = False
    bundle: "Bundle | None" = None
    part: int = 0
    refusal: str | None = None
    meanwhile: str = ""
    kept: "KeptPart | None" = None

    @property
    def prefix(self) -> str:
        """The prefix of the names of the nodes that replace this marker."""
        return self.node if self.bundle is None else f"{self.node}/part{self.part}"


@dataclasses.dataclass(frozen=True)
class KeptPart:
    """This rank's columns or rows of a sum.

    Attributes:
        node: Name of the PoseidonShard that takes them.
        division: How that divides the sum.
        is_verified: Whether verify mode reads the whole sum besides.
    """

    node: str
    division: Division
    is_verified: bool

    def is_of(self, m: int, n: int) -> bool:
        """Whether a rank makes them of half factors with M and N columns."""
        return (self.division.divided, self.division.columns) == (int(n > m), n)


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Several gradients that a program reduces with one op.

    Attributes:
        reduce: Name of the node that reduces them.
        gradients: Its input tensors, one for each part.
        output: Name of the node whose outputs are the sums of the parts.
    """

    reduce: str
    gradients: tuple[str, ...]
    output: str
