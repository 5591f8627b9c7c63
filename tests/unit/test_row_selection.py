"""Datasets of which each rank makes its own rows: element by element, what one process reads."""

import contextlib
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.data import parts as parts_lib
from tf_poseidon.data import row_selection
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.one_process import row_maps

Dataset = tf.data.Dataset
SHARES = ((1, 1), (3, 1, 1, 2, 1))


@contextlib.contextmanager
def job_of_one():
    """A job of one process: its first batch is compared with itself."""
    communicator, = join_loopback(1)
    communicator.use_for_ops()
    try:
        yield
        communicator.goodbye()
    finally:
        communicator.leave()


def values(element):
    return [np.asarray(tensor) for tensor in tf.nest.flatten(element)]


def read(dataset, epochs, most=50):
    """Returns the batches of each epoch: what one process reads."""
    return [[values(batch) for batch in dataset.take(most)] for _ in range(epochs)]


def check(build, shares, epochs=1, most=50, is_independent=False, ranks=None, by_rows=row_maps.by_rows):
    """Checks that the rows of ranks are those of the batches of one process; returns the report of the last rank.

    Args:
        build: Returns a dataset, always the same.
        shares: By rank.
        epochs: How many iterators are made of each.
        most: How many batches are compared.
        is_independent, by_rows: Same as in `row_selection.Ranks`.
        ranks: The ranks whose rows are compared, None for all.
    """
    whole = build()
    expected = read(whole, epochs, most)
    with job_of_one():
        for rank in range(len(shares)) if ranks is None else ranks:
            selected, report = row_selection.select(build(), row_selection.Ranks(
                rank, shares, "data", is_independent, by_rows))
            assert (selected is not None) == report.is_divided
            if selected is None:
                return report
            gc.collect(1)  # the user's dataset
            assert selected.dataset.cardinality() == whole.cardinality()
            tf.nest.assert_same_structure(selected.dataset.element_spec[1], whole.element_spec)
            for epoch, batches in enumerate(expected):
                found = [(part.numpy(), values(batch)) for part, batch in selected.dataset.take(most)]
                assert len(found) == len(batches), (epoch, rank)
                for number, ((part, own), batch) in enumerate(zip(found, batches, strict=True)):
                    total = len(batch[0])
                    first, count = parts_lib.of_rank(total, rank, shares)
                    assert part.tolist() == [total, first if count else 0, count]
                    for tensor, of_rank in zip(batch, own, strict=True):
                        np.testing.assert_array_equal(  # a rank without rows has the first one
                            of_rank, tensor[first:first + count] if count else tensor[:1],
                            err_msg=f"rank {rank}, epoch {epoch}, batch {number}")
    return report


def double(x):
    return x * 2


def pair(x):
    return {"x": tf.cast(x, tf.float32) / 4, "y": (x, x % 2)}


def drawn(x):
    return tf.cast(x, tf.float32) + tf.random.uniform([], seed=3)


def drawn_of_seed(x, seed):
    return tf.cast(x, tf.float32) + tf.random.stateless_uniform([], seed)


def longer(x):
    return tf.fill([x % 5 + 1], x)


def checked(x):
    tf.debugging.assert_less(x, tf.constant(99, tf.int64))
    return x


def scaled(parts):
    return tf.where(parts["x"] > 3, parts["x"], 0) / 8, tf.one_hot(parts["y"][1], 2)


def shaped(x):
    return tf.reshape(tf.tile(x[:, None], [1, 3]), [tf.shape(x)[0], 3]) + tf.range(3, dtype=x.dtype)


def records():
    return Dataset.from_tensor_slices([f"record {i}" for i in range(23)])


def numbered(text):
    return tf.strings.to_number(tf.strings.split(text)[1])


TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(30), tf.range(30) * 7), -1)
RESCALING = keras.layers.Rescaling(1 / 256)
OFFSET = tf.Variable(5, dtype=tf.int64, trainable=False)

# What is made for a rank's rows alone, by name.
DIVIDED = {
    "map": lambda: Dataset.range(23).map(double).batch(6),
    "parallel map": lambda: Dataset.range(23).map(double, tf.data.AUTOTUNE).batch(6).prefetch(2),
    "parallel batch": lambda: Dataset.range(23).map(double, 4).batch(6, num_parallel_calls=2),
    "full batches": lambda: Dataset.range(23).map(pair).batch(6, drop_remainder=True),
    "structure": lambda: Dataset.range(23).map(pair).map(lambda parts: (parts["x"], *parts["y"])).batch(4),
    "shuffled": lambda: Dataset.range(23).shuffle(10, seed=1).map(double).batch(6),
    "shuffled behind map": lambda: Dataset.range(23).map(double).shuffle(10, seed=1).batch(6),
    "shuffled once": lambda: Dataset.range(23).map(double).shuffle(9, seed=1, reshuffle_each_iteration=False).batch(6),
    "repeated": lambda: Dataset.range(7).map(double).repeat(3).batch(4),
    "repeated, shuffled": lambda: Dataset.range(7).shuffle(4, seed=2).repeat(3).map(double).shuffle(3, seed=4).batch(4),
    "repeated behind a map that is shuffled": lambda: Dataset.range(7).shuffle(4, seed=2).map(double).repeat(3).batch(4),
    "repeated for ever": lambda: Dataset.range(7).map(double).repeat().batch(4),
    "batches repeated": lambda: Dataset.range(7).map(double).batch(4).repeat(3),
    "batches repeated for ever": lambda: Dataset.range(7).map(double).batch(4, drop_remainder=True).repeat(),
    "take, skip, shard": lambda: Dataset.range(40).map(double).skip(3).take(30).shard(2, 1).batch(4),
    "of batches": lambda: Dataset.range(40).map(double).batch(4).shuffle(4, seed=3).skip(1).take(6).shard(2, 0),
    "zipped": lambda: Dataset.zip((Dataset.range(23).map(double), Dataset.range(30))).batch(6),
    "both zipped": lambda: Dataset.zip((Dataset.range(23).map(pair), Dataset.range(30).map(double))).shuffle(
        5, seed=1).map(lambda parts, y: (parts["x"], y)).batch(6),
    "zipped batches": lambda: Dataset.zip((Dataset.range(23).map(pair).batch(6), Dataset.range(23).map(double).batch(6))),
    "concatenated batches": lambda: Dataset.range(9).map(double).batch(4).concatenate(Dataset.range(7).map(double).batch(4)),
    "cached": lambda: Dataset.range(23).map(double).cache().map(double).batch(6),
    "cached batches": lambda: Dataset.range(23).shuffle(9, seed=1).map(double).batch(6).cache().repeat(2),
    "filtered": lambda: Dataset.range(43).filter(lambda x: x % 3 > 0).map(double).batch(6),
    "filtered behind map": lambda: Dataset.range(43).map(double).filter(lambda x: x % 3 > 0).map(pair).batch(6),
    "interleaved": lambda: Dataset.range(5).interleave(lambda x: Dataset.range(x * 10, x * 10 + 5), cycle_length=2).map(
        double).batch(4),
    "flat": lambda: Dataset.range(5).flat_map(lambda x: Dataset.range(x)).map(double).batch(4),
    "unbatched": lambda: Dataset.range(23).batch(5).unbatch().map(double).batch(4),
    "generator": lambda: Dataset.from_generator(lambda: iter(range(13)), output_signature=tf.TensorSpec([], tf.int64)).map(
        double).batch(4),
    "strings": lambda: records().shuffle(10, seed=5).map(numbered, tf.data.AUTOTUNE).batch(6),
    "longer rows, cut": lambda: Dataset.range(23).map(longer).map(lambda x: tf.pad(x, [[0, 5]])[:5]).batch(6),
    "rows of any length as elements": lambda: Dataset.range(23).map(longer).filter(lambda x: x[0] != 3).map(
        tf.reduce_sum).batch(6),
    "ragged elements": lambda: Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7]])).map(
        lambda row: tf.reduce_sum(row)).batch(2),
    "sparse elements": lambda: Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(7))).map(
        tf.sparse.to_dense).batch(2),
    "padded to a size": lambda: Dataset.range(23).map(longer).padded_batch(6, padded_shapes=[7], padding_values=tf.constant(-1, tf.int64)),
    "padded structure": lambda: Dataset.range(23).map(lambda x: (longer(x), x)).padded_batch(6, padded_shapes=([5], [])),
    "seeds of elements": lambda: Dataset.zip((Dataset.range(23), Dataset.random(seed=7).batch(2, drop_remainder=True))).map(
        drawn_of_seed, tf.data.AUTOTUNE).batch(6),
    "table and variable": lambda: Dataset.range(23).map(lambda x: TABLE.lookup(tf.cast(x, tf.int32))).map(
        lambda x: tf.cast(x, tf.int64) + OFFSET).batch(6),
    "numpy": lambda: Dataset.range(23).map(lambda x: tf.ensure_shape(tf.numpy_function(
        lambda x: x + 1, [x], tf.int64, stateful=False), [])).batch(6),
    "assertion": lambda: Dataset.range(23).map(checked).batch(6),
    "options": lambda: Dataset.range(23).map(double).batch(6).with_options(tf.data.Options()).prefetch(1),
    "map of batches": lambda: Dataset.range(23).map(pair).batch(6).map(scaled, tf.data.AUTOTUNE).prefetch(1),
    "only maps of batches": lambda: Dataset.range(23).shuffle(9, seed=1).batch(6).map(double).map(shaped),
    "layers": lambda: Dataset.range(23).map(pair).batch(6).map(lambda parts: (RESCALING(parts["x"]), parts["y"][0])),
    "fewer rows than ranks": lambda: Dataset.range(9).map(pair).batch(4).map(scaled).map(lambda x, y: x + y[:, 0]),
    "rows of a batch that is larger": lambda: Dataset.range(23).map(double).batch(100),
    "rows one by one": lambda: Dataset.range(5).map(double).batch(1),
    "no batch at all": lambda: Dataset.range(0).map(double).batch(4),
}


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("build", DIVIDED.values(), ids=DIVIDED)
def test_each_rank_makes_its_own_rows(build, shares):
    report = check(build, shares, epochs=2)
    assert report.is_divided, report
