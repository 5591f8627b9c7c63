"""Simulates workers that read stale weights: when each makes its steps, and on which version of the weights.

Also what the papers' servers would do, which apply each worker's gradient when it arrives.

Tests: tests/unit/test_staleness.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import heapq
from typing import Protocol
from typing import TypeVar

Weights = TypeVar("Weights")
Gradient = TypeVar("Gradient")
# Events of one time: a version that appears is seen by a worker that asks then.
_VERSION, _PUSH, _BEGIN = range(3)


class Gate(Protocol):
    """Says which versions a worker may read, as `tf_poseidon.staleness.gate.VersionGate`."""

    def note_push(self, time: float) -> None: ...

    def note_version(self, time: float) -> None: ...

    def bound(self, clock: int, newest: int) -> int: ...


@dataclasses.dataclass(frozen=True)
class StaleSchedule:
    """What workers have done.

    Attributes:
        seconds: When the last version appeared.
        versions: By rank, and then by clock: the version that was read.
        waiting: By rank: how long it has waited for versions.
        begins: By rank, and then by clock: when its step began.
        pushes: The same of its ends, when its gradient leaves.
    """

    seconds: float
    versions: tuple[tuple[int, ...], ...]
    waiting: tuple[float, ...]
    begins: tuple[tuple[float, ...], ...]
    pushes: tuple[tuple[float, ...], ...]


def simulate(times: Sequence[Sequence[float]], exchange_s: float, make_gate: Callable[[], Gate]) -> StaleSchedule:
    """Simulates a job.

    Args:
        times: By rank, and then by clock: how long the worker's step takes. All have as many.
        exchange_s: From the last gradient of a clock to the next version, in seconds; exchanges follow each other.
        make_gate: Returns what decides for a worker.
    """
    ranks, clocks = len(times), len(times[0])
    gates = [make_gate() for _ in times]
    versions: list[list[int]] = [[] for _ in times]
    begins: list[list[float]] = [[] for _ in times]
    pushes: list[list[float]] = [[] for _ in times]
    waiting, blocked = [0.0] * ranks, dict[int, tuple[float, int]]()  # of a rank: since when, for which version
    missing = [ranks] * clocks  # pushes of each clock
    newest, last = 0, 0.0
    events = [(0.0, _BEGIN, rank) for rank in range(ranks)]
    now = 0.0

    def begin(rank: int) -> None:
        heapq.heappush(events, (now + times[rank][len(versions[rank])], _PUSH, rank))
        versions[rank].append(newest)
        begins[rank].append(now)

    while events:  # each clock of each rank begins and ends once
        now, kind, rank = heapq.heappop(events)
        if kind == _VERSION:
            newest += 1
            for gate in gates:
                gate.note_version(now)
            for freed in [other for other, (_, version) in blocked.items() if version <= newest]:
                since, _ = blocked.pop(freed)
                waiting[freed] += now - since
                begin(freed)
        elif kind == _PUSH:
            clock = len(versions[rank]) - 1
            gates[rank].note_push(now)
            pushes[rank].append(now)
            missing[clock] -= 1
            if not missing[clock]:
                last = max(now, last) + exchange_s
                heapq.heappush(events, (last, _VERSION, -1))
            if clock + 1 < clocks:
                heapq.heappush(events, (now, _BEGIN, rank))
        else:
            clock = len(versions[rank])
            oldest = clock - gates[rank].bound(clock, newest)
            if newest >= oldest:
                begin(rank)
            else:
                blocked[rank] = now, oldest
    return StaleSchedule(now, tuple(map(tuple, versions)), tuple(waiting), tuple(map(tuple, begins)),
                         tuple(map(tuple, pushes)))


def on_arrival(schedule: StaleSchedule, weights: Weights, gradient: Callable[[Weights, int, int], Gradient],
               apply: Callable[[Weights, Gradient], Weights]) -> Weights:
    """Makes the steps of a schedule as in Ho et al.: each worker's gradient is applied at once, when it leaves.

    A worker computes with the weights that are there when its step begins, so its own updates are always in them; of
    events at one time, gradients come first. That a worker is no more steps ahead than its bound is as in the schedule:
    there a version appears when the slowest worker has made a step.

    Args:
        schedule: When the steps begin and end, without time for exchanges.
        weights: The first weights.
        gradient: Returns the gradient of a rank's step, given weights, rank and clock.
        apply: Returns weights after a gradient.

    Returns:
        The weights in the end.
    """
    events = [(time, kind, rank, clock) for kind, of_ranks in ((_PUSH, schedule.pushes), (_BEGIN, schedule.begins))
              for rank, times in enumerate(of_ranks) for clock, time in enumerate(times)]
    read: dict[int, Weights] = {}  # by rank
    for _, kind, rank, clock in sorted(events):
        if kind == _BEGIN:
            read[rank] = weights
        else:
            weights = apply(weights, gradient(read[rank], rank, clock))
    return weights
