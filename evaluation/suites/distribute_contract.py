"""Compares PoseidonStrategy with TensorFlow's own strategies, check by check, and writes what differs, and why.

    python -m evaluation.suites.distribute_contract --markdown docs/results/distribute_contract.md

The checks (`contract_checks.py`) ask what TensorFlow's own tests of tf.distribute ask. They run under OneDeviceStrategy
and PoseidonStrategy in one process; and under MirroredStrategy with two logical CPUs, and PoseidonStrategy on two
ranks. The exit status is 1 if results differ without a reason in `contract_differences.py`.
"""

from collections.abc import Sequence
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

from evaluation import modules
from evaluation.suites import contract_outcomes

_CHECKS = flags.DEFINE_list("checks", ["*"], "Patterns of the names of checks.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the report.")
_TIMEOUT = flags.DEFINE_integer("timeout_s", 1500, "Longest time of a job.")
_RUN = flags.DEFINE_enum("run", None, ["one_device", "mirrored", "poseidon"], "Runs the checks, writes --out.RANK.")
_OUT = flags.DEFINE_string("out", None, "File for the results of --run.")


# ---- jobs --------------------------------------------------------------------------------------------------------


def job(how: str, ranks: int) -> dict[str, Any]:
    """Runs the checks under a strategy, in a process of its own per rank; returns their results.

    Raises:
        RuntimeError: If the job failed as a whole.
    """
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "results"
        launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
        ended = subprocess.run([*launcher, *modules.command("suites.distribute_contract"), "--run", how,
                                "--out", str(out), "--checks", ",".join(_CHECKS.value)], capture_output=True, text=True,
                               timeout=_TIMEOUT.value, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"})
        if ended.returncode:
            raise RuntimeError(f"{how} on {ranks} ranks ended with status {ended.returncode}:\n"
                               f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
        results = [json.loads(pathlib.Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    return {name: contract_outcomes.merged([result[name] for result in results]) for name in results[0]}


def run_here(how: str, out: str, patterns: Sequence[str]) -> None:
    """Runs the checks under a strategy in this process, and writes their results."""
    import tensorflow as tf

    from evaluation.suites import contract_checks  # late: it imports TensorFlow
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
    rows = [*contract_outcomes.compared(job("one_device", 1), job("poseidon", 1), 1),
            *contract_outcomes.compared(job("mirrored", 1), job("poseidon", 2), 2)]
    lines = contract_outcomes.problems(rows, is_complete=_CHECKS.value == ["*"])
    if _MARKDOWN.value:
        versions = " and ".join(f"{name} {importlib.metadata.version(package)}" for name, package in (
            ("TensorFlow", "tensorflow-cpu"), ("Keras", "keras")))
        pathlib.Path(_MARKDOWN.value).write_text(contract_outcomes.report(rows, versions))
    equal = sum(row.is_same for row in rows)
    print("\n".join([f"{len(rows)} comparisons: {equal} equal, {len(rows) - equal} different", *lines]))
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    app.run(main)
