"""The recording of a rank, cut into steps, from which the trace and the table are made.

The communicator notes events while a recording runs. A rank's step is cut into segments that follow each
other without a gap:

    forward        from the end of the previous step to the first exchange
    wait for data  meanwhile, until the batch is there
    backward       from one exchange to the next
    wait           after the last one, until all exchanges in flight have completed; and while rows wait for one
    rebuild        the same, while a gradient is rebuilt from factors

A step that the next one of its graph follows ends with its last exchange, and the next one waits for its gradients.
Computing is only visible by its exchanges: gradients, and whatever else a step partitioned by rows exchanges. The plan
says how much of the arithmetic between two of them precedes the need of a gradient, and computing is taken to be as
fast as when the gradients came allows.

Tests: tests/training/test_timeline.py.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import typing

from tf_poseidon import planning
from tf_poseidon.planning import exchange

# The rows of a step's exchanges, those of a GPU's copies and sums, and all rows.
EXCHANGES = (*dict.fromkeys(scheme.row for scheme in planning.SCHEMES.values()), *exchange.KINDS)
COPIES = ("down", "up", "across")
TURN = "turn"
ROWS = ("data", TURN, *EXCHANGES, "calls", *COPIES, "rebuild")
WAIT_FOR_DATA = "wait for data"
KINDS = (WAIT_FOR_DATA, "forward", "backward", "wait", "rebuild")


class Event(typing.NamedTuple):
    """An event of one site on one rank, in seconds of rank 0's clock.

    Attributes:
        row: "ps", "sfb", "hfb" or "sparse" for a gradient's exchange by that scheme, "gather", "broadcast", "scatter",
            "shards" or "return" for another exchange of a step, from when its tensor was ready; "calls" for other
            exchanges; "down" or "up" for the copy of a piece from a GPU's memory or to it, "across" for copies and sums
            between GPUs; "rebuild" for rebuilding a gradient from the factors of other ranks; "data" for a wait for a
            batch, "turn" for one for the accelerator, which other jobs share.
        site: Name of the site; "" of data.
        begin: When it began.
        end: When it ended.
        num_bytes: Bytes of this rank's tensor or factors, or of the piece.
        is_blocking: Whether the step did nothing else meanwhile: it was exchanged eagerly, or rows wait for it.
        step: Number of its step in a graph of several.
    """

    row: str
    site: str
    begin: float
    end: float
    num_bytes: int = 0
    is_blocking: bool = False
    step: int = 0


class SitePlace(typing.NamedTuple):
    """Where a site is in the arithmetic of a step.

    Attributes:
        ready: Operations of its step before its tensor is ready.
        needed: Operations of the next step before this needs the sum; None if it does not.
    """

    ready: float
    needed: float | None = None


def places_of(plan: planning.Plan | None) -> dict[str, SitePlace]:
    """Returns the `SitePlace` of each site of a plan."""
    if plan is None:
        return {}
    return {site.name: SitePlace(site.operations, None if site.is_waited_for else site.needed)
            for site in plan.sites} | {exchange.site: SitePlace(exchange.operations) for exchange in plan.exchanges}


class Segment(typing.NamedTuple):
    """A part of a step: its kind, one of `KINDS`, and its site."""

    kind: str
    site: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Rank:
    """The recording of one rank.

    Attributes:
        host: Name of its host.
        begin: When it began to record, in seconds of rank 0's clock.
        events: Its `Event`s, in the order in which they began.
        clock_error: Largest error of its times on rank 0's clock, in seconds.
        dropped: Number of events beyond the capacity.
        places: The `SitePlace` of each site, as far as known.
    """

    host: str
    begin: float
    events: tuple[Event, ...]
    clock_error: float = 0.0
    dropped: int = 0
    places: Mapping[str, SitePlace] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def steps(self) -> "list[RecordedStep]":
        """The `RecordedStep`s. A site that is exchanged again begins the next run of the graph."""
        runs = _runs(self.events)
        if self.dropped:  # the last one lacks the events beyond the capacity
            del runs[-1:]
        steps: list[RecordedStep] = []
        now = self.begin
        for run in runs:
            events_before: _Events | None = None
            parts = []
            for number, events in enumerate(run):
                segments = _segments(now, events, events_before, number + 1 < len(run), self.places)
                now, events_before = segments[-1].end, events
                parts.append((events, segments))
            follower: RecordedStep | None = None
            of_run: list[RecordedStep] = []
            for events, segments in reversed(parts):
                follower = RecordedStep(events.exchanges, events.rebuilds, segments, follower)
                of_run.append(follower)
            steps += reversed(of_run)
        return steps


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """One step of one rank.

    Attributes:
        exchanges: The `Event`s of its exchanges, in the order in which their tensors were ready.
        rebuilds: The `Event`s of rebuilding gradients.
        segments: Consecutive `Segment`s, from its beginning to its end.
        follower: The next step of its graph, which overlaps its exchanges; None if there is none.
    """

    exchanges: list[Event]
    rebuilds: list[Event]
    segments: list[Segment]
    follower: "RecordedStep | None" = None

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

    def hidden_next(self, event: Event) -> list[tuple[float, float]]:
        """Returns (begin, end) of the parts of an exchange during which the next step already computed."""
        if self.follower is None or event.is_blocking:
            return []
        begin = max(event.begin, self.last_ready)
        return [(max(begin, segment.begin), min(event.end, segment.end)) for segment in self.follower.segments
                if segment.kind in ("forward", "backward") and segment.begin < event.end and segment.end > begin]


@dataclasses.dataclass
class _Events:
    """The events of one step; of data, those before its first exchange."""

    data: list[Event] = dataclasses.field(default_factory=list)
    exchanges: list[Event] = dataclasses.field(default_factory=list)
    rebuilds: list[Event] = dataclasses.field(default_factory=list)

    def arrivals(self) -> dict[str, float]:
        """Returns when each gradient was there, rebuilding included."""
        ends = {event.site: event.end for event in self.exchanges if not event.is_blocking}
        for event in self.rebuilds:
            ends[event.site] = max(event.end, ends.get(event.site, 0.0))
        return ends


def _runs(events: Sequence[Event]) -> list[list[_Events]]:
    """Returns the events of each run of a graph, by its steps."""
    runs: list[dict[int, _Events]] = []
    seen: set[tuple[str, int]] = set()
    latest: dict[int, _Events] = {}  # by number of a step
    data: list[Event] = []  # since the last exchange
    for event in events:
        if event.row in EXCHANGES:
            if not runs or (event.site, event.step) in seen:
                runs.append({event.step: _Events(data)})
                seen.clear()
            data = []
            seen.add((event.site, event.step))
            latest[event.step] = runs[-1].setdefault(event.step, _Events())
            latest[event.step].exchanges.append(event)
        elif event.row == "data":
            data.append(event)
        elif event.row == "rebuild" and event.step in latest:
            latest[event.step].rebuilds.append(event)
    return [[run[number] for number in sorted(run)] for run in runs]


def _segments(now: float, events: _Events, events_before: _Events | None, is_followed: bool,
              places: Mapping[str, SitePlace]) -> list[Segment]:
    """Returns the segments of a step that begins `now`.

    Args:
        now: When it begins.
        events: Its events.
        events_before: The events of the step before, if that is of the same run of the graph.
        is_followed: Whether the next step is of the same run; then this one does not wait for its gradients.
        places: The `SitePlace` of each site.
    """
    segments: list[Segment] = []

    def until(end: float, kind: str, site: str) -> None:
        nonlocal now
        if end <= now:
            return
        if segments and segments[-1][:2] == (kind, site):
            segments[-1] = segments[-1]._replace(end=end)
        else:
            segments.append(Segment(kind, site, now, end))
        now = end

    for event in events.data:
        until(min(event.begin, events.exchanges[0].begin), "forward", "")
        until(min(event.end, events.exchanges[0].begin), WAIT_FOR_DATA, "")
    reached = 0.0  # operations until now
    for i, event in enumerate(events.exchanges):
        kind, site = ("backward", event.site) if i else ("forward", "")
        place = places.get(event.site)
        if events_before is not None and place is not None:
            for need in _needs(now, event.begin, events_before, reached, place.ready, places):
                until(need.begin, kind, site)
                until(need.rebuild, "wait", need.site)
                until(need.end, "rebuild", need.site)
            reached = max(reached, place.ready)
        until(event.begin, kind, site)
        if event.is_blocking:
            until(event.end, "wait", event.site)
    if not is_followed:
        for segment in _left(now, events):
            until(segment.end, segment.kind, segment.site)
    return segments or [Segment("forward", "", now, now)]


class _Need(typing.NamedTuple):
    """A wait of computing for a gradient of the step before, from `begin` to `end`, rebuilding from `rebuild` on."""

    site: str
    begin: float
    rebuild: float
    end: float


def _needs(begin: float, end: float, events_before: _Events, reached: float, ready: float,
           places: Mapping[str, SitePlace]) -> Iterator[_Need]:
    """Yields when computing waits for gradients of the step before.

    Args:
        begin, end: A span of computing, which waits and computes until it has reached some operations.
        events_before: The events of the step before.
        reached, ready: Operations of the step at its begin and end.
        places: The `SitePlace` of each site.
    """
    late = []  # (operations before it is needed, when it was there, site)
    for site, arrival in events_before.arrivals().items():
        needed = places[site].needed if site in places else None
        if needed is not None and reached <= needed < ready and begin < arrival <= end:
            late.append((needed, arrival, site))
    # All that comes after a gradient was there is at least computing; so this is how long the span computes.
    computing = min([end - begin, *((end - arrival) * (ready - reached) / (ready - needed)
                                    for needed, arrival, _ in late)])
    rebuilds = {event.site: event.begin for event in events_before.rebuilds}
    now, done = begin, reached
    for needed, arrival, site in sorted(late):
        now += computing * (needed - done) / (ready - reached)
        done = needed
        if arrival > now:
            yield _Need(site, now, min(max(now, rebuilds.get(site, arrival)), arrival), arrival)
            now = arrival


def _left(now: float, events: _Events) -> Iterator[Segment]:
    """Yields the segments in which a step waits for all that is left of its exchanges."""
    rebuilds = events.rebuilds
    waits = sorted((e for e in events.exchanges if e.end > now), key=lambda e: e.end)
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
            yield Segment("rebuild", running.site, now, cut)
        elif waits:
            yield Segment("wait", waits[0].site, now, cut)
        else:  # all exchanges have completed, and rows are copied for the next gradient to rebuild
            yield Segment("rebuild", rebuilds[num_begun].site, now, cut)
        now = max(now, cut)
