"""Which shares of a global batch ranks should have, given how long they took for theirs. No exchanges in here.

A rank that takes t seconds for n rows is taken to make n / t rows a second. What a step costs besides its rows makes a
rank with few rows look slower than it is; with new shares that shows, and the next decision is nearer to the best one.

Input is made ahead, while a rank computes and waits for others. So where the slowest rank waits for its input, how long
the others need for theirs is not seen: at most the whole step, since they have it in time. Each is taken to need half
of it; or as long as it did when it was the slowest itself, which is what ends a sequence of decisions.

Tests: tests/unit/test_balancing.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import statistics

from tf_poseidon.stragglers.judgement import Window

# New shares must promise steps that are shorter by this part: datasets are made anew for them.
LEAST_GAIN = 0.05
# Of fewer steps, no shares follow; one window alone may hold a checkpoint.
LEAST_STEPS, LEAST_WINDOWS = 10, 2
_MUCH_LONGER = 1.2  # than when the last decision was taken back
_WAITS_FOR_INPUT = 0.2  # a rank that does so for this part of its time
_MOST_SHARE = 1000


@dataclasses.dataclass(frozen=True)
class Balance:
    """What decisions have come to.

    Attributes:
        former: The shares before the last decision, and how long a step took with them; None before the first one.
        settled_seconds: How long a step took when a decision was taken back, since it had not made steps shorter: no
            further one follows unless steps become longer. None if none was.
        known: Rows a second that ranks made when they were the slowest and waited for input.
    """

    former: tuple[tuple[int, ...], float] | None = None
    settled_seconds: float | None = None
    known: Mapping[int, float] = dataclasses.field(default_factory=dict)


def decide(balance: Balance, windows: Sequence[Window], shares: tuple[int, ...],
           divide: Callable[[Sequence[int]], Sequence[int]]) -> tuple[Balance, tuple[int, ...] | None]:
    """Returns what decisions have come to, and other shares, None to keep the present ones.

    Measurements may mislead: a sequence of decisions ends with the first one that does not make steps shorter, which is
    taken back.

    Args:
        balance: What decisions have come to.
        windows: What ranks have measured with the present shares.
        shares: These.
        divide: Returns the rows of each rank in a usual batch, given shares.
    """
    if len(windows) < LEAST_WINDOWS or sum(window.steps for window in windows) < LEAST_STEPS:
        return balance, None
    seconds = statistics.median(window.seconds / window.steps for window in windows)
    if balance.former is not None and seconds > (1 - LEAST_GAIN / 2) * balance.former[1]:
        return dataclasses.replace(balance, former=None, settled_seconds=balance.former[1]), balance.former[0]
    if balance.settled_seconds is not None and seconds < _MUCH_LONGER * balance.settled_seconds:
        return balance, None
    known = dict(balance.known)
    decided = balanced(windows, divide(shares), divide, known)
    return Balance(None if decided is None else (shares, seconds), None, known), decided


def balanced(windows: Sequence[Window], counts: Sequence[int], divide: Callable[[Sequence[int]], Sequence[int]],
             known: dict[int, float]) -> tuple[int, ...] | None:
    """Returns shares by which all ranks would take as long; None if that would gain too little, or is not known yet.

    Args:
        windows: What ranks have measured with the present shares.
        counts: By rank, the rows of a usual batch that it had.
        divide: Returns the rows of each rank, given shares.
        known: Rows a second that ranks made when they were the slowest and waited for input; brought up to date.
    """
    if 0 in counts:
        return None
    ranks = range(len(counts))
    seconds = [statistics.median((window.seconds - _waited(window, rank)) / window.steps for window in windows)
               for rank in ranks]
    slowest = seconds.index(max(seconds))
    if statistics.median(window.inputs[slowest] / window.steps for window in windows) > (
            _WAITS_FOR_INPUT * seconds[slowest]):
        known[slowest] = counts[slowest] / seconds[slowest]
        unseen = statistics.median(window.seconds / window.steps for window in windows) / 2
        seconds = [max(took, count / known[rank] if rank in known else unseen)
                   for rank, took, count in zip(ranks, seconds, counts, strict=True)]
    if min(seconds) <= 0:
        return None
    speeds = [count / took for count, took in zip(counts, seconds, strict=True)]
    shares = tuple(max(1, round(_MOST_SHARE * speed / max(speeds))) for speed in speeds)
    expected = max(count / speed for count, speed in zip(divide(shares), speeds, strict=True))
    # Noise: by how much the slowest rank's time differs between windows, which a gain must exceed.
    noise = statistics.median(abs((window.seconds - _waited(window, slowest)) / window.steps - seconds[slowest])
                              for window in windows)
    return shares if expected < (1 - LEAST_GAIN) * seconds[slowest] - noise else None


def _waited(window: Window, rank: int) -> float:
    """Returns how long a rank has waited for the slowest.

    That is what it has waited after its last gradients; or, where ranks exchange in the forward pass too, as for
    moments of all rows, how much earlier its parts came.
    """
    return max(window.waiting[rank], max(window.late) - window.late[rank])
