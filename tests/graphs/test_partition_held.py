"""Variables that hold summands from step to step, on many ranks in this process against one process."""

import numpy as np
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.preparation import results

# Batches of some steps: without rows, with fewer rows than ranks, uneven ones.
BATCHES = (7, 1, 0, 12, 2)
FEATURES = 3


def _cond(step, true, false):
    return tf.cond(tf.equal(step % 2, 1), true, false)


def added(x, step, total):
    """A metric: each step adds, and nothing reads."""
    with tf.control_dependencies([total.assign_add(tf.reduce_sum(x, 0))]):
        return tf.constant(1.0, tf.float64)


def subtracted(x, step, total):
    with tf.control_dependencies([total.assign_sub(2 * tf.reduce_sum(x, 0))]):
        return tf.constant(1.0, tf.float64)


def assigned_sum(x, step, total):
    """A value that is read and added to stays a summand."""
    with tf.control_dependencies([total.assign(total.read_value() + tf.reduce_sum(x, 0))]):
        return tf.constant(1.0, tf.float64)


def decayed(x, step, total):
    with tf.control_dependencies([total.assign(0.5 * total.read_value() + tf.reduce_sum(2 * x, 0))]):
        return tf.constant(1.0, tf.float64)


def with_a_whole_term(x, step, total):
    """Whole terms are added to whole values, as everywhere."""
    with tf.control_dependencies([total.assign_add(tf.reduce_sum(x, 0) + 1)]):
        return tf.constant(1.0, tf.float64)


def counted(x, step, total):
    """A whole term is added to what it holds: rank 0's."""
    with tf.control_dependencies([total.assign(total.read_value() + tf.cast(tf.shape(x)[0], tf.float64))]):
        return tf.constant(1.0, tf.float64)


def whole(x, step, total):
    """An assigned value is the same on all ranks."""
    with tf.control_dependencies([total.assign(tf.fill([FEATURES], tf.cast(step, tf.float64)))]):
        return tf.constant(1.0, tf.float64)


def squared(x, step, total):
    """A non-linear op needs it whole."""
    norm = tf.reduce_sum(tf.square(total.read_value()))
    with tf.control_dependencies([norm]):
        with tf.control_dependencies([total.assign_add(tf.reduce_sum(x, 0))]):
            return tf.identity(norm)


def accumulated(x, step, total):
    """Accumulation of gradients: every second step uses the sum and resets it."""
    gradient = tf.reduce_sum(x, 0)

    def use():
        update = (total.read_value() + gradient) / 2
        with tf.control_dependencies([update]):
            with tf.control_dependencies([total.assign(tf.zeros([FEATURES], tf.float64))]):
                return tf.reduce_sum(update * update)

    def accumulate():
        with tf.control_dependencies([total.assign_add(gradient)]):
            return tf.constant(0.0, tf.float64)

    return _cond(step, use, accumulate)


def looped(x, step, total):
    """A loop adds a summand in each iteration: rows of what it reads, and what it has read before."""
    def round_(i):
        with tf.control_dependencies([total.assign_add(tf.reduce_sum(x, 0) * tf.cast(i, tf.float64))]):
            return i + 1

    done = tf.while_loop(lambda i: i < 3, round_, [tf.constant(0)])
    with tf.control_dependencies(done):
        return tf.constant(1.0, tf.float64)


def carried(x, step, total):
    """A loop variable is held from the first iteration."""
    summand = tf.reduce_sum(x, 0)
    value = tf.while_loop(lambda i, value: i < 3, lambda i, value: (i + 1, 0.5 * value + 2 * summand),
                          [tf.constant(0), total.read_value()])[1]
    with tf.control_dependencies([total.assign(value)]):
        return tf.constant(1.0, tf.float64)


def chosen(x, step, total):
    """Branches give a held value, a summand of this step and a whole value: together they are whole."""
    value = _cond(step, total.read_value, lambda: tf.reduce_sum(x, 0))
    value = tf.cond(tf.equal(step, 2), lambda: tf.ones([FEATURES], tf.float64), lambda: value)
    with tf.control_dependencies([total.assign(value)]):
        return tf.constant(1.0, tf.float64)


def of_two_inputs(x, step, total, y):
    """Each input has its own number of rows: a held value counts all ranks, not only those with rows of one input."""
    with tf.control_dependencies([total.assign_add(tf.reduce_sum(x, 0))]):
        with tf.control_dependencies([total.assign(0.5 * total.read_value() + 2 * tf.reduce_sum(y, 0))]):
            with tf.control_dependencies([total.assign_add(tf.ones([FEATURES], tf.float64))]):
                return tf.constant(1.0, tf.float64)


# By step: how many exchanges it has. One in a branch counts.
STEPS = {added: 0, subtracted: 0, assigned_sum: 0, decayed: 0, with_a_whole_term: 1, counted: 0, whole: 0, squared: 1,
         accumulated: 1, looped: 0, carried: 0, chosen: 2, of_two_inputs: 0}


def make(step_of):
    """Returns (the graph in one process, the names to run: (initial value, step, read))."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float64, (None, FEATURES), name="x")
        step = tf.compat.v1.placeholder(tf.int32, (), name="step")
        total = tf.Variable(tf.range(1.0, 1.0 + FEATURES, dtype=tf.float64), use_resource=True, name="total")
        rows, = partitioning.rows(x)
        others = partitioning.rows(x[::2]) if step_of is of_two_inputs else ()
        with tf.control_dependencies([total.assign(tf.range(1.0, 1.0 + FEATURES, dtype=tf.float64))]):
            initial = tf.constant(1.0, tf.float64, name="initial")
        done = tf.identity(step_of(rows, step, total, *others), name="done")
        read = tf.identity(total.read_value(), name="read")
    return graph, [tensor.name for tensor in (initial, done, read)]


def run(session, names, feeds_of):
    """Returns the results of some steps, and the variable after each."""
    initial, done, read = names
    session.run(initial, feeds_of({"x:0": np.ones((2, FEATURES))}))  # which says, too, which rank is the first
    found = []
    for i, rows in enumerate(BATCHES):
        x = np.random.default_rng(i).integers(-3, 4, (rows, FEATURES)).astype(float)
        found.append(session.run(done, feeds_of({"x:0": x, "step:0": i})))
        found.append(session.run(read))
    return found


@pytest.mark.parametrize("step_of", STEPS, ids=lambda step_of: step_of.__name__)
def test_variables_hold_summands(step_of):
    graph, names = make(step_of)
    with tf.compat.v1.Session(graph=graph) as session:
        expected = run(session, names, lambda feeds: feeds)
    flat = inline.inline(graph.as_graph_def(), names)
    partitioned = partition_lib.partition(flat, names, grappler.add_shapes,
                                          partition_lib.KnownVariables(summands=["total"]))
    assert len(partitioned.report.exchanges) == STEPS[step_of] + 1, partitioned.report  # one to read it
    for size in partitioning.RANKS:
        joined, of_ranks = partitioning.on_ranks(partitioned, size)
        with tf.compat.v1.Session(graph=joined) as session:
            found = run(session, of_ranks, lambda feeds: {
                f"rank{rank}/{name}": value for name, value in feeds.items() for rank in range(size)})
        for got, want in zip(found, expected, strict=True):
            for rank in range(size):
                np.testing.assert_array_equal(got[rank], want, err_msg=f"rank {rank} of {size}")


def _mean(x, total, count):
    """A metric, read when both of its variables are updated."""
    with tf.control_dependencies([total.assign_add(tf.reduce_sum(x)), count.assign(
            count.read_value() + tf.cast(tf.shape(x)[0], tf.float64))]):
        return [total.read_value() / count.read_value()]


def _largest(x, total, count):
    with tf.control_dependencies([total.assign(tf.maximum(total.read_value(), tf.reduce_max(x)))]):
        return [total.read_value(), tf.constant(2.0, tf.float64)]


def _read_before(x, total, count):
    before = total.read_value() + 1
    with tf.control_dependencies([before, total.assign_add(tf.reduce_sum(x))]):
        return [tf.identity(before), total.read_value()]


def _with_rows(x, total, count):
    with tf.control_dependencies([total.assign_add(tf.reduce_sum(x))]):
        read = total.read_value()
    return [tf.sqrt(read), tf.sqrt(read) * tf.reduce_max(x)]


def _descended(x, total, count):
    op = tf.raw_ops.AssignAddVariableOp(resource=total.handle, value=tf.reduce_sum(x))
    with tf.control_dependencies([op]):
        other = tf.raw_ops.ResourceApplyGradientDescent(var=total.handle, alpha=tf.constant(0.1, tf.float64),
                                                        delta=tf.reduce_sum(x))
    with tf.control_dependencies([other]):
        return [total.read_value()]


# By program: (the outputs that are taken out, the variables that hold summands, the number of exchanges).
RESULTS = {_mean: ({0}, {"total", "count"}, 0), _largest: ({0}, set(), 1), _read_before: ({1}, set(), 1),
           _with_rows: ({0}, set(), 2), _descended: ({0}, set(), 2)}


@pytest.mark.parametrize("program", RESULTS, ids=lambda program: program.__name__)
def test_results_are_taken_out(program):
    """Variables hold summands if the rest of the step needs none of them whole."""
    with tf.Graph().as_default() as graph:
        rows, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None, FEATURES), name="x"))
        variables = [tf.Variable(0.0, dtype=tf.float64, use_resource=True, name=name) for name in ("total", "count")]
        initial = {variable.initializer.name for variable in variables}
        fetches = [tf.identity(tensor).name for tensor in program(rows, *variables)]
        updates = [operation.name for operation in graph.get_operations() if operation.name not in initial and any(
            part in operation.type for part in ("Assign", "Apply"))]
    names = {variable.handle.op.name for variable in variables}
    flat = inline.inline(graph.as_graph_def(), [*fetches, *updates, "x"])
    step, found = results.cut(flat, fetches, [*updates, "x"], names, set())
    left = [fetch for i, fetch in enumerate(fetches) if i not in found.fetches]
    partitioned = partition_lib.partition(step, left, grappler.add_shapes,
                                          partition_lib.KnownVariables(candidates=names))
    outputs, held, exchanges = RESULTS[program]
    assert set(found.fetches) == outputs
    assert partitioned.summands == held
    assert len(partitioned.report.exchanges) == exchanges, partitioned.report


def test_an_op_that_needs_it_whole_is_refused():
    graph = tf.Graph()
    with graph.as_default():
        rows, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None, FEATURES), name="x"))
        total = tf.Variable(tf.zeros([FEATURES], tf.float64), use_resource=True, name="total")
        tf.raw_ops.ResourceApplyGradientDescent(var=total.handle, alpha=tf.constant(0.1, tf.float64),
                                                delta=tf.reduce_sum(rows, 0), name="descent")
        fetch = tf.reduce_sum(rows).name
    with pytest.raises(PoseidonError, match="Variable 'total' holds summands, but is expected whole by the "
                                            "ResourceApplyGradientDescent 'descent'"):
        partition_lib.partition(inline.inline(graph.as_graph_def(), [fetch, "descent"]), [fetch], grappler.add_shapes,
                                partition_lib.KnownVariables(summands=["total"]))
