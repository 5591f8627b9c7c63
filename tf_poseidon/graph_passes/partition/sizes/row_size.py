"""Sizes of dimensions, for several numbers of rows.

Tests: tests/graphs/test_sizes.py.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import TypeGuard

# Pairs of a number of rows and a value for other unknown sizes of inputs with rows, such as lengths of sequences.
TRIALS = ((4091, 2039), (4099, 2053), (2, 2063))
# A trial that only refutes: there, sizes that are broadcast look like others.
ONE_ROW = (1, TRIALS[-1][1])


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a dimension, for each number of rows."""

    values: tuple[int, ...]

    @property
    def constant(self) -> int | None:
        """Its value if it depends neither on rows nor on other unknown sizes; else None."""
        return self.values[0] if len(set(self.values)) == 1 else None

    @property
    def per_row(self) -> int | None:
        """The number of elements per row; None if it depends on more, or is not an integer."""
        multiples = {value / rows for value, (rows, _) in zip(self.values, TRIALS)}
        return int(min(multiples)) if len(multiples) == 1 and min(multiples).is_integer() and min(multiples) else None

    @property
    def of_rows(self) -> bool:
        """Whether it is a multiple of the number of rows."""
        if any(value % rows or not value for value, (rows, _) in zip(self.values, TRIALS)):
            return False
        multiples = [value // rows for value, (rows, _) in zip(self.values, TRIALS)]
        while len(set(multiples)) > 1 and all(value % unknown == 0 for value, (_, unknown) in zip(multiples, TRIALS)):
            multiples = [value // unknown for value, (_, unknown) in zip(multiples, TRIALS)]
        return len(set(multiples)) == 1

    @property
    def of_one_row(self) -> int | None:
        """What it is expected to be in a batch of one row; None if that is unknown."""
        if self.constant is not None or not self.of_rows:
            return self.constant
        return self.values[-1] // TRIALS[-1][0] if len(self.values) == len(TRIALS) else None

    def divided(self, number: int) -> "Size | None":
        """Returns its part if it is divided by a number; None if it is no multiple of it."""
        return None if any(value % number for value in self.values) else Size(
            tuple(value // number for value in self.values))

    def minus(self, other: "Size") -> "Size | None":
        """Returns a difference of sizes; None if it is negative."""
        values = tuple(value - less for value, less in zip(self.values, other.values))
        return None if min(values) < 0 else Size(values)

    def ratio(self, other: "Size") -> int | None:
        """Returns how many times it is another size, for each number of rows; None if that is not an integer."""
        if any(value < 0 or not by or value % by for value, by in zip(self.values, other.values)):
            return None
        ratios = {value // by for value, by in zip(self.values, other.values)}
        return ratios.pop() if len(ratios) == 1 else None


def product(sizes: Sequence[Size]) -> Size:
    """Returns the product of `Size`s, a `Size`."""
    return Size(tuple(map(math.prod, zip(*(size.values for size in sizes)))) or _ONE)


def consists_of(size: Size | None, blocks: int) -> bool:
    """Whether a size is known to be that of so many blocks, each with a multiple of the number of rows."""
    part = None if size is None else size.divided(blocks)
    return part is not None and part.of_rows


_ONE = (1,) * len(TRIALS)
NONE = Size((0,) * len(TRIALS))
# A tensor's shape, with None for unknown sizes.
Shape = tuple[Size | None, ...]


def is_known(shape: Shape | None) -> TypeGuard[tuple[Size, ...]]:
    """Whether all sizes of a shape are known."""
    return shape is not None and None not in shape


def is_constant(shape: Shape | None) -> TypeGuard[tuple[Size, ...]]:
    """Whether all sizes of a shape are known, and none depends on the number of rows."""
    return is_known(shape) and all(size.constant is not None for size in shape)
