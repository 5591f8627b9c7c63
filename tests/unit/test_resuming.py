"""Programs that resume from backups end where undisturbed ones do, bit for bit: without a job."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import resumed_programs as programs
import tensorflow as tf

from tf_poseidon.errors import JobError
from tf_poseidon.keras_hook import hooks
from tf_poseidon.keras_hook.checkpoints.orders import EpochOrder
from tf_poseidon.keras_hook.checkpoints.orders import order

train = functools.partial(programs.train, scope=contextlib.nullcontext)


@pytest.fixture(autouse=True)
def hooked():
    floatx = keras.config.floatx()  # which the programs change
    with hooks.installed(alone=True):
        yield
    keras.config.set_floatx(floatx)
    keras.backend.clear_session()  # of the policy that Keras has made of the other one


@pytest.mark.parametrize("data, after, options", [
    ("arrays", 13, {}), ("reshuffled dataset", 14, {"save_freq": 1}), ("arrays", 12, {"save_freq": 1}),
    ("reshuffled dataset", 2, {"save_freq": 2}), ("arrays", 4, {"save_freq": 1, "steps_per_execution": 4}),
    ("reshuffled dataset", 14, {"save_freq": 5, "validates": True}), ("arrays", 13, {"save_freq": 4, "plateau": True}),
    ("reshuffled dataset", 13, {"plateau": True})])
def test_ends_where_an_undisturbed_one_does(data, after, options, tmp_path):
    weights, logs = train(None, data, **options)
    assert train(tmp_path, data, after=after, **options) is None
    found, found_logs = train(tmp_path, data, **options)
    assert found_logs and found_logs == {epoch: logs[epoch] for epoch in found_logs}
    assert all(map(np.array_equal, weights, found))


@pytest.mark.parametrize("data", programs.DATA)
def test_data_continue_where_they_were(data, tmp_path):
    weights, logs = train(None, data)
    for after in (6, 10):  # the first is the end of an epoch, in some
        assert train(tmp_path, data, after=after, save_freq=2) is None
    found, found_logs = train(tmp_path, data, save_freq=2)
    assert found_logs == {epoch: logs[epoch] for epoch in found_logs}
    assert all(map(np.array_equal, weights, found))


def test_two_backups(tmp_path):
    x, y = programs.arrays()
    model = programs.net()
    model.compile("sgd", "mse")
    backups = [keras.callbacks.BackupAndRestore(tmp_path / name, delete_checkpoint=False) for name in "ab"]
    model.fit(x, y, verbose=0, callbacks=backups)
    assert all((tmp_path / name / "latest.weights.h5").exists() for name in "ab")


def test_fewer_data_than_before_are_refused(tmp_path):
    train(tmp_path, "dataset in order", after=6, save_freq=6)
    with pytest.raises(JobError, match="after step 6 of an epoch, but the data have only 5; give fit the data"):
        train(tmp_path, "PyDataset", save_freq=6)


D, ROWS = tf.data.Dataset, tf.data.Dataset.range(9)
OFFSET = tf.Variable(1, dtype=tf.int64)


@tf.autograph.experimental.do_not_convert
def some(x):
    return x + tf.random.uniform([], 0, 5, tf.int64)


@pytest.mark.parametrize("dataset, expected", [
    (ROWS.map(lambda x: x + 1, num_parallel_calls=2).batch(2).prefetch(1), EpochOrder.SAME),
    (ROWS.shuffle(3, reshuffle_each_iteration=False).cache().skip(1), EpochOrder.SAME),
    (D.zip((ROWS.shuffle(3), ROWS)).padded_batch(2), EpochOrder.RESHUFFLED),
    (ROWS.map(lambda x: tf.random.stateless_uniform([], [0, x])), EpochOrder.SAME),
    (ROWS.map(lambda x: tf.cond(x > 3, lambda: x, lambda: x + 1)), EpochOrder.SAME),
    (ROWS.map(lambda x: tf.cond(x > 3, lambda: some(x), lambda: x)), EpochOrder.CONTINUED),
    (ROWS.map(some).batch(2), EpochOrder.CONTINUED), (ROWS.shuffle(3).repeat(2), EpochOrder.CONTINUED),
    (ROWS.map(lambda x: x * OFFSET), EpochOrder.SAME),
    (ROWS.map(lambda x: x * OFFSET.assign_add(1)), EpochOrder.CONTINUED),
    (ROWS.map(lambda x: tf.py_function(int, [x], tf.int64)), EpochOrder.CONTINUED),
    (ROWS.interleave(lambda x: D.range(x)), EpochOrder.CONTINUED),
    (ROWS.concatenate(ROWS.shuffle(3)), EpochOrder.CONTINUED),
    (D.from_generator(lambda: range(3), output_signature=tf.TensorSpec([], tf.int32)), EpochOrder.CONTINUED)])
def test_the_order_of_epochs_is_known_from_the_dataset(dataset, expected):
    assert order(dataset) is expected


def test_reshuffled_dataset_depends_on_iterators_only():
    def third(begin):
        tf.random.set_seed(1)
        dataset = ROWS.shuffle(9, seed=3).map(lambda x: x + 1).prefetch(2)
        for _ in range(2):
            begin(iter(dataset))
        return list(dataset.as_numpy_iterator())

    assert third(list) == third(lambda iterator: None) != list(range(1, 10))
