"""Times evaluate, predict and fit of a small model on several ranks against plain Keras, taking turns in one run.

    mpiexec -n 2 python -m evaluation.benchmarks.bench_steps --json out.json

A step costs little more than its call, so what this project adds to a step shows. Each process has two equal models,
one built under the strategy, whose ranks share the rows of each batch, and one of Keras alone, with all rows, in whose
turns no function of Keras is wrapped. Logs and predictions of both are compared before anything is timed.
"""

from collections.abc import Iterator
import contextlib

from absl import app
from absl import flags
import keras
import numpy as np

from evaluation import output
from evaluation import timing
import tf_poseidon as poseidon
from tf_poseidon.keras_hook import hooks

_JSON = output.json_flag()
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
    def calling(name, call):
        model, context = models[name]

        def run():
            with context():
                result = call(model)
            communicator.sum("barrier", np.zeros(1, np.float32))
            return result

        return run

    systems = {method: {name: calling(name, call) for name in models} for method, call in calls.items()}
    for ours_and_plain in systems.values():  # the first calls trace
        np.testing.assert_allclose(*(run() for run in ours_and_plain.values()), rtol=1e-4, atol=1e-5)
    times = {method: {"poseidon": [], "plain": []} for method in systems}
    for turn in range(_ROUNDS.value):
        for method, ours_and_plain in systems.items():
            # Who goes first changes, so that neither always follows the other.
            order = dict(sorted(ours_and_plain.items(), reverse=turn % 2 == 0))
            for name, measured in timing.in_turns(order, range(1), lambda: communicator.sum(
                    "barrier", np.zeros(1, np.float32))).items():
                times[method][name] += measured
    if strategy.rank == 0:
        _report(times)


def _report(times):
    """Prints milliseconds of a step, median and quartiles, and what of them Keras alone does not take."""
    results = {}
    for method, by_name in times.items():
        plain, ours = ([1e3 * seconds / _STEPS.value for seconds in by_name[name]] for name in ("plain", "poseidon"))
        results[method] = {"plain": timing.summary(plain), "poseidon": timing.summary(ours),
                           "more": timing.summary([a - b for a, b in zip(ours, plain, strict=True)])}
    output.show("milliseconds of a step: median (quartiles)",
                ("method", "plain Keras", "under PoseidonStrategy", "more than plain Keras"),
                [(method, *map(timing.text, found.values())) for method, found in results.items()])
    output.write_json(_JSON.value, results)


if __name__ == "__main__":
    app.run(main)
