"""What is on the page of a plan: the values of `Plan.predictions`, and the step that it expects, as figures.

Tests: tests/unit/test_reports.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import math
import typing

from tf_poseidon.planning.partition_facts import COLUMNS
from tf_poseidon.planning.plan import Plan
from tf_poseidon.planning.step_time import BusySpan
from tf_poseidon.reports import figures
from tf_poseidon.reports import page
from tf_poseidon.reports.figures import Figure
from tf_poseidon.reports.texts import duration
from tf_poseidon.reports.texts import size
from tf_poseidon.reports.texts import times

_MOST_ROWS = 40  # of a figure; what takes less time than these is added up
_MOST_SPANS = 4000  # which a browser draws in a second

_Variable = Mapping[str, typing.Any]  # as in `Plan.predictions`


def html_report(plans: Mapping[str, Plan]) -> str:
    """Returns the page of plans.

    Args:
        plans: {name of a step: its plan}; the name matters only where there are several.
    """
    parts: list[str | Figure] = [page.element("h1", "How gradients are expected to travel")]
    for name, plan in plans.items():
        if len(plans) > 1:
            parts.append(page.element("h1", f"Step '{name}'"))
        parts += _parts(plan)
    return page.page("Plan of tf_poseidon", parts)


def _parts(plan: Plan) -> list[str | Figure]:
    if plan.refusal:
        return [page.element("p", str(plan), "warning")]
    predictions = plan.predictions()
    rows = _in_order(plan, predictions)
    return [*_verdict(plan, predictions), *_step(plan.spans(), rows, plan.steps), *_times(rows),
            page.element("h2", "Everything that is exchanged"), page.element(
                "p", "In the order in which it is ready. Bytes are those that a node sends plus receives; times are "
                "those of an exchange by itself. A click on a column's name sorts by it.", "note"),
            page.table(("name", "shape", "scheme", "bytes", "time", "runner-up", "its time", "reason"),
                       [_cells(row) for row in rows]), *_whole(plan)]


def _verdict(plan: Plan, predictions: Mapping[str, typing.Any]) -> list[str | Figure]:
    """Returns what matters most: the expected time, in a sentence and as numbers."""
    step, alone, least = (predictions[key] for key in ("step_seconds", "compute_seconds", "least_seconds"))
    paragraphs: list[str | Figure] = []
    values = [(size(plan.total_bytes), "sent plus received by a node in a step")]
    if step is None:
        paragraphs.append(page.element("p", "The arithmetic of this step is unknown, and so is its time.", "verdict"))
    else:
        workers = plan.cluster.workers
        of = f" of {plan.steps} that overlap" if plan.steps > 1 else ""
        ratio = times(workers * alone / step)
        paragraphs.append(page.element("p", f"A step{of} is expected to take {duration(step)}: training is {ratio} "
                                       "times as fast as in one process.", "verdict"))
        if predictions["is_slower_than_one_process"]:
            paragraphs.append(page.element(
                "p", "This plan is expected to be SLOWER than one process, which would take "
                f"{duration(workers * alone)} for the rows of all {workers} ranks; use larger batches, fewer ranks, or "
                "a faster network.", "warning"))
        values = [(duration(step), "expected for a step"),
                  (f"{ratio} \N{MULTIPLICATION SIGN}", "the speed of one process"),
                  (duration(alone), "without other ranks"),
                  (duration(least), f"at least, by any schemes; the plan takes {times(step / least)} times as long"),
                  *values]
    note = " ".join(filter(None, (f"Policy '{plan.policy}' for {plan.cluster}.", plan.cluster.routes, plan.overlap)))
    return [*paragraphs, page.element("p", note, "note"), page.tiles(values)]


def _in_order(plan: Plan, predictions: Mapping[str, typing.Any]) -> list[_Variable]:
    """Returns the variables and other exchanges in the order in which they are ready; divided weights come last."""
    places = {tensor.name: (tensor.operations, tensor.depth or 0) for tensor in plan.sites}
    places |= {weight.path: (math.inf, 0) for weight in plan.divided}
    places |= {tensor.site: (tensor.operations, tensor.depth or 0) for tensor in plan.exchanges}
    others = [{**fields, "rides_on": None, "runner_up": None, "runner_up_cost": None, "reason": exchange.reason}
              for fields, exchange in zip(predictions["exchanges"], plan.exchanges, strict=True)]
    # What rides on a site comes after it.
    return sorted([*predictions["variables"], *others],
                  key=lambda row: (*places[row["rides_on"] or row["name"]], row["rides_on"] is not None))


def _step(spans: Iterable[BusySpan], rows: Iterable[_Variable], steps: int) -> list[str | Figure]:
    """Returns the figure of how a step goes."""
    in_order = sorted(spans, key=lambda span: span.begin)
    if not in_order:
        return []
    schemes = {row["name"]: row["scheme"] for row in rows}
    what = {"compute": "computes until '{}' is ready", "wait": "waits for '{}'", "rebuild": "rebuilds '{}'",
            "transfer": "sends and receives '{}'"}
    shown = [figures.Span(
        "link" if span.kind == "transfer" else "rank",
        schemes[span.site] if span.kind == "transfer" else span.kind, span.begin, span.end,
        (what[span.kind].format(span.site) if span.site else "computes the rest",
         f"{duration(span.end - span.begin)}, from {duration(span.begin)} to {duration(span.end)}"))
        for span in in_order[:_MOST_SPANS]]
    caption = ("One rank, and the link of its node. A message is there a latency after its transfer; the rank "
               "rebuilds gradients from what has arrived. Drag across the figure to look closer; a double click shows "
               "all of it.")
    if len(in_order) > _MOST_SPANS:
        caption += f" It ends with the first {_MOST_SPANS:,} of {len(in_order):,} spans."
    title = "How a step is expected to go" if steps == 1 else f"How {steps} steps that overlap are expected to go"
    return [page.element("h2", title), page.element("p", caption, "note"),
            figures.spans({"rank": "rank", "link": "link"}, shown, "time since the beginning")]


def _times(rows: Iterable[_Variable]) -> list[str | Figure]:
    """Returns the figure of the time of each exchange, by its scheme and by the runner-up."""
    costly = [row for row in rows if row["cost"] is not None and not row["rides_on"] and row["scheme"] != COLUMNS]
    if not any(row["cost"]["seconds"] for row in costly):
        return []
    longest = sorted(costly, key=lambda row: -max(_seconds(row, "cost"), _seconds(row, "runner_up_cost")))
    kept = {row["name"] for row in longest[:_MOST_ROWS]}
    names: list[str] = []
    bars = []
    for row in costly:
        if row["name"] not in kept:
            continue
        number, cost = len(names), row["cost"]
        names.append(row["name"])
        lines = [row["name"], f"{row['scheme']}: {duration(cost['seconds'])}, {cost['bytes']:,.0f} bytes",
                 row["reason"]]
        bars.append(figures.Bar(number, row["scheme"], cost["seconds"], lines, size(cost["bytes"])))
        if (other := row["runner_up_cost"]) is not None:
            bars.append(figures.Bar(
                number, row["runner_up"], other["seconds"],
                [row["name"],
                 f"{row['runner_up']} would take {duration(other['seconds'])}, {other['bytes']:,.0f} bytes"],
                size(other["bytes"]), is_second=True))
    caption = "In the order of backpropagation, each by itself. Labels are bytes that a node sends plus receives."
    rest: dict[str, list[_Variable]] = {}
    for row in longest[_MOST_ROWS:]:
        rest.setdefault(row["scheme"], []).append(row)
    for scheme, some in rest.items():
        seconds, num_bytes = (sum(row["cost"][key] for row in some) for key in ("seconds", "bytes"))
        text = f"{len(some)} others by {scheme}"
        bars.append(figures.Bar(len(names), scheme, seconds, [f"{text}: {duration(seconds)}, {num_bytes:,.0f} bytes"],
                                size(num_bytes)))
        names.append(text)
    if rest:
        caption += f" The {_MOST_ROWS} that take longest by either scheme have names; the others are added up."
    return [page.element("h2", "Time of each exchange"), page.element("p", caption, "note"),
            figures.bars(names, bars, "time", "not chosen")]


def _cells(row: _Variable) -> list[page.Cell]:
    cost, other = row["cost"], row["runner_up_cost"]
    shape = "?" if row["shape"] is None else "x".join(map(str, row["shape"]))
    unknown: list[page.Cell] = ["unknown", "unknown"]
    return [row["name"], shape, row["scheme"],
            *(unknown if cost is None else [(f"{cost['bytes']:,.0f}", cost["bytes"]), _time(cost)]),
            row["runner_up"] or "", "" if other is None else _time(other), row["reason"]]


def _time(cost: Mapping[str, float]) -> tuple[str, float]:
    return duration(cost["seconds"]), cost["seconds"]


def _seconds(row: _Variable, key: str) -> float:
    return 0.0 if row[key] is None else row[key]["seconds"]


def _whole(plan: Plan) -> list[str | Figure]:
    """Returns the list of the ops that every rank computes for the rows of all ranks."""
    if not plan.whole:
        return []
    return [page.element("h2", "Computed by every rank for the rows of all ranks"),
            page.element("p", "These ops have no partitioning rule.", "note"), page.bullets(map(str, plan.whole))]
