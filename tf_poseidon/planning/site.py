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
        itemsize: Bytes of an element.
        extra_bytes: What has to travel with the factors whatever K is.
    """

    m: int
    n: int
    k: int | None
    itemsize: int
    extra_bytes: int = 0

    @property
    def num_bytes(self):
        """Bytes of one worker's factors."""
        return self.k * (self.m + self.n) * self.itemsize + self.extra_bytes


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
    def num_bytes(self):
        """Bytes of one worker's slices, when no index occurs twice."""
        return self.k * self.row_bytes


@dataclasses.dataclass(frozen=True)
class Site:
    """A gradient to be synchronised.

    Attributes:
        name: The path of its variable, and which synchronisation of it in the step this is.
        dtype: Name of its dtype.
        itemsize: Bytes of an element.
        shape: Its shape, None where that is unknown.
        factors: Its factors, or None.
        slices: Its slices, or None.
        refusal: Why there are none, a sentence.
        bias_of: Name of the site one of whose factors this gradient is the sum of the rows of: a
            dense layer's bias.
    """

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None
    factors: Factors | None = None
    slices: Slices | None = None
    refusal: str = ""
    bias_of: str | None = None

    @property
    def num_bytes(self):
        """Bytes of the dense gradient, None where its shape is unknown."""
        return None if self.shape is None else math.prod(self.shape) * self.itemsize
