"""Times one process under PoseidonStrategy against plain Keras, taking turns in one run.

    python -m evaluation.benchmarks.bench_overhead --json out.json

Two equal models train on the same data, one built under the strategy, one not. The ratio is the
median of the ratios of neighbouring calls of `fit`, over several pairs of models, since equal
models differ in speed from one instance to the next. Processor time is reported beside wall time: on
a shared machine it is the better measure of a few per cent. The weights of both are compared first.
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
_PAIRS = flags.DEFINE_integer("pairs", 4, "Pairs of models.")
_ROUNDS = flags.DEFINE_integer("rounds", 8, "Calls of fit of each model.")


def small():
    """A model whose step costs little more than its call: all overhead shows."""
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(32, "relu"),
                             keras.layers.Dense(10)])


def convolution():
    """A model of the size of the digits example."""
    return keras.Sequential([
        keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten(),
        keras.layers.Dense(10)])


def train(make_model, scope, rows=6400, batch=64, epochs=4):
    """Returns a compiled model made in `scope`, and a function that trains it."""
    keras.utils.set_random_seed(1)
    with scope:
        model = make_model()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, 10, rows)
    return model, lambda: model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0,
                                    shuffle=False)


def seconds(function):
    """Returns (wall, processor) seconds of a call."""
    wall, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - processor


def ratio(times, clock):
    """Returns median and quartiles of the ratios of neighbours."""
    ratios = [a[clock] / b[clock] for a, b in zip(times["strategy"], times["plain"])]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"median": median, "quartiles": [low, high]}


def main(_):
    strategy = poseidon.PoseidonStrategy()
    results = {}
    for make_model in (small, convolution):
        times = {"strategy": [], "plain": []}
        rounds = range(_PAIRS.value * _ROUNDS.value)
        for i in rich.progress.track(rounds, make_model.__name__, transient=True):
            if i % _ROUNDS.value == 0:
                ours, run_ours = train(make_model, strategy.scope())
                plain, run_plain = train(make_model, contextlib.nullcontext())
                run_ours(), run_plain()  # warm-up
                for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
                    np.testing.assert_array_equal(a, b)
            # Who goes first changes, so that neither always follows the other.
            order = [("strategy", run_ours), ("plain", run_plain)]
            for name, run in order if i % 2 else order[::-1]:
                times[name].append(seconds(run))
        results[make_model.__name__] = {
            "wall": ratio(times, 0), "processor": ratio(times, 1),
            **{f"{name}_fit_s": statistics.median(wall for wall, _ in t)
               for name, t in times.items()}}
    table = rich.table.Table(title="one process: fit under PoseidonStrategy / plain Keras")
    for column in ("model", "strategy, s", "plain, s", "ratio of wall time (quartiles)",
                   "of processor time"):
        table.add_column(column, justify="right")
    for name, r in results.items():
        ratios = ["{median:.3f} ({quartiles[0]:.3f}-{quartiles[1]:.3f})".format(**r[clock])
                  for clock in ("wall", "processor")]
        table.add_row(name, f"{r['strategy_fit_s']:.3f}", f"{r['plain_fit_s']:.3f}", *ratios)
    rich.console.Console(width=110).print(table)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    app.run(main)
