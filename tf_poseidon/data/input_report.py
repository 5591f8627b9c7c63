"""What of a dataset each rank runs for its own rows, and what for all rows of a global batch.

Tests: tests/unit/test_row_selection.py.
"""

import dataclasses

from tf_poseidon.base import tables


@dataclasses.dataclass(frozen=True)
class Transformation:
    """What one dataset does.

    Attributes:
        name: The method of `tf.data.Dataset`, and of a map its function.
        is_own: Whether each rank does it for its own rows alone.
        obstacle: Why what comes before is done for all rows, and what to do about it, a clause; "" if it need not be.
    """

    name: str
    is_own: bool
    obstacle: str


@dataclasses.dataclass(frozen=True)
class InputReport:
    """What each rank runs of a dataset.

    Attributes:
        transformations: The `Transformation`s, behind what they read.
        batch_size: Rows of a global batch, -1 if that is not known; None if every rank makes all rows.
    """

    transformations: tuple[Transformation, ...]
    batch_size: int | None

    @property
    def is_divided(self) -> bool:
        """Whether each rank makes its own rows."""
        return self.batch_size is not None

    @property
    def undivided_maps(self) -> tuple[Transformation, ...]:
        """The maps that every rank runs for all rows."""
        return tuple(each for each in self.transformations if each.name.startswith("map") and not each.is_own)

    def sentence(self) -> str:
        """Returns what runs for all rows, and why; "" if each rank makes its own rows with all maps."""
        if not self.undivided_maps:
            return ""
        names = ", ".join(dict.fromkeys(each.name for each in self.undivided_maps))
        reasons = [f"'{each.name}': {each.obstacle}" for each in self.transformations if each.obstacle]
        return (f"Every rank runs {names} for all rows of a batch" + (f", since of {'; of '.join(reasons)}" if reasons
                else "") + ".")

    def __str__(self) -> str:
        sizes = "" if self.batch_size == -1 else f" of batches of {self.batch_size}"
        title = (f"Each rank makes its own rows{sizes}:" if self.is_divided else
                 "Every rank makes all rows of each batch, and takes its own:")
        rows = [[each.name, "own rows" if each.is_own else "all rows", each.obstacle] for each in self.transformations]
        return "\n".join([title, *tables.aligned(rows, left=(0, 1, 2), indent="  ")])
