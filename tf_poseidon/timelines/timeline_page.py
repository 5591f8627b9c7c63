"""What is on the page of a timeline: a step of all ranks, and where the time of their steps went, as figures.

Tests: tests/unit/test_reports.py.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import statistics
from typing import Any

from tf_poseidon import planning
from tf_poseidon.reports import figures
from tf_poseidon.reports import page
from tf_poseidon.reports.figures import Figure
from tf_poseidon.reports.texts import duration
from tf_poseidon.timelines import recorded_steps as steps_lib
from tf_poseidon.timelines import step_table as table_lib

_MOST_RANKS = 8  # in the figure of a step, and with tables
_MOST_STEPS = 3  # of a run whose steps overlap
_MOST_ROWS = 40  # of a figure; of what takes less time than these, it shows the mean


def html_report(ranks: Sequence[steps_lib.Rank], rank: int, plan: planning.Plan | None = None) -> str:
    """Returns the page of a timeline.

    Args:
        ranks: The `Rank`s.
        rank: The rank whose variables are shown.
        plan: The `Plan` that they followed, or None.
    """
    return page.page("Timeline of tf_poseidon", [page.element("h1", "Where the time of a step went"),
                                                 *_parts(ranks, rank, plan)])


def _parts(ranks: Sequence[steps_lib.Rank], rank: int, plan: planning.Plan | None) -> list[str | Figure]:
    if not all(recorded_rank.steps for recorded_rank in ranks):
        return [page.element("p", "No step was recorded: train inside strategy.timeline.", "warning")]
    step_summary, parts = table_lib.summary(ranks, rank, plan), list(map(table_lib.parts, ranks))
    slowest, _ = table_lib.longest(list(map(_compute, parts)))
    latest = rank if step_summary.latest_data is None else step_summary.latest_data
    shown = sorted(list(dict.fromkeys([rank, slowest, latest, *range(len(ranks))]))[:_MOST_RANKS])
    return [*_verdict(ranks, rank, step_summary), *_ranks(ranks, parts, step_summary), *_step(ranks, rank, shown),
            *_variables(rank, step_summary), *_predictions(rank, step_summary, plan), page.element("h2", "Tables"),
            *(page.details(f"rank {number} on {ranks[number].host}", table_lib.table(ranks, number, plan))
              for number in shown)]


def _verdict(ranks: Sequence[steps_lib.Rank], rank: int, step_summary: table_lib.StepSummary) -> list[str | Figure]:
    total, data = step_summary.total, step_summary.parts[steps_lib.WAIT_FOR_DATA]

    def share(seconds: float | None) -> str:
        return f"{100 * seconds / total.measured if seconds else 0.0:.2g}\N{NO-BREAK SPACE}% of the step"

    values = [(duration(total.measured), "a step"), (duration(total.compute), "computing"),
              (duration(total.exposed), f"waiting for exchanges, {share(total.exposed)}"),
              (duration(step_summary.parts["rebuild"]), "rebuilding gradients")]
    if step_summary.waits_for_data:
        values.insert(1, (duration(data), f"waiting for data, {share(data)}"))
    if total.predicted is not None:
        values.append((duration(total.predicted), "expected by the plan"))
    waiting = f"{duration(data)} of waiting for data, " if step_summary.waits_for_data else ""
    parts: list[str | Figure] = [
        page.element("p", f"A step of rank {rank} takes {duration(total.measured)}: {waiting}{duration(total.compute)} "
                     f"for computing, {duration(total.exposed)} of waiting for exchanges, and "
                     f"{duration(step_summary.parts['rebuild'])} of rebuilding gradients.", "verdict"),
        page.element("p", f"{len(ranks[rank].steps):,} recorded steps; times are means over the middle half of them by "
                     "duration. Clocks of ranks agree within "
                     f"{duration(table_lib.clocks_agree_within(ranks))}.", "note"),
        page.tiles(values)]
    for number, recorded_rank in enumerate(ranks):
        if recorded_rank.dropped:
            parts.append(page.element("p", f"The recording of rank {number} was full, and {recorded_rank.dropped:,} "
                                      "later events are missing: record fewer steps.", "warning"))
    return parts


def _ranks(ranks: Sequence[steps_lib.Rank], parts: Sequence[dict[str, float]],
           step_summary: table_lib.StepSummary) -> list[str | Figure]:
    """Returns the figure of what ranks spend their time on."""
    names = [f"rank {number} on {rank.host}" for number, rank in enumerate(ranks)]
    bars = [figures.Bar(number, kind, seconds, [names[number], f"{kind}: {duration(seconds)}"])
            for number, of_rank in enumerate(parts) for kind, seconds in of_rank.items() if seconds]
    caption = "Forward is everything from the end of a step to the first exchange of the next one, but waits for data."
    if len(ranks) > 1:
        slowest, longer = table_lib.longest(list(map(_compute, parts)))
        caption += (f" Rank {slowest} on {ranks[slowest].host} computes longest: {duration(_compute(parts[slowest]))}, "
                    f"{duration(longer)} more than the median rank.")
    if (latest := step_summary.latest_data) is not None:
        data = parts[latest][steps_lib.WAIT_FOR_DATA]
        caption += (f" Rank {latest} on {ranks[latest].host} waits longest for data: {duration(data)}, "
                    f"{duration(step_summary.data_longer)} more than the median rank.")
    return [page.element("h2", "Ranks"), page.element("p", caption, "note"),
            figures.bars(names, bars, "time of a step", is_stacked=True)]


def _compute(parts: dict[str, float]) -> float:
    return parts["forward"] + parts["backward"]


def _step(ranks: Sequence[steps_lib.Rank], rank: int, shown: Sequence[int]) -> list[str | Figure]:
    """Returns the figure of a step of median length, and of those that it overlaps."""
    of_all = min(len(recorded_rank.steps) for recorded_rank in ranks)
    steps = ranks[rank].steps[:of_all]
    first = last = sorted(range(of_all), key=lambda i: steps[i].end - steps[i].begin)[(of_all - 1) // 2]
    while first and steps[first - 1].follower is not None:
        first -= 1
    while last + 1 < of_all and steps[last].follower is not None and last + 1 - first < _MOST_STEPS:
        last += 1
    origin = min(ranks[number].steps[first].begin for number in shown)
    lanes: dict[Hashable, str] = {}
    spans: list[figures.Span] = []
    for number in shown:
        if lanes:
            lanes[number, ""] = ""
        lanes[number, "compute"] = f"rank {number}: compute"
        rank_spans = list(_spans(number, ranks[number], ranks[number].steps[first:last + 1], origin))
        for row in steps_lib.ROWS:
            if any(span.lane == (number, row) for span in rank_spans):
                lanes[number, row] = row
        spans += rank_spans
    which = f"Step {first + 1}" if first == last else f"Steps {first + 1} to {last + 1}, which overlap,"
    caption = (f"{which} of {of_all:,}. Exchanges begin when a rank's tensor is ready. Drag across the figure to look "
               "closer; a double click shows all of it.")
    if len(shown) < len(ranks):
        caption += f" {len(shown)} of {len(ranks)} ranks are shown."
    title = "A step of median length" if first == last else "Steps of median length"
    return [page.element("h2", title), page.element("p", caption, "note"),
            figures.spans(lanes, spans, "time since the step began")]


def _spans(number: int, rank: steps_lib.Rank, steps: Iterable[steps_lib.RecordedStep],
           origin: float) -> Iterator[figures.Span]:
    """Yields what a rank does in some steps, in seconds after the origin."""
    def span(lane: str, kind: str, what: str, begin: float, end: float, *more: str) -> figures.Span:
        begin, end = begin - origin, end - origin
        return figures.Span((number, lane), kind, begin, end, (
            f"rank {number}: {what}", f"{duration(end - begin)}, from {duration(begin)} to {duration(end)}", *more))

    for step in steps:
        for part in step.segments:
            yield span("compute", part.kind, f"{part.kind} {part.site}".strip(), part.begin, part.end)
        others = [event for event in rank.events
                  if event.row in ("data", steps_lib.TURN, "calls", *steps_lib.COPIES)
                  and step.begin <= event.begin < step.end]
        for event in (*step.exchanges, *step.rebuilds, *others):
            yield span(event.row, event.row, f"{event.row} {event.site}".strip(), event.begin, event.end,
                       *([f"{event.num_bytes:,} bytes of this rank"] if event.num_bytes else []))


def _variables(rank: int, step_summary: table_lib.StepSummary) -> list[str | Figure]:
    """Returns the figure of what hid an exchange, and what did not."""
    kinds = ("hidden", *(("hidden next",) if step_summary.is_overlapping else ()), "exposed", "rebuild")

    def seconds(row: table_lib.Row, kind: str) -> float:
        return getattr(row, kind.replace(" ", "_")) or 0.0

    groups = _by_size(step_summary.rows, lambda row: (seconds(row, "exposed") + seconds(row, "rebuild"),
                                                      seconds(row, "hidden")))
    bars = []
    for number, (name, rows) in enumerate(groups.items()):
        for kind in kinds:
            if mean := statistics.fmean(seconds(row, kind) for row in rows):
                bars.append(figures.Bar(number, kind, mean, [name, f"{kind}: {duration(mean)}"]))
    caption = (f"Of rank {rank}, in the order of backpropagation. Hidden: the exchange was in flight while the rank "
               "continued to compute. Exposed: the step waited for it, from the end of the exchange before.")
    if step_summary.is_overlapping:
        caption += " Hidden next: it was in flight while the next step already computed."
    if len(step_summary.rows) > _MOST_ROWS:
        caption += f" The {_MOST_ROWS} that cost most time have names."
    return [page.element("h2", "Exchanges"), page.element("p", caption, "note"),
            figures.bars(list(groups), bars, "time in a step", is_stacked=True)]


def _predictions(rank: int, step_summary: table_lib.StepSummary, plan: planning.Plan | None) -> list[str | Figure]:
    """Returns the figure of what the plan expected beside what was measured."""
    groups = _by_size([row for row in step_summary.rows if row.predicted],
                      lambda row: max(row.predicted or 0.0, row.measured or 0.0))
    if not groups or plan is None:
        return []
    bars = []
    for number, (name, rows) in enumerate(groups.items()):
        for kind in ("predicted", "measured"):
            mean = statistics.fmean(getattr(row, kind) for row in rows)
            bars.append(figures.Bar(number, kind, mean, [name, f"{kind}: {duration(mean)}"], duration(mean),
                                    kind == "measured"))
    caption = (f"Predicted: what the plan expects of each exchange by itself, for {plan.cluster.bandwidth_gbps:g} "
               f"Gbit/s and {plan.cluster.latency_us:g} µs. Measured: from when all ranks were ready until rank {rank} "
               "had the result, which may have been behind other exchanges.")
    return [page.element("h2", "Predicted and measured"), page.element("p", caption, "note"),
            figures.bars(list(groups), bars, "time of an exchange")]


def _by_size(rows: Sequence[table_lib.Row], size: Callable[[table_lib.Row], Any]) -> dict[str, list[table_lib.Row]]:
    """Returns {name of a figure's row: what it shows the mean of}: the largest by themselves, and then all others.

    A sum of the others would mean little, since many are in flight at the same time.
    """
    largest = sorted(rows, key=size, reverse=True)
    kept = {row.site for row in largest[:_MOST_ROWS]}
    groups = {row.site: [row] for row in rows if row.site in kept}
    if others := largest[_MOST_ROWS:]:
        groups[f"{len(others)} others, mean"] = others
    return groups
