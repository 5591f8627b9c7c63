"""Compares the results of a step on all ranks with those of one process, and between ranks.

Differences are noted in a `verifying.Verification`.

Tests: tests/saved/test_saved_commands.py.
"""

from collections.abc import Mapping
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tf_poseidon.base import rounding
from tf_poseidon.job import runtime

if TYPE_CHECKING:  # it imports this module
    from tf_poseidon.saved_graphs.verifying import Verification


def with_one_process(result: "Verification", values: Mapping[tuple[str, str], np.ndarray],
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


def between_ranks(result: "Verification", step: int, values: Mapping[tuple[str, str], np.ndarray]) -> None:
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
    rows, = communicator.submit_factors(f"verify/{step}", [digests.reshape(1, -1)])()
    rows = rows.reshape(-1, *digests.shape[1:])
    differing = {key for i, key in enumerate(keys) if np.any(rows[:, i] != rows[0, i])}
    result.differing = sorted({*result.differing, *differing})


def _digest(value: np.ndarray) -> bytes:
    data = repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
    return hashlib.sha256(f"{value.dtype} {value.shape} ".encode() + data).digest()
