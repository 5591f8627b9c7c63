"""Variables of which each rank holds a shard, on many ranks in this process against one process."""

import numpy as np
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.graph_passes.partition import inline
from tf_poseidon.graph_passes.partition import partitioner as partition_lib

# Batches of some steps: without rows, with fewer rows than ranks, uneven ones.
BATCHES = (7, 1, 0, 12)
SHAPE = (7000, 3)  # in several KV pairs


def _after(ops, *values):
    with tf.control_dependencies(ops):
        return [tf.identity(value) for value in values]


def momentum(weights, slots, gradient):
    slot, = slots
    with tf.control_dependencies([slot.assign(0.5 * slot.read_value() - gradient)]):
        return weights.assign_add(slot.read_value())


def nesterov(weights, slots, gradient):
    """The weights are assigned, not added to; the gradient passes an op with others."""
    slot, = slots
    gradient, _ = tf.identity_n([gradient, weights.read_value()])
    with tf.control_dependencies([slot.assign(0.5 * slot.read_value() - gradient)]):
        return weights.assign(weights.read_value() + 0.5 * slot.read_value() - gradient)


def decayed(weights, slots, gradient):
    """Weights, which are whole, meet a slot; single elements have dimensions, or none."""
    slot, = slots
    ratio = tf.reshape(tf.reduce_max(tf.abs(weights.read_value())), [1, 1])
    with tf.control_dependencies([slot.assign(tf.abs(slot.read_value() / (1 + ratio)) + weights.read_value())]):
        return weights.assign_sub(0.25 * slot.read_value() + 2 * gradient)


def second_moment(weights, slots, gradient):
    first, second = slots
    with tf.control_dependencies([first.assign_add(0.5 * (gradient - first.read_value())),
                                  second.assign_add(0.25 * (tf.square(gradient) - second.read_value()))]):
        return weights.assign_sub(first.read_value() / (tf.sqrt(second.read_value()) + 0.125))


def clipped(weights, slots, gradient):
    """Its norm is a sum over all shards, as those of LAMB are."""
    slot, = slots
    norm = tf.sqrt(tf.reduce_sum(tf.square(gradient), [0, 1], keepdims=True))
    clipped_gradient = gradient / tf.maximum(norm, 1.0)
    with tf.control_dependencies([slot.assign(slot.read_value() + clipped_gradient)]):
        return weights.assign_sub(slot.read_value() * tf.reduce_mean(tf.square(slot.read_value())))


def guarded(weights, slots, gradient):
    """Only finite gradients are applied, as under loss scaling."""
    slot, = slots
    finite = tf.reduce_all(tf.math.is_finite(gradient))

    def apply():
        with tf.control_dependencies([slot.assign_sub(gradient)]):
            with tf.control_dependencies([weights.assign_add(slot.read_value())]):
                return tf.constant(1.0, tf.float64)

    return tf.cond(finite, apply, lambda: tf.constant(0.0, tf.float64))


def any_large(weights, slots, gradient):
    slot, = slots
    large = tf.reduce_any(tf.abs(gradient) > 20, axis=[0, 1], keepdims=True)
    with tf.control_dependencies([slot.assign_add(tf.where(large, tf.zeros_like(gradient), gradient))]):
        return weights.assign_sub(slot.read_value())


def of_one_element(weights, slots, gradient):
    """One element decides, whose rank may have no rows."""
    slot, = slots
    is_first = tf.constant(np.arange(np.prod(SHAPE)).reshape(SHAPE) == 0)
    value = tf.where(is_first, tf.fill(SHAPE, tf.constant(1000.0, tf.float64)), slot.read_value())
    added = tf.cast(tf.reduce_any(value > 500), tf.float64) + 2 * (1 - tf.cast(tf.reduce_all(value < 500), tf.float64))
    with tf.control_dependencies([slot.assign_add(gradient + added)]):
        return weights.assign_sub(slot.read_value())


def also_whole(weights, slots, gradient):
    """The gradient is needed whole besides."""
    slot, = slots
    with tf.control_dependencies([slot.assign_add(gradient)]):
        return weights.assign_sub(slot.read_value() * tf.reduce_max(tf.cumsum(gradient)))


def by_rows(weights, slots, gradient):
    """A mean over one dimension is no sum over a shard: the slot is whole."""
    slot, = slots
    with tf.control_dependencies([slot.assign_add(gradient * tf.reduce_mean(slot.read_value(), 0))]):
        return weights.assign_sub(slot.read_value())


# By update: (the number of slots; the kinds of what is exchanged).
UPDATES = {momentum: (1, ["scatter", "shards"]), nesterov: (1, ["scatter", "shards"]),
           decayed: (1, ["scatter", "shards"]), second_moment: (2, ["scatter", "shards"]),
           clipped: (1, ["scatter", "shards", "sum", "sum"]), guarded: (1, ["scatter", "shards", "sum"]),
           any_large: (1, ["scatter", "shards", "sum"]),
           of_one_element: (1, ["scatter", "shards", "sum", "sum"]), also_whole: (1, ["shards", "sum"]),
           by_rows: (1, ["sum"])}


def make(update):
    """Returns (the graph in one process, the names to run: (initial value, step, weights and slots))."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float64, (None, SHAPE[0]), name="x")
        rows, = partitioning.rows(x)
        variables = [tf.Variable(tf.zeros(SHAPE, tf.float64), use_resource=True, name=name)
                     for name in ("weights", "slot0", "slot1")[:1 + UPDATES[update][0]]]
        initial, = _after([variable.assign(tf.reshape(tf.range(1.0, 1.0 + np.prod(SHAPE), dtype=tf.float64) % (i + 3),
                                                      SHAPE)) for i, variable in enumerate(variables)], 1.0)
        y = tf.matmul(rows, variables[0].read_value())
        gradient = tf.matmul(rows, y, transpose_a=True) / 1024  # sums are exact
        done, = _after([update(variables[0], variables[1:], gradient)], 1.0)
        read = _after([], *[variable.read_value() for variable in variables])
    return graph, initial.name, done.name, [tensor.name for tensor in read]


def run(session, names, feeds_of):
    """Returns the variables after each of some steps."""
    initial, done, read = names
    session.run(initial, feeds_of({"x:0": np.ones((2, SHAPE[0]))}))
    found = []
    for i, rows in enumerate(BATCHES):
        x = np.zeros((rows, SHAPE[0]))
        x[:, i::7] = np.random.default_rng(i).integers(-3, 4, x[:, i::7].shape)
        session.run(done, feeds_of({"x:0": x}))
        found.append(session.run(read))
    return found


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: update.__name__)
def test_updates_run_on_shards(update):
    graph, initial, done, read = make(update)
    with tf.compat.v1.Session(graph=graph) as session:
        expected = run(session, (initial, done, read), lambda feeds: feeds)
    names, num_slots, kinds = [initial, done, *read], *UPDATES[update]
    slots = {f"slot{i}": "weights" for i in range(num_slots)}
    flat = inline.inline(graph.as_graph_def(), names)
    partitioned = partition_lib.partition(flat, [initial, done], grappler.add_shapes,
                                          partition_lib.KnownVariables(shard_candidates=slots))
    assert sorted(exchange.kind for exchange in partitioned.report.exchanges) == kinds, partitioned.report
    held = {} if update is by_rows else slots
    assert partitioned.shards == held.keys()
    partitioned = partition_lib.partition(flat, names, grappler.add_shapes, partition_lib.KnownVariables(shards=held))
    for size in partitioning.RANKS:
        joined, of_ranks = partitioning.on_ranks(partitioned, size)
        with tf.compat.v1.Session(graph=joined) as session:
            found = run(session, (of_ranks[0], of_ranks[1], of_ranks[2:]), lambda feeds: {
                f"rank{rank}/{name}": value for name, value in feeds.items() for rank in range(size)})
        for step, (got, want) in enumerate(zip(found, expected, strict=True)):
            for name, of_all, value in zip(("weights", *slots), got, want, strict=True):
                for rank in range(size):
                    np.testing.assert_allclose(of_all[rank], value, rtol=1e-12, atol=1e-12,
                                               err_msg=f"{name} on rank {rank} of {size} after step {step}")
                    assert of_all[rank].tobytes() == of_all[0].tobytes(), f"bits of {name} on rank {rank} of {size}"
