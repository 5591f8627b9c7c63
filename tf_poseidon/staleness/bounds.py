"""How far a worker may run ahead of the weights that it reads.

Clocks, as in Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS
2013: a worker's clock is the number of steps that it has made. Here servers apply the gradients of a clock when those
of all workers are in, so version v of the weights, W_v, contains exactly the steps 0 to v - 1 of all workers; a worker
at clock c reads one version of all variables together, at most c.

Tests: tests/unit/test_staleness.py.
"""

import dataclasses
from typing import Any

from tf_poseidon.errors import ConfigurationError

# Each version that some rank may still read is a copy of the weights.
MOST_STALENESS = 64
BSP = "bsp"
TEXTS = "bsp, ssp:STALENESS or dssp:LOWER,UPPER, such as ssp:3"


@dataclasses.dataclass(frozen=True)
class SSP:
    """Stale synchronous parallel: a worker at clock c reads version c - staleness of the weights, or a newer one.

    Attributes:
        staleness: By how many steps the version may be older than the worker's clock; 0 waits as bulk synchronous
            training does, and computes the same bits.

    Raises:
        ConfigurationError: If it is out of range.
    """

    staleness: int

    def __post_init__(self) -> None:
        _check(str(self), "staleness", self.staleness, 0)

    @property
    def lower(self) -> int:
        """The staleness that is always allowed."""
        return self.staleness

    @property
    def upper(self) -> int:
        """The staleness that is never exceeded."""
        return self.staleness

    def __str__(self) -> str:
        return f"SSP({self.staleness})"


@dataclasses.dataclass(frozen=True)
class DSSP:
    """Dynamic stale synchronous parallel: the staleness of each worker follows its speed, between two bounds.

    Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", ICDCS 2019. Beyond `lower`
    a worker goes on if it would then wait less (`gate.extra_steps`), and never beyond `upper`.

    Attributes:
        lower: The staleness that is always allowed.
        upper: The staleness that is never exceeded.

    Raises:
        ConfigurationError: If one is out of range.
    """

    lower: int
    upper: int

    def __post_init__(self) -> None:
        _check(str(self), "lower", self.lower, 0)
        _check(str(self), "upper", self.upper, self.lower)

    def __str__(self) -> str:
        return f"DSSP({self.lower}, {self.upper})"


Synchrony = SSP | DSSP


def of(synchrony: Any) -> Synchrony | None:
    """Returns the bounds that a user's option means; None for bulk synchronous training.

    Raises:
        ConfigurationError: If it means none.
    """
    if isinstance(synchrony, Synchrony):
        return synchrony
    if synchrony == BSP:
        return None
    raise ConfigurationError(f"synchrony={synchrony!r}, expected 'bsp', poseidon.SSP(staleness) or "
                             "poseidon.DSSP(lower, upper).")


def from_text(text: str) -> str | Synchrony:
    """Returns the option that a text means, as a command and the environment have it.

    Raises:
        ConfigurationError: If it means none.
    """
    kind, _, numbers = text.partition(":")
    kinds = {"ssp": (SSP, 1), "dssp": (DSSP, 2)}
    given = [int(number) for number in numbers.split(",") if number.isdecimal() and number.isascii()]
    if text == BSP:
        return BSP
    if kind not in kinds or numbers.count(",") + 1 != len(given) or len(given) != kinds[kind][1]:
        raise ConfigurationError(f"'{text}', expected {TEXTS}.")
    return kinds[kind][0](*given)


def _check(whole: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_STALENESS:
        raise ConfigurationError(f"{whole} has {name}={value!r}, expected a whole number from {least} to "
                                 f"{MOST_STALENESS}.")
