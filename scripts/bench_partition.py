"""Times steps over `poseidon.distribute` against the same steps in `strategy.run`, taking turns in one job.

    mpiexec -n 4 python scripts/bench_partition.py --json out.json

Both train equal weights on equal batches: the one as for one process, the other by tf.distribute's rules (the loss
scaled by hand, gradients synchronised by the strategy). After the first steps their weights are compared. A ratio
above 1 says that `distribute` is slower. How long the graph takes to partition is given too.
"""

import json
import statistics
import time

from absl import app
from absl import flags
import numpy as np
import rich.console
import rich.table
import tensorflow as tf

import tf_poseidon as poseidon

_JSON = flags.DEFINE_string("json", None, "File for the results, of rank 0.")
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Steps of each way.")
_POLICY = flags.DEFINE_string("policy", "auto", "Policy of the strategy.")

RATE = 0.01
# Name: (rows of the global batch, widths of the dense layers).
MODELS = {"small": (64, (32, 32, 10)), "dense": (128, (1024, 2048, 2048, 100)), "wide": (32, (4096, 4096, 10))}


def weights(widths):
    """Returns the kernels and biases of dense layers, the same on all ranks."""
    rng = np.random.default_rng(0)
    pairs = zip(widths, widths[1:])
    return [tf.Variable(value.astype("float32")) for m, n in pairs
            for value in (rng.normal(size=(m, n)) / m**0.5, np.zeros(n))]


def losses(variables, x, y):
    """Returns the loss of each row."""
    h = x
    for kernel, bias in zip(variables[:-2:2], variables[1:-2:2]):
        h = tf.nn.relu(tf.matmul(h, kernel) + bias)
    logits = tf.matmul(h, variables[-2]) + variables[-1]
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)


def by_distribute(strategy, variables, rows):
    """Returns a function of a global batch that makes a step, written for one process."""
    del rows

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(variables, x, y))
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(RATE * gradient)
        return loss

    return poseidon.distribute(step, strategy=strategy)


def by_run(strategy, variables, rows):
    """Returns a function of a global batch that makes a step, written for tf.distribute."""
    def of_replica(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(variables, x, y)) / rows
        gradients = strategy.synchronize(tape.gradient(loss, variables), variables)
        for variable, gradient in zip(variables, gradients):
            variable.assign_sub(RATE * gradient)
        return loss

    @tf.function
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(of_replica, args=(x, y)), axis=None)

    first, last = (rows * rank // strategy.num_replicas_in_sync for rank in (strategy.rank, strategy.rank + 1))
    return lambda x, y: step(x[first:last], y[first:last])


def measure(strategy, name):
    """Returns the times of a model's steps, in seconds, and how they compare."""
    rows, widths = MODELS[name]
    rng = np.random.default_rng(1)
    x = tf.constant(rng.normal(size=(rows, widths[0])).astype("float32"))
    y = tf.constant(rng.integers(0, widths[-1], rows))
    ways = {}
    for way, make in (("distribute", by_distribute), ("run", by_run)):
        variables = weights(widths)
        ways[way] = make(strategy, variables, rows), variables
    started = time.perf_counter()
    ways["distribute"][0](x, y)
    first_s = time.perf_counter() - started
    ways["run"][0](x, y)
    for _ in range(3):
        for step, _ in ways.values():
            step(x, y)
    for ours, theirs in zip(ways["distribute"][1], ways["run"][1]):
        # After four steps, in parts of how far a variable has moved at most.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * max(np.abs(theirs.numpy()).max(), 1e-3))
    times = {way: [] for way in ways}
    for i in range(_ROUNDS.value):
        # Who goes first changes, so that neither always follows the other.
        for way in list(ways) if i % 2 else reversed(ways):
            started = time.perf_counter()
            ways[way][0](x, y)
            times[way].append(time.perf_counter() - started)
    ratios = [a / b for a, b in zip(times["distribute"], times["run"])]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {"ratio": median, "quartiles": [low, high], "first_step_s": first_s,
            **{f"{way}_ms": 1e3 * statistics.median(seconds) for way, seconds in times.items()}}


def main(_):
    strategy = poseidon.PoseidonStrategy(policy=_POLICY.value)
    results = {"ranks": strategy.num_replicas_in_sync, "policy": _POLICY.value}
    results["models"] = {name: measure(strategy, name) for name in MODELS}
    if strategy.rank:
        return
    table = rich.table.Table(title=f"{results['ranks']} ranks: a step over distribute / in strategy.run")
    for column in ("model", "distribute, ms", "run, ms", "ratio (quartiles)", "first step, s"):
        table.add_column(column, justify="right")
    for name, r in results["models"].items():
        table.add_row(name, f"{r['distribute_ms']:.2f}", f"{r['run_ms']:.2f}",
                      "{ratio:.3f} ({quartiles[0]:.3f}-{quartiles[1]:.3f})".format(**r), f"{r['first_step_s']:.2f}")
    rich.console.Console(width=110).print(table)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    app.run(main)
