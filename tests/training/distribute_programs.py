"""Programs about `poseidon.distribute`, for test_distribution.py: what it accepts, and what it does otherwise.

Run as `distribute_programs.py NAME ...` on several ranks. After each program it prints a line: the name, and "all
right" or the error with which the program ended.
"""

import contextlib
import sys
from unittest import mock

import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.one_process import partitioning

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def _weights():
    return tf.Variable(np.arange(12.).reshape(4, 3) / 10, name="weights")


def _batch(rows, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)), rng.normal(size=(rows, 3))


def _gradient(w, x, y):
    """The gradient of a mean of squares, by NumPy."""
    return 2 * x.T @ (x @ w - y) / y.size


def _step(w, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w - y)**2)
    gradient = tape.gradient(loss, w)
    w.assign_sub(gradient)
    return gradient


@program
def methods(strategy):
    """Methods of modules; two objects have two variables."""
    class Model(tf.Module):
        def __init__(self, factor):
            self.w = tf.Variable(_weights() * factor)

        @poseidon.distribute
        @tf.function
        def step(self, x, y):
            return _step(self.w, x, y)

    x, y = _batch(7)
    for factor in (1., 2.):
        model = Model(factor)
        for _ in range(2):
            want = _gradient(model.w.numpy(), x, y)
            np.testing.assert_allclose(model.step(x, y), want, rtol=1e-12)


@program
def structures(strategy):
    """Rows in structures, in other dimensions, and beside inputs without rows."""
    w = _weights()

    @poseidon.distribute(inputs={"batch": {"x": 1, "y": "rows"}, "table": "same"})
    def step(batch, table, rate, name="unused", flag=True):
        assert flag and name == "other"
        loss = tf.reduce_sum((tf.transpose(batch["x"]) @ w - batch["y"])**2) * rate + tf.reduce_sum(table)
        return {"loss": loss, "none": None, "rows": batch["y"] * 2, "number": 3}

    x, y = _batch(7)
    table = np.ones((2, 2))
    result = step({"x": x.T, "y": y}, table, np.float64(.5), name="other")
    np.testing.assert_allclose(result["loss"], ((x @ w.numpy() - y)**2).sum() / 2 + 4, rtol=1e-12)
    np.testing.assert_array_equal(result["rows"], 2 * y)
    assert result["none"] is None and int(result["number"]) == 3


@program
def traces(strategy):
    """Batches of other sizes do not cause a new trace; other types and constants do."""
    w = _weights()
    count = []

    @poseidon.distribute
    def step(x, y, factor=1.):
        count.append(1)
        return tf.cast(factor, x.dtype) * tf.reduce_mean((x @ tf.cast(w, x.dtype) - y)**2)

    def want(x, y):
        return ((x @ w.numpy() - y)**2).mean()

    for rows in (7, 1, 2, 30):
        np.testing.assert_allclose(step(*_batch(rows)), want(*_batch(rows)), rtol=1e-12)
    traced = len(count)
    step(*_batch(8))
    assert len(count) == traced
    x, y = _batch(5)
    np.testing.assert_allclose(step(x.astype("float32"), y.astype("float32")), want(x, y), rtol=1e-5)
    np.testing.assert_allclose(step(x, y, factor=3.), 3 * want(x, y), rtol=1e-12)
    assert len(count) > traced


@program
def within_a_function(strategy):
    """A loop of one's own over a dataset is a tf.function too."""
    w = _weights()

    @poseidon.distribute
    @tf.function
    def step(x, y):
        if tf.reduce_sum(x) > 1e6:  # for AutoGraph
            x = x / 1e6
        return _step(w, x, y)

    x, y = _batch(12)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)

    @tf.function
    def epoch():
        for batch in data:
            step(*batch)

    epoch()
    want = _weights().numpy()
    for i in range(0, 12, 5):
        want -= _gradient(want, x[i:i + 5], y[i:i + 5])
    np.testing.assert_allclose(w, want, rtol=1e-12)

    @tf.function
    def twice():
        step(x, y)
        return step(x, y)

    twice()
    for _ in range(2):
        want -= _gradient(want, x, y)
    np.testing.assert_allclose(w, want, rtol=1e-12)
    assert not strategy.plan.refusal, strategy.plan.refusal


@program
def split_datasets(strategy):
    """Batches that the strategy has split are joined again."""
    w = _weights()
    step = poseidon.distribute(tf.function(lambda x, y: _step(w, x, y)))
    x, y = _batch(12)
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    for i, batch in enumerate(strategy.experimental_distribute_dataset(whole)):
        want = _gradient(w.numpy(), x[5 * i:5 * i + 5], y[5 * i:5 * i + 5])
        np.testing.assert_allclose(step(*batch), want, rtol=1e-12)


@program
def nothing_to_sum(strategy):
    """Rows go in and come out; composite tensors are whole."""
    @poseidon.distribute
    def step(x, ragged):
        return x * 2 + ragged.values[0], ragged.row_lengths()

    x, _ = _batch(7)
    ragged = tf.ragged.constant([[1.], [2., 3.]], dtype=tf.float64)
    result, lengths = step(x, ragged)
    np.testing.assert_array_equal(result, 2 * x + 1)
    np.testing.assert_array_equal(lengths, [1, 2])


@program
def starts_equal(strategy):
    """Variables that differ between ranks get rank 0's values."""
    w = tf.Variable(np.full((4, 3), 1. + strategy.rank))

    @poseidon.distribute
    def step(x, y):
        return tf.reduce_sum(x @ w - y)

    x, y = _batch(5)
    np.testing.assert_allclose(step(x, y), (x @ np.ones((4, 3)) - y).sum(), rtol=1e-12)
    np.testing.assert_array_equal(w, np.ones((4, 3)))


def _failing_on_rank_1(strategy):
    """While rank 1 cannot partition graphs."""
    if strategy.rank != 1:
        return contextlib.nullcontext()
    return mock.patch.object(partitioning, "partition", side_effect=RuntimeError("no pass today"))


@program
def one_rank_without_the_pass(strategy):
    """Then all ranks compute whole batches: slower, but correct."""
    w = _weights()
    step = poseidon.distribute(tf.function(lambda x, y: _step(w, x, y)))
    with _failing_on_rank_1(strategy):
        for rows in (7, 1):
            x, y = _batch(rows)
            want = _gradient(w.numpy(), x, y)
            np.testing.assert_allclose(step(x, y), want, rtol=1e-12)
    assert step.report is None


@program
def eagerly(strategy):
    """Functions that run eagerly are given whole batches, also where each rank has its rows alone."""
    w = _weights()
    step = poseidon.distribute(tf.function(lambda x, y: _step(w, x, y)))
    x, y = _batch(7)
    own, = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((x, y)))
    tf.config.run_functions_eagerly(True)
    for batch in ((x, y), own):
        want = _gradient(w.numpy(), x, y)
        np.testing.assert_allclose(step(*batch), want, rtol=1e-12)
    tf.config.run_functions_eagerly(False)


@program
def without_grappler(strategy):
    """The graph is partitioned, but its exchanges are not planned."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": strategy.rank == 1})
    w = _weights()
    step = poseidon.distribute(tf.function(lambda x, y: _step(w, x, y)))
    for rows in (7, 12):
        x, y = _batch(rows)
        want = _gradient(w.numpy(), x, y)
        np.testing.assert_allclose(step(x, y), want, rtol=1e-12)
    assert step.report is not None


# ---- errors -------------------------------------------------------------------------------------


@program
def strict(strategy):
    with _failing_on_rank_1(strategy):
        poseidon.distribute(lambda x: x * 2)(np.ones((4, 2)))


@program
def different_rows(strategy):
    poseidon.distribute(lambda x, y: tf.reduce_sum(x) + tf.reduce_sum(y))(np.ones((4, 2)), np.ones((3, 2)))


@program
def other_batches(strategy):
    poseidon.distribute(lambda x: x * 2)(np.full((4, 2), 1. + strategy.rank))


@program
def ragged_rows(strategy):
    poseidon.distribute(lambda x: x, inputs={"x": "rows"})(tf.ragged.constant([[1.], [2., 3.]]))


@program
def unknown_input(strategy):
    poseidon.distribute(lambda x: x, inputs={"y": "rows"})(np.ones((4, 2)))


@program
def scalar_with_rows(strategy):
    poseidon.distribute(lambda x, y: x * y, inputs={"y": "rows"})(np.ones((4, 2)), np.float64(1))


@program
def other_structure(strategy):
    poseidon.distribute(lambda x: x[0], inputs={"x": ["rows", "same"]})([np.ones((4, 2))])


@program
def no_rows(strategy):
    poseidon.distribute(lambda x: x, inputs={"x": "same"})(np.ones((4, 2)))


if __name__ == "__main__":
    made = poseidon.PoseidonStrategy(policy="sfb", strict="strict" in sys.argv)
    for each in sys.argv[1:]:
        try:
            PROGRAMS[each](made)
            print(f"{each}: all right", flush=True)
        except Exception as error:
            if isinstance(error, AssertionError):
                raise
            print(f"{each}: {error}", flush=True)
