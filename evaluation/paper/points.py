"""One step to simulate, and its stored results: simulated and emulated.

Emulated points are those of docs/results/emulated.json (bench_emulated.py), by model, accelerator, system, rate and
nodes. Everything else is simulated at one setting, that of EFFICIENCY and LATENCY_US.
"""

import dataclasses
import functools
import json
import math

from evaluation.simulation import inputs
from evaluation.simulation import simulation
from evaluation.simulation import transfers

EFFICIENCY = 0.94  # share of TCP's payload on Ethernet with frames of 1500 bytes
LATENCY_US = 50.0
BUS_GBYTES_PER_S = 10.0  # PCI Express 3 with 16 lanes, the rate reached in practice
# Names in bench_emulated.py of the systems of inputs.SYSTEMS.
EMULATED_AS = {"poseidon": "poseidon", "poseidon-paper": "poseidon-paper", "wfbp": "poseidon-ps",
               "horovod": "horovod", "mwms": "mwms"}


@dataclasses.dataclass(frozen=True)
class Point:
    """One step to simulate; attributes are the same as in `claims.Claim`, with nominal rates."""

    model: str
    profile: str
    system: str
    nodes: int
    gbps: float
    gpus: int = 1

    @property
    def key(self):
        return f"{self.model} {self.profile} {self.system} {self.nodes}x{self.gpus} {self.gbps:g}"


@functools.cache
def _profile(name):
    from evaluation.workloads import profiles  # imported late: they import Keras, which takes some seconds
    if name != "k80":
        return profiles.PROFILES[name]
    fast = profiles.PROFILES["titan_x"]
    return dataclasses.replace(fast, name="k80", gflops=fast.gflops / 2,
                               images_per_s={m: rate / 2 for m, rate in fast.images_per_s.items()})


@functools.cache
def work_of(model, profile):
    """Returns the `inputs.Work` of a model on an accelerator, at the paper's batch."""
    from evaluation.simulation import models
    return models.work_of(model, _profile(profile))


def simulate(point, gbps=None, bus=BUS_GBYTES_PER_S, copy=math.inf, message_us=0.0):
    """Returns the `simulation.Result` of a point, at the rate `gbps` of payload if it is given."""
    machines = inputs.Machines(point.nodes, gbps or EFFICIENCY * point.gbps, LATENCY_US, message_us=message_us,
                               gpus_per_node=point.gpus, local_gbytes_per_s=bus, copy_gbytes_per_s=copy)
    return simulation.simulate(work_of(point.model, point.profile), machines, inputs.SYSTEMS[point.system])


def measure(point, emulated=()):
    """Returns the stored results of a point; `emulated` is the content of emulated.json."""
    result, accelerators = simulate(point), point.nodes * point.gpus
    step, bits = result.step_seconds, [8e-9 * b for b in result.node_bytes]
    found = {"step_s": step, "speed_up": accelerators * result.compute_seconds / step,
             "compute_s": result.compute_seconds, "rebuild_s": result.rebuild_seconds,
             "waiting": max(0.0, 1 - (result.compute_seconds + result.rebuild_seconds) / step),
             "busy": 8e-9 * max(*result.sent, *result.received, 0) / (EFFICIENCY * point.gbps) / step,
             "gb_mean": sum(bits) / point.nodes, "gb_worst": max(bits)}
    if point.system == "adam":
        found["gb_of_nodes"] = bits
    found = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.6g}"))
    return {**dataclasses.asdict(point), **found, "schemes": _schemes(point),
            "emulated": _emulated(point, emulated)}


def _schemes(point):
    """Returns how the gradients of dense layers travel, None if the system does not plan that."""
    if not point.system.startswith("poseidon") or point.nodes * point.gpus == 1:
        return None
    machines = inputs.Machines(point.nodes, EFFICIENCY * point.gbps, LATENCY_US, gpus_per_node=point.gpus)
    plan = transfers.make_plan(work_of(point.model, point.profile), machines, inputs.SYSTEMS[point.system])
    return ", ".join(d.scheme.upper() for s, d in zip(plan.sites, plan.decisions) if s.factors)


def _emulated(point, runs):
    """Returns the emulated step of a point, from the run that shrinks tensors least; None without one."""
    name = EMULATED_AS.get(point.system)
    fitting = [run for run in runs if point.gpus == 1 and name in run["run"]["systems"].split(",")
               and (point.model, point.profile, point.nodes, 1, point.gbps, None) == tuple(
                   run["run"][k] for k in ("model", "profile", "hosts", "ranks_per_host", "gbps", "batch_size"))]
    if not fitting:
        return None
    rows = {row["system"]: row for row in min(fitting, key=lambda run: run["run"]["shrink"])["results"]}
    step, payload = rows[name]["step"]["median_ms"] / 1e3, rows[name]["payload_bytes"]
    return {"step_s": step, "speed_up": point.nodes * rows["single"]["step"]["median_ms"] / 1e3 / step,
            "gb_mean": payload and 8e-9 * payload}


def rate_for(point, seconds, share=0.01, **options):
    """Returns the payload rate in Gbit/s at which a step takes so long, within a relative tolerance."""
    low, high = 1.0, 100.0
    while high / low > 1 + share:
        middle = math.sqrt(low * high)
        is_slow = simulate(point, middle, **options).step_seconds > seconds
        low, high = (middle, high) if is_slow else (low, middle)
    return math.sqrt(low * high)
