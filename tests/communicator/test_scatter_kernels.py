"""Our kernels of TensorFlow's ops that update some rows of a variable: the rows of one index in their order."""

import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.ops import library

ROWS, COLUMNS = 7, 40
COUNT = 4000  # from 1,024 on, TensorFlow's threads share them; enough elements for two threads here
UPDATES = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


@pytest.fixture(autouse=True)
def loaded():
    library.load()


def _case(update, dtype, count=COUNT):
    """Returns (initial values, indices, updates): some that no order of the updates but theirs gives the same bits."""
    rng = np.random.default_rng(1)
    initial = rng.normal(size=(ROWS, COLUMNS))
    updates = np.exp(rng.normal(size=(count, COLUMNS)) / 100) if update in ("mul", "div") else rng.normal(
        size=(count, COLUMNS))
    if dtype.startswith("complex"):
        initial = initial + 1j * initial[::-1]
        # Products of these are exact, however they are computed.
        updates = rng.choice([1, -1, 1j, -1j, 2, 0.5], updates.shape) if update in ("mul", "div") else (
            updates + 1j * updates[::-1])
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    return initial.astype(numpy_dtype), rng.integers(0, ROWS, count), updates.astype(numpy_dtype)


def _in_order(update, initial, indices, updates):
    result = initial.copy()
    for index, row in zip(indices, updates):
        result[index] = UPDATES[update](result[index], row)
    return result


def _of_resource(update, initial, indices, updates):
    variable = tf.Variable(initial)
    getattr(tf.raw_ops, f"ResourceScatter{update.capitalize()}")(
        resource=variable.handle, indices=indices, updates=updates)
    return variable.numpy()


def _of_reference(update, initial, indices, updates):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=initial, use_resource=False)
        session.run(variable.initializer)
        return session.run(getattr(tf.compat.v1, f"scatter_{update}")(variable, indices, updates))


@pytest.mark.parametrize("scatter", [_of_resource, _of_reference])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("update", UPDATES)
def test_rows_of_one_index_are_taken_in_their_order(update, dtype, scatter):
    initial, indices, updates = _case(update, dtype)
    expected = _in_order(update, initial, indices, updates)
    for index_dtype in (np.int32, np.int64):
        found = scatter(update, initial, indices.astype(index_dtype), updates)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("scatter", [_of_resource, _of_reference])
@pytest.mark.parametrize("indices, updates", [
    (np.arange(3), np.float32(2)), (np.zeros((0,), int), np.zeros((0, COLUMNS), "f4")),
    (np.array([[1, 2], [1, 6]]), np.ones((2, 2, COLUMNS), "f4")), (np.int64(5), np.ones(COLUMNS, "f4"))])
def test_indices_of_all_shapes_are_scattered(scatter, indices, updates):
    initial, _, _ = _case("sub", "float32")
    rows = np.broadcast_to(updates, (*indices.shape, COLUMNS)).reshape(-1, COLUMNS)
    found = scatter("sub", initial, indices, updates)
    np.testing.assert_array_equal(found, _in_order("sub", initial, indices.reshape(-1), rows))


@pytest.mark.parametrize("update, initial, indices, updates, message", [
    ("add", np.ones((3, 2)), [0, 3], np.ones((2, 2)), r"indices\[1\] = 3 is not in \[0, 3\)"),
    ("add", np.ones((3, 2)), [[0, -1]], np.ones((1, 2, 2)), r"indices\[0,1\] = -1 is not in \[0, 3\)"),
    ("add", np.ones((0, 2)), [0], np.ones((1, 2)), r"indices\[0\] = 0 is not in \[0, 0\)"),
    ("sub", np.ones((3, 2)), [0, 1], np.ones((2, 3)), r"Must have updates.shape = indices.shape \+ params.shape\[1:\]"),
    ("sub", np.float64(1), [0], np.ones((1, 2)), "params must be at least 1-D, got shape"),
    ("div", np.ones((3, 2)), [0], np.array([[1.0, 0.0]]), "updates must not contain 0"),
])
def test_indices_and_updates_that_do_not_fit_are_refused(update, initial, indices, updates, message):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        _of_resource(update, initial, indices, updates)


def test_what_was_read_before_stays_as_it_was():
    variable = tf.Variable(np.zeros((3, 2)))
    read = [variable.value()]
    for _ in range(2):  # the first copies the variable, later ones need not
        tf.raw_ops.ResourceScatterAdd(resource=variable.handle, indices=[1], updates=tf.ones([1, 2], tf.float64))
        read.append(variable.value())
    assert [int(value[1, 0]) for value in read] == [0, 1, 2]
