"""A plan in about fifteen lines: what it is expected to gain, what it exchanges, and what would gain more.

Tests: tests/unit/test_advice.py, tests/training/test_explaining.py.
"""

from collections.abc import Iterable
import dataclasses
import textwrap
from typing import Any

from tf_poseidon import planning
from tf_poseidon.base import tables
from tf_poseidon.explanations import prospects
from tf_poseidon.explanations.prospects import Prospect
from tf_poseidon.reports import texts
from tf_poseidon.reports.texts import duration

_WIDTH = 100  # columns
_MOST_NAMED, _ENOUGH = 10, 0.9  # exchanges; the share of the time of all after which no more are named
_LONGEST_NAME = 48
_LEAST_GAIN = 0.03  # of what is said to help


@dataclasses.dataclass(frozen=True)
class Advice:
    """What to know about a plan first.

    `print(advice)` shows it.

    Attributes:
        plan: The `Plan`.
        policies: A `Prospect` of each policy, and of rings; fewer if the plan can have no other.
        changes: `Prospect`s of what could be changed, whatever they gain.
        accelerated: If the rate of arithmetic is assumed, `Prospect`s of some accelerators, by their names.
    """

    plan: planning.Plan
    policies: tuple[Prospect, ...]
    changes: tuple[Prospect, ...]
    accelerated: tuple[Prospect, ...] = ()

    @property
    def helpful(self) -> list[Prospect]:
        """Those changes that gain enough to be named, those that gain most first."""
        return sorted(prospects.worthwhile(self.changes, _LEAST_GAIN), key=lambda change: -(change.gain or 0))

    def predictions(self) -> dict[str, Any]:
        """Returns the plan's predictions, and this, as values for JSON."""
        return {**self.plan.predictions(), "policies": list(map(dataclasses.asdict, self.policies)),
                "changes": list(map(dataclasses.asdict, self.changes)),
                "accelerated": list(map(dataclasses.asdict, self.accelerated))}

    def __str__(self) -> str:
        if self.plan.refusal:
            return str(self.plan)
        return "\n".join([*self._verdict(), *self._policies(), *self._exchanges(), *self._changes(), *self._notes()])

    def _verdict(self) -> list[str]:
        plan = self.plan
        step, alone, least = plan.step_seconds, plan.compute_seconds, plan.least_seconds
        if step is None or alone is None or least is None:
            return _wrapped(f"{plan.cluster}: the arithmetic of this step is unknown, and so is its time")
        workers = plan.cluster.workers
        of = f" of {plan.steps} that overlap" if plan.steps > 1 else ""
        lines = [*_wrapped(f"{plan.cluster}:"), *_wrapped(
            f"{_ratio(workers * alone / step)} times as fast as one process is expected, "
            f"{_ratio(workers * alone / least)} at most by any choice of schemes;"), *_wrapped(
                f"{duration(step)} for a step{of}, {duration(alone)} without other ranks")]
        if plan.is_slower_than_one_process:
            lines += _wrapped(f"That is SLOWER than one process, which would take {duration(workers * alone)} for the "
                              f"rows of all {workers} ranks.")
        return lines

    def _policies(self) -> list[str]:
        rows = [("policy", "step", "speed-up", "bytes", "")]
        notes = {prospects.ALL_REDUCE: "rings over dense gradients, as others have",
                 "auto": "all weights whole; --policy auto may divide some", self.plan.policy: self._this_plan()}
        for each in self.policies:
            note = notes.get(each.name, "")
            rows.append((each.name, *_figures(each), texts.size(each.num_bytes), note))
        return ["", *tables.aligned(rows, left=(0, 4))]

    def _this_plan(self) -> str:
        divided = len(self.plan.divided)
        return "this plan" + (f"; each rank holds columns of {divided} weights" if divided else "")

    def _exchanges(self) -> list[str]:
        """Returns a table of what takes longest, and how much else there is."""
        plan = self.plan
        costs = [(decision.site, decision.scheme, decision.cost) for decision in plan.decisions if not decision.leader]
        costs += [(exchange.site, exchange.kind, exchange.cost(plan.cluster)) for exchange in plan.exchanges]
        known = sorted(((name, scheme, cost) for name, scheme, cost in costs if cost is not None and cost.seconds),
                       key=lambda row: -row[2].seconds)
        total, named, rows = sum(cost.seconds for *_, cost in known), 0.0, [
            ("exchange", "scheme", "bytes", "time", "of all")]
        for name, scheme, cost in known[:_MOST_NAMED]:
            if named >= _ENOUGH * total:
                break
            rows.append((_short(name), scheme, texts.size(cost.num_bytes), duration(cost.seconds),
                         _percent(cost.seconds / total)))
            named += cost.seconds
        if left := known[len(rows) - 1:]:
            rows.append((f"{len(left)} others", "", texts.size(sum(cost.num_bytes for *_, cost in left)),
                         duration(total - named), _percent(1 - named / total)))
        lines = ["", *tables.aligned(rows, left=(0, 1))] if known else []
        if unknown := sum(cost is None for *_, cost in costs):
            lines += _wrapped(f"Nothing is known about the bytes of {unknown} more.")
        return lines

    def _changes(self) -> list[str]:
        if not self.changes:
            return []
        helpful = self.helpful
        if not helpful:
            return ["", *_wrapped(f"None of these would gain more than {_LEAST_GAIN:.0%}: "
                                  f"{', '.join(change.name for change in self.changes)}.".replace("%", " %"))]
        rows = [("what would help", "step", "speed-up", "rows/s"),
                *((change.name, *_figures(change), f"{_ratio(change.gain or 0)} x") for change in helpful)]
        return ["", *tables.aligned(rows, left=(0,))]

    def _notes(self) -> Iterable[str]:
        if whole := len(self.plan.whole):
            yield from _wrapped(f"Computed by every rank for the rows of all ranks: {whole} ops, for lack of a rule.")
        if self.accelerated:
            others = ", ".join(f"{_ratio(each.speed_up or 0)} times with --accelerator {each.name}"
                               for each in self.accelerated)
            yield ""
            yield from _wrapped(f"This hangs on how fast a rank computes, for which {self.plan.cluster.gflops:g} "
                                f"GFLOP/s are assumed: it is {others}.")
        for sentence in filter(None, (self.plan.cluster.routes, self.plan.overlap)):
            yield from _wrapped(sentence)


def of(plan: planning.Plan, whole: planning.Plan, planner: planning.Planner, batch_size: int,
       may_overlap: bool = False, has_choice: bool = True, is_assumed: bool = False) -> Advice:
    """Returns what to know about a plan.

    Args:
        plan: The plan.
        whole: The plan in which only those weights are divided that are pinned; the same if no other is.
        planner: What has made the plan.
        batch_size: Rows on each worker.
        may_overlap: Whether steps would overlap in one execution.
        has_choice: Whether other policies are possible, which they are not for stale weights.
        is_assumed: Whether the rate of arithmetic is a guess.
    """
    accelerated = tuple(prospects.accelerated(plan, whole, planner)) if is_assumed and plan.operations else ()
    if has_choice:
        return Advice(plan, tuple(prospects.policies(plan, whole, planner)),
                      tuple(prospects.changes(plan, whole, planner, batch_size, may_overlap)), accelerated)
    return Advice(plan, (prospects.prospect(plan.policy, plan, plan),), (), accelerated)


def _figures(each: Prospect) -> tuple[str, str]:
    return duration(each.step_seconds), "unknown" if each.speed_up is None else _ratio(each.speed_up)


def _ratio(value: float) -> str:
    return texts.times(value)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def _short(name: str) -> str:
    """Returns a name without its middle, if it is long."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}…{name[1 - half:]}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
