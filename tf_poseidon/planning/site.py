"""What a training graph contains: its gradients, and which of them are products of factors."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Factors:
    """The sufficient factors of a gradient: U [K, M] and V [K, N] with gradient U^T V.

    Attributes:
        m: M, columns of U.
        n: N, columns of V.
        k: K, rows that one worker has in a full batch; None if that is not known before the step.
        itemsize: Bytes of an element on its way.
        extra_bytes: What has to travel with the factors whatever K is.
    """

    m: int
    n: int
    k: int | None
    itemsize: int
    extra_bytes: int = 0

    @property
    def rows(self) -> int:
        """K where it is known."""
        assert self.k is not None
        return self.k

    @property
    def num_bytes(self) -> int:
        """Bytes of one worker's factors."""
        return self.rows * (self.m + self.n) * self.itemsize + self.extra_bytes


@dataclasses.dataclass(frozen=True)
class Slices:
    """A gradient that is some rows of a variable, each with its index: that of an embedding.

    Attributes:
        k: Rows that one worker has in a full batch, before those with the same index are added up;
            None if that is not known before the step.
        row_bytes: Bytes of a row and its index.
    """

    k: int | None
    row_bytes: int

    @property
    def rows(self) -> int:
        """`k` where it is known."""
        assert self.k is not None
        return self.k

    @property
    def num_bytes(self) -> int:
        """Bytes of one worker's slices, when no index occurs twice."""
        return self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class Site:
    """A gradient to be synchronised.

    Attributes:
        name: The path of its variable, and which synchronisation of it in the step this is.
        dtype: Name of its dtype.
        itemsize: Bytes of an element on its way.
        shape: Its shape, None where that is unknown.
        factors: Its factors, or None.
        slices: Its slices, or None.
        refusal: Why there are none, a sentence.
        bias_of: Name of the site one of whose factors this gradient is the sum of the rows of: a
            dense layer's bias.
        operations: Additions and multiplications that have to be done before the gradient is there,
            those of the forward pass included.
        depth: How many exchanges come one after the other before it; None in a loop.
        is_waited_for: Whether the step computes nothing until it is there.
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None
    factors: Factors | None = None
    slices: Slices | None = None
    refusal: str = ""
    bias_of: str | None = None
    operations: float = 0.0
    depth: int | None = dataclasses.field(default=0, repr=False)
    is_waited_for: bool = dataclasses.field(default=False, repr=False)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the dense gradient, None where its shape is unknown."""
        if self.shape is None:
            return None if self.factors is None else self.factors.m * self.factors.n * self.itemsize
        return math.prod(self.shape) * self.itemsize

    def fingerprint(self) -> str:
        """Returns its type and shape as text."""
        text = f"{self.dtype}{list(self.shape) if self.shape is not None else ' of unknown shape'}"
        return f"{text}, {self.itemsize} bytes each"
