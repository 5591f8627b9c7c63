"""Functions that a partitioned graph calls: they live as long as it does, and nothing else of the trace does."""

import gc
import weakref

import pytest
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import function as defun
from tensorflow.python.ops import functional_ops

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import partition_options
from tf_poseidon.one_process import partitioning
from tf_poseidon.one_process import rank_graphs
from tf_poseidon.one_process import tracing

pytestmark = pytest.mark.usefixtures("alone")

F64 = tf.float64


def _while_of_defuns(x, factor):
    """TensorFlow 1's functional While, which is not inlined; its body captures a tensor."""
    @defun.Defun(tf.int32, F64)
    def is_first(i, value):
        return i < 3

    @defun.Defun(tf.int32, F64)
    def body(i, value):
        return i + 1, value * factor

    return functional_ops.While([tf.constant(0), x], is_first, body)[1]


def _defun(x, noinline=True):
    @defun.Defun(F64, noinline=noinline)
    def twice(value):
        return value * 2

    return twice(x)


def _compiled(x):
    return tf.function(lambda value: tf.function(lambda v: v * 3)(value) + 1, jit_compile=True)(x)


@tf.custom_gradient
def _with_gradient(x):
    return tf.exp(x), lambda dy: _while_of_defuns(dy, tf.constant(0.5, F64))


def while_of_defuns(x):
    return _while_of_defuns(x, tf.reduce_sum(x))


def defun_that_is_not_inlined(x):
    return _defun(x)


def compiled_by_xla(x):
    return _compiled(x)


def in_cond(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: while_of_defuns(x), lambda: _defun(x))


def in_while(x):
    return tf.while_loop(lambda i, _: i < 2, lambda i, value: (i + 1, tf.ensure_shape(_defun(value), x.shape)),
                         [0, x])[1]


def in_map(x):
    return tf.map_fn(lambda row: _while_of_defuns(row, tf.constant(2.0, F64)), x)


def in_case(x):
    return tf.switch_case(tf.cast(tf.reduce_sum(x), tf.int32) % 2, [lambda: _defun(x), lambda: while_of_defuns(x)])


def gradient_of_while(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(_with_gradient(x))
    return tape.gradient(loss, x)


def gradient_of_ctc(x):
    x = tf.cast(x, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(x)
        lengths = tf.fill([tf.shape(x)[0]], 2)
        loss = tf.nn.ctc_loss(tf.ones((tf.shape(x)[0], 2), tf.int32), tf.stack([x, x * 2, x * 3, -x, x]), lengths,
                              lengths + 3)
    return tape.gradient(loss, x), loss


def functions_in_functions(x):
    @defun.Defun(F64, noinline=True)
    def outer(value):
        return tf.cond(tf.reduce_sum(value) > 0, lambda: in_while(_defun(value)), lambda: while_of_defuns(value))

    return outer(x)


def of_datasets(x):
    doubled = tf.data.Dataset.from_tensor_slices(tf.zeros(3, F64)).map(lambda v: _while_of_defuns(
        v + 1, tf.constant(2.0, F64)))
    return x + doubled.reduce(tf.constant(0.0, F64), lambda total, v: total + v)


def three_deep(x):
    """A map in a loop in a branch."""
    return tf.cond(tf.reduce_sum(x) > -9, lambda: tf.while_loop(
        lambda i, _: i < 2, lambda i, value: (i + 1, in_map(value)), [0, x])[1], lambda: in_case(x))


PROGRAMS = (while_of_defuns, defun_that_is_not_inlined, compiled_by_xla, in_cond, in_while, in_map, in_case,
            gradient_of_while, gradient_of_ctc, functions_in_functions, of_datasets, three_deep)


def _partitioned(function, x):
    """Returns a function of one step as it is partitioned, and a reference to its trace, which is not kept."""
    traced = tracing.traced(lambda x: function(x), calls.Call(function, {}, (x,), {}))
    made = rank_graphs.RankGraphs(partitioning.partition(traced, partition_options.PartitionOptions(1, rows=4)))
    tf_compat.dismantle(traced.graph)
    return made, weakref.ref(traced.graph)


def _defined():
    """Returns the names of the functions that TensorFlow knows, of graphs that were partitioned."""
    return {name for name in context.context().list_function_names() if "_partitioned" in name}


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_functions_live_as_long_as_the_graph_that_calls_them(function):
    batches = [tf.random.stateless_normal((4, 3), (i, 7), dtype=F64) for i in range(2)]
    expected = [tf.nest.flatten(tf.function(function, autograph=False)(batch)) for batch in batches]
    before = _defined()
    made, trace = _partitioned(function, batches[0])
    gc.collect()
    # TensorFlow keeps what custom gradients refer to.
    assert trace() is None or function in (gradient_of_while, gradient_of_ctc), "the traced graph is kept"
    assert _defined() - before
    for mark in ("", "#1"):  # as where a function calls ours twice
        step = made.marked(mark)
        for batch, want in zip(batches, expected):
            for value, each in zip(tf.nest.flatten(step(batch)), want):
                bound = 1e-12 if each.dtype == F64 else 1e-5
                tf.debugging.assert_near(value, each, rtol=bound, atol=bound)
    del step
    made = weakref.ref(made)
    gc.collect()
    assert made() is None and not _defined() - before, "functions of a graph that is gone are kept"


def test_a_trace_that_is_not_partitioned_computes_the_same():
    """TensorFlow takes the first output of the node before a function that grows, so each input has its own node."""
    def step(x, y):
        return tf.reduce_max(tf.exp(y)), tf.reduce_min(tf.sigmoid(x))

    x, y = tf.constant([[1.0], [2.0]], F64), tf.constant([[3.0], [5.0]], F64)
    traced = tracing.traced(step, calls.Call(step, {}, (x, y), {}))
    made = rank_graphs.RankGraphs(partitioning.partition(traced, partition_options.PartitionOptions(1, rows=2)))
    for results in (traced(x, y), made.marked("")(x, y)):
        assert [float(value) for value in results] == [float(value) for value in step(x, y)]
