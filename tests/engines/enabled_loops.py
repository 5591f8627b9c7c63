"""Training loops for Horovod and tf.distribute, before and after `poseidon.enable()`: enabled_loops.py LIBRARY OUT.

Each case trains twice from the same weights, in the same process: first unchanged, and then after
`poseidon.enable()` with the policy "sfb". OUT.RANK gets a pickled dictionary, by case:
(weights before, weights after, {site: scheme, or why not}, ops of the graph that was executed).
"""

import collections
import json
import os
import pickle
import sys
import time

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import tf_poseidon as poseidon

STEPS = 3
ROWS = 6
CASES = {"horovod": {}, "tf_distribute": {}}


def case(library):
    """Registers a case: a function of a step's `Loop` that returns its training step."""
    def register(function):
        CASES[library][function.__name__] = function
        return function
    return register


class Loop:
    """Common parts of the cases: two layers, and the loss of some rows."""

    def __init__(self, rank, size, library, width=16):
        self.rank, self.size, self.library = rank, size, library
        rng = np.random.default_rng(1)  # the same on all ranks
        self.variables = [tf.Variable(value) for value in (
            rng.normal(size=(8, width)) / 3, np.zeros(width), rng.normal(size=(width, 4)) / 4, np.zeros(4))]

    def gradients(self, x, y, tape=None):
        """Returns the gradients of the mean loss of this rank's rows."""
        w1, b1, w2, b2 = self.variables
        with tf.GradientTape() as own:
            prediction = tf.nn.tanh(x @ w1 + b1) @ w2 + b2
            loss = tf.reduce_mean(tf.square(prediction - y)) + 0.01 * tf.nn.l2_loss(w1)
        return (tape or (lambda own: own))(own).gradient(loss, self.variables)

    def apply(self, gradients):
        for variable, gradient in zip(self.variables, gradients):
            variable.assign_sub(0.1 * tf.cast(gradient, variable.dtype))

    def batch(self, step):
        rng = np.random.default_rng(100 * step + self.rank)
        return rng.integers(-3, 4, (ROWS, 8)) / 2, rng.integers(-3, 4, (ROWS, 4)) / 2


# ---- Horovod ----------------------------------------------------------------------------------------


@case("horovod")
def tape(loop):
    hvd = loop.library
    return lambda x, y: loop.apply(loop.gradients(x, y, hvd.DistributedGradientTape))


@case("horovod")
def predivided(loop):
    hvd = loop.library
    return lambda x, y: loop.apply(loop.gradients(
        x, y, lambda tape: hvd.DistributedGradientTape(tape, gradient_predivide_factor=4.0)))


@case("horovod")
def in_groups(loop):
    hvd = loop.library
    return lambda x, y: loop.apply(loop.gradients(
        x, y, lambda tape: hvd.DistributedGradientTape(tape, num_groups=2)))


@case("horovod")
def sums_that_are_scaled(loop):
    hvd = loop.library
    return lambda x, y: loop.apply([
        hvd.allreduce(g, op=hvd.Sum, prescale_factor=0.25, postscale_factor=0.5, name=f"scaled{i}")
        for i, g in enumerate(loop.gradients(x, y))])


@case("horovod")
def halves(loop):
    """Compressed to half: a gradient that is rounded before it is summed is left unchanged."""
    hvd = loop.library
    return lambda x, y: loop.apply(loop.gradients(
        x, y, lambda tape: hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)))


@case("horovod")
def largest(loop):
    """Neither a sum nor an average: left unchanged."""
    hvd = loop.library
    return lambda x, y: loop.apply([hvd.allreduce(g, op=hvd.Max, name=f"largest{i}")
                                    for i, g in enumerate(loop.gradients(x, y))])


@case("horovod")
def process_sets(loop):
    """Ranks 0 and 1 train together, rank 2 alone."""
    hvd = loop.library
    own = loop.sets[loop.rank == 2]
    return lambda x, y: loop.apply([hvd.allreduce(g, op=hvd.Average, name=f"set{i}", process_set=own)
                                    for i, g in enumerate(loop.gradients(x, y))])


@case("horovod")
def fewer_rows_on_rank_1(loop):
    """Rank 1 has another number of rows in the last step: only it traces its function again."""
    hvd = loop.library
    batch = loop.batch
    loop.batch = lambda step: tuple(part[:2] if (loop.rank, step) == (1, STEPS - 1) else part
                                    for part in batch(step))
    return lambda x, y: loop.apply(loop.gradients(x, y, hvd.DistributedGradientTape))


@case("horovod")
def other_mask_on_rank_1(loop):
    """A mask that is a constant, but not the same one on all ranks: ranks do not agree."""
    hvd = loop.library
    mask = np.eye(8, 16) * (loop.rank + 1)
    def step(x, y):
        first, *others = loop.gradients(x, y)
        loop.apply([hvd.allreduce(first * mask, op=hvd.Sum, name="masked"),
                    *(hvd.allreduce(g, name=f"other{i}") for i, g in enumerate(others))])
    return step


@case("horovod")
def own_state_of_each_rank(loop):
    """A loss weight that is local to each rank, and that the graph assigns: neither a coefficient nor a mask."""
    hvd = loop.library
    own = tf.Variable(np.eye(8, 16) * (loop.rank + 1))
    def step(x, y):
        first, *others = loop.gradients(x, y)
        loop.apply([hvd.allreduce(first * own, op=hvd.Sum, name="weighted"),
                    *(hvd.allreduce(g, name=f"unweighted{i}") for i, g in enumerate(others))])
        own.assign(own * 0.9)
    return step


@case("horovod")
def carried_by_a_loop(loop):
    """The weights are tensors of the loop: only the sums make a step wait for the one before."""
    hvd = loop.library
    def step(x, y):
        variable = loop.variables[0]
        weights = variable.read_value()
        for _ in tf.range(10):
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = tf.reduce_mean(tf.square(x @ weights))
            weights = weights - 0.1 * hvd.allreduce(tape.gradient(loss, weights), name="carried")
        variable.assign(weights)
    return step


@case("horovod")
def another_step_on_rank_0(loop):
    """In the last step, only rank 0 runs a function that computes more, with other names of nodes."""
    hvd = loop.library
    def make(does_more):
        def step(x, y):
            if does_more:
                tf.debugging.assert_all_finite(tf.matmul(x, x, transpose_a=True), "finite")
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(x @ loop.variables[0]))
            gradient = tape.gradient(loss, loop.variables[0])
            loop.variables[0].assign_sub(0.1 * hvd.allreduce(gradient, name="same"))
        return tf.function(step)
    usual, other = make(False), make(loop.rank == 0)
    steps = iter([usual, usual, other])
    def step(x, y):
        next(steps)(x, y)
    step.is_function = True
    return step


@case("horovod")
def in_a_loop(loop):
    hvd = loop.library
    def step(x, y):
        for _ in tf.range(2):
            loop.apply([hvd.allreduce(g, op=hvd.Average, name=f"looped{i}")
                        for i, g in enumerate(loop.gradients(x, y))])
    return step


# ---- tf.distribute ----------------------------------------------------------------------------------


def replicated(loop, reduce):
    """A step in which `reduce(context, gradients)` synchronises."""
    def replica(x, y):
        context = tf.distribute.get_replica_context()
        loop.apply(reduce(context, loop.gradients(x, y)))
    return lambda x, y: loop.library.run(replica, args=(x, y))


@case("tf_distribute")
def laid_end_to_end(loop):
    return replicated(loop, lambda context, gradients: context.all_reduce("SUM", gradients))


@case("tf_distribute")
def one_by_one(loop):
    return replicated(loop, lambda context, gradients: [context.all_reduce("SUM", g) for g in gradients])


@case("tf_distribute")
def means(loop):
    return replicated(loop, lambda context, gradients: context.all_reduce("MEAN", gradients))


@case("tf_distribute")
def in_small_packs(loop):
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1200)
    return replicated(loop, lambda context, gradients: context.all_reduce("SUM", gradients, options))


@case("tf_distribute")
def fewer_rows_later(loop):
    """The last batch is smaller, and on rank 1 smaller still: each traces its function again."""
    batch = loop.batch
    loop.batch = lambda step: tuple(part[:4 - 2 * loop.rank] if step == STEPS - 1 else part
                                    for part in batch(step))
    return replicated(loop, lambda context, gradients: context.all_reduce("SUM", gradients))


@case("tf_distribute")
def more_rows_later(loop):
    """More rows than the plan of the first trace has room for: ranks agree on another plan."""
    batch = loop.batch
    loop.batch = lambda step: tuple(np.repeat(part, 1 + step, 0) for part in batch(step))
    return replicated(loop, lambda context, gradients: context.all_reduce("SUM", gradients))


@case("tf_distribute")
def bfloat16(loop):
    """TensorFlow sums bfloat16, but does not gather it."""
    return replicated(loop, lambda context, gradients: context.all_reduce(
        "SUM", [tf.cast(g, tf.bfloat16) for g in gradients]))


def fed_by_an_iterator(loop, width, has_end=True, rows=None):
    """Batches that the function reads from an iterator of tf.distribute: by default, of an open number of rows."""
    loop.variables = Loop(loop.rank, loop.size, loop.library, width).variables  # no plan knows these yet
    arrays = tuple(np.concatenate(parts) for parts in zip(*map(loop.batch, range(STEPS))))
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.batch(ROWS) if has_end else dataset.batch(ROWS, drop_remainder=True).repeat()
    options = tf.data.Options()
    options.autotune.enabled = False  # the thread that tunes may keep an iterator from being freed for a minute
    dataset = dataset.with_options(options)
    batches = iter(loop.library.distribute_datasets_from_function(lambda _: dataset))

    def replica(x, y):
        if rows is not None:
            x, y = tf.ensure_shape(x, [rows, 8]), tf.ensure_shape(y, [rows, 4])
        loop.apply(tf.distribute.get_replica_context().all_reduce("SUM", loop.gradients(x, y)))

    return lambda x, y: loop.library.run(replica, args=next(batches))


@case("tf_distribute")
def open_number_of_rows(loop):
    return fed_by_an_iterator(loop, 10)


@case("tf_distribute")
def open_number_of_rows_that_is_ensured(loop):
    return fed_by_an_iterator(loop, 20, rows=ROWS)


@case("tf_distribute")
def no_end(loop):
    return fed_by_an_iterator(loop, 24, has_end=False)


@case("tf_distribute")
def fewer_rows_on_rank_1_from_the_first(loop):
    """Then TensorFlow's collectives cannot gather, and the program is left unchanged."""
    batch = loop.batch
    loop.batch = lambda step: tuple(part[:ROWS - loop.rank] for part in batch(step))
    loop.variables = Loop(loop.rank, loop.size, loop.library, width=12).variables  # no plan knows these yet
    return replicated(loop, lambda context, gradients: context.all_reduce("SUM", gradients))


# ---- the job ----------------------------------------------------------------------------------------


def train(loop, make_step):
    """Trains, and returns (weights, Counter of the ops that were executed)."""
    step = make_step(loop)
    if not hasattr(step, "is_function"):
        step = tf.function(step)
    with context.collect_graphs(optimized=True) as graphs:
        for number in range(STEPS):
            step(*map(tf.constant, loop.batch(number)))
    result = [variable.numpy() for variable in loop.variables]
    return result, collections.Counter(node.op for graph in graphs for node in graph.node)


def main(library, out):
    sets = None
    if library == "horovod":
        import horovod.tensorflow as module
        sets = [module.ProcessSet([0, 1]), module.ProcessSet([2])]
        module.init(process_sets=sets)
        rank, size = module.rank(), module.size()
    else:
        rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
        ports = os.environ["PORTS"].split(",")
        os.environ["TF_CONFIG"] = json.dumps({
            "cluster": {"worker": [f"localhost:{port}" for port in ports]},
            "task": {"type": "worker", "index": rank}})
        module = tf.distribute.MultiWorkerMirroredStrategy()
    results = {}
    for name, make_step in CASES[library].items():
        loop = Loop(rank, size, module)
        loop.sets = sets
        results[name] = [train(loop, make_step)]
    enabled = poseidon.enable(policy="sfb")
    for name, make_step in CASES[library].items():
        loop = Loop(rank, size, module)
        loop.sets = sets
        results[name].append(train(loop, make_step))
        plan = enabled.plan
        results[name].append(plan.refusal or {d.site: d.scheme if d.scheme != "ps" else d.reason
                                              for d in plan.decisions})
    with open(f"{out}.{rank}", "wb") as file:
        pickle.dump(results, file)
    # Others may still fetch what they need of the last sum: TensorFlow does not wait for them when a process ends.
    for other in range(size):
        while not os.path.exists(f"{out}.{other}"):
            time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
