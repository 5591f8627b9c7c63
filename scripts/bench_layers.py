"""Times a training step of a network of dense layers under each policy, side by side.

    mpiexec -n 4 python scripts/bench_layers.py --json out.json
    sudo python scripts/emulated_cluster.py --hosts 4 --gbps 1 -- \
        python scripts/bench_layers.py --bandwidth_gbps 1

Every policy trains a model of its own, and so does "compute only", which exchanges nothing; they take
turns, and so do Horovod over Gloo (a HorovodAllreduce for each gradient), if it is installed, and TensorFlow's
ring (one CollectiveReduceV2 for all, as tf.distribute lays them end to end); --enabled lets both of them exchange
factors as well, as after poseidon.enable(). Before anything is timed, all models make the same steps from the same weights, and are compared:
bit by bit between ranks, and with policy "ps" within rounding. "Extra rebuild" is what the products of
all ranks' rows take longer than this rank's alone. The bound of a step is what it cannot be faster than:
the larger of compute only plus extra rebuild, and bytes over bandwidth.
"""

import dataclasses
import functools
import json
import re
import statistics
import time

from absl import app
from absl import flags
import keras
from mpi4py import MPI  # starts MPI with MPI_THREAD_MULTIPLE; the strategy then shares it
import numpy as np
import peers
import rich.console
import rich.progress
import rich.table
import tensorflow as tf
import timing

import tf_poseidon as poseidon
from tf_poseidon import agreement
from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon import runtime
from tf_poseidon.graph_passes import find_collectives

_JSON = flags.DEFINE_string("json", None, "File for the results.")
_LAYERS = flags.DEFINE_list("layers", ["1024", "4096", "4096", "1000"], "Sizes of the layers.")
_BATCH = flags.DEFINE_integer("batch_size", 32, "Rows of each worker.")
_POLICIES = flags.DEFINE_list("policies", ["ps", "sfb", "paper", "auto"], "What to compare; with "
                              "+merge, small messages wait for each other.")
_PEERS = flags.DEFINE_list("peers", peers.names(), "Other libraries to compare with.")
_ENABLED = flags.DEFINE_bool("enabled", True, "Also compare with these after poseidon.enable().")
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Measurements of each.")
_STEPS = flags.DEFINE_integer("steps", 2, "Steps in one measurement.")
_BANDWIDTH = flags.DEFINE_float("bandwidth_gbps", None, "Of a rank's link; measured by default.")

_COMPUTE_ONLY = "compute only"


@dataclasses.dataclass
class System:
    """Something to compare: its model, a function that makes a step, and the plan that it follows."""

    model: keras.Model
    step: object
    plan: planning.Plan | None = None


def make_model(name, sizes):
    """Returns a compiled model with the same weights under every name."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(size, "relu", name=re.sub(r"\W", "_", f"{name}_{i}"))
              for i, size in enumerate(sizes[1:])]
    model = keras.Sequential([keras.Input((sizes[0],)), *layers])
    model.compile(keras.optimizers.SGD(0.01))
    model.optimizer.build(model.trainable_variables)
    return model


def make_step(model, x, y, ranks):
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / ranks
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss
    return step


def make_peer_step(model, x, y, ranks, reduce):
    """As make_step, with gradients that `reduce` sums over ranks."""
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y)) / ranks
        variables = model.trainable_variables
        model.optimizer.apply(reduce(tape.gradient(loss, variables)), variables)
        return loss
    return step


def peer_names(peer):
    """Returns the names of the systems of another library."""
    return (peer, f"{peer}+enable")[:1 + _ENABLED.value]


def make_peers(libraries, models, cluster, x, y, ranks, rank):
    """Returns the systems of other libraries by name; each of them has made one step."""
    systems = {}
    for peer, library in libraries.items():
        if peer == "horovod":
            def reduce(gradients, hvd=library):
                return [hvd.allreduce(g, op=hvd.Sum, name=f"gradient{i}") for i, g in enumerate(gradients)]
            over = agreement.OverCommunicator(runtime.communicator())
        else:
            def reduce(gradients, mirrored=library):
                def replica():  # which wants tensors that were made on its device
                    context = tf.distribute.get_replica_context()
                    return context.all_reduce("SUM", [tf.identity(g) for g in gradients])
                return mirrored.run(replica)
            over = agreement.OverCoordinationService(rank, ranks, timeout_s=60)
        for name in peer_names(peer):
            step = make_peer_step(models[name], x, y, ranks, reduce)
            systems[name] = System(models[name], tf.function(step))
            if name == peer:
                systems[name].step()
                continue
            passes = grappler.GraphPass(planning.Planner(cluster, "auto"), agreed=agreement.Agreed(over),
                                        markers=find_collectives.MARKERS)
            with passes.registered():
                systems[name].step()
            if passes.plan is None or passes.plan.refusal:
                raise RuntimeError(f"{peer} was not rewritten: {passes.plan}")
            systems[name].plan = passes.plan
    return systems


def make_systems(strategy, libraries, cluster, sizes, x, y):
    """Returns the systems by name; each of them has made one step."""
    ranks = strategy.num_replicas_in_sync
    # All models first: setting a seed lets TensorFlow optimize all functions anew.
    others = {name: make_model(name, sizes) for peer in libraries for name in peer_names(peer)}
    models = {_COMPUTE_ONLY: make_model(_COMPUTE_ONLY, sizes)}
    with strategy.scope():
        models |= {policy: make_model(policy, sizes) for policy in _POLICIES.value}
    systems = {}
    for name, model in models.items():
        step = make_step(model, x, y, ranks)
        if name == _COMPUTE_ONLY:
            systems[name] = System(model, tf.function(step))
            systems[name].step()
            continue
        systems[name] = System(model, tf.function(functools.partial(strategy.run, step)))
        policy, merge, _ = name.partition("+merge")
        passes = grappler.GraphPass(planning.Planner(cluster, policy, merge=bool(merge)))
        with passes.registered():
            systems[name].step()
        if passes.plan is None or passes.plan.refusal:
            raise RuntimeError(f"policy {name} was not rewritten: {passes.plan}")
        systems[name].plan = passes.plan
    return systems | make_peers(libraries, others, cluster, x, y, ranks, strategy.rank)


def verify(systems, communicator):
    """Lets all make one more step and compares their weights; they have made one already."""
    for name, system in systems.items():
        system.step()
        if name == _COMPUTE_ONLY:
            continue
        references = systems[_POLICIES.value[0]].model.variables
        for variable, reference in zip(system.model.variables, references, strict=True):
            mine = variable.numpy()
            np.testing.assert_array_equal(
                mine, communicator.broadcast(f"verify/{variable.path}", mine),
                f"{variable.path} differs between ranks")
            np.testing.assert_allclose(mine, reference.numpy(), rtol=1e-4, atol=1e-5,
                                       err_msg=f"{name} and {_POLICIES.value[0]} differ")


def time_rounds(runs, communicator, rounds, steps, description):
    """Returns the seconds until all ranks have made each run, a dictionary of lists; runs take turns."""
    times = {name: [] for name in runs}
    progress = rich.progress.Progress(disable=communicator.rank != 0, transient=True,
                                      console=rich.console.Console(stderr=True))
    with progress:
        for _ in progress.track(range(rounds), description=description):
            for name, run in runs.items():
                communicator.sum("barrier", np.zeros(1, np.float32))
                begin = time.perf_counter()
                for _ in range(steps):
                    run()
                communicator.sum("barrier", np.zeros(1, np.float32))
                times[name].append((time.perf_counter() - begin) / steps)
    return times


def rebuilding(sizes, rows, ranks):
    """Returns functions that make the products of all ranks' rows, and of this rank's own."""
    def products(rows, multiply):
        factors = [(tf.ones((rows, m)), tf.ones((rows, n))) for m, n in zip(sizes, sizes[1:])]

        @tf.function
        def run():
            return [tf.reduce_max(multiply(u, v)[:1]) for u, v in factors]
        return run

    return {"all": products(rows * ranks, ops.outer_product),
            "own": products(rows, lambda u, v: tf.matmul(u, v, transpose_a=True))}


def main(_):
    # In this order: TensorFlow's server has to be there before anything else uses TensorFlow.
    start = {"tensorflow": peers.start_tensorflow, "horovod": peers.start_horovod}
    libraries = {peer: start[peer](MPI.COMM_WORLD) for peer in start if peer in _PEERS.value}
    strategy = poseidon.PoseidonStrategy("ps", timeout_s=120)
    communicator = runtime.communicator()
    ranks = strategy.num_replicas_in_sync
    cluster = poseidon.calibrate()
    sizes = layer_sizes()
    rng = np.random.default_rng(strategy.rank)
    x, y = (tf.constant(rng.normal(size=(_BATCH.value, size)), tf.float32)
            for size in (sizes[0], sizes[-1]))
    systems = make_systems(strategy, libraries, cluster, sizes, x, y)
    verify(systems, communicator)
    times = time_rounds({name: system.step for name, system in systems.items()}, communicator,
                        _ROUNDS.value, _STEPS.value, "steps")
    rebuild = time_rounds(rebuilding(sizes, _BATCH.value, ranks), communicator, _ROUNDS.value, 1,
                          "rebuilding")
    if strategy.rank == 0:
        extra = statistics.median(a - b for a, b in zip(rebuild["all"], rebuild["own"]))
        report(systems, times, extra, cluster)


def report(systems, times, extra, cluster):
    """Prints the results as a table and writes them as JSON."""
    compute = statistics.median(times[_COMPUTE_ONLY])
    gbps = _BANDWIDTH.value or cluster.bandwidth_gbps
    table = rich.table.Table(title=(
        f"layers {'-'.join(_LAYERS.value)}, {_BATCH.value} rows on each of {cluster.workers} ranks; "
        f"{cluster}; extra rebuild of factors {1e3 * extra:.1f} ms"))
    for column in ("policy", "step, ms (quartiles)", "to compute only", "MB sent + received",
                   "at least, ms", "to that", f"to {_POLICIES.value[-1]}", "schemes"):
        table.add_column(column, justify="right")
    results = []
    for name, system in systems.items():
        summary = timing.summarize(times[name])
        row = {"policy": name, "step": summary,
               "to_compute_only": statistics.median(
                   a / b for a, b in zip(times[name], times[_COMPUTE_ONLY])),
               "to_last_policy": statistics.median(
                   a / b for a, b in zip(times[name], times[_POLICIES.value[-1]]))}
        if system.plan:
            weights = [matrix_size(s) for s in system.plan.sites]
            rebuilt = sum(w for w, d in zip(weights, system.plan.decisions) if d.scheme == "sfb")
            wire = system.plan.total_bytes / 2 * 8 / (gbps * 1e9)
            bound = max(compute + extra * rebuilt / sum(weights), wire)
            schemes = [d.scheme for d in system.plan.decisions if not d.rides_on]
            row |= {"bytes": system.plan.total_bytes, "bound_ms": 1e3 * bound,
                    "to_bound": statistics.median(t / bound for t in times[name]),
                    "predicted_ms": 1e3 * system.plan.step_seconds,
                    "schemes": {s: schemes.count(s) for s in sorted(set(schemes))}}
        results.append(row)
        table.add_row(name, timing.cell(summary), f"{row['to_compute_only']:.2f}",
                      *([f"{row['bytes'] / 1e6:.1f}", f"{row['bound_ms']:.1f}",
                         f"{row['to_bound']:.2f}"] if system.plan else [""] * 3),
                      f"{row['to_last_policy']:.2f}", str(row["schemes"]) if system.plan else "")
    rich.console.Console(width=160).print(table)
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump({"layers": layer_sizes(), "batch_size": _BATCH.value,
                       "cluster": dataclasses.asdict(cluster), "bandwidth_gbps": gbps,
                       "extra_rebuild_ms": 1e3 * extra, "results": results}, file, indent=1)


def matrix_size(site):
    """Returns the elements of a site that is a matrix: what rebuilding is proportional to."""
    return site.shape[0] * site.shape[1] if len(site.shape) == 2 else 0


def layer_sizes():
    return list(map(int, _LAYERS.value))


if __name__ == "__main__":
    app.run(main)
