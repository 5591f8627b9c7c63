"""A rank of a job that trains each model, and compares it with one process, and with whole tensors on the host."""

import collections
from collections.abc import Sequence
import json

from absl import app
from absl import flags
import numpy as np
from tensorflow.python.eager import context

from evaluation.gpu import gpu_models
from evaluation.gpu import gpu_setting
import tf_poseidon as poseidon
from tf_poseidon.base import rounding

_POLICY = flags.DEFINE_string("policy", "auto", "Same as in PoseidonStrategy.")
_NUMBERS = flags.DEFINE_string("numbers", "float32", "What to multiply with.")
_NODES = ("PoseidonSend", "PoseidonRecv", "SufficientFactorOuterProduct")


def _places() -> dict[str, int]:
    """Returns how many of our nodes ran on which kind of device, since the last call."""
    found = collections.Counter()
    for function in context.context().export_run_metadata().function_graphs:
        for graph in function.partition_graphs:
            for node in graph.node:
                if node.op in _NODES:
                    found[f"{node.op} {node.device.rpartition('device:')[2].partition(':')[0]}"] += 1
    return dict(found)


def _trained(name: str, way: str) -> dict[str, np.ndarray]:
    with gpu_setting.moving_by(way):
        return gpu_models.trained(gpu_models.made(name, gpu_setting.UNIT.value), name)


def _compared(strategy: poseidon.PoseidonStrategy, name: str) -> dict[str, object]:
    before = strategy.stats()["staging"]
    found = _trained(name, "pieces")
    places = _places()
    copied = {key: value - before[key] for key, value in strategy.stats()["staging"].items()}
    whole = _trained(name, "whole")
    _places()
    plain = np.load(gpu_setting.path(f"{name}.{_NUMBERS.value}.npz"))
    bounds = json.loads(gpu_setting.path(f"{name}.{_NUMBERS.value}.bounds.json").read_text())
    return {"error": max(rounding.error(found[path], plain[path], bound) for path, bound in bounds.items()),
            "is_equal_to_whole": all(np.array_equal(value, whole[path]) for path, value in found.items()),
            "schemes": dict(collections.Counter(decision.scheme for decision in strategy.plan.decisions)),
            "places": places, "copied": copied}


def main(_: Sequence[str]) -> None:
    gpu_setting.prepare()
    gpu_setting.compute_with(_NUMBERS.value)
    context.context().enable_graph_collection()
    strategy = poseidon.PoseidonStrategy(policy=_POLICY.value, timeout_s=60,
                                         ranks_per_node=gpu_setting.ranks_per_node())
    results = {}
    with strategy.scope():
        for name in gpu_setting.MODELS.value or gpu_models.MODELS:
            results[name] = _compared(strategy, name)
            if strategy.rank == 0:
                gpu_setting.save(f"{_POLICY.value}.{_NUMBERS.value}{'.apart' * gpu_setting.APART.value}", results)


if __name__ == "__main__":
    app.run(main)
