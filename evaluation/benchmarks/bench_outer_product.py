"""Times SufficientFactorOuterProduct against tf.matmul(u, v, transpose_a=True) on the CPU.

    python -m evaluation.benchmarks.bench_outer_product --json out.json

Both are called inside a tf.function, and take turns. Results are verified before anything is timed.
"""


from absl import app
from absl import flags
import numpy as np
import rich.progress
import tensorflow as tf

from evaluation import output
from evaluation import timing
from tf_poseidon import ops

_JSON = output.json_flag()
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


def main(_):
    results = []
    with rich.progress.Progress(transient=True) as progress:
        for dtype, k, m, n in progress.track(_CASES, description="sizes"):
            rng = np.random.default_rng(1)
            # Small integers: exact in every type and order of summation.
            u, v = (tf.cast(rng.integers(-1, 2, shape), dtype) for shape in ((k, m), (k, n)))
            systems = {"ours": outer_product(u, v), "matmul": matmul(u, v)}
            np.testing.assert_array_equal(*(tf.cast(run(), "float32") for run in systems.values()))
            longest = max(max(times) for times in timing.in_turns(systems, range(2)).values())
            times = timing.in_turns(systems, range(max(10, int(_REPEAT_S.value / longest))))
            ratio = timing.ratios(times["ours"], times["matmul"])
            results.append({"dtype": dtype, "k": k, "m": m, "n": n, "ratio": ratio["median"],
                            "ratio_quartiles": ratio["quartiles"],
                            **{name: timing.milliseconds(t) for name, t in times.items()}})
    rows = [(r["dtype"], str(r["k"]), f"{r['m']} x {r['n']}", *map(timing.milliseconds_text, (r["ours"], r["matmul"])),
             timing.text({"median": r["ratio"], "quartiles": r["ratio_quartiles"]})) for r in results]
    output.show("U^T V on the CPU, ms: median (quartiles)",
                ("factors", "K", "M x N", "ours", "tf.matmul", "ratio"), rows)
    output.write_json(_JSON.value, {"results": results})


if __name__ == "__main__":
    app.run(main)
