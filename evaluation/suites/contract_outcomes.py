"""How the checks of tf.distribute's contract have ended under each strategy, and the report about it."""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

import numpy as np

from evaluation.suites import contract_differences

_ROUNDING = 1e-6  # relative: sums of two terms in single precision


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one check, with one or two replicas.

    Attributes:
        name: The check.
        replicas: How many.
        expected: What TensorFlow's strategy gives.
        found: What PoseidonStrategy gives.
        reason: Why they may differ; "" if no reason is known.
    """

    name: str
    replicas: int
    expected: Any
    found: Any
    reason: str

    @property
    def is_same(self) -> bool:
        return same(self.expected, self.found)


def same(expected: Any, found: Any) -> bool:
    """Whether two results are equal: numbers up to rounding, and errors of any kind."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if "error" in expected and "error" in found:
            return True
        return expected.keys() == found.keys() and all(same(expected[key], found[key]) for key in expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(expected) == len(found) and all(map(same, expected, found))
    if isinstance(expected, float) and isinstance(found, float):
        return bool(np.isclose(found, expected, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True))
    return type(expected) is type(found) and expected == found


def merged(ranks: Sequence[Any]) -> Any:
    """Returns the result of a job: values of replicas end to end, everything else as all ranks have it."""
    first = ranks[0]
    if isinstance(first, dict) and all(isinstance(rank, dict) and rank.keys() == first.keys() for rank in ranks):
        if "replicas" in first:
            return {"replicas": [value for rank in ranks for value in rank["replicas"]]}
        return first if "error" in first else {key: merged([rank[key] for rank in ranks]) for key in first}
    if isinstance(first, list) and all(isinstance(rank, list) and len(rank) == len(first) for rank in ranks):
        return [merged(parts) for parts in zip(*ranks)]
    return first if all(rank == first for rank in ranks) else {"ranks differ": list(ranks)}


def compared(expected: Mapping[str, Any], found: Mapping[str, Any], replicas: int) -> list[Row]:
    """Returns a row per check."""
    return [Row(name, replicas, value, found.get(name, {"missing": True}), contract_differences.reason(name, replicas))
            for name, value in expected.items()]


def problems(rows: Sequence[Row], is_complete: bool) -> list[str]:
    """Returns a line per difference without a reason and, if all checks ran, per reason without a difference."""
    lines = [f"{row.name}, {row.replicas} replicas: expected {_short(row.expected)}, found {_short(row.found)}"
             for row in rows if not row.is_same and not row.reason]
    used = {row.reason for row in rows if not row.is_same}
    lines += [f"no check differs because {reason}: delete the line"
              for *_, reason in contract_differences.DIFFERENCES if is_complete and reason not in used]
    return lines


def report(rows: Sequence[Row], versions: str) -> str:
    """Returns the report as Markdown."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.name.partition("/")[0]].append(row)
    counted = []
    for name, group in [*groups.items(), ("**all**", list(rows))]:
        cells = [name]
        for replicas in (1, 2):
            part = [row for row in group if row.replicas == replicas]
            cells += [str(len(part)), str(sum(row.is_same for row in part))]
        counted.append(f"| {' | '.join(cells)} |")
    different = collections.defaultdict(list)
    for row in rows:
        if not row.is_same:
            different[row.reason or "nobody has explained it"].append(row)
    lines = []
    for reason, group in different.items():
        lines += ["", f"### {reason[0].upper()}{reason[1:]}", "",
                  "| check | replicas | tf.distribute | PoseidonStrategy |", "|---|---|---|---|"]
        lines += [f"| `{row.name}` | {row.replicas} | {_short(row.expected)} | {_short(row.found)} |" for row in group]
    return "\n".join([
        "# The contract of tf.distribute", "",
        f"Written by `evaluation.suites.distribute_contract --markdown`, with {versions}.", "",
        "Each check is a small program that runs under TensorFlow's strategies and under PoseidonStrategy: with one",
        "replica, OneDeviceStrategy and one process; with two, MirroredStrategy on two logical CPUs and two ranks.",
        "Results are equal if types and values are, floating-point numbers up to 1e-6. Where one gives an error, so",
        "must the other; its text may differ.", "",
        "| group | checks, 1 replica | equal | checks, 2 replicas | equal |", "|---|---|---|---|---|", *counted, "",
        "## Differences, by their reasons", *lines, ""])


def _short(value: Any) -> str:
    text = json.dumps(value)
    if isinstance(value, dict) and "error" in value:  # the place in a program comes before what has happened
        text = f"error: {value['error'].strip().splitlines()[-1].strip()}"
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= 120 else f"{text[:117]}..."
