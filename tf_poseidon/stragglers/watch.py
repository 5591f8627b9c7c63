"""Measures in windows of steps what ranks wait for, and has them say so to each other; rank 0 warns of stragglers.

A step costs a rank a look at the clock. At the end of a window, which all ranks end after the same step, they exchange
a few numbers; while they make the next step, these travel. A program may end before: then its end waits for them.

Tests: tests/unit/test_stragglers.py, tests/training/test_slow_ranks.py.
"""

from collections.abc import Callable
import dataclasses
import logging
import math
import socket
import time
from typing import Any
import weakref

import numpy as np

from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.joined_job import Job
from tf_poseidon.stragglers import judgement

_log = logging.getLogger("tf_poseidon")

# A window has as few steps as tell more than one. Its end wakes processors up for a millisecond: at first every 0.2 s,
# to tell soon who is slow; once many windows are known, every second, which no step notices.
_LEAST_STEPS, _LEAST_S = 5, 0.2
_SHORT_WINDOWS, _MOST_GROWTH = 10, 5

_SITE, _HOST = "stragglers", "stragglers/host"
SITES = frozenset({_SITE, f"{_HOST}/length", f"{_HOST}/text"})  # what is exchanged here

# By communicator, since names of exchanges are.
_watches: "weakref.WeakKeyDictionary[Communicator, Watch]" = weakref.WeakKeyDictionary()


def of(job: Job) -> "Watch":
    """Returns the watch of a job."""
    watch = _watches.get(job.communicator)
    if watch is None:
        watch = _watches[job.communicator] = Watch(job)
    watch.job = weakref.proxy(job)
    return watch


class Watch:
    """This rank's watch over the speed of all; all ranks call its methods after the same steps.

    Attributes:
        job: A proxy of the job; of several strategies, that of the one whose steps are made.
        history: What was judged, the same on all ranks.
        hosts: The names of the stragglers' hosts, by rank.
        late_seconds: By rank, how much later than the median rank's its parts came, in each step the latest.
    """

    def __init__(self, job: Job) -> None:
        self.job: Job = weakref.proxy(job)
        self.history = judgement.History()
        self.hosts: dict[int, str] = {}
        self.late_seconds = dict.fromkeys(range(job.size), 0.0)
        self._communicator = weakref.proxy(job.communicator)  # by which `of` finds this
        self._steps, self._interval = 0, _LEAST_STEPS
        # What `_measure` has returned at the beginning, None before the first step of a loop; and differences to it.
        self._begun: np.ndarray | None = None
        self._window = np.zeros_like(self._measure())
        self._sent: tuple[Callable[[], np.ndarray], int, int] | None = None  # with the first step, and their number

    def begin(self) -> None:
        """Notes that another loop begins, whose steps may be slower."""
        self.pause()
        self._interval = _LEAST_STEPS

    def after(self, steps: int) -> bool:
        """Notes that steps were made; returns whether a window was judged."""
        is_judged = self._judge()
        self._steps += steps
        if self._begun is None:  # what was done since the last step is no part of one
            self._begun = self._measure()
        elif self._window[0] + self._steps - self._begun[0] >= self._interval:
            self._add()
            if self._communicator.is_recording:  # a timeline knows more, and shows all exchanges
                self._window[:] = 0
            else:
                self._send()
        return is_judged

    def pause(self) -> None:
        """Notes that something else than steps comes next, such as the end of an epoch."""
        self._judge()
        if self._begun is not None:
            self._add()
            self._begun = None

    def forget_windows(self) -> None:
        """Notes that what was measured does not hold any more, since ranks have other rows."""
        self.pause()
        self._window = np.zeros_like(self._window)
        self.history = dataclasses.replace(self.history, windows=(), costs=())

    def values(self) -> list[dict[str, Any]]:
        """Returns the stragglers, as `strategy.stats` does."""
        return [{**dataclasses.asdict(each), "host": self.hosts[each.rank]} for each in self.history.stragglers]

    def _measure(self) -> np.ndarray:
        """Returns the number of steps, and seconds: the time, waits for others, waits for batches, lateness by rank.

        The time is that without other jobs on the same accelerators: all ranks wait alike for these. For its turn, a
        rank waits for the others of its own job before the first gradient, and not behind the last one.
        """
        counts = self._communicator.statistics(has_sites=False)
        turns = self._communicator.turns()
        agreeing, others = turns.get("agreeing_seconds", 0.0), turns.get("waiting_seconds", 0.0)
        late = [counts["late_seconds"].get(rank, 0.0) for rank in range(self._communicator.size)]
        return np.array([self._steps, time.perf_counter() - others, counts["waiting_seconds"], counts["input_seconds"],
                         agreeing, *late])

    def _add(self) -> None:
        now = self._measure()
        self._window += now - self._begun
        self._begun = now

    def _send(self) -> None:
        """Begins to tell all ranks what this one has measured."""
        rank, size = self._communicator.rank, self._communicator.size
        (steps, seconds, waiting, inputs, agreeing, *late), self._window = self._window, np.zeros_like(self._window)
        plan = self.job.graph_pass.plan
        # Of steps that overlap, the wait of the last one alone is measured; the others wait as long.
        times = 1 if plan is None else plan.steps
        # By rank: the third and the fourth power of how late its parts came; how long it has waited; and for its input.
        own = np.zeros((4, size))
        own[:2] = np.power(times * np.array(late), [[3], [4]])
        own[2:, rank] = times * waiting + agreeing, inputs
        common = [seconds / size, time.time() if rank == 0 else 0.0]
        self._sent = (self._communicator.submit(_SITE, np.concatenate([own.ravel(), common])),
                      self._steps - int(steps) + 1, int(steps))

    def _judge(self) -> bool:
        """Judges the window that was sent last, on all ranks by the same numbers; returns whether there is one."""
        if self._sent is None:
            return False
        (wait, first, steps), self._sent = self._sent, None
        *sums, seconds, end = wait().tolist()
        cubes, fourths, waiting, inputs = np.reshape(sums, (4, -1))
        # About the largest of what the ranks say that add up, which is what a step waits for: a sum can find it.
        late = np.divide(fourths, cubes, out=np.zeros_like(cubes), where=cubes > 0)
        for rank, seconds_late in enumerate(late.tolist()):
            self.late_seconds[rank] += seconds_late
        self.history, news = judgement.judge(self.history, judgement.Window(
            first, steps, end, seconds, tuple(waiting.tolist()), tuple(inputs.tolist()), tuple(late.tolist())))
        growth = min(max(1, len(self.history.windows) / _SHORT_WINDOWS), _MOST_GROWTH)
        self._interval = min(2 * self._interval, max(_LEAST_STEPS, math.ceil(growth * _LEAST_S * steps / seconds)))
        for rank in sorted({straggler.rank for straggler in self.history.stragglers} - self.hosts.keys()):
            self.hosts[rank] = self._communicator.broadcast_text(_HOST, socket.gethostname(), rank)
        if self._communicator.rank == 0:
            for straggler in news:
                _log.warning("%s", straggler.sentence(self.hosts[straggler.rank]))
        return True
