"""Which rank costs the others time, and why, given what ranks have measured in windows of steps. No exchanges in here.

A straggler's parts come later than the median rank's, and the others wait for them. All ranks end a step together, so
what one waits less than the others, it has computed or read longer; one whose parts come later though it waits as long
as the others has a slow link.

Tests: tests/unit/test_stragglers.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math
import statistics
import time

from tf_poseidon.reports import texts

# Of a step. Equal machines differ by less, and what is less is hard to gain.
SHARE = 0.10
# A straggler remains one until it costs less than this, so that one at the limit is reported once; for so many seconds.
RECOVERED = SHARE / 2
RECOVERY_S = 60.0
# A single window may hold a checkpoint, or the one step in which memory was short.
LEAST_STEPS, LEAST_WINDOWS = 10, 2
# The median of n windows must exceed SHARE by so many standard errors: of thousands of windows, none by chance. The
# noise is by what one window in ten deviates from the median, at least: the slowest rank of many has a longer tail than
# the median absolute deviation knows. Of few windows that is too small; hence a least noise, and more for few.
DEVIATIONS = 4.0
LEAST_NOISE = 0.03
_TAIL, _TAIL_DEVIATIONS = 0.9, 1.645  # nine of ten deviations of a normal distribution are smaller than that many sigma
KEPT = 64  # windows: so many that a share of 0.12 is found in the end
# Whatever happens, no more warnings in so many seconds.
WARNINGS, WARNINGS_S = 2, 3600.0

ARITHMETIC, INPUT, LINK = "arithmetic", "input", "link"

_REMEDIES = {
    ARITHMETIC: "look for what else runs on that host, and whether it is hot (`tf-poseidon doctor`), or give it fewer "
                "rows (`PoseidonStrategy(rows=...)`)",
    INPUT: "give its data `num_parallel_calls` or `cache`, or look at the storage of that host",
    LINK: "`tf-poseidon selftest --hosts ...` measures the links of hosts",
}


@dataclasses.dataclass(frozen=True)
class Window:
    """What ranks have measured in successive steps. Sequences are by rank, times in seconds over all these steps.

    Attributes:
        first: Number of the first step.
        steps: How many they are.
        end: When they were over, as `time.time`.
        seconds: How long they took.
        waiting: How long each rank has waited for others.
        inputs: How long it has waited for its batches.
        late: How much later than the median rank's its part came to those who add up, at most, in each step.
    """

    first: int
    steps: int
    end: float
    seconds: float
    waiting: tuple[float, ...]
    inputs: tuple[float, ...]
    late: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A rank that costs the others time.

    Attributes:
        rank: The rank.
        cause: "arithmetic", "input" or "link".
        share: Which share of each step it costs the others.
        since_step: The first step in which it did.
        since: When that was, as `time.time`.
        last: When it last did.
        own_seconds: How long that takes it in a step: its arithmetic, or its input; of a link, how late its part comes.
        median_seconds: The median of the same of the other ranks.
    """

    rank: int
    cause: str
    share: float
    since_step: int
    since: float
    last: float
    own_seconds: float
    median_seconds: float

    def sentence(self, host: str) -> str:
        """Returns a warning; `host` is the name of the rank's host."""
        own, median = texts.duration(self.own_seconds), texts.duration(self.median_seconds)
        why = {
            ARITHMETIC: f"its arithmetic takes {self.own_seconds / max(self.median_seconds, 1e-9):.2g} times the "
                        f"median ({own}, {median})",
            INPUT: f"it waits for its batches {own} a step, the median is {median}",
            LINK: f"its part comes {own} after those of the others, and neither its arithmetic nor its input explains "
                  "that, so it is probably its link",
        }[self.cause]
        return (f"Rank {self.rank} (host {host}) costs the others {100 * self.share:.0f} % of each step since step "
                f"{self.since_step} ({time.strftime('%H:%M', time.localtime(self.since))}): {why}; "
                f"{_REMEDIES[self.cause]}.")


@dataclasses.dataclass(frozen=True)
class History:
    """What was judged before.

    Attributes:
        windows: The last ones.
        costs: Their `costs_of`.
        stragglers: The ranks that cost the others time, or did so less than `RECOVERY_S` ago.
        warned: (rank, cause, time) of each warning that still counts.
    """

    windows: tuple[Window, ...] = ()
    costs: tuple[tuple[float, ...], ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    warned: tuple[tuple[int, str, float], ...] = ()


def judge(history: History, window: Window) -> tuple[History, tuple[Straggler, ...]]:
    """Returns the history with another window, and the stragglers to warn of now."""
    windows = (*history.windows, window)[-KEPT:]
    costs = (*history.costs, costs_of(window))[-KEPT:]
    known = {straggler.rank: straggler for straggler in history.stragglers}
    stragglers, found = [], []
    for rank in range(len(window.waiting)):
        before, now = known.get(rank), _straggler(rank, windows, costs)
        if now is not None:
            if before is not None:
                now = dataclasses.replace(now, since_step=before.since_step, since=before.since)
            stragglers.append(now)
            found.append(now)
        elif before is not None and window.end - before.last <= RECOVERY_S:
            stragglers.append(before)
    ranks = {straggler.rank for straggler in stragglers}
    warned, news = [], []
    for rank, cause, when in history.warned:
        if rank in ranks or window.end - when < WARNINGS_S:
            # After a recovery, one that counts for the limit alone.
            warned.append((rank, cause if rank in ranks else "", when))
    for straggler in found:
        is_new = all((straggler.rank, straggler.cause) != each[:2] for each in warned)
        if is_new and sum(window.end - when < WARNINGS_S for *_, when in warned) < WARNINGS:
            warned.append((straggler.rank, straggler.cause, window.end))
            news.append(straggler)
    return History(windows, costs, tuple(stragglers), tuple(warned)), tuple(news)


def costs_of(window: Window) -> tuple[float, ...]:
    """Returns by rank which share of a step the others wait for it; about 0 if it is as fast as they are.

    What they compute may hide lateness, so it is no more than they have waited.
    """
    late, waiting = _medians_of_others(window.late), _medians_of_others(window.waiting)
    return tuple(min(own - of_others, waited) / window.seconds
                 for own, of_others, waited in zip(window.late, late, waiting))


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Returns by rank the median of the values of all others."""
    order = sorted(range(len(values)), key=values.__getitem__)
    medians = [0.0] * len(values)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2  # of the others, in their order
    for place, rank in enumerate(order):
        medians[rank] = (values[order[low + (low >= place)]] + values[order[high + (high >= place)]]) / 2
    return medians


def _noise(*series: Sequence[Sequence[float]]) -> float:
    """Returns the standard deviation of what ranks cost in a window, given the costs of series of equal windows."""
    deviations = []
    for costs in series:
        for of_rank in zip(*costs):
            middle = statistics.median(of_rank)
            deviations += [abs(cost - middle) for cost in of_rank]
    deviations.sort()
    noise = max(LEAST_NOISE, deviations[int(_TAIL * len(deviations))] / _TAIL_DEVIATIONS)
    return noise * (1 + 4 / sum(map(len, series)))


def _straggler(rank: int, windows: Sequence[Window], costs: Sequence[Sequence[float]]) -> Straggler | None:
    """Returns the straggler that a rank is in the last windows, given their `costs_of`; None if it is none."""
    length = next((i for i, each in enumerate(reversed(costs)) if each[rank] <= RECOVERED), len(costs))
    if length < LEAST_WINDOWS:
        return None
    run, share = windows[-length:], statistics.median(each[rank] for each in costs[-length:])
    is_long = sum(window.steps for window in run) >= LEAST_STEPS
    if not is_long or share <= SHARE:  # as nearly always
        return None
    if share <= SHARE + DEVIATIONS * _noise(costs[:-length], costs[-length:]) / math.sqrt(length):
        return None

    def compared(of: Callable[[Window], Sequence[float]]) -> tuple[float, float]:
        """Returns the median of a time in a step of this rank, and of the others."""
        own = [of(window)[rank] / window.steps for window in run]
        others = [_medians_of_others(of(window))[rank] / window.steps for window in run]
        return statistics.median(own), statistics.median(others)

    own_input, others_input = compared(lambda window: window.inputs)
    own_waiting, others_waiting = compared(lambda window: window.waiting)
    own_late, others_late = compared(lambda window: window.late)
    busier = others_waiting - own_waiting  # so much longer it has computed and read
    if 2 * busier < own_late - others_late:
        if len(windows[0].late) == 2:  # whose links are one
            return None
        cause, times = LINK, (own_late, others_late)
    elif 2 * (own_input - others_input) >= busier:
        cause, times = INPUT, (own_input, others_input)
    else:
        cause, times = ARITHMETIC, compared(lambda window: [
            window.seconds - waiting - inputs for waiting, inputs in zip(window.waiting, window.inputs)])
    first = run[0]
    return Straggler(rank, cause, share, first.first, first.end - first.seconds, run[-1].end, *times)
