"""The memory of one rank for what training adds to a model's intermediate results.

Tests: tests/training/test_explaining.py.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds.

    Attributes:
        weights: The variables of the model.
        gradients: The gradients of one step, whole.
        slots: The optimizer's variables for each trained one; a rank's shards of those that are divided, and what
            the rank owns that owns most.
        whole_slots: The same if none were divided.
        received: What the rank receives of others in a step, if all of it is there at a time.
    """

    weights: int
    gradients: int
    slots: int
    whole_slots: int
    received: int

    def __str__(self) -> str:
        divided = f" (in one process {_megabytes(self.whole_slots)})" if self.slots != self.whole_slots else ""
        return (f"memory of a rank: weights {_megabytes(self.weights)}, gradients {_megabytes(self.gradients)}, "
                f"the optimizer's variables {_megabytes(self.slots)}{divided}, received from others up to "
                f"{_megabytes(self.received)}")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.3g} MB"
