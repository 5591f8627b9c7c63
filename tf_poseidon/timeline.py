"""The timeline of steps: what every rank did when, as a trace to look at and a table to read.

The communicator notes events while somebody records; all that follows is functions of these events. A
rank's step is cut into segments that follow each other without a gap:

    forward    from the end of the step before to its first gradient
    backward   from one gradient to the next
    wait       after the last gradient, until what is under way is there
    rebuild    the same, but meanwhile a gradient was made of factors

Backpropagation has no other marks than the gradients that leave it.
"""

import bisect
import collections
import contextlib
import dataclasses
import functools
import gzip
import json
import pathlib
import socket
import statistics
import typing
import zlib

import numpy as np

from tf_poseidon.errors import PoseidonError

# What it exchanges itself: no part of training.
_CLOCKS, _LENGTHS, _EVENTS = (f"strategy.timeline/{what}" for what in ("clocks", "lengths", "events"))
SITES = frozenset({_CLOCKS, _LENGTHS, _EVENTS})

_CAPACITY = 1 << 18  # events that a rank keeps, of 56 bytes
_TRIES = 30

_SCHEMES = ("ps", "sfb", "sparse")
_ROWS = (*_SCHEMES, "calls", "rebuild")
_KINDS = ("forward", "backward", "wait", "rebuild")


class Event(typing.NamedTuple):
    """Something of one site on one rank, in seconds of rank 0's clock.

    Attributes:
        row: "ps", "sfb" or "sparse" when a gradient was exchanged so, from when it was ready; "calls" for
            other exchanges; "rebuild" when a gradient was made of what others have sent.
        site: Name of the site.
        begin: When it began.
        end: When it was done.
        num_bytes: Of an exchange, this rank's tensor or factors.
        is_blocking: Whether the step did nothing else meanwhile: it was exchanged eagerly.
    """

    row: str
    site: str
    begin: float
    end: float
    num_bytes: int = 0
    is_blocking: bool = False


@dataclasses.dataclass(frozen=True)
class Rank:
    """What one rank has recorded.

    Attributes:
        host: Name of its host.
        begin: When it began to record, in seconds of rank 0's clock.
        events: Its `Event`s, in the order in which they began.
        clock_error: By how many seconds its times may be off those of rank 0.
        dropped: Events that came when there was no room left.
    """

    host: str
    begin: float
    events: tuple[Event, ...]
    clock_error: float = 0.0
    dropped: int = 0

    @functools.cached_property
    def steps(self):
        """The `Step`s. A site that is exchanged again begins the next one."""
        gradients, seen = [], set()
        for event in self.events:
            if event.row in _SCHEMES:
                if event.site in seen or not gradients:
                    gradients.append([])
                    seen.clear()
                seen.add(event.site)
                gradients[-1].append(event)
        begins = [events[0].begin for events in gradients]
        rebuilds = [[] for _ in gradients]
        for event in self.events:
            if event.row == "rebuild" and begins and event.begin >= begins[0]:
                rebuilds[bisect.bisect(begins, event.begin) - 1].append(event)
        steps, now = [], self.begin
        for parts in zip(gradients, rebuilds):
            steps.append(Step(*parts, _segments(now, *parts)))
            now = steps[-1].end
        # What came when there was no room left is missing in the last one.
        return steps[:-1] if self.dropped else steps


class Segment(typing.NamedTuple):
    """A part of a step: "forward", "backward", "wait" or "rebuild", as above, and for which site."""

    kind: str
    site: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one rank.

    Attributes:
        gradients: The `Event`s of exchanging gradients, in the order in which these were ready.
        rebuilds: Those of rebuilding gradients.
        segments: `Segment`s that follow each other, from its beginning to its end.
    """

    gradients: list[Event]
    rebuilds: list[Event]
    segments: list[Segment]

    @property
    def begin(self):
        return self.segments[0].begin

    @property
    def end(self):
        return self.segments[-1].end

    @property
    def last_gradient(self):
        """When backpropagation ended."""
        return self.gradients[-1].begin

    def seconds(self, *kinds):
        """Returns how long all segments of some kinds are."""
        return sum(s.end - s.begin for s in self.segments if s.kind in kinds)

    def hidden(self, event):
        """Returns (begin, end) of an exchange's time while backpropagation went on."""
        return event.begin, event.begin if event.is_blocking else min(event.end, self.last_gradient)


def _segments(now, gradients, rebuilds):
    """Returns the segments of a step that begins `now`."""
    segments = []

    def until(end, kind, site):
        nonlocal now
        if segments and segments[-1][:2] == (kind, site):
            segments[-1] = segments[-1]._replace(end=end)
        elif end > now:
            segments.append(Segment(kind, site, now, end))
        now = max(now, end)

    for i, event in enumerate(gradients):
        until(event.begin, "backward" if i else "forward", event.site if i else "")
        if event.is_blocking:
            until(event.end, "wait", event.site)
    waits = sorted((e for e in gradients if e.end > now), key=lambda e: e.end)
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
        else:  # all is there, and rows are copied for what is rebuilt next
            until(cut, "rebuild", rebuilds[num_begun].site)
    return segments


# ---- clocks -----------------------------------------------------------------------------------


def clock_offset(own, of_rank_0):
    """Returns (time, offset, error): by how much this rank's clock was ahead of rank 0's, and when.

    In an exchange of all with all, nobody is done before everybody has begun. So the offset is at least this
    rank's beginning minus rank 0's end, and at most this rank's end minus rank 0's beginning: of some tries
    the one with the shortest round trip counts (F. Cristian, "Probabilistic clock synchronization", 1989).

    Args:
        own: (begin, end) of some exchanges, in seconds of this rank's clock.
        of_rank_0: The same of rank 0.
    """
    bounds = [(begin - end_0, end - begin_0, (begin + end) / 2)
              for (begin, end), (begin_0, end_0) in zip(own, of_rank_0, strict=True)]
    low, high, time = min(bounds, key=lambda bound: bound[1] - bound[0])
    return time, (low + high) / 2, (high - low) / 2


def aligned(recorded):
    """Returns the `Rank`s with all times on rank 0's clock.

    Args:
        recorded: For each rank what it has sent, see `_record`.
    """
    ranks = []
    for rank, mine in enumerate(recorded):
        (first, offset, error), (last, last_offset, last_error) = (
            clock_offset(mine[key], recorded[0][key]) if rank else (0.0, 0.0, 0.0)
            for key in ("before", "after"))
        drift = (last_offset - offset) / (last - first) if rank else 0.0

        def to_rank_0(time):
            return time - offset - drift * (time - first)

        events = [Event(row, site, to_rank_0(1e-9 * begin), to_rank_0(1e-9 * end), *rest)
                  for row, site, begin, end, *rest in mine["events"]]
        events.sort(key=lambda e: e.begin)
        ranks.append(Rank(mine["host"], to_rank_0(1e-9 * mine["begin"]), tuple(events),
                          max(error, last_error), mine["dropped"]))
    return ranks


# ---- the trace --------------------------------------------------------------------------------


def trace(ranks):
    """Returns the recording of all ranks as the object of a Chrome trace.

    A rank is a process of it, with a thread for computing and one for each kind of exchange; where several
    exchanges are under way at a time, with more of that kind.
    """
    origin = min(rank.begin for rank in ranks)
    events = []

    def note(rank, phase, name, **more):
        events.append({"ph": phase, "pid": rank, "name": name, **more})

    def name_thread(rank, tid, name):
        note(rank, "M", "thread_name", tid=tid, args={"name": name})
        note(rank, "M", "thread_sort_index", tid=tid, args={"sort_index": tid})

    def note_span(rank, tid, name, category, span, **arguments):
        note(rank, "X", name, tid=tid, cat=category, ts=1e6 * (span.begin - origin),
             dur=1e6 * (span.end - span.begin), args=arguments)

    for number, rank in enumerate(ranks):
        note(number, "M", "process_name", args={"name": f"rank {number} on {rank.host}"})
        note(number, "M", "process_sort_index", args={"sort_index": number})
        name_thread(number, 0, "compute")
        steps = rank.steps
        for i, step in enumerate(steps):
            for segment in step.segments:
                note_span(number, 0, f"{segment.kind} {segment.site}".strip(), segment.kind, segment,
                          site=segment.site, step=i)
        ends, tid = [step.end for step in steps], 1
        for row in _ROWS:
            lanes = []  # when each is free
            for event in (e for e in rank.events if e.row == row):
                lane = next((i for i, free in enumerate(lanes) if free <= event.begin), len(lanes))
                if lane == len(lanes):
                    lanes.append(0.0)
                    name_thread(number, tid + lane, row if lane == 0 else f"{row} {lane + 1}")
                lanes[lane] = event.end
                index = bisect.bisect_left(ends, event.end)
                note_span(number, tid + lane, event.site, row, event, site=event.site,
                          step=index if index < len(steps) else None, bytes=event.num_bytes)
            tid += len(lanes)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clocks": "all times are on rank 0's clock; those of another rank may be off by its error",
            **{f"clock error of rank {i}, us": 1e6 * rank.clock_error for i, rank in enumerate(ranks)}}}


# ---- the table --------------------------------------------------------------------------------


def table(ranks, rank, plan=None):
    """Returns where the steps of one rank went, as text.

    Times are means, in milliseconds, over the half of the steps whose duration is in the middle: medians of
    parts would not add up, and lose what is sometimes here and sometimes there.

    Args:
        ranks: The `Rank`s.
        rank: Whose steps.
        plan: The `Plan` that they followed, or None.
    """
    steps = sorted(ranks[rank].steps, key=lambda step: step.end - step.begin)
    if not steps:
        return "No step was recorded: train inside of strategy.timeline."
    num_steps, quarter = len(steps), len(steps) // 4
    steps = steps[quarter:num_steps - quarter]
    error = 2 * max(other.clock_error for other in ranks)
    values, exchanges = _by_site(steps), _exchanges(ranks)
    # The plan may be that of another function.
    decisions = {decision.site: decision for decision in (plan.decisions if plan else ())
                 if decision.site in values and decision.scheme == values[decision.site]["scheme"]}

    def place(site):  # in the order of backpropagation, with what is made of a gradient's factors after it
        leader = decisions[site].rides_on if site in decisions else None
        return values[leader if leader in values else site]["ready"], bool(leader), site

    def mean(value):
        return _ms(statistics.fmean(map(value, steps)))

    rows = [("variable", "scheme", "compute", "hidden", "exposed", "rebuild", "slowest rank", "later by",
             "predicted", "measured"),
            ("forward", "", mean(lambda step: step.seconds("forward")), *[""] * 7)]
    for site in sorted(values, key=place):
        columns, decision = values[site], decisions.get(site)
        slowest, measured = ["", ""], columns.get("rebuild", 0.0)
        if site in exchanges:
            number, seconds = _slowest(exchanges[site])
            slowest = [str(number), _ms(seconds)] if seconds > error else slowest
            measured += statistics.median(_arrivals(exchanges[site], rank))
        rows.append((site, columns["scheme"],
                     *(_ms(columns.get(key)) for key in ("compute", "hidden", "exposed", "rebuild")),
                     *slowest, _ms(decision and decision.seconds), _ms(measured)))
    calls = [e for e in ranks[rank].events if e.row == "calls"]
    if calls:
        rows.append(("other exchanges", "calls", *[""] * 7, mean(
            lambda step: sum(e.end - e.begin for e in calls if step.begin <= e.begin < step.end))))
    compute, exposed, rebuild, total = (
        mean(lambda step, kinds=kinds: step.seconds(*kinds))
        for kinds in (("forward", "backward"), ("wait",), ("rebuild",), _KINDS))
    predicted = plan.step_seconds if decisions and len(decisions) == len(values) else None
    rows.append(("total", "", compute, mean(_covered), exposed,
                 mean(lambda step: sum(e.end - e.begin for e in step.rebuilds)), "", "", _ms(predicted),
                 total))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{text:{'<' if i < 2 else '>'}{widths[i]}}" for i, text in enumerate(row)).rstrip()
             for row in rows]
    lines.append(f"a step of {total} ms: {compute} ms compute; then {exposed} ms waiting for exchanges, and "
                 f"{rebuild} ms rebuilding gradients")
    if ranks[rank].dropped:
        lines.append(f"The recording was full, and {ranks[rank].dropped:,} later events are missing: record "
                     "fewer steps.")
    title = (f"rank {rank} on {ranks[rank].host}, {num_steps} steps, times in ms; clocks of ranks agree "
             f"within {1e3 * error:.2g} ms")
    return "\n".join([title, *lines])


def _by_site(steps):
    """Returns {site: {column: mean over the steps, in seconds; of "scheme" the last one}}."""
    values = collections.defaultdict(dict)

    def add(site, column, seconds):
        values[site][column] = values[site].get(column, 0.0) + seconds / len(steps)

    for step in steps:
        exchanged = {event.site for event in step.gradients}
        for event in step.gradients:
            begin, end = step.hidden(event)
            values[event.site]["scheme"] = event.row
            add(event.site, "ready", event.begin - step.begin)
            add(event.site, "hidden", end - begin)
            for column in ("compute", "exposed"):
                add(event.site, column, 0.0)
        for event in step.rebuilds:
            add(event.site, "rebuild", event.end - event.begin)
            if event.site not in exchanged:
                values[event.site]["scheme"] = "sfb"
                add(event.site, "ready", event.begin - step.begin)
        for segment in step.segments:
            column = {"backward": "compute", "wait": "exposed"}.get(segment.kind)
            if column:
                add(segment.site, column, segment.end - segment.begin)
    return values


def _exchanges(ranks):
    """Returns {site: for each time that it was exchanged, the `Event`s of all ranks}."""
    of_ranks = [collections.defaultdict(list) for _ in ranks]
    for rank, of_rank in zip(ranks, of_ranks):
        for step in rank.steps:
            for event in step.gradients:
                of_rank[event.site].append(event)
    result = {site: list(zip(*(of_rank[site] for of_rank in of_ranks))) for site in list(of_ranks[0])}
    return {site: exchanges for site, exchanges in result.items() if exchanges}


def _slowest(exchanges):
    """Returns (the rank whose gradient is the last, by how many seconds after that of the median rank).

    Of an even number of ranks, the median is the earlier of the two in the middle.
    """
    later = [statistics.median(events[rank].begin - statistics.median_low(e.begin for e in events)
                               for events in exchanges) for rank in range(len(exchanges[0]))]
    return max(enumerate(later), key=lambda pair: pair[1])


def _arrivals(exchanges, rank):
    """Returns the seconds from when all ranks' gradients were ready to when a rank had the sum."""
    return [max(0.0, events[rank].end - max(e.begin for e in events)) for events in exchanges]


def _covered(step):
    """Returns how long something was under way while backpropagation went on."""
    total = reached = 0.0
    for begin, end in sorted(map(step.hidden, step.gradients)):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _ms(seconds):
    """Returns seconds as milliseconds, and nothing of None."""
    return "" if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


# ---- recording --------------------------------------------------------------------------------


class Timeline:
    """What `strategy.timeline` gives: the recorded steps, once it was left.

    `print(timeline)` shows where this rank's steps went.

    Attributes:
        path: The file of the trace, which rank 0 writes.
        ranks: The recorded `Rank`s; empty before the end.
    """

    def __init__(self, path, rank):
        self.path, self.ranks = path, []
        self._rank, self._plan = rank, None

    def table(self, rank=None, plan=None):
        """Returns the table of a rank as text.

        Args:
            rank: Whose; None for this one.
            plan: The `Plan` that its steps have followed; None for `strategy.plan`.
        """
        if not self.ranks:
            return "The timeline is not there yet: leave strategy.timeline first."
        return table(self.ranks, self._rank if rank is None else rank, plan or self._plan)

    def __str__(self):
        return self.table()

    def finish(self, ranks, plan):
        """Takes what was recorded, and writes the trace on rank 0."""
        self.ranks, self._plan = ranks, plan
        if self._rank == 0:
            with (gzip.open if self.path.suffix == ".gz" else open)(self.path, "wt") as file:
                json.dump(trace(ranks), file)


_recording = set()  # communicators that record


@contextlib.contextmanager
def record(communicator, path, plan):
    """Records what all ranks do inside; see `PoseidonStrategy.timeline`.

    Args:
        communicator: This process's `Communicator`.
        path: Where rank 0 writes the trace.
        plan: A function that returns the `Plan` at the end.
    """
    if communicator in _recording:
        raise PoseidonError(f"strategy.timeline('{path}') was entered inside of another one; leave that one "
                            "first.")
    path = pathlib.Path(path)
    if communicator.rank == 0:  # now, not after hours of training
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            raise PoseidonError(f"strategy.timeline cannot write the trace '{path}' ({error.strerror}); give "
                                "it the path of a file that rank 0 may write.") from error
    timeline = Timeline(path, communicator.rank)
    _recording.add(communicator)
    try:
        before = _try_clocks(communicator)
        communicator.record_events(_CAPACITY)
        yield timeline
        communicator.record_events(0)
        mine = communicator.events()
        mine.update(host=socket.gethostname(), before=before, after=_try_clocks(communicator))
        timeline.finish(aligned(_gather(communicator, mine)), plan())
    finally:
        communicator.record_events(0)
        _recording.discard(communicator)


def _try_clocks(communicator):
    """Returns (begin, end) of some exchanges of all with all, in seconds of this rank's clock."""
    communicator.record_events(_TRIES)
    for _ in range(_TRIES):
        communicator.submit_factors(_CLOCKS, [np.zeros((1, 1), np.uint8)])()
    communicator.record_events(0)
    return [(1e-9 * begin, 1e-9 * end) for _, _, begin, end, *_ in communicator.events()["events"]]


def _gather(communicator, value):
    """Returns the values of all ranks, which JSON can express, in rank order."""
    data = zlib.compress(json.dumps(value).encode())
    lengths, = communicator.submit_factors(_LENGTHS, [np.array([[len(data)]])])()
    everything, = communicator.submit_factors(_EVENTS, [np.frombuffer(data, np.uint8).reshape(-1, 1)])()
    ends = np.cumsum(lengths)
    return [json.loads(zlib.decompress(everything[end - length:end].tobytes()))
            for end, length in zip(ends, lengths[:, 0])]
