"""Compares this project with PyTorch and with Keras on JAX, on emulated hosts: the same network, weights and batches.

    sudo env "PATH=$PATH" python scripts/benchmarks/bench_alternatives.py \
        --pytorch_python torch/bin/python --jax_python jax/bin/python

Each library is in an environment of its own: `pip install torch numpy absl-py` in one, `pip install jax keras absl-py`
in the other. Jobs of scripts/benchmarks/alternatives.py take turns, each rank with one thread; another begins in each
round. In each round the losses of all epochs must agree. Times are medians over the epochs of all rounds; a ratio is
the median of the rounds' ratios.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from absl import app
from absl import flags
import emulated_cluster
import rich.console
import rich.table

_PYTORCH = flags.DEFINE_string("pytorch_python", None, "Python that has torch.", required=True)
_JAX = flags.DEFINE_string("jax_python", None, "Python that has jax and keras.", required=True)
_HOSTS = flags.DEFINE_integer("hosts", 4, "Number of hosts.")
_GBPS = flags.DEFINE_float("gbps", 1, "Rate of their links.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Jobs of each system.", lower_bound=1)
_JSON = flags.DEFINE_string("json", "docs/results/alternatives.json", "File for the results.")

_PROGRAM = pathlib.Path(__file__).with_name("alternatives.py")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu",
               "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "GLOO_SOCKET_IFNAME": "eth0",
               "TF_CPP_MIN_LOG_LEVEL": "3"}
# Rounding differs from library to library, and grows from step to step; a wrong scale of the gradient gives 1e-2.
_BOUND = 1e-3
_VERSIONS = """import importlib.metadata as m
for name in ("tensorflow-cpu", "keras", "torch", "jax"):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: pass"""


def main(_):
    pythons = {"poseidon": sys.executable, "pytorch": _PYTORCH.value, "jax": _JAX.value}
    rounds = []
    for number in range(_ROUNDS.value):
        order = [*pythons, *pythons][number % len(pythons):][:len(pythons)]
        rounds.append({system: run(system, pythons[system]) for system in order})
        check(rounds[-1])
    result = {"hosts": _HOSTS.value, "gbps": _GBPS.value, "systems": {}}
    table = rich.table.Table("system", "ms per step", "quartiles", "to poseidon", "quartiles")
    for system in pythons:
        steps = [1e3 * seconds for found in rounds for seconds in found[system]["step_seconds"]]
        ratios = [statistics.median(found[system]["step_seconds"]) / statistics.median(
            found["poseidon"]["step_seconds"]) for found in rounds]
        versions = subprocess.run([pythons[system], "-c", _VERSIONS], check=True, capture_output=True, text=True)
        result["systems"][system] = {"versions": versions.stdout.splitlines(), "ms": quartiles(steps),
                                     "ratio": quartiles(ratios), "losses": rounds[0][system]["losses"]}
        times, to_poseidon = result["systems"][system]["ms"], result["systems"][system]["ratio"]
        table.add_row(system, f"{times[1]:.0f}", f"{times[0]:.0f}–{times[2]:.0f}", f"{to_poseidon[1]:.2f}",
                      f"{to_poseidon[0]:.2f}–{to_poseidon[2]:.2f}")
    rich.console.Console().print(table)
    pathlib.Path(_JSON.value).write_text(json.dumps(result, indent=1) + "\n")


def run(system, python):
    """Returns what rank 0 of a job has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.json")
        with emulated_cluster.EmulatedCluster(_HOSTS.value, _GBPS.value) as cluster, open(
                os.path.join(folder, "log"), "w+") as log:
            status = cluster.run([python, str(_PROGRAM), "--system", system, "--json", path, "--master",
                                  cluster.addresses[0]], env={**os.environ, **_ONE_THREAD}, stdout=log,
                                 stderr=subprocess.STDOUT)
            log.seek(0)
            if status:
                raise SystemExit(f"The job of {system} ended with status {status}:\n{log.read()}")
        result = json.loads(pathlib.Path(path).read_text())
    print(f"{system}: {1e3 * statistics.median(result['step_seconds']):.0f} ms", file=sys.stderr, flush=True)
    return result


def check(found):
    """Ends the program if systems have not computed the same."""
    expected = found["poseidon"]["losses"]
    for system, result in found.items():
        if not all(abs(loss - other) <= _BOUND * other for loss, other in zip(result["losses"], expected, strict=True)):
            raise SystemExit(f"The losses of {system} are {result['losses']}, expected those of poseidon, {expected}.")


def quartiles(values):
    """Returns the first quartile, the median and the third."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


if __name__ == "__main__":
    app.run(main)
