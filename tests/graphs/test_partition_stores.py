"""Stacks and TensorArrays, which TensorFlow 1 uses for loops and their gradients, partitioned on many ranks."""

import collections

import numpy as np
from partition_families import v1_control_flow
import partitioning
import pytest
import tensorflow as tf
from tensorflow.python.ops import rnn

v1 = tf.compat.v1
raw = tf.raw_ops
_FEATURES, _STEPS = 4, 6


def _rows(*shape, name="x"):
    marked, = partitioning.rows(v1.placeholder(tf.float64, shape, name=name))
    return marked


def _feeds(**shapes):
    """Returns values for inputs of these shapes, whose first size is replaced by numbers of rows."""
    rng = np.random.default_rng(0)
    return [{name: rng.normal(size=(rows, *shape)) for name, shape in shapes.items()} for rows in (7, 1, 2)]


_SEQUENCES = _feeds(x=(_STEPS, _FEATURES))


def _variable(name, *shape):
    values = np.sin(np.arange(np.prod(shape))).reshape(shape)
    return v1.get_variable(name, initializer=tf.constant(values), use_resource=True)


def _trained(loss):
    return [loss, *tf.gradients(loss, v1.trainable_variables())]


class _LSTM:
    """A cell for dynamic_rnn."""

    output_size, state_size = 3, (3, 3)

    def __init__(self, name, inputs=_FEATURES):
        self._kernel, self._bias = _variable(f"{name}/kernel", inputs + 3, 12), _variable(f"{name}/bias", 12)

    def zero_state(self, batch, dtype):
        return (tf.zeros([batch, 3], dtype),) * 2

    def __call__(self, x, state, scope=None):
        memory, h = state
        gates = tf.nn.bias_add(tf.matmul(tf.concat([x, h], 1), self._kernel), self._bias)
        i, j, f, o = tf.split(gates, 4, 1)
        memory = tf.sigmoid(f + 1) * memory + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(memory)
        return h, (memory, h)


def _dynamic_rnn(x, *names, **options):
    for name in names:
        with v1.variable_scope(f"of_{name}"):
            x, state = rnn.dynamic_rnn(_LSTM(name, x.shape[-1]), x, dtype=tf.float64, **options)
    return x, state


def _lengths(x):
    return tf.reduce_sum(tf.cast(x[:, :, 0] > 0, tf.int32), 1)


def _loop(step, h, steps=3):
    return v1.while_loop(lambda i, _: i < steps, lambda i, h: (i + 1, step(i, h)), (tf.constant(0), h))[1]


def stacks():
    x, kernel = _rows(None, _STEPS, _FEATURES), _variable("kernel", 4, 4)
    return _trained(tf.reduce_mean(_loop(lambda i, h: tf.tanh((x[:, i] + h) @ kernel), tf.zeros_like(x[:, 0])) ** 2))


def arrays():
    x, kernel = _rows(None, _STEPS, _FEATURES), _variable("kernel", 4, 4)
    read = tf.TensorArray(tf.float64, size=_STEPS).unstack(tf.transpose(x, [1, 0, 2]))

    def step(i, h, written):
        h = tf.tanh((read.read(i) + h) @ kernel)
        return i + 1, h, written.write(i, h)

    _, _, written = v1.while_loop(lambda i, *_: i < _STEPS, step, (
        tf.constant(0), tf.zeros_like(x[:, 0]), tf.TensorArray(tf.float64, size=_STEPS)))
    return _trained(tf.reduce_mean(written.stack() ** 2))


def lstm():
    return _trained(tf.reduce_mean(_dynamic_rnn(_rows(None, _STEPS, _FEATURES), "a")[0] ** 2))


def lstm_of_any_length():
    return _trained(tf.reduce_mean(_dynamic_rnn(_rows(None, None, _FEATURES), "a")[0][:, -1] ** 2))


def state_of_lstm():
    return _trained(tf.reduce_mean(_dynamic_rnn(_rows(None, _STEPS, _FEATURES), "a")[1][1] ** 2))


def two_lstms():
    y, _ = _dynamic_rnn(_rows(None, _STEPS, _FEATURES), "a", "b", swap_memory=True)
    return _trained(tf.reduce_mean(y ** 2))


def lstm_both_ways():
    x = _rows(None, _STEPS, _FEATURES)
    y, _ = rnn.bidirectional_dynamic_rnn(_LSTM("a"), _LSTM("b"), x, sequence_length=_lengths(x), dtype=tf.float64)
    return _trained(tf.reduce_mean(tf.concat(y, 2) ** 2))


def attention():
    """Pushes dimensions of one element."""
    x, kernel = _rows(None, _STEPS, _FEATURES), _variable("kernel", 4, 4)

    def step(i, h):
        scores = tf.nn.softmax(x @ (h @ kernel)[:, :, None], 1)
        values = tf.exp(x[:, i])
        return tf.tanh(tf.reduce_sum(scores * x, 1) + values / tf.reduce_sum(values, 1, keepdims=True))

    return _trained(tf.reduce_mean(_loop(step, tf.zeros_like(x[:, 0])) ** 2))


def loops_in_loops():
    x, kernel = _rows(None, _STEPS, _FEATURES), _variable("kernel", 4, 4)

    def step(i, h):
        read = tf.TensorArray(tf.float64, size=2, clear_after_read=False).unstack(tf.stack([x[:, i], h]))

        def inner(j, h, written):
            h = tf.tanh((read.read(j) + h) @ kernel)
            return j + 1, h, written.write(j, h)

        written = v1.while_loop(lambda j, *_: j < 2, inner, (tf.constant(0), h, tf.TensorArray(tf.float64, size=2)))[2]
        return tf.reduce_sum(written.stack(), 0)

    return _trained(tf.reduce_mean(_loop(step, tf.zeros_like(x[:, 0])) ** 2))


def conditions_in_loops():
    x, kernel = _rows(None, _STEPS, _FEATURES), _variable("kernel", 4, 4)

    def step(i, h):
        return v1.cond(tf.equal(i % 2, 0), lambda: tf.tanh((x[:, i] + h) @ kernel), lambda: tf.sin(h) * x[:, i])

    return _trained(tf.reduce_mean(_loop(step, tf.zeros_like(x[:, 0])) ** 2))


def array_of_weights():
    """The gradient of an array of whole tensors holds summands."""
    x, kernels = _rows(None, _STEPS, _FEATURES), _variable("kernels", 3, 4, 4)
    read = tf.TensorArray(tf.float64, size=3).unstack(kernels)
    return _trained(tf.reduce_mean(_loop(lambda i, h: tf.tanh((x[:, i] + h) @ read.read(i)),
                                         tf.zeros_like(x[:, 0])) ** 2))


# By program: how many sums are exchanged, of the loss and per variable; no more.
_SUMS = {stacks: 2, arrays: 2, lstm: 3, lstm_of_any_length: 3, state_of_lstm: 3, two_lstms: 5, lstm_both_ways: 5,
         attention: 2, loops_in_loops: 2, conditions_in_loops: 2, array_of_weights: 2}


@pytest.mark.parametrize("built", _SUMS, ids=lambda built: built.__name__)
def test_loops_run_on_rows(built):
    made = partitioning.check(v1_control_flow(built), _SEQUENCES, optimize=built in (stacks, arrays))
    kinds = collections.Counter(exchange.kind for exchange in made.report.exchanges)
    assert not made.report.whole
    assert kinds == {"sum": _SUMS[built], **({"max": 2} if built is lstm_both_ways else {})}
    assert not any(exchange.loop for exchange in made.report.exchanges)


def test_what_is_kept_across_batches_is_whole():
    def build():
        x, kernel = v1.placeholder(tf.float64, [None, _STEPS, _FEATURES], name="x"), _variable("kernel", 4, 4)
        weights = kernel.read_value()

        def step(i, *arrays):
            batch, = partitioning.rows(tf.reshape(x[:, 2 * i:2 * i + 2], [-1, 2, _FEATURES]))
            h = _loop(lambda j, h: tf.tanh((batch[:, j] + h) @ weights), tf.zeros_like(batch[:, 0]), steps=2)
            values = h, tf.reduce_mean(h ** 2), tf.gradients(tf.reduce_mean(h ** 2), weights)[0]
            return i + 1, *(array.write(i, value) for array, value in zip(arrays, values))

        arrays = [tf.TensorArray(tf.float64, size=3) for _ in range(3)]
        _, *arrays = v1.while_loop(lambda i, *_: i < 3, step, (tf.constant(0), *arrays), parallel_iterations=1)
        return [array.stack() for array in arrays]

    made = partitioning.check(v1_control_flow(build), _SEQUENCES, optimize=False)
    assert sorted(exchange.kind for exchange in made.report.exchanges) == ["rows", "sum", "sum"]
    assert {op.op for op in made.report.whole} == {"TensorArrayWriteV3"}


def test_inputs_with_other_numbers_of_rows_have_loops_and_stacks_of_their_own():
    def build():
        outputs = []
        for x in (_rows(None, _FEATURES), _rows(None, _FEATURES, name="z")):
            outputs.append(_loop(lambda i, total: total + tf.reduce_sum(x[:, i]), tf.constant(0.0, tf.float64)))
            stack = raw.StackV2(max_size=-1, elem_type=x.dtype)
            with tf.control_dependencies([raw.StackPushV2(handle=stack, elem=x)]):
                popped = raw.StackPopV2(handle=stack, elem_type=x.dtype)
            outputs += [tf.reduce_sum(popped, 0), popped * tf.ones([tf.shape(x)[0], 1], x.dtype)]
        return outputs

    values = _feeds(x=(_FEATURES,), z=(_FEATURES,))
    partitioning.check(v1_control_flow(build), [{"x": one["x"], "z": other["z"]}
                                                for one, other in zip(values, values[1:])], optimize=False)
