"""A rank of a job of wide layers: how fast their gradients are copied, and how much of that backpropagation hides."""

from collections.abc import Sequence
import statistics
import time

from absl import app
import keras
from keras import layers
import numpy as np

from evaluation.gpu import gpu_setting
import tf_poseidon as poseidon
from tf_poseidon.job import engines
from tf_poseidon.timelines import recorded_steps as steps_lib

_ROWS, _STEPS, _WARM = 256, 12, 4


def _model() -> keras.Model:
    width = 64 * gpu_setting.UNIT.value
    model = keras.Sequential([keras.Input((width,)), *(layers.Dense(width, "relu") for _ in range(5)),
                              layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  jit_compile=False)
    return model


def _fit(model: keras.Model, rows: int, steps: int) -> float:
    """Returns the seconds of a step."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((rows * steps, model.input_shape[1]), np.float32)
    labels = rng.integers(0, 10, rows * steps)
    begin = time.perf_counter()
    model.fit(inputs, labels, batch_size=rows, shuffle=False, verbose=0)
    return (time.perf_counter() - begin) / steps


def _copies(rank: steps_lib.Rank) -> dict[str, dict[str, float]]:
    """Returns for each direction the rate, in bytes/s, the bytes of a step, and what of its time computing hid."""
    found = {}
    steps = rank.steps[_WARM:]
    for row in steps_lib.COPIES:
        by_step = [[event for event in rank.events if event.row == row and step.begin <= event.begin < step.end]
                   for step in steps]
        seconds = [sum(event.end - event.begin for event in copies) for copies in by_step]
        hidden = [sum(max(0.0, min(event.end, step.last_ready) - event.begin) for event in copies)
                  for step, copies in zip(steps, by_step)]
        moved = [sum(event.num_bytes for event in copies) for copies in by_step]
        if sum(seconds):
            found[row] = {"bytes_per_s": sum(moved) / sum(seconds), "bytes": statistics.median(moved),
                          "hidden": sum(hidden) / sum(seconds),
                          "piece_s": statistics.median(e.end - e.begin for copies in by_step for e in copies)}
            found[row]["exposed_s"] = statistics.median(
                max((event.end for event in copies), default=step.last_ready) - step.last_ready
                for step, copies in zip(steps, by_step))
    return found


def main(_: Sequence[str]) -> None:
    gpu_setting.prepare()
    gpu_setting.compute_with("tf32")
    alone, rows = _model(), _ROWS // engines.launch().size  # before there is a strategy: it exchanges nothing
    _fit(alone, rows, _WARM)
    results = {"alone_step_s": _fit(alone, rows, _STEPS)}
    strategy = poseidon.PoseidonStrategy(policy="ps", timeout_s=60, ranks_per_node=gpu_setting.ranks_per_node())
    with gpu_setting.moving_by("pieces"), strategy.scope():
        model = _model()
        _fit(model, _ROWS, _WARM)
        results["step_s"] = _fit(model, _ROWS, _STEPS)
        with strategy.timeline(gpu_setting.path("timeline.json.gz")) as timeline:
            _fit(model, _ROWS, _STEPS)
    with gpu_setting.moving_by("whole"), strategy.scope():
        model = _model()
        _fit(model, _ROWS, _WARM)
        results["whole_step_s"] = _fit(model, _ROWS, _STEPS)
    if strategy.rank == 0:
        results |= {"copies": _copies(timeline.ranks[0]), "memory": strategy.stats()["staging"]}
        gpu_setting.save("rates.apart" if gpu_setting.APART.value else "rates", results)
        print(timeline)


if __name__ == "__main__":
    app.run(main)
