"""Times one process under PoseidonStrategy against plain Keras, taking turns in one run.

    python scripts/bench_overhead.py --json out.json

Two equal models train on the same data, one built under the strategy, one not. The ratio is the
median of the ratios of neighbouring epochs. The weights of both are compared first.
"""

import contextlib
import json
import statistics
import time

from absl import app
from absl import flags
import keras
import numpy as np
import rich.console
import rich.progress
import rich.table

import tf_poseidon as poseidon

_JSON = flags.DEFINE_string("json", None, "File for the results.")
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Epochs of each system to time.")


def small():
    """A model whose step costs little more than calling it: all overhead shows."""
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(32, "relu"),
                             keras.layers.Dense(10)])


def convolution():
    """A model of the size of the digits example."""
    return keras.Sequential([
        keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten(),
        keras.layers.Dense(10)])


def train(make_model, scope, rows=12800, batch=64):
    """Returns a compiled model made in `scope`, and a function that trains it for one epoch."""
    keras.utils.set_random_seed(1)
    with scope:
        model = make_model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, 10, rows)
    return model, lambda: model.fit(x, y, batch_size=batch, verbose=0, shuffle=False)


def seconds(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main(_):
    strategy = poseidon.PoseidonStrategy()
    results = {}
    for make_model in (small, convolution):
        ours, run_ours = train(make_model, strategy.scope())
        plain, run_plain = train(make_model, contextlib.nullcontext())
        run_ours(), run_plain()  # warm-up
        for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        times = {"strategy": [], "plain": []}
        for i in rich.progress.track(range(_ROUNDS.value), make_model.__name__, transient=True):
            # Who goes first changes, so that neither always follows the other.
            order = [("strategy", run_ours), ("plain", run_plain)]
            for name, run in order if i % 2 else order[::-1]:
                times[name].append(seconds(run))
        ratios = [a / b for a, b in zip(times["strategy"], times["plain"])]
        low, median, high = statistics.quantiles(ratios, n=4)
        results[make_model.__name__] = {
            "ratio": median, "ratio_quartiles": [low, high],
            **{f"{name}_epoch_s": statistics.median(t) for name, t in times.items()}}
    table = rich.table.Table(title="one process: epoch under PoseidonStrategy / plain Keras")
    for column in ("model", "strategy, s", "plain, s", "ratio (quartiles)"):
        table.add_column(column, justify="right")
    for name, r in results.items():
        table.add_row(name, f"{r['strategy_epoch_s']:.3f}", f"{r['plain_epoch_s']:.3f}",
                      "{:.3f} ({:.3f}-{:.3f})".format(r["ratio"], *r["ratio_quartiles"]))
    rich.console.Console().print(table)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    app.run(main)
