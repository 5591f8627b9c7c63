"""What of a dataset each rank runs for its own rows, and what for all rows of a global batch.

Tests: tests/unit/test_row_selection.py.
"""

import dataclasses

from tf_poseidon.base import tables


@dataclasses.dataclass(frozen=True)
class Step:
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
        steps: The `Step`s, behind what they read.
        batch_size: Rows of a global batch, None if every rank makes all rows.
    """

    steps: tuple[Step, ...]
    batch_size: int | None

    @property
    def is_divided(self) -> bool:
        """Whether each rank makes its own rows."""
        return self.batch_size is not None

    @property
    def undivided_maps(self) -> tuple[Step, ...]:
        """The maps that every rank runs for all rows."""
        return tuple(step for step in self.steps if step.name.startswith("map") and not step.is_own)

    def sentence(self) -> str:
        """Returns what runs for all rows, and why; "" if each rank makes its own rows with all maps."""
        if not self.undivided_maps:
            return ""
        names = ", ".join(dict.fromkeys(step.name for step in self.undivided_maps))
        reasons = [f"'{step.name}': {step.obstacle}" for step in self.steps if step.obstacle]
        return (f"Every rank runs {names} for all rows of a batch" + (f", since of {'; of '.join(reasons)}" if reasons
                else "") + ".")

    def __str__(self) -> str:
        title = (f"Each rank makes its own rows of batches of {self.batch_size}:" if self.is_divided else
                 "Every rank makes all rows of each batch, and takes its own:")
        rows = [[step.name, "own rows" if step.is_own else "all rows", step.obstacle] for step in self.steps]
        return "\n".join([title, *tables.aligned(rows, left=(0, 1, 2), indent="  ")])
