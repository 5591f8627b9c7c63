"""Programs about Horovod, run one after the other on several ranks: horovod_programs.py NAME…

The first strategy of a process decides on its options, so all of them use the same.
"""

import collections
import os
import pathlib
import pickle
import sys

import keras
import numpy as np
from rewritten_programs import small_model
import tensorflow as tf
from tensorflow.python.eager import context

import tf_poseidon as poseidon
from tf_poseidon import planning
from tf_poseidon.job import runtime

OPTIONS = dict(policy="sfb", merge=True)


def write_report(name, rank, report):
    pathlib.Path(os.environ["REPORTS"], f"{name}.{rank}").write_bytes(pickle.dumps(report))


def executed():
    """Reports, by policy, the ops that were executed, the schemes, and the sites of our own exchanges."""
    report = {}
    strategy = poseidon.PoseidonStrategy(**OPTIONS)
    for policy in ("sfb", "ps"):
        cluster = strategy.extended.job.graph_pass.session.planner.cluster
        strategy.extended.job.graph_pass.session.planner = planning.Planner(cluster, policy, merge=True)
        keras.backend.clear_session()
        strategy.extended.job.graph_pass.session._plans.clear()
        model, x, y = small_model(strategy)
        before = set(strategy.stats()["sites"])
        with context.collect_graphs(optimized=True) as graphs:
            model.fit(x, y, batch_size=32, verbose=0)
        ops = collections.Counter(node.op for graph in graphs for node in graph.node)
        sites = [site for site in strategy.stats()["sites"]
                 if site not in before and not site.startswith(("variables/", "state/"))]
        report[policy] = ops, {d.scheme for d in strategy.plan.decisions}, sites
    write_report("executed", strategy.rank, report)


def keras_optimizers():
    """Reports which variables differ between ranks after `fit` on different rows."""
    import horovod.tensorflow.keras as hvd
    hvd.init()
    rows = np.random.default_rng(hvd.rank())
    x, y = rows.normal(size=(64, 4)), rows.normal(size=(64, 1))
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(x, y, verbose=0)
    stock = model.weights
    strategy = poseidon.PoseidonStrategy(**OPTIONS)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = strategy.distribute_datasets_from_function(
        lambda _: tf.data.Dataset.from_tensor_slices((x, y)).batch(32))
    model.fit(data, verbose=0)
    communicator = runtime.communicator()

    def differing(variables):
        return [v.name for v in variables if communicator.sum(
            "differs", np.int64(communicator.broadcast("of rank 0", v.numpy()).tobytes()
                                != v.numpy().tobytes()))]

    write_report("keras_optimizers", strategy.rank, {"stock, as Horovod documents it": differing(stock),
                                                     "PoseidonStrategy": differing(model.weights)})


def refuse():
    """Prints the errors of options that Horovod does not support."""
    for case, options in {"wire_dtype": dict(wire_dtype="bfloat16"), "servers": dict(servers=[0]),
                          "ranks_per_node": dict(ranks_per_node=2),
                          "engine": dict(engine="nccl"),
                          "mpi": dict(engine="mpi")}.items():
        try:
            poseidon.PoseidonStrategy(**options)
        except poseidon.PoseidonError as error:
            print(f"{case}: {error}", flush=True)


def mismatched_types():
    """After `enable()`, prints the error of a gradient with another type on rank 1: in a first trace."""
    _sum_of_types(["float64", "float32"])


def mismatched_types_later():
    """The same, after a step in which the types were equal: only rank 1 traces again."""
    _sum_of_types(["float64", "float64"], ["float64", "float32"])


def mismatched_with_integers():
    """The same as `mismatched_types`, with a type that factors never replace."""
    _sum_of_types(["int32", "float32"])


def joins_after_sums():
    _join("ps")


def joins_after_factors():
    _join("sfb")


def _join(policy):
    """Rank 1 joins while rank 0 goes on."""
    import horovod.tensorflow as hvd
    hvd.init()
    poseidon.enable(policy=policy)
    weights = tf.Variable(np.ones((8, 4)))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ weights)
        return hvd.allreduce(tape.gradient(loss, weights), op=hvd.Sum, name="gradient")

    for _ in range(3 - hvd.rank()):
        gradient = step(tf.ones([6, 8], tf.float64))
    try:
        hvd.join()
        print(f"rank {hvd.rank()}: joined, {gradient[0, 0].numpy()}", flush=True)
    except poseidon.PoseidonError as error:
        print(f"rank {hvd.rank()}: {error}", flush=True)
        if hvd.rank() == 1:
            step(tf.ones([6, 8], tf.float64))  # rank 0 waits for it


def _sum_of_types(*types):
    """Makes a step for each list of types, by rank."""
    import horovod.tensorflow as hvd
    hvd.init()
    poseidon.enable(policy="sfb", timeout_s=10)
    weights = tf.Variable(np.ones((8, 4)))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(x, weights.dtype) @ weights)**2)
        gradient = tf.cast(tape.gradient(loss, weights), x.dtype)
        return hvd.allreduce(gradient, name="gradient")

    for of_rank in types:
        try:
            step(tf.ones([6, 8], of_rank[hvd.rank()]))
        except tf.errors.OpError as error:
            print(f"rank {hvd.rank()}: {' '.join(error.message.split())}", flush=True)


if __name__ == "__main__":
    for program in sys.argv[1:]:
        globals()[program]()
