"""What a verification has found: how the results of steps on all ranks differ from one process', and between ranks.

Tests: tests/saved/test_saved_commands.py.
"""

from collections.abc import Mapping
import dataclasses
import hashlib

import numpy as np

from tf_poseidon.base import rounding
from tf_poseidon.base import tables
from tf_poseidon.job import runtime


@dataclasses.dataclass
class Verification:
    """The result of a verification. `print(verification)` shows it.

    Attributes:
        size: Number of ranks.
        steps: Number of steps.
        errors: By ("variable" or "output", its name): (number of compared values, the largest error as a fraction of
            its bound). Floats are compared where those of one process are finite; for other types, any error is
            infinite.
        differing: Variables and outputs whose bits differ between ranks, sorted.
        elsewhere: Devices of other processes that nodes name, sorted; these nodes ran in each process all the same.
        failures: What is wrong, as sentences; empty if nothing is.
    """

    size: int
    steps: int
    errors: dict[tuple[str, str], tuple[int, float]] = dataclasses.field(default_factory=dict)
    differing: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    elsewhere: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def conclusions(self) -> list[str]:
        """Returns what errors and differences say is wrong, as sentences."""
        return [
            *(f"{kind} '{name}' is off by {error:.3g} times the rounding bound" if np.isfinite(error) else
              f"{kind} '{name}' has values that are not those of one process"
              for (kind, name), (_, error) in self.errors.items() if not error <= 1),
            *(f"ranks have different bits of {kind} '{name}'" for kind, name in self.differing)]

    def __str__(self) -> str:
        rows = [("", "", "values", "largest error / bound"),
                *((kind, name, f"{number:,}", f"{error:.3g}") for (kind, name), (number, error) in self.errors.items())]
        ranks = f"{self.size} ranks" if self.size > 1 else "one rank"
        lines = []
        if self.errors:
            lines = [f"{self.steps} steps on {ranks}, against the original in one process:",
                     *tables.aligned(rows, left=(0, 1, 3), indent="  ")]
            if self.size > 1:
                lines.append("on all ranks: " + ("the same bits" if not self.differing else
                                                 "different bits of " + ", ".join(name for _, name in self.differing)))
            else:
                lines.append("nothing was exchanged: start it with mpiexec -n RANKS to verify that, too")
        if self.elsewhere:
            lines.append(f"nodes that name {', '.join(self.elsewhere)} have run in each process all the same; to "
                         "train, import the graph with clear_devices=True")
        return "\n".join([*lines, *(f"WRONG: {failure}" for failure in self.failures),
                          "wrong" if self.failures else "all right"])


def with_one_process(result: Verification, values: Mapping[tuple[str, str], np.ndarray],
                     expected: Mapping[tuple[str, str], np.ndarray], allowed: Mapping[tuple[str, str], float]) -> None:
    """Notes how far values are from those of one process.

    Args:
        result: The `Verification`.
        values: Variables and outputs after a step, arrays by (kind, name).
        expected, allowed: The same in one process, and the bounds on the difference of floats: from `Reference.step`.
    """
    for key, wanted in expected.items():
        value = values.get(key)
        if value is None or value.shape != wanted.shape or value.dtype != wanted.dtype:
            error = np.inf
        elif key in allowed:
            error = rounding.error(value, wanted, allowed[key])
        else:
            error = 0.0 if np.array_equal(value, wanted) else np.inf
        number, largest = result.errors.get(key, (0, 0.0))
        compared = rounding.num_finite(wanted) if key in allowed else wanted.size
        result.errors[key] = number + compared, max(largest, error)


def between_ranks(result: Verification, step: int, values: Mapping[tuple[str, str], np.ndarray]) -> None:
    """Notes values whose bits differ between ranks; all ranks must call it.

    Args:
        result: The `Verification`.
        step: Number of the step.
        values: Variables and outputs after it, arrays by (kind, name).
    """
    communicator, keys = runtime.communicator(), sorted(values)
    if communicator is None or not keys:
        return
    digests = np.frombuffer(b"".join(_digest(values[key]) for key in keys), np.uint8).reshape(1, len(keys), -1)
    rows = communicator.gather(f"verify/{step}", digests.reshape(1, -1)).reshape(-1, *digests.shape[1:])
    differing = {key for i, key in enumerate(keys) if np.any(rows[:, i] != rows[0, i])}
    result.differing = sorted({*result.differing, *differing})


def _digest(value: np.ndarray) -> bytes:
    data = repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
    return hashlib.sha256(f"{value.dtype} {value.shape} ".encode() + data).digest()
