"""Steps in two parts against the same steps as they are, on one rank: variables, results, and which version is read."""

import time

import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon import planning
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes import session
from tf_poseidon.job import worker_clocks
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import partition_options
from tf_poseidon.one_process import partitioning
from tf_poseidon.one_process import rank_graphs
from tf_poseidon.one_process import tracing
from tf_poseidon.one_process.clocked import clocked_step
from tf_poseidon.staleness.bounds import SSP

pytestmark = pytest.mark.usefixtures("alone")

STEPS = 5


class State:
    """Variables of a step."""

    def __init__(self):
        self.w, self.v = tf.Variable([[1.0], [2.0]]), tf.Variable(3.0)
        self.count = tf.Variable(0, dtype=tf.int64)
        self.wide, self.narrow = tf.Variable(tf.ones([2, 9])), tf.Variable(tf.ones([9, 1]))

    @property
    def values(self):
        return [v.numpy() for v in (self.w, self.v, self.count, self.wide, self.narrow)]


def gradient_of(x, w):
    return tf.matmul(x, tf.matmul(x, w), transpose_a=True)


def train(state, x):
    state.w.assign_sub(gradient_of(x, state.w))


def decay_and_count(state, x):
    gradient = gradient_of(x, state.w)
    state.count.assign_add(1)
    state.w.assign(state.w * 2)
    state.w.assign_sub(gradient * tf.cast(state.count, tf.float32))


def regularise(state, x):
    state.w.assign_sub(gradient_of(x, state.w) + 2 * state.w)


def draw_by_clock(state, x):
    """The worker reads a variable that changes with its clock, as a seed does; the server reads it too."""
    seed = state.count.assign_add(1)
    gradient = gradient_of(x * tf.cast(seed % 3, tf.float32), state.w)
    state.w.assign_sub(gradient * tf.cast(state.count, tf.float32))


def draw_before_counting(state, x):
    """As Keras draws: nothing that the worker needs follows from the next state."""
    gradient = gradient_of(x * tf.cast(state.count % 3, tf.float32), state.w)
    state.count.assign_add(1)
    state.w.assign_sub(gradient)


def regularise_what_was_read(state, x):
    w = tf.convert_to_tensor(state.w)
    state.w.assign_sub(gradient_of(x, w) + 2 * w)


def train_in_loop(state, x):
    def body(i, y):
        return i + 1, tf.matmul(x, state.w) + y
    _, y = tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros([tf.shape(x)[0], 1])])
    state.w.assign_sub(tf.matmul(x, y, transpose_a=True))


def update_in_branch(state, x):
    gradient = gradient_of(x, state.w)
    state.count.assign_add(1)

    def overwrite():
        state.w.assign(gradient)
        return 0.0

    tf.cond(state.count % 2 == 0, overwrite, lambda: 0.0)
    return gradient


def divide_by_rows(state, x):
    state.w.assign_sub(gradient_of(x, state.w) / tf.cast(tf.shape(x)[0], tf.float32) * 4)
    return tf.shape(x)[0]


def return_rows_and_sums(state, x):
    gradient = gradient_of(x, state.w)
    state.w.assign_sub(gradient)
    return {"rows": x * 2, "sum": gradient, "other": state.v.read_value()}


SAME = (train, decay_and_count, regularise, regularise_what_was_read, draw_by_clock, draw_before_counting,
        train_in_loop, update_in_branch, divide_by_rows, return_rows_and_sums)


def partitioned(function):
    """Returns (a function's state, its `Partition` for one rank)."""
    state, x = State(), tf.ones((4, 2))
    call = calls.Call(lambda x: function(state, x), {}, (x,), {})
    traced = tracing.traced(lambda x: function(state, x), call)
    return state, partitioning.partition(traced, partition_options.PartitionOptions(2, rows=4, trains=True))


def clocked(function, synchrony, replayed=None):
    """Returns (a function's state, its `ClockedStep`, and clocks)."""
    state, partition = partitioned(function)
    of_rank = worker_clocks.Clocks(synchrony, replayed)
    planner = planning.Planner(planning.Cluster(2), "ps")
    return state, clocked_step.ClockedStep(partition, of_rank, session.RewriteSession(planner)), of_rank


def batches():
    return [tf.constant(np.random.default_rng(i).integers(-1, 2, (4, 2)), tf.float32) for i in range(STEPS)]


@pytest.mark.parametrize("function", SAME, ids=lambda function: function.__name__)
def test_both_parts_do_what_the_step_does(function):
    state, partition = partitioned(function)
    step = rank_graphs.RankGraphs(partition).marked("")
    expected = [[result for result in tf.nest.flatten(step(batch)) if result is not None] for batch in batches()]
    again, parts, of_rank = clocked(function, SSP(0))
    results = [list(parts.run([batch])) for batch in batches()]
    of_rank.finish()
    for mine, theirs in zip(again.values, state.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert np.abs(again.w.numpy()).max() > 2
    for mine, theirs in zip(results, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("versions", [(0, 1, 2, 3, 4), (0, 0, 1, 1, 2), (0, 0, 0, 0, 0), (0, 1, 1, 3, 4)])
def test_gradients_are_those_of_the_version(versions):
    state, step, of_rank = clocked(train, SSP(4), versions)
    for batch in batches():
        step.run([batch])
        time.sleep(0.05)  # so that there are newer versions
    of_rank.finish()
    values = [np.array([[1.0], [2.0]])]
    for batch, version in zip(batches(), versions):
        x = batch.numpy()
        values.append(values[-1] - x.T @ (x @ values[version]))
    np.testing.assert_array_equal(state.w, values[-1])
    assert of_rank.log().versions == (versions,)


def test_clocks_go_on_when_the_program_changes_weights():
    state, step, of_rank = clocked(train, SSP(3))
    x = batches()[0]
    step.run([x])
    of_rank.finish()
    state.w.assign([[5.0], [7.0]])
    step.run([x])
    of_rank.finish()
    expected = np.array([[5.0], [7.0]])
    np.testing.assert_array_equal(state.w, expected - x.numpy().T @ (x.numpy() @ expected))
    assert of_rank.log().versions == ((0, 1),)


def test_steps_of_two_functions_follow_each_other():
    """As of batches of two sizes; the second function computes with what the server of the first one has made."""
    state, partition = partitioned(train)
    planner = planning.Planner(planning.Cluster(2), "ps")
    of_rank = worker_clocks.Clocks(SSP(3))
    steps = [clocked_step.ClockedStep(partition, of_rank, session.RewriteSession(planner)) for _ in range(2)]
    expected = state.w.numpy()
    for i, batch in enumerate(batches()):
        steps[i % 2].run([batch])
        expected = expected - batch.numpy().T @ (batch.numpy() @ expected)
    of_rank.finish()
    np.testing.assert_array_equal(state.w, expected)


def test_a_step_that_fails_is_none():
    def checked(state, x):
        state.w.assign_sub(gradient_of(tf.debugging.check_numerics(x, "not this one"), state.w))

    state, step, of_rank = clocked(checked, SSP(1))
    step.run([batches()[0]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not this one"):
        step.run([tf.fill((4, 2), np.nan)])
    of_rank.finish()  # waits for no version of it
    assert of_rank.log().versions == ((0,),)
    assert np.isfinite(state.w).all()


def test_an_update_that_fails_ends_the_worker():
    state, step, of_rank = clocked(lambda state, x: [
        gradient := gradient_of(x, state.w), tf.debugging.assert_less(gradient, 1e9),
        state.w.assign_sub(gradient)][0], SSP(1))
    step.run([tf.ones((4, 2)) * 1e6])
    with pytest.raises(tf.errors.InvalidArgumentError):
        for _ in range(4):
            step.run([tf.ones((4, 2))])
            of_rank.finish()


def norm_of_batch(state, x):
    """Of the whole batch, before the gradient."""
    scale = tf.reduce_sum(tf.matmul(x, state.w) ** 2)
    state.w.assign_sub(gradient_of(x / scale, state.w))


def product_behind_exchange(state, x):
    """What is exchanged is the gradient of a product of weights, which is smaller than theirs."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(x, tf.matmul(state.wide, state.narrow)))
    for variable, gradient in zip((state.wide, state.narrow), tape.gradient(loss, [state.wide, state.narrow])):
        variable.assign_sub(gradient)


def read_after_update(state, x):
    state.w.assign_sub(gradient_of(x, state.w))
    return tf.reduce_sum(tf.matmul(x, state.w))


def whole_on_every_rank(state, x):
    """An op without a rule, which all ranks run on the whole batch, with their versions of a weight."""
    whole = tf.numpy_function(lambda x, w: w * x.sum(), [x, state.w], tf.float32)
    state.w.assign_sub(gradient_of(x, state.w) + tf.ensure_shape(whole, [2, 1]))


def update_of_rows(state, x):
    """In a branch, which is not known to run."""
    tf.cond(state.v > 0, lambda: state.w.assign_sub(gradient_of(x, state.w)), lambda: state.w + 0)


@pytest.mark.parametrize("function, message", [
    (norm_of_batch, "needs the exchange '.*' before this rank's gradients are there: all ranks would have to be at the "
                    "same clock; train with synchrony='bsp'"),
    (product_behind_exchange, "takes a sum of all ranks, and '.*', which they compute of weights that may be older"),
    (read_after_update, "needs the exchange '.*' before this rank's gradients are there"),
    (whole_on_every_rank, "the update '.*' needs '.*', which each rank computes with its own version of them"),
    (update_of_rows, "the exchange '.*' is in a branch or loop"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_has_no_version_is_refused(function, message):
    with pytest.raises(GraphError, match=f"Workers are to read stale weights, but .*{message}"):
        clocked(function, SSP(1))
