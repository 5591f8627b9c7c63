"""One step of a model on some nodes: simulated, and emulated where docs/results/emulated.json has it.

All steps are simulated at one setting, that of EFFICIENCY and LATENCY_US: no rate is fitted to a number of the paper.
"""

import dataclasses
import functools
import math

from evaluation.simulation import inputs
from evaluation.simulation import simulation
from evaluation.simulation import transfers

EFFICIENCY = 0.94  # share of TCP's payload on Ethernet with frames of 1500 bytes
LATENCY_US = 50.0
_SAME_BYTES = 0.05  # emulated tensors are shrunk and rounded, and small ones are divided otherwise
_EMULATED_AS = {"wfbp": "poseidon-ps"}  # names in emulated.json, where they are others than in inputs.SYSTEMS


@dataclasses.dataclass(frozen=True)
class Point:
    """A step to simulate.

    Attributes:
        model, profile, system: Names in zoo.MODELS, profiles.PROFILES (or "k80") and inputs.SYSTEMS.
        nodes, gpus, gbps: The number of nodes, the accelerators of each, and the nominal rate of the links.
        options: Other values of `inputs.Machines`, such as "message_us=10".
    """

    model: str
    profile: str
    system: str
    nodes: int
    gpus: int
    gbps: float
    options: str | None = None

    @classmethod
    def of(cls, row):
        """Returns the point of a row of claims.csv or points.csv."""
        return cls(**{field.name: row.get(field.name) for field in dataclasses.fields(cls)})

    @property
    def machines(self):
        options = {"gbps": EFFICIENCY * self.gbps, "latency_us": LATENCY_US, "gpus_per_node": self.gpus}
        for option in (self.options or "").split():
            name, value = option.split("=")
            options[name] = float(value)
        return inputs.Machines(self.nodes, **options)


@functools.cache
def work_of(model, profile):
    """Returns the `inputs.Work` of a model on an accelerator, at the paper's batch."""
    from evaluation.simulation import models  # imported late: they import Keras, which takes some seconds
    from evaluation.workloads import profiles
    fast = profiles.PROFILES["titan_x" if profile == "k80" else profile]
    half = {"gflops": fast.gflops / 2, "images_per_s": {m: rate / 2 for m, rate in fast.images_per_s.items()}}
    return models.work_of(model, dataclasses.replace(fast, **half) if profile == "k80" else fast)


def simulate(point):
    """Returns the `simulation.Result` of a point."""
    return simulation.simulate(work_of(point.model, point.profile), point.machines, inputs.SYSTEMS[point.system])


@functools.cache
def measure(point):
    """Returns what the simulation says about a point, by name."""
    result, accelerators = simulate(point), point.nodes * point.gpus
    step, bits = result.step_seconds, [8e-9 * b for b in result.node_bytes]
    found = {"step_ms": 1e3 * step, "speed_up": accelerators * result.compute_seconds / step,
             "waiting": max(0.0, 1 - (result.compute_seconds + result.rebuild_seconds) / step),
             "rebuilding": result.rebuild_seconds / step,
             "gb_mean": sum(bits) / point.nodes, "gb_worst": max(bits)}
    return _rounded(found) | {"schemes": _schemes(point)}


def emulated(point, runs):
    """Returns the same of a point's emulated step, from the run that shrinks tensors least, {} without one.

    A run whose bytes are others than those of the simulation had another plan, and says nothing of this one.

    Args:
        point: The `Point`.
        runs: The content of emulated.json.
    """
    name = _EMULATED_AS.get(point.system, point.system)
    fitting = [run for run in runs if point.gpus == 1 and name in run["run"]["systems"].split(",")
               and (point.model, point.profile, point.nodes, 1, point.gbps, None) == tuple(
                   run["run"][k] for k in ("model", "profile", "hosts", "ranks_per_host", "gbps", "batch_size"))]
    if not fitting:
        return {}
    rows = {row["system"]: row for row in min(fitting, key=lambda run: run["run"]["shrink"])["results"]}
    step, payload = rows[name]["step"]["median_ms"], rows[name]["payload_bytes"]
    if payload and not math.isclose(8e-9 * payload, measure(point)["gb_mean"], rel_tol=_SAME_BYTES):
        return {}
    return _rounded({"step_ms": step, "speed_up": point.nodes * rows["single"]["step"]["median_ms"] / step,
                     **({"gb_mean": 8e-9 * payload} if payload else {})})


def _rounded(values):
    return {name: float(f"{value:.6g}") for name, value in values.items()}


def _schemes(point):
    """Returns how the gradients of dense layers travel, None if the system does not plan that."""
    if not point.system.startswith("poseidon") or point.nodes * point.gpus == 1:
        return None
    plan = transfers.make_plan(work_of(point.model, point.profile), point.machines, inputs.SYSTEMS[point.system])
    return ", ".join(d.scheme.upper() for s, d in zip(plan.sites, plan.decisions) if s.factors)


def needed_gbps(point, step_ms):
    """Returns the rate of payload at which a step takes so long; None if none between 1 and 100 Gbit/s does.

    It is that of the links between nodes, or of those between the accelerators of a single node. It is right within
    1 %, or 5 % for whole tensors on servers, whose nodes are simulated one by one.
    """
    if point.nodes * point.gpus == 1:
        return None
    name, unit = ("gbps", 1) if point.nodes > 1 else ("local_gbytes_per_s", 8)
    low, high = 1.0, 100.0
    while high / low > (1.05 if inputs.SYSTEMS[point.system].exchange == "whole" else 1.01):
        middle = math.sqrt(low * high)
        result = simulate(dataclasses.replace(point, options=f"{name}={middle / unit}"))
        low, high = (middle, high) if 1e3 * result.step_seconds > step_ms else (low, middle)
    return None if low == 1.0 or high == 100.0 else float(f"{math.sqrt(low * high):.6g}")
