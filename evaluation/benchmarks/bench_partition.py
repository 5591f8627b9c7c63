"""Times steps partitioned by rows against the same steps in `strategy.run`, taking turns in one job.

    mpiexec -n 4 python -m evaluation.benchmarks.bench_partition --json out.json

All train equal weights on equal batches: with `poseidon.distribute` and from a rewritten SavedModel, both written for
one process; and by tf.distribute's rules (the loss scaled by hand, gradients synchronised by the strategy). After the
first steps their weights are compared. A ratio above 1 means that the partitioned step is slower. The time of the first
step of `distribute`, which partitions its graph, is reported too.
"""

import functools
import os
import statistics
import tempfile

from absl import app
from absl import flags
import numpy as np
import tensorflow as tf

from evaluation import output
from evaluation import timing
import tf_poseidon as poseidon

_JSON = output.json_flag(what="File for the results, of rank 0.")
_ROUNDS = flags.DEFINE_integer("rounds", 40, "Steps of each way.")
_POLICY = flags.DEFINE_string("policy", "sfb", "Policy of all ways.")

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


def step_of_one_process(variables):
    """Returns a function that runs a step on a global batch, written for one process."""
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(losses(variables, x, y))
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(RATE * gradient)
        return loss

    return step


def by_distribute(strategy, rows, widths):
    """Returns (a function that runs a step on a global batch, its variables)."""
    del rows
    variables = weights(widths)
    return poseidon.distribute(step_of_one_process(variables), strategy=strategy), variables


def by_saved(strategy, rows, widths):
    """The same, from a rewritten SavedModel."""
    module = tf.Module()
    module.parameters = weights(widths)
    module.step = tf.function(step_of_one_process(module.parameters), input_signature=[
        tf.TensorSpec([None, widths[0]], name="x"), tf.TensorSpec([None], tf.int64, name="y")])
    ranks = strategy.num_replicas_in_sync
    with tempfile.TemporaryDirectory() as folder:
        original, rewritten = (os.path.join(folder, name) for name in ("original", "rewritten"))
        tf.saved_model.save(module, original, signatures={"step": module.step})
        poseidon.rewrite_saved_model(original, rewritten, signature="step", workers=ranks, batch_size=rows // ranks,
                                     policy=_POLICY.value)
        loaded = tf.saved_model.load(rewritten)
    step = loaded.signatures["step"]
    return lambda x, y: step(x=x, y=y), loaded.parameters


def by_run(strategy, rows, widths):
    """The same, written for tf.distribute."""
    variables = weights(widths)

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
    return lambda x, y: step(x[first:last], y[first:last]), variables


WAYS = {"distribute": by_distribute, "saved": by_saved, "run": by_run}


def measure(strategy, name):
    """Returns the times of a model's steps, in seconds, and how they compare."""
    rows, widths = MODELS[name]
    rng = np.random.default_rng(1)
    x = tf.constant(rng.normal(size=(rows, widths[0])).astype("float32"))
    y = tf.constant(rng.integers(0, widths[-1], rows))
    ways = {way: make(strategy, rows, widths) for way, make in WAYS.items()}
    first_s = timing.seconds(lambda: ways["distribute"][0](x, y))
    ways["saved"][0](x, y)
    ways["run"][0](x, y)
    for _ in range(3):
        for step, _ in ways.values():
            step(x, y)
    for way in ("distribute", "saved"):
        for ours, theirs in zip(ways[way][1], ways["run"][1], strict=True):
            # After four steps, relative to the largest change of a variable.
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * max(np.abs(theirs.numpy()).max(), 1e-3))
    times = timing.in_turns({way: functools.partial(step, x, y) for way, (step, _) in ways.items()},
                            range(_ROUNDS.value))
    return {"first_step_s": first_s, **{f"{way}_ms": 1e3 * statistics.median(times[way]) for way in ways},
            **{way: timing.ratios(times[way], times["run"]) for way in ("distribute", "saved")}}


def main(_):
    strategy = poseidon.PoseidonStrategy(policy=_POLICY.value)
    results = {"ranks": strategy.num_replicas_in_sync, "policy": _POLICY.value}
    results["models"] = {name: measure(strategy, name) for name in MODELS}
    if strategy.rank:
        return
    rows = [(name, *(f"{r[f'{way}_ms']:.2f}" for way in WAYS),
             *(timing.text(r[way], 3) for way in ("distribute", "saved")), f"{r['first_step_s']:.2f}")
            for name, r in results["models"].items()]
    output.show(f"{results['ranks']} ranks: a partitioned step / one in strategy.run",
                ("model", *(f"{way}, ms" for way in WAYS), "distribute / run", "saved / run", "first step, s"), rows)
    output.write_json(_JSON.value, results)


if __name__ == "__main__":
    app.run(main)
