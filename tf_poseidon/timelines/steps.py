"""The recording of a rank, cut into steps, from which the trace and the table are made.

The communicator notes events while a recording runs. A rank's step is cut into segments that follow each
other without a gap:

    forward    from the end of the previous step to the first exchange
    backward   from one exchange to the next
    wait       after the last one, until all exchanges in flight have completed; and while rows wait for one
    rebuild    the same, while a gradient is rebuilt from factors

Computing is only visible by its exchanges: gradients, and whatever else a step partitioned by rows exchanges.
"""

import bisect
from collections.abc import Sequence
import dataclasses
import functools
import typing

from tf_poseidon import planning
from tf_poseidon.planning import exchange

# The rows of a step's exchanges; and all rows.
EXCHANGES = (*dict.fromkeys(scheme.row for scheme in planning.SCHEMES.values()), *exchange.PURPOSES)
ROWS = (*EXCHANGES, "calls", "rebuild")
KINDS = ("forward", "backward", "wait", "rebuild")


class Event(typing.NamedTuple):
    """An event of one site on one rank, in seconds of rank 0's clock.

    Attributes:
        row: "ps", "sfb" or "sparse" for a gradient's exchange by that scheme, "gather" or "broadcast" for another
            exchange of a step, from when its tensor was ready; "calls" for other exchanges; "rebuild" for rebuilding
            a gradient from the factors of other ranks.
        site: Name of the site.
        begin: When it began.
        end: When it ended.
        num_bytes: For an exchange: bytes of this rank's tensor or factors.
        is_blocking: Whether the step did nothing else meanwhile: it was exchanged eagerly, or rows wait for it.
    """

    row: str
    site: str
    begin: float
    end: float
    num_bytes: int = 0
    is_blocking: bool = False


@dataclasses.dataclass(frozen=True)
class Rank:
    """The recording of one rank.

    Attributes:
        host: Name of its host.
        begin: When it began to record, in seconds of rank 0's clock.
        events: Its `Event`s, in the order in which they began.
        clock_error: Largest error of its times on rank 0's clock, in seconds.
        dropped: Number of events beyond the capacity.
    """

    host: str
    begin: float
    events: tuple[Event, ...]
    clock_error: float = 0.0
    dropped: int = 0

    @functools.cached_property
    def steps(self) -> "list[Step]":
        """The `Step`s. A site that is exchanged again begins the next step."""
        exchanges, seen = [], set()
        for event in self.events:
            if event.row in EXCHANGES:
                if event.site in seen or not exchanges:
                    exchanges.append([])
                    seen.clear()
                seen.add(event.site)
                exchanges[-1].append(event)
        begins = [events[0].begin for events in exchanges]
        rebuilds = [[] for _ in exchanges]
        for event in self.events:
            if event.row == "rebuild" and begins and event.begin >= begins[0]:
                rebuilds[bisect.bisect(begins, event.begin) - 1].append(event)
        steps, now = [], self.begin
        for parts in zip(exchanges, rebuilds):
            steps.append(Step(*parts, _segments(now, *parts)))
            now = steps[-1].end
        # The last step lacks the events beyond the capacity.
        return steps[:-1] if self.dropped else steps


class Segment(typing.NamedTuple):
    """A part of a step: its kind, "forward", "backward", "wait" or "rebuild" as above, and its site."""

    kind: str
    site: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        exchanges: The `Event`s of its exchanges, in the order in which their tensors were ready.
        rebuilds: The `Event`s of rebuilding gradients.
        segments: Consecutive `Segment`s, from its beginning to its end.
    """

    exchanges: list[Event]
    rebuilds: list[Event]
    segments: list[Segment]

    @property
    def begin(self) -> float:
        return self.segments[0].begin

    @property
    def end(self) -> float:
        return self.segments[-1].end

    @property
    def last_ready(self) -> float:
        """When the last exchange began, the last known time of computing."""
        return self.exchanges[-1].begin

    def seconds(self, *kinds: str) -> float:
        """Returns the total seconds of the segments of given kinds."""
        return sum(s.end - s.begin for s in self.segments if s.kind in kinds)

    def hidden(self, event: Event) -> tuple[float, float]:
        """Returns (begin, end) of the part of an exchange during which the step continued to compute."""
        return event.begin, event.begin if event.is_blocking else min(event.end, self.last_ready)


def _segments(now: float, exchanges: Sequence[Event], rebuilds: Sequence[Event]) -> list[Segment]:
    """Returns the segments of a step that begins `now`."""
    segments = []

    def until(end: float, kind: str, site: str) -> None:
        nonlocal now
        if segments and segments[-1][:2] == (kind, site):
            segments[-1] = segments[-1]._replace(end=end)
        elif end > now:
            segments.append(Segment(kind, site, now, end))
        now = max(now, end)

    for i, event in enumerate(exchanges):
        until(event.begin, "backward" if i else "forward", event.site if i else "")
        if event.is_blocking:
            until(event.end, "wait", event.site)
    waits = sorted((e for e in exchanges if e.end > now), key=lambda e: e.end)
    cuts = sorted({e.end for e in waits} | {t for e in rebuilds for t in e[2:4] if t > now})
    num_begun, running = 0, None
    for cut in cuts:  # nothing begins or ends between two of them
        while num_begun < len(rebuilds) and rebuilds[num_begun].begin <= now:
            if running is None or rebuilds[num_begun].end > running.end:
                running = rebuilds[num_begun]
            num_begun += 1
        while waits and waits[0].end <= now:
            waits.pop(0)
        if running is not None and running.end > now:
            until(cut, "rebuild", running.site)
        elif waits:
            until(cut, "wait", waits[0].site)
        else:  # all exchanges have completed, and rows are copied for the next gradient to rebuild
            until(cut, "rebuild", rebuilds[num_begun].site)
    return segments
