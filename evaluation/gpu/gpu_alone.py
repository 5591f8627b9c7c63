"""Trains each model in one process: plainly, with other last places, and in the scope of a strategy.

The first is what jobs are compared with, the second gives the bounds (`rounding.py`).
"""

from collections.abc import Sequence

from absl import app
from absl import flags
import keras
import numpy as np

from evaluation.gpu import gpu_models
from evaluation.gpu import gpu_setting
import tf_poseidon as poseidon
from tf_poseidon.base import rounding

_NUMBERS = flags.DEFINE_list("numbers", list(gpu_setting.NUMBERS), "What to multiply with.")


def _variables(name: str, epsilon: float | None = None, seed: int = 0) -> dict[rounding.Key, np.ndarray]:
    """Returns the variables of a model after its steps; its first ones have other last places if epsilon is given."""
    model = gpu_models.made(name, gpu_setting.UNIT.value)
    if epsilon is not None:
        rng = np.random.default_rng(seed)
        model.set_weights([rounding.changed(value, epsilon, rng) for value in model.get_weights()])
    return {("variable", path): value for path, value in gpu_models.trained(model, name).items()}


def _compared(name: str, numbers: str) -> dict[str, object]:
    """Returns how far the scope's variables are from those of plain training, which it saves."""
    epsilon = gpu_setting.NUMBERS[numbers][2]
    plain = _variables(name)
    bounds = rounding.measured(plain, [_variables(name, epsilon, seed) for seed in (1, 2)], epsilon)
    np.savez(gpu_setting.path(f"{name}.{numbers}.npz"), **{path: value for (_, path), value in plain.items()})
    gpu_setting.save(f"{name}.{numbers}.bounds", {path: bound for (_, path), bound in bounds.items()})
    with poseidon.PoseidonStrategy().scope():
        scoped = _variables(name)
    return {"is_equal": all(np.array_equal(value, scoped[key]) for key, value in plain.items()),
            "error": max(rounding.error(scoped[key], plain[key], bound) for key, bound in bounds.items()),
            "variables": len(plain)}


def main(_: Sequence[str]) -> None:
    gpu_setting.prepare()
    results: dict[str, dict[str, object]] = {}
    for numbers in _NUMBERS.value:
        gpu_setting.compute_with(numbers)
        for name in gpu_setting.MODELS.value or gpu_models.MODELS:
            results[f"{name} {numbers}"] = _compared(name, numbers)
            gpu_setting.save("alone", results)
            keras.utils.clear_session(free_memory=True)


if __name__ == "__main__":
    app.run(main)
