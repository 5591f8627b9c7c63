"""Compares PoseidonStrategy with TensorFlow's own strategies, check by check, and writes what differs, and why.

    python -m evaluation.suites.distribute_contract --markdown docs/results/distribute_contract.md

The checks (`contract_checks.py`) ask what TensorFlow's own tests of tf.distribute ask. They run under OneDeviceStrategy
and PoseidonStrategy in one process; and under MirroredStrategy with two logical CPUs, and PoseidonStrategy on two
ranks. `--names` has patterns of checks. The exit status is 1 if results differ without a reason in `DIFFERENCES`.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
from typing import Any

from absl import app
import numpy as np

from evaluation.runner import command
from evaluation.runner import jobs
from evaluation.runner.outcomes import Difference
from evaluation.runner.outcomes import Outcome
from evaluation.runner.outcomes import Outcomes
from evaluation.suites import contract_checks

_ROUNDING = 1e-6  # relative: sums of two terms in single precision
_RUNS = {"OneDeviceStrategy": "", "MirroredStrategy": "", "1 rank": "OneDeviceStrategy", "2 ranks": "MirroredStrategy"}

_REFUSED = "what a rank cannot compute as one process does is refused by name"
_ONCE = "the initial value and what is assigned outside of steps count once, as in one process, not once per replica"
_OWN = "without an aggregation each process keeps and reads what its own replica has assigned"
_MORE = "PoseidonStrategy takes what MirroredStrategy refuses"
_PROCESSES = "each replica has a process of its own: it reads its part of the input, and rank 0 alone writes files"
_MERGED = "a merged call runs in each process, which has one replica; MirroredStrategy runs it once"
_PARTS = "each part of a structure is gathered; MirroredStrategy returns the first replica's"
_RULES = "gradients are summed before they are clipped, and moving statistics are averaged (docs/semantics.md)"

# The first that matches a check explains it.
DIFFERENCES = tuple(Difference(checks, reason, ("2 ranks",)) for checks, reason in (
    ("context/merge_call*", _MERGED),
    ("reduce/reduce_other_types*", _REFUSED),
    ("variables/scattered_in_a_step*", _REFUSED),
    ("datasets/sharding_policy*", _REFUSED),
    ("reduce/reduce_a_python_number*", "a Python number is reduced as a tensor that all replicas have"),
    ("gather/gather[[]*", _MORE),  # "[[]" is "[" in patterns
    ("gather/all_gather*", _MORE),
    ("gather/gather_structure*", _PARTS),
    ("variables/assigned_outside[[]ON_READ-NONE*", _MORE),
    ("variables/used_under_another_strategy", _MORE),
    ("training/optimizers[[]ema*", _MORE),
    ("variables/*ON_READ-SUM*", _ONCE),
    ("variables/ways_to_read[[]ON_READ*", _ONCE),
    ("checkpoints/*SUM*", _ONCE),
    ("variables/read_after_a_step[[]*NONE*", _OWN),
    ("datasets/input_context*", _PROCESSES),
    ("interfaces/files*", _PROCESSES),
    ("training/optimizers*clipnorm*", _RULES),
    ("training/batch_normalisation*", _RULES),
))

_ABOUT = """\
Each check is a small program that runs under TensorFlow's strategies and under PoseidonStrategy: on one rank as under
OneDeviceStrategy; on two ranks as under MirroredStrategy on two logical CPUs. A check passes on ranks if types and
values are those of TensorFlow's strategy, floating-point numbers up to 1e-6. Where one gives an error, so must the
other; its text may differ."""


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


def judged(outcome: Outcome, expected: Outcome) -> Outcome:
    """Returns the outcome of a check, which fails if it has passed with another value than is expected."""
    if "failed" in (outcome.outcome, expected.outcome):
        return outcome
    want, have = merged(expected.values), merged(outcome.values)
    return outcome if same(want, have) else dataclasses.replace(
        outcome, outcome="failed", error=f"expected {_short(want)}, found {_short(have)}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    if isinstance(value, dict) and "error" in value:  # the place in a program comes before what has happened
        text = f"error: {value['error'].strip().splitlines()[-1].strip()}"
    return text if len(text) <= 110 else f"{text[:107]}..."


def _run(suite: str, run: str, before: Mapping[str, Outcomes]) -> Outcomes:
    reference = _RUNS[run]
    job = jobs.Job("suites.contract_rank", 2 if run == "2 ranks" else 1, "PoseidonStrategy" if reference else run,
                   **command.limits())
    found = jobs.run(job, command.wanted(contract_checks.CHECKS))
    return {name: judged(outcome, before[reference].get(name, outcome)) if reference else outcome
            for name, outcome in found.items()}


COMMAND = command.Command(
    "The contract of tf.distribute", "evaluation.suites.distribute_contract", _ABOUT, _RUNS, DIFFERENCES,
    row=lambda suite, check: check.partition("/")[0])


def main(_: Sequence[str]) -> int:
    return COMMAND.main(["checks"], _run)


if __name__ == "__main__":
    app.run(main)
