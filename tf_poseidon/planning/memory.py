"""The memory of one rank for what training adds to a model's intermediate results.

Tests: tests/training/test_explaining.py.
"""

import dataclasses

from tf_poseidon.reports.texts import size


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds.

    Attributes:
        weights: The variables of the model; of those that are divided, a rank's shards and working copies.
        whole_weights: The same if none were divided.
        gradients: The gradients of one step, whole; of weights that ranks divide, a rank's columns.
        slots: The optimizer's variables for each trained one; a rank's shards of those that are divided, and what
            the rank owns that owns most.
        whole_slots: The same if none were divided.
        received: What the rank receives of others in a step, if all of it is there at a time.
    """

    weights: int
    whole_weights: int
    gradients: int
    slots: int
    whole_slots: int
    received: int

    def __str__(self) -> str:
        return (f"memory of a rank: weights {_compared(self.weights, self.whole_weights)}, gradients "
                f"{size(self.gradients)}, the optimizer's variables {_compared(self.slots, self.whole_slots)}, "
                f"received from others up to {size(self.received)}")


def _compared(num_bytes: int, in_one_process: int) -> str:
    compared = f" (in one process {size(in_one_process)})" if num_bytes != in_one_process else ""
    return f"{size(num_bytes)}{compared}"
