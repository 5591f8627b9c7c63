"""Tests of Keras that pass plainly and fail in the scope of a PoseidonStrategy, and why."""

import fnmatch
from typing import NamedTuple

_BOTH, _TWO = (1, 2), (2,)


class Difference(NamedTuple):
    """A kind of failure.

    Attributes:
        tests: Pattern of the names of tests, after "keras/src/".
        error: What their errors contain.
        ranks: Numbers of ranks.
        reason: Why they may fail.
    """

    tests: str
    error: str
    ranks: tuple[int, ...]
    reason: str


# The first that matches a failure explains it.
DIFFERENCES: tuple[Difference, ...] = (
)


def reason(test: str, ranks: int, error: str) -> str:
    """Returns why a test may fail; "" if no reason is known."""
    return next((difference.reason for difference in DIFFERENCES
                 if fnmatch.fnmatchcase(test.removeprefix("keras/src/"), difference.tests)
                 and difference.error in error and ranks in difference.ranks), "")
