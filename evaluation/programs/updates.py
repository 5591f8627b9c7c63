"""Compares what runs of a program computed: by the ratio of updates, and by weights."""

import collections
from collections.abc import Mapping
import dataclasses
import re

import numpy as np

Arrays = Mapping[str, np.ndarray]

# Some gradients are zero but for rounding, like those of a bias before a softmax or a batch normalization. An update
# that is so much shorter than the longest of its step is noise, and has no ratio.
_NOISE = 1e-12
_SMALLEST = 1e-6  # weights that are all smaller are compared as if the largest was this


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How far a run is from the reference.

    Attributes:
        updates: Number of updates of variables that were compared.
        ratio: The length of the update that is furthest from the reference's, relative to it: 1 if all are the same.
        weights: Largest difference of a weight, relative to the largest of its variable, or to 1e-6.
        logs: Largest difference of a log, relative to its value or 1.
        is_equal: Whether all bits are the same.
    """

    updates: int
    ratio: float
    weights: float
    logs: float
    is_equal: bool

    def within(self, bound: float) -> bool:
        """Whether nothing differs by more than a bound."""
        return self.updates > 0 and max(abs(self.ratio - 1), self.weights, self.logs) <= bound


def compare(reference: Arrays, run: Arrays) -> Comparison:
    """Compares the arrays of two runs of run_program.py.

    Args:
        reference: Those of plain Keras.
        run: Those of a rank.

    Raises:
        ValueError: If they are not about the same steps and variables.
    """
    if list(reference) != list(run):
        other = sorted({*reference} ^ {*run}) or ["their order"]
        raise ValueError(f"The runs noted different things: {other[0]}, and {len(other) - 1} others.")
    weights, logs = [0.0], [0.0]
    # By step: the squared length of each update, and its ratio.
    lengths: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for key, want in reference.items():
        have = run[key]
        if "/log " in key:
            logs.append(float(_difference(have, want, max(abs(float(want)), 1.0))))
            continue
        weights.append(float(_difference(have, want, max(np.abs(want).max(initial=0.0), _SMALLEST))))
        step = int(re.search(r"/step (-?\d+)/", key)[1])
        before = key.replace(f"/step {step}/", f"/step {step - 1}/")
        if key.startswith("sgd/") and before in reference:
            expected, update = want - reference[before], have - run[before]
            length = float(np.vdot(expected, expected))
            if length > 0:
                lengths[key.partition("/weight ")[0]].append((length, float(np.vdot(update, expected)) / length))
    ratios = [ratio for step in lengths.values() for length, ratio in step if length > _NOISE ** 2 * max(step)[0]]
    worst = max([1.0, *ratios], key=lambda ratio: abs(ratio - 1))
    is_equal = all(value.tobytes() == run[key].tobytes() for key, value in reference.items())
    return Comparison(len(ratios), worst, max(weights), max(logs), is_equal)


def _difference(have: np.ndarray, want: np.ndarray, scale: float) -> float:
    if np.array_equal(have, want, equal_nan=True):
        return 0.0
    difference = np.abs(have - want).max(initial=0.0) / scale
    return float(difference) if np.isfinite(difference) else float("inf")
