"""Times an embedding's gradient, exchanged as slices, against its dense sum, taking turns in one run.

    mpiexec -n 2 python -m evaluation.benchmarks.bench_slices --json out.json

Each rank has some rows of a large table, with indices distributed like words in a text: few of them are
frequent (Zipf's law). They are exchanged as slices, by `tf_poseidon.ops.sync_slices`, or made dense and
summed over the parameter server. Both update the table by gradient descent, slices by a scatter. Tables
are compared before anything is timed; times are those of rank 0, ratios are medians of the ratios of
neighbours.
"""


from absl import app
from absl import flags
import numpy as np
import rich.progress
import tensorflow as tf

from evaluation import output
from evaluation import timing
import tf_poseidon as poseidon
from tf_poseidon import ops

_JSON = output.json_flag()
_ROUNDS = flags.DEFINE_integer("rounds", 30, "Rounds of each size.")

# (rows of the table, columns, slices of each rank)
_CASES = ((1_000, 64, 2_048), (10_000, 64, 2_048), (100_000, 64, 2_048), (500_000, 64, 2_048))


def make_slices(rank, rows, columns, count):
    """Returns (indices, values): small integers, exact in any order of summation."""
    rng = np.random.default_rng(rank)
    indices = np.minimum(rng.zipf(1.2, count), rows) - 1
    return indices, rng.integers(-3, 4, (count, columns)).astype(np.float32)


def step(kind, rows, columns, indices, values):
    """Returns (table, function): the function runs a step of gradient descent to its end."""
    table = tf.Variable(tf.zeros((rows, columns)))

    @tf.function
    def run(indices, values):
        gradient = tf.IndexedSlices(values, indices, tf.constant([rows, columns]))
        if kind == "slices":
            total = ops.sync_slices(gradient, table.shape, f"slices/{rows}")
            table.scatter_sub(tf.IndexedSlices(total.values, total.indices))
        else:
            table.assign_sub(ops.sync(ops.dense_slices(gradient, table.shape), f"dense/{rows}"))
        return tf.zeros(())

    arguments = tf.constant(indices), tf.constant(values)
    return table, lambda: run(*arguments).numpy()


def main(_):
    strategy = poseidon.PoseidonStrategy()
    rank, size = strategy.rank, strategy.num_replicas_in_sync
    communicator = strategy.extended.job.communicator
    results = []
    with rich.progress.Progress(disable=rank != 0, transient=True) as progress:
        for rows, columns, count in progress.track(_CASES, description="tables"):
            indices, values = make_slices(rank, rows, columns, count)
            systems = {kind: step(kind, rows, columns, indices, values)
                       for kind in ("slices", "dense")}
            for _, run in systems.values():
                run()
            expected = np.zeros((rows, columns), np.float32)
            for other in range(size):
                np.subtract.at(expected, *make_slices(other, rows, columns, count))
            for kind, (table, _) in systems.items():
                np.testing.assert_array_equal(table, expected, f"{kind} sums wrongly")
            times = timing.in_turns({kind: run for kind, (_, run) in systems.items()}, range(_ROUNDS.value),
                                    lambda: communicator.sum("barrier", np.zeros(1)))
            results.append({
                "rows": rows, "columns": columns, "count": count,
                "distinct": len(np.unique(indices)),
                **{kind: timing.milliseconds(t) for kind, t in times.items()},
                "ratio": timing.ratios(times["slices"], times["dense"])["median"]})
    if rank == 0:
        rows = [(f"{r['rows']} x {r['columns']}", f"{r['count']} ({r['distinct']})",
                 *map(timing.milliseconds_text, (r["slices"], r["dense"])), f"{r['ratio']:.2f}") for r in results]
        output.show(f"gradient of a table over {size} ranks, ms: median (quartiles)",
                    ("table", "slices (distinct)", "as slices", "dense", "ratio"), rows)
        output.write_json(_JSON.value, {"ranks": size, "results": results})


if __name__ == "__main__":
    app.run(main)
