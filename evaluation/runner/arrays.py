"""What ranks have computed, in files, and how far it is from what the ranks of a plain run have computed."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib

import numpy as np

from evaluation.runner.outcomes import Outcome
from evaluation.runner.outcomes import Outcomes

Arrays = Mapping[str, np.ndarray]


def save(directory: str, name: str, rank: int, arrays: Arrays) -> None:
    """Writes what a rank has computed in an item."""
    path = pathlib.Path(directory) / name / f"{rank}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def load(directory: str, name: str) -> list[dict[str, np.ndarray]]:
    """Returns what each rank has computed in an item."""
    return [dict(np.load(path)) for path in sorted(pathlib.Path(directory, name).glob("*.npz"))]


def judged(plain: Outcomes, found: Outcomes, directories: tuple[str, str], bounds: Callable[[str], float],
           smallest: float = 1.0) -> Outcomes:
    """Returns the outcomes of a run, in which items fail that have computed something else than in a plain run.

    Args:
        plain: The outcomes of the plain run.
        found: Those of the run that is compared with it.
        directories: Where each of the two has saved what it has computed.
        bounds: Returns the largest difference of an item.
        smallest: Of `difference`.
    """
    def judge(name: str, outcome: Outcome) -> Outcome:
        if outcome.outcome != "passed" or plain[name].outcome != "passed":
            return outcome
        apart, bound = difference(*(load(directory, name) for directory in directories), smallest), bounds(name)
        return dataclasses.replace(outcome, difference=apart, **({} if apart <= bound else {
            "outcome": "failed", "error": f"differs by {apart:g}, expected at most {bound:g}"}))

    return {name: judge(name, outcome) for name, outcome in found.items()}


def difference(plain: Sequence[Arrays], found: Sequence[Arrays], smallest: float = 1.0) -> float:
    """Returns the largest difference of ranks, relative to the largest element of an array, or to `smallest`.

    Each rank is compared with the same one of the plain run; if that had one process, with it, and all ranks must have
    the same bits. The difference is infinite if arrays are missing, or have other shapes, integers or infinities.
    """
    if len(plain) == 1 and any(arrays[key].tobytes() != value.tobytes()
                               for arrays in found for key, value in found[0].items()):
        return np.inf
    largest = 0.0
    for before, after in zip(plain, found):
        if before.keys() != after.keys():
            return np.inf
        for key, want in before.items():
            have, is_exact = after[key], want.dtype.kind != "f"
            finite = np.isfinite(want)
            if want.shape != have.shape or not np.array_equal(*(
                    (want, have) if is_exact else (finite, np.isfinite(have)))):
                return np.inf
            if not is_exact:
                apart = np.abs(have[finite].astype("float64") - want[finite]).max(initial=0)
                largest = max(largest, float(apart / max(np.abs(want[finite]).max(initial=0), smallest)))
    return largest
