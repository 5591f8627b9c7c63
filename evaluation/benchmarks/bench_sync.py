"""Times the sum of tensors over ranks, against MPI_Iallreduce of the same MPI and other libraries in the same run.

    mpiexec -n 4 python -m evaluation.benchmarks.bench_sync --json out.json

Each size is summed by `tf_poseidon.ops.sync` in a tf.function and by MPI_Iallreduce on NumPy arrays, polled
with a sleep of 20 µs (a blocking call would keep a core busy on every rank). They take turns with an empty
tf.function (the cost of TensorFlow itself) and, where many tensors are summed, with the sum of one of them; there
is a barrier before each. So do Horovod over Gloo (one HorovodAllreduce per tensor, which it merges), if it is
installed, in blocks of its own, and TensorFlow's ring (one CollectiveReduceV2, as tf.distribute concatenates
tensors). Results are verified before anything is timed. Times are those of rank 0, ratios are medians of the
ratios within each round.
"""

import statistics
import time

from absl import app
from absl import flags
from mpi4py import MPI  # starts MPI with MPI_THREAD_MULTIPLE; the strategy then shares it
import numpy as np
import rich.progress
import tensorflow as tf

from evaluation import output
from evaluation import peers
from evaluation import timing
import tf_poseidon as poseidon
from tf_poseidon import ops

_JSON = output.json_flag()
_REPEAT_S = flags.DEFINE_float("repeat_s", 2.0, "Seconds of measuring per size and system.")

_RANKS_PER_NODE = flags.DEFINE_integer("ranks_per_node", None, "As of PoseidonStrategy.", lower_bound=1)
_PEERS = flags.DEFINE_list("peers", peers.names(), "Other libraries to compare with.")

_KIB, _MIB = 1 << 10, 1 << 20
_BLOCKS = 4  # how often Horovod takes turns with all others
# (bytes of one tensor, tensors)
_CASES = ((4 * _KIB, 1), (64 * _KIB, 1), (_MIB, 1), (16 * _MIB, 1), (64 * _MIB, 1), (4 * _KIB, 64))


def make_input(rank, num_bytes, count):
    """Returns [count, elements]: small integers, exact in any order of summation."""
    elements = num_bytes // 4
    return (np.arange(count * elements).reshape(count, elements) % 7 + rank).astype(np.float32)


def poseidon_sum(x):
    """Returns a function that sums the rows of x over ranks, each row by its own op."""
    tensor = tf.constant(x)

    @tf.function
    def run(tensor):
        # The tensors are made inside the function, as gradients are: passing 64 arguments to a
        # function costs TensorFlow more than all 64 exchanges.
        rows = tf.unstack(tensor) if len(x) > 1 else [tensor]
        sums = [ops.sync(row, f"bench/{x.shape}/{i}") for i, row in enumerate(rows)]
        return tf.stack(sums) if len(x) > 1 else sums[0]

    return lambda: run(tensor)


def horovod_sum(x, hvd):
    """Same as `poseidon_sum`, by Horovod's ops."""
    tensor = tf.constant(x)

    @tf.function
    def run(tensor):
        rows = tf.unstack(tensor) if len(x) > 1 else [tensor]
        sums = [hvd.allreduce(row, op=hvd.Sum, name=f"bench{i}.{x.shape[1]}") for i, row in enumerate(rows)]
        return tf.stack(sums) if len(x) > 1 else sums[0]

    return lambda: run(tensor)


def tensorflow_sum(x, mirrored):
    """Same as `poseidon_sum`, by a MultiWorkerMirroredStrategy."""
    tensor = tf.constant(x)

    def replica(tensor):
        rows = tf.unstack(tensor) if len(x) > 1 else [tf.identity(tensor)]
        sums = tf.distribute.get_replica_context().all_reduce("SUM", rows)
        return tf.stack(sums) if len(x) > 1 else sums[0]

    run = tf.function(lambda tensor: mirrored.run(replica, args=(tensor,)))
    return lambda: run(tensor)


def empty_function(x):
    """Returns a function that calls an identity tf.function on x."""
    tensor = tf.constant(x)
    run = tf.function(lambda tensor: tensor)
    return lambda: run(tensor)


def mpi_sum(x):
    """Returns a function that sums the rows of x over ranks by MPI_Iallreduce."""
    output = np.empty_like(x)

    def run():
        requests = [MPI.COMM_WORLD.Iallreduce(row, out) for row, out in zip(x, output)]
        while not MPI.Request.Testall(requests):
            time.sleep(20e-6)
        return output

    return run


def measure(systems, barrier, seconds):
    """Returns the times in seconds of the systems, which take turns: {name: [times]}."""
    first = timing.in_turns(systems, range(1), barrier)  # warm-up, and to agree on the number of rounds
    longest = max(seconds for seconds, in first.values())
    rounds = MPI.COMM_WORLD.bcast(int(min(max(seconds / longest, 10), 300)))
    return timing.in_turns(systems, range(rounds), barrier)


def measure_horovod(x, expected):
    """Returns the times of Horovod by its name.

    It runs only for this long: its thread wakes up every millisecond and talks to those of the other ranks, even
    when there is nothing to do, which would slow down all other systems.
    """
    hvd = peers.start_horovod(MPI.COMM_WORLD)
    run = horovod_sum(x, hvd)
    np.testing.assert_array_equal(run(), expected, "horovod sums wrongly")
    times = measure({"horovod": run}, MPI.COMM_WORLD.Barrier, _REPEAT_S.value / _BLOCKS / 3)
    MPI.COMM_WORLD.Barrier()
    hvd.shutdown()
    return times


def main(_):
    # In this order: TensorFlow's server must be started before anything else uses TensorFlow.
    mirrored = peers.start_tensorflow(MPI.COMM_WORLD) if "tensorflow" in _PEERS.value else None
    strategy = poseidon.PoseidonStrategy(ranks_per_node=_RANKS_PER_NODE.value)
    rank, size = strategy.rank, strategy.num_replicas_in_sync
    results = []
    with rich.progress.Progress(disable=rank != 0, transient=True) as progress:
        for num_bytes, count in progress.track(_CASES, description="sizes"):
            x = make_input(rank, num_bytes, count)
            expected = sum(make_input(r, num_bytes, count) for r in range(size))
            systems = {"poseidon": poseidon_sum(x), "mpi": mpi_sum(x)}
            if mirrored:
                systems["tensorflow"] = tensorflow_sum(x, mirrored)
            for name, run in systems.items():
                np.testing.assert_array_equal(run(), expected, f"{name} sums wrongly")
            systems["empty"] = empty_function(x)
            if count > 1:
                systems["one"] = poseidon_sum(x[:1])
            times = {}
            for _ in range(_BLOCKS):
                block = measure(systems, MPI.COMM_WORLD.Barrier, _REPEAT_S.value / _BLOCKS)
                if "horovod" in _PEERS.value:
                    block |= measure_horovod(x, expected)
                for name, values in block.items():
                    times.setdefault(name, []).append(values)
            ratios = {peer: statistics.median(
                statistics.median(a) / statistics.median(b) for a, b in zip(times[peer], times["poseidon"]))
                      for peer in _PEERS.value}
            times = {name: sum(blocks, []) for name, blocks in times.items()}
            results.append({"bytes": num_bytes, "tensors": count,
                            **{name: timing.milliseconds(t) for name, t in times.items()},
                            "to_mpi": timing.ratios(times["poseidon"], times["mpi"])["median"],
                            **{f"{peer}_to_poseidon": value for peer, value in ratios.items()},
                            "to_one": timing.ratios(times["poseidon"], times["one"])["median"] if count > 1 else None})
    if rank == 0:
        rows = [(f"{r['tensors']} x {r['bytes']}", *map(timing.milliseconds_text, (r["poseidon"], r["mpi"])),
                 f"{r['to_mpi']:.2f}", f"{r['to_one']:.2f}" if r["to_one"] else "", f"{r['empty']['median_ms']:.3f}",
                 *(f"{timing.milliseconds_text(r[peer])} ({r[f'{peer}_to_poseidon']:.2f})" for peer in _PEERS.value))
                for r in results]
        output.show(f"sum over {size} ranks, ms: median (quartiles)",
                    ("tensors x bytes", "poseidon", "MPI_Iallreduce", "to MPI", "to one tensor", "empty tf.function",
                     *(f"{peer} (to poseidon)" for peer in _PEERS.value)), rows)
        output.write_json(_JSON.value, {"ranks": size, "results": results})


if __name__ == "__main__":
    app.run(main)
