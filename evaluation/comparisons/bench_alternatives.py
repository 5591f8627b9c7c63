"""Compares this project with Horovod, PyTorch and Keras on JAX on emulated hosts, by jobs of alternatives.py.

    sudo env "PATH=$PATH" python -m evaluation.comparisons.bench_alternatives \
        --pytorch_python torch/bin/python --jax_python jax/bin/python

Libraries other than Horovod are in environments of their own: `pip install torch torchvision numpy absl-py` in one,
`pip install jax keras absl-py` in the other. Jobs take turns, each rank with one thread; another begins in each round.
Each job verifies its first update. A job's time is the median over its epochs, a ratio that of two jobs of one round;
the table has medians and ranges over rounds. Keras on JAX, whose jobs take minutes, runs in the first round only, with
fewer steps, on the fastest links of each network. The file has each round as soon as it is done, and a further call
adds rounds.
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

from evaluation import modules
from evaluation import output
from tf_poseidon.emulation import emulated_cluster

_PYTORCH = flags.DEFINE_string("pytorch_python", None, "Python that has torch and torchvision.")
_JAX = flags.DEFINE_string("jax_python", None, "Python that has jax and keras.")
_HOSTS = flags.DEFINE_integer("hosts", 4, "Number of hosts.")
_NETWORKS = flags.DEFINE_list("networks", None, "Networks, by default all.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Jobs of each system.", lower_bound=1)
_JSON = output.json_flag("docs/results/alternatives.json", "File for the results; existing ones are kept.")

# Rates of links in Gbit/s, by network.
RATES = {"mobilenet_v2": (10, 1), "resnet50": (10, 1), "transformer_12": (10, 1), "efficientnet_b0": (10, 1),
         "mlp": (1,)}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "NPROC": "1", "JAX_PLATFORMS": "cpu",
               "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "GLOO_SOCKET_IFNAME": "eth0",
               "TF_CPP_MIN_LOG_LEVEL": "3"}
_VERSIONS = """import importlib.metadata as m
for name in ("tensorflow-cpu", "keras", "horovod", "torch", "jax"):
    try: print(name, m.version(name))
    except m.PackageNotFoundError: pass"""


def main(_):
    pythons = {"poseidon": sys.executable, "horovod": sys.executable, "pytorch": _PYTORCH.value, "jax": _JAX.value}
    path = pathlib.Path(_JSON.value)
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"hosts": _HOSTS.value, "versions": {system: _versions(python) for system, python in pythons.items()}}
    runs = result.setdefault("runs", [])
    for number in range(_ROUNDS.value):
        for network in _NETWORKS.value or list(RATES):
            for gbps in RATES[network]:
                key = {"network": network, "gbps": gbps, "round": number}
                if any(key.items() <= done.items() for done in runs):
                    continue
                has_jax = number == 0 and gbps == max(RATES[network])
                order = [system for system in pythons if system != "jax" or has_jax]
                start = number % len(order)
                jobs = {system: run(system, pythons[system], network, gbps) for system in order[start:] + order[:start]}
                runs.append(key | {"jobs": jobs})
                output.write_json(path, result)
    show(runs)


def _versions(python):
    return subprocess.run([python, "-c", _VERSIONS], check=True, capture_output=True, text=True).stdout.splitlines()


def run(system, python, network, gbps):
    """Returns the medians over the epochs of a job, times in milliseconds, and its losses."""
    steps = ["--steps=3", "--epochs=3"] if system == "jax" else []
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out"
        with emulated_cluster.EmulatedCluster(_HOSTS.value, gbps) as cluster, open(
                os.path.join(folder, "log"), "w+") as log:
            status = cluster.run([*modules.command("comparisons.alternatives", python), f"--system={system}",
                                  f"--network={network}", f"--json={out}", f"--master={cluster.addresses[0]}", *steps],
                                 env={**os.environ, **_ONE_THREAD}, stdout=log, stderr=subprocess.STDOUT)
            log.seek(0)
            if status:
                raise SystemExit(f"The job of {system} ended with status {status}:\n{log.read()}")
        ranks = [json.loads(pathlib.Path(f"{out}.{rank}.json").read_text()) for rank in range(_HOSTS.value)]
    processor = [sum(times) for times in zip(*(rank["processor_seconds"] for rank in ranks))]
    job = {"ms": 1e3 * statistics.median(ranks[0]["step_seconds"]), "processor_ms": 1e3 * statistics.median(processor),
           "update_error": ranks[0]["difference"], "losses": ranks[0]["losses"]}
    print(f"{network}, {gbps} Gbit/s, {system}: {job['ms']:.0f} ms, processors {job['processor_ms']:.0f} ms",
          file=sys.stderr, flush=True)
    return job


def summary(runs):
    """Returns {(network, gbps): {system: {what: (least, median, most)}}} of the runs in a file.

    What is measured: "ms", "processor_ms", both per step, and how these are to those of poseidon: "ratio" and
    "processor_ratio".
    """
    found = {}
    for entry in runs:
        ours = entry["jobs"]["poseidon"]
        for system, job in entry["jobs"].items():
            measures = found.setdefault((entry["network"], entry["gbps"]), {}).setdefault(system, {})
            for what, value in (("ms", job["ms"]), ("processor_ms", job["processor_ms"]),
                                ("ratio", job["ms"] / ours["ms"]),
                                ("processor_ratio", job["processor_ms"] / ours["processor_ms"])):
                measures.setdefault(what, []).append(value)
    return {key: {system: {what: (min(values), statistics.median(values), max(values))
                           for what, values in measures.items()} for system, measures in systems.items()}
            for key, systems in found.items()}


def show(runs):
    """Prints a table of `summary`."""
    rows = [(network, str(gbps), system, *(
        f"{measures[what][1]:.{digits}f} ({measures[what][0]:.{digits}f}–{measures[what][2]:.{digits}f})"
        for what, digits in (("ms", 0), ("ratio", 2), ("processor_ms", 0), ("processor_ratio", 2))))
            for (network, gbps), systems in summary(runs).items() for system, measures in systems.items()]
    output.show("median (least–most) of the jobs", (
        "network", "Gbit/s", "system", "ms per step", "to poseidon", "processors, ms", "to poseidon"), rows, left=3)


if __name__ == "__main__":
    flags.mark_flags_as_required(["pytorch_python", "jax_python"])  # here, for scripts that import this one
    app.run(main)
