"""How the ranks of a job share the rows of global batches, the same on all of them.

Tests: tests/training/test_row_shares.py.
"""

from collections.abc import Sequence
import weakref

from tf_poseidon.job.communicator import Communicator

# By communicator: strategies of one job share rows alike.
_of: "weakref.WeakKeyDictionary[Communicator, RowShares]" = weakref.WeakKeyDictionary()


def of(communicator: Communicator, shares: Sequence[int] | None, is_balanced: bool) -> "RowShares":
    """Returns the shares of a job; `shares` are given to it unless they are None, and it has some."""
    if communicator not in _of:
        _of[communicator] = RowShares(communicator, shares or (1,) * communicator.size, is_balanced)
    elif shares is not None or is_balanced:
        _of[communicator].is_balanced = is_balanced
        _of[communicator].set(shares or _of[communicator].current)
    return _of[communicator]


class RowShares:
    """The shares of the ranks, which may change between steps; who divides a batch asks for them.

    Attributes:
        current: By rank, positive.
        is_balanced: Whether they follow measured speeds.
        usual_rows: Rows of most of the batches that are trained with, None if unknown.
    """

    def __init__(self, communicator: Communicator, shares: Sequence[int], is_balanced: bool) -> None:
        self._communicator = weakref.proxy(communicator)  # by which `of` finds this
        self.is_balanced = is_balanced
        self.usual_rows: int | None = None
        self.set(shares)

    def set(self, shares: Sequence[int]) -> None:
        """Sets the shares; all ranks do so between the same two steps."""
        self.current = tuple(shares)
        self._communicator.set_row_shares(self.current)

    @property
    def are_equal(self) -> bool:
        """Whether all ranks have as many rows, up to one."""
        return len(set(self.current)) == 1
