"""What a training graph contains: its gradients, and which of them are products of factors.

Tests: tests/unit/test_planning.py, tests/unit/test_plan.py.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Factors:
    """The sufficient factors of a gradient: U [K, M] and V [K, N] with gradient U^T V.

    Attributes:
        m: M, columns of U.
        n: N, columns of V.
        k: K, rows that one worker has in a full batch; None if unknown before the step.
        itemsize: Bytes of an element on the wire.
        extra_bytes: Bytes that travel with the factors, independent of K.
        sent_share: The share of their bytes that travelled without their zeros, see `Plan.measured`; 1 if unknown.
    """

    m: int
    n: int
    k: int | None
    itemsize: int
    extra_bytes: int = 0
    sent_share: float = dataclasses.field(default=1.0, repr=False)

    @property
    def rows(self) -> int:
        """K, which must be known."""
        assert self.k is not None
        return self.k

    @property
    def narrow(self) -> int:
        """Columns of the narrow factor."""
        return min(self.m, self.n)

    @property
    def wide(self) -> int:
        """Columns of the other one."""
        return max(self.m, self.n)

    @property
    def divided(self) -> int:
        """The factor that half factors divide, the wide one: 0 for U, 1 for V; so the dimension of the gradient."""
        return int(self.n > self.m)

    @property
    def num_bytes(self) -> int:
        """Bytes of one worker's factors, as they travel."""
        return round(self.rows * (self.m + self.n) * self.itemsize * self.sent_share) + self.extra_bytes


@dataclasses.dataclass(frozen=True)
class Slices:
    """A gradient of some rows of a variable, each with its index, such as an embedding's.

    Attributes:
        k: Rows that one worker has in a full batch, before rows with the same index are summed;
            None if unknown before the step.
        row_bytes: Bytes of a row and its index.
    """

    k: int | None
    row_bytes: int

    @property
    def rows(self) -> int:
        """`k`, which must be known."""
        assert self.k is not None
        return self.k

    @property
    def num_bytes(self) -> int:
        """Bytes of one worker's slices, if no index occurs twice."""
        return self.rows * self.row_bytes


@dataclasses.dataclass(frozen=True)
class Site:
    """A gradient to synchronise.

    Attributes:
        name: The path of its variable, and which of its uses in the step this is.
        dtype: Name of its dtype.
        itemsize: Bytes of an element on the wire.
        shape: Its shape, None if unknown.
        factors: Its factors, or None.
        slices: Its slices, or None.
        refusal: Why it has neither, as a sentence.
        bias_of: For a dense layer's bias: the name of the layer's site. The bias' gradient is the sum of the rows of
            one of that site's factors.
        operations: Additions and multiplications before the gradient is ready, including those of the forward pass.
        needed: Those of the next step before it needs the sum; None if the graph has no next step that does.
        depth: How many exchanges precede it one after the other; None in a loop.
        is_waited_for: Whether the step computes nothing until its exchange is complete.
        cast_from: Name of the type of two bytes from which the graph casts each rank's dense gradient; None if it does
            not. Then ranks send their gradients in that type, and get the sum in `dtype`.
        is_divided: Whether each rank needs those columns of the sum alone, or rows if U is the wider factor, that it
            makes of half factors.
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
    needed: float | None = dataclasses.field(default=None, repr=False)
    depth: int | None = dataclasses.field(default=0, repr=False)
    is_waited_for: bool = dataclasses.field(default=False, repr=False)
    cast_from: str | None = dataclasses.field(default=None, repr=False)
    is_divided: bool = dataclasses.field(default=False, repr=False)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the dense gradient, None if its shape is unknown."""
        if self.shape is None:
            return None if self.factors is None else self.factors.m * self.factors.n * self.itemsize
        return math.prod(self.shape) * self.itemsize

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of the dense gradient as a rank sends it, None if its shape is unknown."""
        if self.num_bytes is None or self.cast_from is None:
            return self.num_bytes
        return self.num_bytes // self.itemsize * 2

    def fingerprint(self) -> str:
        """Returns its type and shape as text."""
        text = f"{self.dtype}{list(self.shape) if self.shape is not None else ' of unknown shape'}"
        return f"{text}, {self.itemsize} bytes each"
