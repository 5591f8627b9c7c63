"""The results of matching a gradient: a Match, BiasMatch, SlicesMatch or Refusal; and what it was cast from.

Tests: tests/graphs/test_passes.py.
"""

import dataclasses
import re

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

_CALLS = re.compile(r"^(StatefulPartitionedCall(_\d+)?/)+")


@dataclasses.dataclass(frozen=True)
class NarrowGradient:
    """A gradient of half or bfloat16, which the graph casts to float before it is summed.

    Attributes:
        tensor: The gradient before its cast.
        dtype: Its `types_pb2.DataType`.
    """

    tensor: str
    dtype: int


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why a gradient is not a product of factors.

    Attributes:
        node: The node at which the match fails.
        reason: A sentence without its full stop.
    """

    node: str
    reason: str

    def __str__(self) -> str:
        # Without the calls that it is inlined from, which say nothing of where it is in the program.
        return f"{self.reason} (node '{_CALLS.sub('', self.node)}')"


@dataclasses.dataclass(frozen=True)
class Factor:
    """One factor: a tensor, and how it becomes a matrix with its rows first.

    Attributes:
        tensor: The tensor.
        transpose: The order of dimensions that puts the rows first, None if they are first.
        columns: Size of the matrix' second dimension.
        is_matrix: Whether it is a matrix once transposed; otherwise it must be reshaped.
    """

    tensor: str
    transpose: tuple[int, ...] | None
    columns: int
    is_matrix: bool


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One scalar of a scale or coefficient.

    Attributes:
        tensor: A tensor with one element, or None for a constant.
        value: The constant.
        divides: Whether it is a divisor.
    """

    tensor: str | None = None
    value: float | None = None
    divides: bool = False


# Scalars to multiply or divide by.
Scale = tuple[Scalar, ...]


@dataclasses.dataclass(frozen=True)
class Product:
    """scale * U^T V.

    Attributes:
        node: The node that computes U^T V.
        u: U, [K, M].
        v: V, [K, N].
        scale: Scalars to multiply or divide by.
        dtype: Type of the factors, a `types_pb2.DataType`.
    """

    node: str
    u: Factor
    v: Factor
    scale: Scale
    dtype: int


@dataclasses.dataclass(frozen=True)
class Term:
    """coefficient * an elementwise product of tensors that are equal on all ranks."""

    coefficient: Scale
    tensors: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Match:
    """A gradient that is exactly

        reshape(sum of scale * U^T V over the products) * masks + sum of coefficient * term.

    Masks and terms are equal on all ranks; scales and coefficients are scalars, and may differ.
    """

    products: tuple[Product, ...]
    masks: tuple[str, ...] = ()
    terms: tuple[Term, ...] = ()

    def tensors(self) -> list[str]:
        """Returns all tensors that are read to rebuild the gradient, and the nodes that computed it."""
        return [*(t for p in self.products for t in (p.node, p.u.tensor, p.v.tensor)), *self.others()]

    def others(self) -> list[str]:
        """Returns the tensors that are read to rebuild the gradient, without the factors."""
        scalars = [s.tensor for p in self.products for s in p.scale]
        scalars += [s.tensor for term in self.terms for s in term.coefficient]
        return [*self.masks, *(t for term in self.terms for t in term.tensors), *(t for t in scalars if t)]


@dataclasses.dataclass(frozen=True)
class BiasMatch:
    """A gradient that is the sum of the rows of another site's factor.

    Attributes:
        leader: Name of the other site.
        factor: Which of its factors: "u" or "v".
        nodes: The nodes that sum the rows.
    """

    leader: str
    factor: str
    nodes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SlicesMatch:
    """A gradient that is slices.

    Attributes:
        indices: Tensors with as many elements as there are slices: the indices, and what these are computed from.
        index_dtype: Type of the indices, a `types_pb2.DataType`.
    """

    indices: tuple[str, ...]
    index_dtype: int


GradientMatch = Match | BiasMatch | SlicesMatch | Refusal


class Refused(Exception):
    """Carries a Refusal out of a search."""

    def __init__(self, tensor: str, reason: str) -> None:
        super().__init__(Refusal(graph_lib.node_of(tensor), reason))
