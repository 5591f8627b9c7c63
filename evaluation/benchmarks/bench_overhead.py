"""Times one process under PoseidonStrategy against plain Keras, taking turns in one run.

    python -m evaluation.benchmarks.bench_overhead --json out.json

Two equal models train on the same data, one built under the strategy, one not. The ratio is the
median of the ratios of neighbouring calls of `fit`, over several pairs of models, since equal
models differ in speed from one instance to the next. Processor time is reported beside wall time: on
a shared machine it is the better measure of a few per cent. The weights of both are compared first.
"""

import contextlib
import statistics
import time

from absl import app
from absl import flags
import keras
import numpy as np
import rich.progress

from evaluation import output
from evaluation import timing
import tf_poseidon as poseidon

_JSON = output.json_flag()
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
    processor = time.process_time()
    return timing.seconds(function), time.process_time() - processor


def main(_):
    strategy = poseidon.PoseidonStrategy()
    results = {}
    for make_model in (small, convolution):
        times = {"strategy": [], "plain": []}
        for _ in rich.progress.track(range(_PAIRS.value), make_model.__name__, transient=True):
            ours, run_ours = train(make_model, strategy.scope())
            plain, run_plain = train(make_model, contextlib.nullcontext())
            run_ours(), run_plain()  # warm-up
            for a, b in zip(ours.get_weights(), plain.get_weights(), strict=True):
                np.testing.assert_array_equal(a, b)
            turns = timing.in_turns({"strategy": run_ours, "plain": run_plain}, range(_ROUNDS.value), clock=seconds)
            for name, measured in turns.items():
                times[name] += measured
        ours, plain = (list(zip(*times[name])) for name in ("strategy", "plain"))
        results[make_model.__name__] = {
            "wall": timing.ratios(ours[0], plain[0]), "processor": timing.ratios(ours[1], plain[1]),
            "strategy_fit_s": statistics.median(ours[0]), "plain_fit_s": statistics.median(plain[0])}
    rows = [(name, f"{r['strategy_fit_s']:.3f}", f"{r['plain_fit_s']:.3f}",
             *(timing.text(r[clock], 3) for clock in ("wall", "processor"))) for name, r in results.items()]
    output.show("one process: fit under PoseidonStrategy / plain Keras",
                ("model", "strategy, s", "plain, s", "ratio of wall time (quartiles)", "of processor time"), rows)
    output.write_json(_JSON.value, results)


if __name__ == "__main__":
    app.run(main)
