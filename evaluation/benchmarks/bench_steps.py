"""Times evaluate, predict and fit of a small model on several ranks against plain Keras, taking turns in one run.

    mpiexec -n 2 python -m evaluation.benchmarks.bench_steps --json out.json

A step costs little more than its call, so what this project adds to a step shows. Each process has two equal models,
one built under the strategy, whose ranks share the rows of each batch, and one of Keras alone, with all rows, in whose
turns no function of Keras is wrapped. Logs and predictions of both are compared before anything is timed.
"""

from collections.abc import Iterator
import contextlib
import json
import statistics
import time

from absl import app
from absl import flags
import keras
import numpy as np
import rich.console
import rich.table

import tf_poseidon as poseidon
from tf_poseidon.keras_hook import hooks

_JSON = flags.DEFINE_string("json", None, "File for the results.")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Calls of each method of each model.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 200, "Steps of a call.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 32, "Rows of a batch.", lower_bound=1)
_VERBOSE = flags.DEFINE_integer("verbose", 0, "As of fit.")


def made(scope: contextlib.AbstractContextManager) -> keras.Model:
    """Returns a compiled model made in `scope`."""
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu"),
                                  keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """A context in which Keras is as without this project."""
    wrapped = [hooks.resolve(hook) for hook in hooks.HOOKS]
    for owner, attribute, function in wrapped:
        setattr(owner, attribute, function.__wrapped__)
    try:
        yield
    finally:
        for owner, attribute, function in wrapped:
            setattr(owner, attribute, function)


def main(_):
    strategy = poseidon.PoseidonStrategy()
    communicator = strategy.extended.job.communicator
    if communicator is None:
        raise SystemExit("This is a single process, expected several; start it with mpiexec -n 2 or more.")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_STEPS.value * _ROWS.value, 64)).astype("float32")
    y = rng.integers(0, 10, len(x))
    options = {"batch_size": _ROWS.value, "verbose": _VERBOSE.value}
    calls = {
        "evaluate": lambda model: list(model.evaluate(x, y, return_dict=True, **options).values()),
        "predict": lambda model: model.predict(x, **options),
        "fit": lambda model: [each[0] for each in model.fit(x, y, shuffle=False, **options).history.values()]}
    models = {"poseidon": (made(strategy.scope()), contextlib.nullcontext)}
    with unwrapped():
        models["plain"] = made(contextlib.nullcontext()), unwrapped
    seconds = {(method, name): [] for method in calls for name in models}
    for turn in range(-1, _ROUNDS.value):
        for method, call in calls.items():
            found = {}
            # Who goes first changes, so that neither always follows the other.
            for name in sorted(models, reverse=turn % 2 == 0):
                model, context = models[name]
                communicator.sum("barrier", np.zeros(1, np.float32))
                begin = time.perf_counter()
                with context():
                    found[name] = call(model)
                communicator.sum("barrier", np.zeros(1, np.float32))
                if turn >= 0:  # the first calls trace
                    seconds[method, name].append(time.perf_counter() - begin)
            if turn < 0:
                np.testing.assert_allclose(found["poseidon"], found["plain"], rtol=1e-4, atol=1e-5)
    if strategy.rank == 0:
        _report(seconds)


def _report(seconds):
    """Prints milliseconds of a step, median and quartiles, and what of them Keras alone does not take."""
    results = {}
    table = rich.table.Table(title="milliseconds of a step: median (quartiles)")
    for column in ("method", "plain Keras", "under PoseidonStrategy", "more than plain Keras"):
        table.add_column(column, justify="right")
    for method in dict.fromkeys(method for method, _ in seconds):
        plain, ours = ([1e3 * each / _STEPS.value for each in seconds[method, name]] for name in ("plain", "poseidon"))
        results[method] = {name: dict(zip(("low", "median", "high"), statistics.quantiles(times, n=4)))
                           for name, times in (("plain", plain), ("poseidon", ours), (
                               "more", [a - b for a, b in zip(ours, plain, strict=True)]))}
        table.add_row(method, *("{median:.2f} ({low:.2f}-{high:.2f})".format(**each)
                                for each in results[method].values()))
    rich.console.Console(width=110).print(table)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    app.run(main)
