"""Where gradients are synchronised: markers, whatever put them there."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Marker:
    """Where a gradient is synchronised.

    Attributes:
        site: Name of the site.
        node: Name of the node that synchronises it.
        gradient: This rank's gradient, a tensor; of slices, their values.
        contributes: Whether this rank has rows of its own, a tensor.
        shape: The gradient's shape, None if it is unknown.
        dtype: The gradient's `types_pb2.DataType`.
        indices: The indices of slices, a tensor; None of a dense gradient.
        wire_dtype: The `types_pb2.DataType` in which it travels if it is wider; None for its own.
        is_foreign: Whether it is of a program that another library synchronises; then `contributes` is None.
        is_flat: Whether its sum is a vector, whatever shape the gradient has.
        bundle: The `Bundle` that it is in, None if it is by itself.
        part: Which part of it.
        refusal: Why factors cannot take its place, whatever the gradient is; None if they could.
        meanwhile: What the step does meanwhile, see `graph.MEANWHILE`; "" where that is not said.
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

    @property
    def prefix(self) -> str:
        """What the names of the nodes begin with that stand for this marker."""
        return self.node if self.bundle is None else f"{self.node}/part{self.part}"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Several gradients that a program reduces by one op.

    Attributes:
        reduce: Name of the node that does.
        gradients: What it is given of each part.
        output: Name of the node whose outputs are the sums of the parts.
    """

    reduce: str
    gradients: tuple[str, ...]
    output: str
