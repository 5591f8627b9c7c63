"""Times SufficientFactorOuterProduct against tf.matmul(u, v, transpose_a=True) on the CPU.

    python -m evaluation.benchmarks.bench_outer_product --json out.json

Both are called inside a tf.function, and take turns. Results are verified before anything is timed.
"""

import json
import statistics
import time

from absl import app
from absl import flags
import numpy as np
import rich.console
import rich.progress
import rich.table
import tensorflow as tf

from evaluation import timing
from tf_poseidon import ops

_JSON = flags.DEFINE_string("json", None, "File for the results.")
_REPEAT_S = flags.DEFINE_float("repeat_s", 3.0, "Seconds of measuring per case and system.")

# (type of the factors, K, M, N): K is the number of rows of all ranks together.
_CASES = (
    ("float32", 16, 256, 256), ("float32", 64, 1024, 1000), ("float32", 32, 4096, 4096),
    ("float32", 128, 4096, 4096), ("float32", 512, 4096, 4096), ("float32", 256, 6272, 4096),
    ("float64", 128, 2048, 2048), ("float16", 128, 2048, 2048), ("bfloat16", 128, 2048, 2048),
)


def outer_product(u, v):
    """Returns a function of no arguments that computes U^T V by our op."""
    return _bound(lambda u, v: ops.outer_product(u, v), u, v)


def matmul(u, v):
    """Returns a function of no arguments that computes U^T V by TensorFlow's."""
    return _bound(lambda u, v: tf.matmul(u, v, transpose_a=True), u, v)


def _bound(function, u, v):
    compiled = tf.function(function)
    return lambda: compiled(u, v)


def measure(systems, seconds):
    """Returns the times in seconds of the systems, which take turns: {name: [times]}."""
    times = {name: [] for name in systems}
    for run in [*systems.values()] * 2:
        run()
    end = time.perf_counter() + seconds * len(systems)
    while time.perf_counter() < end or len(times["ours"]) < 10:
        for name, run in systems.items():
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return times


def main(_):
    results = []
    with rich.progress.Progress(transient=True) as progress:
        for dtype, k, m, n in progress.track(_CASES, description="sizes"):
            rng = np.random.default_rng(1)
            # Small integers: exact in every type and order of summation.
            u, v = (tf.cast(rng.integers(-1, 2, shape), dtype) for shape in ((k, m), (k, n)))
            systems = {"ours": outer_product(u, v), "matmul": matmul(u, v)}
            np.testing.assert_array_equal(*(tf.cast(run(), "float32") for run in systems.values()))
            times = measure(systems, _REPEAT_S.value)
            ratios = [a / b for a, b in zip(times["ours"], times["matmul"])]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            results.append({"dtype": dtype, "k": k, "m": m, "n": n, "ratio": ratio,
                            "ratio_quartiles": [low, high],
                            **{name: timing.summarize(t) for name, t in times.items()}})
    report(results)


def report(results):
    """Prints the results as a table and writes them as JSON."""
    table = rich.table.Table(title="U^T V on the CPU, ms: median (quartiles)")
    for column in ("factors", "K", "M x N", "ours", "tf.matmul", "ratio"):
        table.add_column(column, justify="right")
    for r in results:
        cells = [timing.cell(r[name]) for name in ("ours", "matmul")]
        table.add_row(r["dtype"], str(r["k"]), f"{r['m']} x {r['n']}", *cells,
                      "{ratio:.2f} ({ratio_quartiles[0]:.2f}-{ratio_quartiles[1]:.2f})".format(**r))
    rich.console.Console(width=120).print(table)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump({"results": results}, file, indent=1)


if __name__ == "__main__":
    app.run(main)
