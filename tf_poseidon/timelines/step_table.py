"""Where the time of a rank's steps went: as values, and as a table.

Tests: tests/training/test_timeline.py.
"""

import bisect
import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import statistics
from typing import Any

from tf_poseidon import planning
from tf_poseidon.base import tables
from tf_poseidon.reports.texts import duration
from tf_poseidon.timelines import recorded_steps as steps_lib

_NOTICEABLE = 0.01  # of a step


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of a site, or of the whole step, in seconds; None where there is none.

    Attributes:
        site: Name of the site; "" for the whole step.
        kind: The row of its exchange, see `recorded_steps.Event`; "" for the whole step.
        compute: Backpropagation until its tensor was ready.
        hidden: The part of its exchange that computing hid.
        hidden_next: The part that computing of the next step hid.
        exposed: The part for which the step waited.
        rebuild: Rebuilding it.
        slowest: The rank whose tensor came last; None if that is no more than clocks may be off.
        later: How much later that came than on the median rank.
        predicted: What the plan expects of the exchange by itself; of the whole step.
        measured: From when all ranks were ready to when this rank had the result; of the whole step, all of it.
    """

    site: str
    kind: str
    compute: float | None
    hidden: float | None
    hidden_next: float | None
    exposed: float | None
    rebuild: float | None
    slowest: int | None
    later: float | None
    predicted: float | None
    measured: float


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """Where the time of a rank's steps went: means over the middle half of the steps by duration.

    Medians of parts would not add up to the whole, and would hide delays that move from part to part. Steps that
    overlap count together.

    Attributes:
        rows: A `Row` per site, in the order of backpropagation.
        total: The `Row` of the whole step. Here, hidden exchanges that overlap count once.
        parts: {kind of a segment: its seconds in a step}.
        waits_for_data: Whether it was recorded how long steps wait for their batches.
        latest_data: The rank that waits longest for its batches; None if others wait about as long.
        data_longer: How much longer that waits in a step than the median rank.
        calls: Seconds of other exchanges in a step, None if there were none.
        turns: Seconds in which a step waits for its turn on the accelerator, None if other jobs do not share it.
        copies: {row of copies: (its seconds in a step, its bytes)}; empty where tensors are in the host's memory.
        is_overlapping: Whether steps overlap.
    """

    rows: list[Row]
    total: Row
    parts: dict[str, float]
    waits_for_data: bool
    latest_data: int | None
    data_longer: float
    calls: float | None
    turns: float | None
    copies: dict[str, tuple[float, float]]
    is_overlapping: bool


def clocks_agree_within(ranks: Sequence[steps_lib.Rank]) -> float:
    """Returns by how many seconds the clocks of two ranks may differ."""
    return 2 * max(rank.clock_error for rank in ranks)


def parts(rank: steps_lib.Rank) -> dict[str, float]:
    """Returns {kind of a segment: its seconds in a step of a rank}, a mean as in `StepSummary`."""
    steps = _middle_half(rank.steps)
    return {kind: statistics.fmean(step.seconds(kind) for step in steps) for kind in steps_lib.KINDS}


def summary(ranks: Sequence[steps_lib.Rank], rank: int, plan: planning.Plan | None = None) -> StepSummary:
    """Returns the `StepSummary` of a rank, which has recorded steps; the arguments are those of `table`."""
    steps = _middle_half(ranks[rank].steps)
    values, exchanges = _by_site(steps, plan), _exchanges(ranks)
    # The plan may be that of another function.
    decisions = {decision.site: decision for decision in (plan.decisions if plan else ())
                 if decision.site in values and decision.by.row == values[decision.site]["row"]}
    costs = {site: decision.cost for site, decision in decisions.items()}
    if plan is not None:
        costs |= {exchange.site: cost for exchange in plan.exchanges
                  if exchange.site in values and exchange.kind == values[exchange.site]["row"]
                  and (cost := exchange.cost(plan.cluster)) is not None}

    # In the order of backpropagation, with riders after their leaders.
    def place(site: str) -> tuple[float, bool, str]:
        leader = decisions[site].leader if site in decisions else None
        return values[leader if leader in values else site]["ready"], bool(leader), site

    def mean(value: Callable[[steps_lib.RecordedStep], float]) -> float:
        return statistics.fmean(map(value, steps))

    rows = []
    for site in sorted(values, key=place):
        columns, cost = values[site], costs.get(site)
        slowest, later, measured = None, None, columns.get("rebuild", 0.0)
        if site in exchanges:
            number, seconds = _slowest(exchanges[site])
            if seconds > clocks_agree_within(ranks):
                slowest, later = number, seconds
            measured += statistics.median(_arrivals(exchanges[site], rank))
        rows.append(Row(site, columns["row"], columns.get("compute"), columns.get("hidden"), columns.get("hidden next"),
                        columns.get("exposed"), columns.get("rebuild"), slowest, later,
                        None if cost is None else cost.seconds, measured))
    calls, turns = ([e for e in ranks[rank].events if e.row == row] for row in ("calls", steps_lib.TURN))

    def of_a_step(events: Sequence[steps_lib.Event], value: Callable[[steps_lib.Event], float]) -> float:
        begins = [event.begin for event in events]  # in their order; of copies there are very many
        return mean(lambda step: sum(map(value, events[bisect.bisect_left(begins, step.begin):
                                                       bisect.bisect_left(begins, step.end)])))

    copied = {row: copies for row in steps_lib.COPIES if (copies := [e for e in ranks[rank].events if e.row == row])}
    total = Row(
        "", "", mean(lambda step: step.seconds("forward", "backward")), mean(_covered), mean(_covered_next),
        mean(lambda step: step.seconds("wait")), mean(lambda step: sum(e.end - e.begin for e in step.rebuilds)),
        None, None, plan.step_seconds if plan and costs and len(costs) == len(values) else None,
        mean(lambda step: step.seconds(*steps_lib.KINDS)))
    number, seconds = longest([parts(each)[steps_lib.WAIT_FOR_DATA] if each.steps else 0.0 for each in ranks])
    return StepSummary(rows, total, parts(ranks[rank]), any(e.row == "data" for e in ranks[rank].events),
                       number if seconds > _NOTICEABLE * total.measured else None, seconds,
                       of_a_step(calls, _seconds) if calls else None, of_a_step(turns, _seconds) if turns else None,
                       {row: (of_a_step(copies, _seconds), of_a_step(copies, lambda e: e.num_bytes))
                        for row, copies in copied.items()},
                       any(step.follower is not None for step in steps))


def longest(of_ranks: Sequence[float]) -> tuple[int, float]:
    """Returns (the rank that takes longest for something, by how many seconds more than the median rank).

    For an even number of ranks, the median is the shorter of the two in the middle.
    """
    rank, seconds = max(enumerate(of_ranks), key=lambda pair: pair[1])
    return rank, seconds - statistics.median_low(of_ranks)


def _seconds(event: steps_lib.Event) -> float:
    return event.end - event.begin


def table(ranks: Sequence[steps_lib.Rank], rank: int, plan: planning.Plan | None = None) -> str:
    """Returns where the time of one rank's steps went, as text: its `StepSummary`, in milliseconds.

    Args:
        ranks: The `Rank`s.
        rank: The rank whose steps are shown.
        plan: The `Plan` that they followed, or None.
    """
    num_steps = len(ranks[rank].steps)
    if not num_steps:
        return "No step was recorded: train inside strategy.timeline."
    step_summary = summary(ranks, rank, plan)

    def cells(row: Row) -> list[str]:
        hidden_next = [_ms(row.hidden_next)] if step_summary.is_overlapping else []
        return [_ms(row.compute), _ms(row.hidden), *hidden_next, _ms(row.exposed), _ms(row.rebuild),
                "" if row.slowest is None else str(row.slowest), *map(_ms, (row.later, row.predicted, row.measured))]

    names = ("compute", "hidden", *(("hidden next",) if step_summary.is_overlapping else ()), "exposed", "rebuild")
    empty = [""] * (len(names) - 1)
    rows = [("variable", "scheme", *names, "slowest rank", "later by", "predicted", "measured"),
            ("forward", "", _ms(step_summary.parts["forward"]), *empty, *[""] * 4),
            *((row.site, row.kind, *cells(row)) for row in step_summary.rows)]
    if step_summary.calls is not None:
        rows.append(("other exchanges", "calls", "", *empty, *[""] * 3, _ms(step_summary.calls)))
    if step_summary.turns is not None:
        rows.append(("turns of other jobs", steps_lib.TURN, "", *empty, *[""] * 3, _ms(step_summary.turns)))
    rows.append(("total", "", *cells(step_summary.total)))
    lines = tables.aligned(rows, left=(0, 1))
    total = step_summary.total
    data = step_summary.parts[steps_lib.WAIT_FOR_DATA]
    waiting = f"{duration(data)} waiting for data; " if step_summary.waits_for_data else ""
    lines.append(f"a step of {duration(total.measured)}: {waiting}{duration(total.compute)} compute; then "
                 f"{duration(total.exposed)} waiting for exchanges, and {duration(step_summary.parts['rebuild'])} "
                 "rebuilding gradients")
    if step_summary.latest_data is not None:
        lines.append(f"rank {step_summary.latest_data} waits longest for data, {duration(step_summary.data_longer)} of "
                     "a step longer than the median rank")
    for row, what in zip(steps_lib.COPIES, ("from its GPU", "to its GPU", "and sums between GPUs")):
        seconds, num_bytes = step_summary.copies.get(row, (0.0, 0.0))
        if seconds:
            lines.append(f"copies {what}: {duration(seconds)} of a step, {1e-9 * num_bytes / seconds:.1f} GB/s")
    if ranks[rank].dropped:
        lines.append(f"The recording was full, and {ranks[rank].dropped:,} later events are missing: record "
                     "fewer steps.")
    title = (f"rank {rank} on {ranks[rank].host}, {num_steps} steps, times in ms; clocks of ranks agree "
             f"within {duration(clocks_agree_within(ranks))}")
    if plan is not None and any(row.predicted is not None for row in step_summary.rows):
        title += f"; predicted for {plan.cluster.bandwidth_gbps:g} Gbit/s and {plan.cluster.latency_us:g} µs"
    return "\n".join([title, *lines])


def _by_site(steps: Sequence[steps_lib.RecordedStep], plan: planning.Plan | None) -> dict[str, dict[str, Any]]:
    """Returns {site: {column: mean over the steps, in seconds; for "row" the last one}}."""
    rows_of_riders = {decision.site: decision.by.row for decision in (plan.decisions if plan else ())
                      if decision.leader}
    values: collections.defaultdict[str, dict[str, Any]] = collections.defaultdict(dict)

    def add(site: str, column: str, seconds: float) -> None:
        values[site][column] = values[site].get(column, 0.0) + seconds / len(steps)

    for step in steps:
        exchanged = {event.site for event in step.exchanges}
        for event in step.exchanges:
            begin, end = step.hidden(event)
            values[event.site]["row"] = event.row
            add(event.site, "ready", event.begin - step.begin)
            add(event.site, "hidden", end - begin)
            add(event.site, "hidden next", sum(end - begin for begin, end in step.hidden_next(event)))
            for column in ("compute", "exposed"):
                add(event.site, column, 0.0)
        for event in step.rebuilds:
            add(event.site, "rebuild", event.end - event.begin)
            if event.site not in exchanged:
                # Rebuilt from another site's factors.
                values[event.site]["row"] = rows_of_riders.get(event.site, planning.SFB)
                add(event.site, "ready", event.begin - step.begin)
        for segment in step.segments:
            if segment.kind in ("backward", "wait"):
                add(segment.site, "compute" if segment.kind == "backward" else "exposed", segment.end - segment.begin)
    return values


def _exchanges(ranks: Sequence[steps_lib.Rank]) -> dict[str, list[tuple[steps_lib.Event, ...]]]:
    """Returns {site: the `Event`s of all ranks, per exchange}."""
    of_ranks: list[collections.defaultdict[str, list[steps_lib.Event]]] = [
        collections.defaultdict(list) for _ in ranks]
    for rank, of_rank in zip(ranks, of_ranks):
        for step in rank.steps:
            for event in step.exchanges:
                of_rank[event.site].append(event)
    result = {site: list(zip(*(of_rank[site] for of_rank in of_ranks))) for site in list(of_ranks[0])}
    return {site: exchanges for site, exchanges in result.items() if exchanges}


def _slowest(exchanges: Sequence[Sequence[steps_lib.Event]]) -> tuple[int, float]:
    """Returns (the rank whose tensor comes last, by how many seconds after that of the median rank).

    For an even number of ranks, the median is the earlier of the two in the middle.
    """
    later = [statistics.median(events[rank].begin - statistics.median_low(e.begin for e in events)
                               for events in exchanges) for rank in range(len(exchanges[0]))]
    return max(enumerate(later), key=lambda pair: pair[1])


def _arrivals(exchanges: Sequence[Sequence[steps_lib.Event]], rank: int) -> list[float]:
    """Returns, per exchange, the seconds from when all ranks' gradients were ready to when a rank had the sum."""
    return [max(0.0, events[rank].end - max(e.begin for e in events)) for events in exchanges]


def _middle_half(steps: Sequence[steps_lib.RecordedStep]) -> list[steps_lib.RecordedStep]:
    """Returns the steps of the middle half of the runs of a graph, by the mean time of their steps."""
    runs: list[list[steps_lib.RecordedStep]] = []
    is_followed = False
    for step in steps:
        if is_followed:
            runs[-1].append(step)
        else:
            runs.append([step])
        is_followed = step.follower is not None
    runs.sort(key=lambda run: (run[-1].end - run[0].begin) / len(run))
    quarter = len(runs) // 4
    return [step for run in runs[quarter:len(runs) - quarter] for step in run]


def _covered(step: steps_lib.RecordedStep) -> float:
    """Returns how long anything was in flight while the step continued to compute."""
    return _length(map(step.hidden, step.exchanges))


def _covered_next(step: steps_lib.RecordedStep) -> float:
    """Returns how long anything was in flight while the next step already computed."""
    return _length(part for event in step.exchanges for part in step.hidden_next(event))


def _length(parts: Iterable[tuple[float, float]]) -> float:
    """Returns the length of some (begin, end), of which parts that overlap count once."""
    total = reached = 0.0
    for begin, end in sorted(parts):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _ms(seconds: float | None) -> str:
    """Returns seconds as text in milliseconds, "" for None."""
    return "" if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
