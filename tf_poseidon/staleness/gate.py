"""Which version of the weights a worker reads at a clock.

Versions appear in order. As every version needs a step of the slowest worker, the times at which they appear are the
times of that worker's pushes, later by an exchange: so a worker needs no other message to know how far ahead it is, and
of which rhythm the slowest one is.

Tests: tests/unit/test_staleness.py.
"""

from collections.abc import Sequence

from tf_poseidon.staleness.bounds import DSSP
from tf_poseidon.staleness.bounds import Synchrony


class VersionGate:
    """Decides for one worker. Times are of any clock that goes forward, the same for all calls."""

    def __init__(self, synchrony: Synchrony) -> None:
        self._synchrony = synchrony
        self._granted = 0  # so many more steps need not be asked for
        self._pushes: list[float] = []  # the last two of this worker
        self._versions: list[float] = []  # when the last two versions appeared

    def note_push(self, time: float) -> None:
        """Notes that the worker has made a step."""
        self._pushes = [*self._pushes, time][-2:]

    def note_version(self, time: float) -> None:
        """Notes that the next version is there."""
        self._versions = [*self._versions, time][-2:]

    def bound(self, clock: int, newest: int) -> int:
        """Returns how old a version may be that the worker reads, in clocks; called once at each clock.

        Args:
            clock: The worker's clock.
            newest: The newest version that is there.
        """
        synchrony = self._synchrony
        lead = clock - newest
        if self._granted:
            self._granted -= 1
            return max(lead, synchrony.lower)
        if lead <= synchrony.lower or not isinstance(synchrony, DSSP):
            return synchrony.lower
        if len(self._pushes) == len(self._versions) == 2:
            # The paper leaves out the second limit, so a worker that asks again may get any lead.
            most = min(extra_steps(self._pushes, self._versions, synchrony.upper - synchrony.lower),
                       synchrony.upper - lead)
            self._granted = max(0, most)
        return lead if self._granted else synchrony.lower


def extra_steps(own: Sequence[float], slowest: Sequence[float], most: int) -> int:
    """Returns after how many more steps a worker would wait least for the slowest one.

    Both are assumed to go on at the pace of their last step (Zhao et al., algorithm 2): the number is that of the push
    of this worker, out of `most`, that comes closest to a push of the slowest one.

    Args:
        own: The times of this worker's last two pushes.
        slowest: Those of the slowest worker's.
        most: How many more steps are possible.
    """
    own_pace, pace = own[1] - own[0], slowest[1] - slowest[0]
    others = [slowest[1] + i * pace for i in range(most + 1)]
    return min(range(most + 1), key=lambda i: min(abs(own[1] + i * own_pace - other) for other in others))
