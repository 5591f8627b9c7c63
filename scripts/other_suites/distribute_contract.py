"""Compares PoseidonStrategy with TensorFlow's own strategies, check by check, and writes what differs, and why.

    python scripts/other_suites/distribute_contract.py --markdown docs/results/distribute_contract.md

The checks (`contract_checks.py`) ask what TensorFlow's own tests of tf.distribute ask. They run under OneDeviceStrategy
and PoseidonStrategy in one process; and under MirroredStrategy with two logical CPUs, and PoseidonStrategy on two
ranks. The exit status is 1 if results differ without a reason in `contract_differences.py`.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import fnmatch
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

from absl import app
from absl import flags
import contract_differences
import numpy as np

_CHECKS = flags.DEFINE_list("checks", ["*"], "Patterns of the names of checks.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the report.")
_TIMEOUT = flags.DEFINE_integer("timeout_s", 1500, "Longest time of a job.")
_RUN = flags.DEFINE_enum("run", None, ["one_device", "mirrored", "poseidon"], "Runs the checks, writes --out.RANK.")
_OUT = flags.DEFINE_string("out", None, "File for the results of --run.")

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
        f"Written by `scripts/other_suites/distribute_contract.py --markdown`, with {versions}.", "",
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


# ---- jobs --------------------------------------------------------------------------------------------------------


def job(how: str, ranks: int) -> dict[str, Any]:
    """Runs the checks under a strategy, in a process of its own per rank; returns their results.

    Raises:
        RuntimeError: If the job failed as a whole.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "results"
        launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
        ended = subprocess.run([*launcher, sys.executable, __file__, "--run", how, "--out", str(out),
                                "--checks", ",".join(_CHECKS.value)], capture_output=True, text=True,
                               timeout=_TIMEOUT.value, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})
        if ended.returncode:
            raise RuntimeError(f"{how} on {ranks} ranks ended with status {ended.returncode}:\n"
                               f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
        results = [json.loads(pathlib.Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    return {name: merged([result[name] for result in results]) for name in results[0]}


def run_here(how: str, out: str, patterns: Sequence[str]) -> None:
    """Runs the checks under a strategy in this process, and writes their results."""
    import contract_checks  # late: it imports TensorFlow
    import tensorflow as tf
    rank = 0
    if how == "mirrored":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    elif how == "one_device":
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    else:
        import tf_poseidon as poseidon
        strategy = poseidon.PoseidonStrategy(policy="ps", timeout_s=60)
        rank = strategy.rank
    results = {}
    for name, function in contract_checks.CHECKS.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            continue
        print(f"rank {rank}: {name}", flush=True)  # the last line says where a job has ended
        with tempfile.TemporaryDirectory() as directory:
            os.environ["CONTRACT_DIRECTORY"] = directory
            try:
                results[name] = contract_checks.plain(function(strategy))
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"}
    pathlib.Path(f"{out}.{rank}").write_text(json.dumps(results))


def main(_: Sequence[str]) -> None:
    if _RUN.value:
        run_here(_RUN.value, _OUT.value, _CHECKS.value)
        return
    rows = [*compared(job("one_device", 1), job("poseidon", 1), 1),
            *compared(job("mirrored", 1), job("poseidon", 2), 2)]
    lines = problems(rows, is_complete=_CHECKS.value == ["*"])
    if _MARKDOWN.value:
        versions = " and ".join(f"{name} {importlib.metadata.version(package)}" for name, package in (
            ("TensorFlow", "tensorflow-cpu"), ("Keras", "keras")))
        pathlib.Path(_MARKDOWN.value).write_text(report(rows, versions))
    equal = sum(row.is_same for row in rows)
    print("\n".join([f"{len(rows)} comparisons: {equal} equal, {len(rows) - equal} different", *lines]))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    app.run(main)
