"""Datasets of which each rank makes its own rows: element by element, what one process reads."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import os
import pathlib
import tempfile
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.data import changing_shares
from tf_poseidon.data import datasets
from tf_poseidon.data import parts as parts_lib
from tf_poseidon.data import row_selection
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.strategy import row_maps

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
                found = [(tag.numpy()[:3], values(batch)) for tag, batch in selected.dataset.take(most)]
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


def check_split(build, tolerance=0.0, epochs=2):
    """Checks the rows that `strategy` gives to the steps of several ranks, whether each makes its own or takes them."""
    whole = build()
    expected = [[list(map(dense, tf.nest.flatten(batch))) for batch in whole] for _ in range(epochs)]
    assert expected[0]
    for rank, size in ((0, 2), (1, 2), (2, 3)):
        for batches, found in zip(expected, _split(build(), rank, size, epochs), strict=True):
            assert len(found) == len(batches)
            for own, batch in zip(found, batches, strict=True):
                for (part, of_rank), tensor in zip(own, batch, strict=True):
                    first, count = parts_lib.of_rank(len(tensor), rank, (1,) * size)
                    assert part.tolist() == [len(tensor), first if count else 0, count]
                    wanted = tensor[first:first + count] if count else tensor[:1]
                    if tolerance:
                        np.testing.assert_allclose(of_rank, wanted, rtol=tolerance)
                    else:
                        np.testing.assert_array_equal(of_rank, wanted)


def _split(dataset, rank, size, epochs):
    """Returns the batches of each epoch: of each tensor the part, and this rank's rows."""
    communicator, = join_loopback(1)
    communicator.use_for_ops()
    try:
        ranks = row_selection.Ranks(rank, (1,) * size, "data", by_rows=row_maps.by_rows)
        split = datasets.split_dataset(dataset, ranks, communicator)
        del dataset
        return [[[(leaf.part.numpy(), dense(leaf.value)) for leaf in tf.nest.flatten(batch)] for batch in split]
                for _ in range(epochs)]
    finally:
        communicator.goodbye()
        communicator.leave()


def dense(tensor):
    """Returns an array; a ragged tensor's has a row that is longer than all of these."""
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.to_dense(tensor).numpy()
    return (tensor.to_tensor(shape=[None, 9]) if isinstance(tensor, tf.RaggedTensor) else tensor).numpy()


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


def image(x):
    return tf.reshape(tf.cast(x, tf.float32) + tf.range(24.0), [4, 6, 1])


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


def saved(dataset):
    path = f"{FOLDER.name}/{next(NAMES)}"
    dataset.save(path)
    return path


def table_of(size):
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(
        tf.range(size, dtype=tf.int64), 7 * tf.range(size, dtype=tf.int64)), -1)


Named = collections.namedtuple("Named", "x parts")


@dataclasses.dataclass
class Data:
    x: tf.Tensor
    y: tf.Tensor

    def __tf_flatten__(self):
        return (), (self.x, self.y)

    @classmethod
    def __tf_unflatten__(cls, metadata, leaves):
        return cls(*leaves)


UNORDERED = tf.data.Options()
UNORDERED.deterministic = False
UNORDERED.experimental_slack = True
UNOPTIMIZED = tf.data.Options()
UNOPTIMIZED.experimental_optimization.apply_default_optimizations = False
UNOPTIMIZED.autotune.enabled = False
FOLDER = tempfile.TemporaryDirectory()
NAMES = itertools.count()
TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(tf.range(30), tf.range(30) * 7), -1)
layers = keras.layers
RESCALING = layers.Rescaling(1 / 256)
WORDS = layers.StringLookup(vocabulary=[str(i) for i in range(0, 23, 2)], num_oov_indices=2)
NUMBERS = layers.IntegerLookup(vocabulary=[5, 3, 12], output_mode="one_hot")
HASHES = layers.Hashing(7)
BUCKETS = layers.Discretization([2.5, 9.0])
CODES = layers.CategoryEncoding(23, output_mode="one_hot")
NORMAL = layers.Normalization(mean=4.0, variance=4.0)
NORMAL.build([None, 1])
CROP, RESIZING = layers.CenterCrop(2, 2), layers.Resizing(8, 4)
TEXTS = layers.TextVectorization(vocabulary=["1", "2"], output_sequence_length=2)
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
    "repeated behind a map that is shuffled":
        lambda: Dataset.range(7).shuffle(4, seed=2).map(double).repeat(3).batch(4),
    "repeated behind a map that does nothing": lambda: Dataset.range(7).map(double).shuffle(4, seed=2).take(-1).map(
        lambda x: {"x": x}).repeat(3).batch(4).shuffle(2, seed=1).map(lambda x: x).repeat(2),
    "repeated for ever": lambda: Dataset.range(7).map(double).repeat().batch(4),
    "batches repeated": lambda: Dataset.range(7).map(double).batch(4).repeat(3),
    "batches repeated for ever": lambda: Dataset.range(7).map(double).batch(4, drop_remainder=True).repeat(),
    "take, skip, shard": lambda: Dataset.range(40).map(double).skip(3).take(30).shard(2, 1).batch(4),
    "of batches": lambda: Dataset.range(40).map(double).batch(4).shuffle(4, seed=3).skip(1).take(6).shard(2, 0),
    "zipped": lambda: Dataset.zip((Dataset.range(23).map(double), Dataset.range(30))).batch(6),
    "both zipped": lambda: Dataset.zip((Dataset.range(23).map(pair), Dataset.range(30).map(double))).shuffle(
        5, seed=1).map(lambda parts, y: (parts["x"], y)).batch(6),
    "zipped batches":
        lambda: Dataset.zip((Dataset.range(23).map(pair).batch(6), Dataset.range(23).map(double).batch(6))),
    "concatenated batches":
        lambda: Dataset.range(9).map(double).batch(4).concatenate(Dataset.range(7).map(double).batch(4)),
    "cached": lambda: Dataset.range(23).map(double).cache().map(double).batch(6),
    "cached batches": lambda: Dataset.range(23).shuffle(9, seed=1).map(double).batch(6).cache().repeat(2),
    "filtered": lambda: Dataset.range(43).filter(lambda x: x % 3 > 0).map(double).batch(6),
    "filtered behind map": lambda: Dataset.range(43).map(double).filter(lambda x: x % 3 > 0).map(pair).batch(6),
    "interleaved": lambda: Dataset.range(5).interleave(lambda x: Dataset.range(x * 10, x * 10 + 5), cycle_length=2).map(
        double).batch(4),
    "flat": lambda: Dataset.range(5).flat_map(lambda x: Dataset.range(x)).map(double).batch(4),
    "unbatched": lambda: Dataset.range(23).batch(5).unbatch().map(double).batch(4),
    "generator":
        lambda: Dataset.from_generator(lambda: iter(range(13)), output_signature=tf.TensorSpec([], tf.int64)).map(
        double).batch(4),
    "strings": lambda: records().shuffle(10, seed=5).map(numbered, tf.data.AUTOTUNE).batch(6),
    "longer rows, cut": lambda: Dataset.range(23).map(longer).map(lambda x: tf.pad(x, [[0, 5]])[:5]).batch(6),
    "rows of any length as elements": lambda: Dataset.range(23).map(longer).filter(lambda x: x[0] != 3).map(
        tf.reduce_sum).batch(6),
    "ragged elements": lambda: Dataset.from_tensor_slices(tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7]])).map(
        lambda row: tf.reduce_sum(row)).batch(2),
    "sparse elements": lambda: Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(7))).map(
        tf.sparse.to_dense).batch(2),
    "padded to a size":
        lambda: Dataset.range(23).map(longer).padded_batch(6, padded_shapes=[7],
                                                       padding_values=tf.constant(-1, tf.int64)),
    "padded structure":
        lambda: Dataset.range(23).map(lambda x: (longer(x), x)).padded_batch(6, padded_shapes=([5], [])),
    "seeds of elements":
        lambda: Dataset.zip((Dataset.range(23), Dataset.random(seed=7).batch(2, drop_remainder=True))).map(
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
    "layers of keys": lambda: Dataset.range(23).batch(6).map(lambda x: (WORDS(tf.as_string(x)), NUMBERS(x), HASHES(x))),
    "layers of numbers": lambda: Dataset.range(23).map(lambda x: tf.cast(x, tf.float32)).batch(6).map(
        lambda x: (BUCKETS(x), CODES(tf.cast(x, tf.int64)), NORMAL(x[:, None]))),
    "layers of images": lambda: Dataset.range(23).map(image).batch(6).map(lambda x: (CROP(x), RESIZING(x))),
    "tables of batches": lambda: Dataset.range(46).batch(2, drop_remainder=True).batch(6).map(
        lambda x, table=table_of(9): table.lookup(x)),
    "parsed batches": lambda: Dataset.range(23).map(tf.as_string).batch(6).map(
        lambda x: (tf.io.decode_csv(x, [0])[0], tf.io.decode_raw(x, tf.uint8, fixed_length=2),
                   tf.strings.length(tf.strings.regex_replace(x, "1", "one")))),
    "fewer rows than ranks": lambda: Dataset.range(9).map(pair).batch(4).map(scaled).map(lambda x, y: x + y[:, 0]),
    "rows of a batch that is larger": lambda: Dataset.range(23).map(double).batch(100),
    "rows one by one": lambda: Dataset.range(5).map(double).batch(1),
    "batches of batches":
        lambda: Dataset.range(40).batch(3, drop_remainder=True).map(double).shuffle(9, seed=1).batch(4),
    "zipped with batches": lambda: Dataset.zip(
        (Dataset.range(23).map(double), Dataset.range(60).batch(2, drop_remainder=True))).shuffle(5, seed=1).batch(4),
    "one source of two": lambda: (lambda source: Dataset.zip(source.map(double), source.map(pair)))(
        Dataset.range(23)).batch(4),
    "batches of a dataset that is unbatched":
        lambda: Dataset.range(23).map(double).batch(6).unbatch().map(pair).batch(4),
    "named tuple": lambda: Dataset.range(9).map(lambda x: Named(x, {"b": x, "a": (double(x),)})).batch(4),
    "data class": lambda: Dataset.range(9).map(lambda x: Data(x, double(x))).batch(4),
    "tuple of one": lambda: Dataset.range(9).map(lambda x: (x,)).batch(4),
    "list, which is a tensor": lambda: Dataset.range(9).map(lambda x: [x, double(x)]).batch(4),
    "argument without value": lambda: Dataset.range(9).map(lambda x, y=None: double(x) if y is None else y).batch(4),
    "unknown rank": lambda: Dataset.range(9).map(lambda x: tf.numpy_function(double, [x], tf.int64, False)).batch(4),
    "size of batches in a tensor": lambda: Dataset.range(9).map(double).batch(tf.constant(4, tf.int64)),
    "all is taken": lambda: Dataset.range(9).map(double).take(-1).batch(4),
    "all is skipped": lambda: Dataset.range(9).map(double).skip(-1).batch(4),
    "small and complex numbers": lambda: Dataset.range(9).map(
        lambda x: (tf.cast(x, tf.bfloat16), tf.cast(x, tf.complex64), x > 3)).batch(4),
    "what a function has taken": lambda: Dataset.range(9).map(
        lambda x, table=table_of(9), offset=tf.Variable(5, dtype=tf.int64): table.lookup(x) + offset).shuffle(
            5, seed=1).batch(4),
    "what a function of batches has taken": lambda: Dataset.range(9).batch(4).map(
        lambda x, offset=tf.Variable(5, dtype=tf.int64): x + offset),
    "enumerated": lambda: Dataset.range(9).map(double).enumerate().map(lambda i, x: i * x).batch(4),
    "unordered": lambda: Dataset.range(23).map(double, 4, deterministic=False).batch(4).with_options(UNORDERED),
    "unoptimized": lambda: Dataset.range(7).shuffle(4, seed=2).map(double).repeat(2).batch(4).with_options(UNOPTIMIZED),
    "parallel interleave":
        lambda: Dataset.range(4).interleave(lambda x: Dataset.range(x + 2), num_parallel_calls=2).map(
        double).batch(4),
    "unique": lambda: Dataset.range(23).map(lambda x: x % 5).unique().map(double).batch(4),
    "random": lambda: Dataset.random(seed=3, rerandomize_each_iteration=True).take(9).map(lambda x: x // 2).batch(4),
    "number of elements asserted": lambda: Dataset.range(23).filter(lambda x: x % 3 > 0).map(double).apply(
        tf.data.experimental.assert_cardinality(15)).shuffle(9, seed=1).batch(4),
    "number of cached elements asserted": lambda: Dataset.range(7).map(double).cache().apply(
        tf.data.experimental.assert_cardinality(7)).batch(4),
    "number of batches asserted": lambda: Dataset.range(23).filter(lambda x: x % 3 > 0).map(double).batch(4).apply(
        tf.data.experimental.assert_cardinality(4)).repeat(2),
    "batches on a device": lambda: Dataset.range(7).map(double).shuffle(4, seed=2).batch(3).apply(
        tf.data.experimental.prefetch_to_device("/cpu:0")),
    "batches on a device, repeated": lambda: Dataset.range(7).map(double).shuffle(4, seed=2).batch(3).apply(
        tf.data.experimental.copy_to_device("/cpu:0")).repeat(2),
    "applied": lambda: Dataset.range(9).map(double).batch(4).apply(
        lambda first: first.concatenate(Dataset.range(7).map(double).batch(4))),
    "windows": lambda: Dataset.range(23).window(5).flat_map(lambda window: window.batch(5)).unbatch().map(double).batch(
        4),
    "snapshot": lambda: Dataset.range(9).map(double).snapshot(f"{FOLDER.name}/{next(NAMES)}").map(double).batch(4),
    "tensors": lambda: Dataset.from_tensors(tf.range(3)).repeat(9).map(double).batch(4),
    "counter": lambda: Dataset.counter(3, 2).take(9).map(double).batch(4),
    "no batch at all": lambda: Dataset.range(0).map(double).batch(4),
}


@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("build", DIVIDED.values(), ids=DIVIDED)
def test_each_rank_makes_its_own_rows(build, shares):
    report = check(build, shares, epochs=2, ranks=None if len(shares) == 2 else (1, 4))
    assert report.is_divided, report


def mapped():
    return Dataset.range(13).map(double)


DEPENDS = "which elements it makes may depend on all that it reads"
DENSE = "its batches are not dense tensors"
# What every rank makes whole, by name; and why.
LEFT = {
    "random numbers": (lambda: Dataset.range(13).map(drawn).batch(4), "its function has a RandomUniform"),
    "Python": (lambda: Dataset.range(13).map(lambda x: tf.ensure_shape(
        tf.py_function(double, [x], tf.int64), [])).batch(4), "its function calls Python"),
    "a dataset inside a map": (lambda: Dataset.range(13).window(3).map(
        lambda window: window.reduce(tf.constant(0, tf.int64), tf.add)).batch(4), "its function has a ReduceDataset"),
    "cached in front of shuffle": (lambda: mapped().cache().shuffle(5, seed=1).batch(4), "'shuffle' behind it"),
    "cached in front of repeat": (lambda: mapped().cache().repeat(2).batch(4), "'repeat' behind it"),
    "a variable that it assigns": (lambda: Dataset.range(13).map(
        lambda x, count=tf.Variable(0, dtype=tf.int64): x + count.assign_add(1)).batch(4), "has a AssignAddVariableOp"),
    "filter of batches": (lambda: mapped().batch(4).filter(lambda x: x[0] > 0), DEPENDS),
    "flat_map": (lambda: mapped().flat_map(lambda x: Dataset.range(x % 3)).batch(4), DEPENDS),
    "interleave": (lambda: mapped().interleave(lambda x: Dataset.range(x % 3)).batch(4), DEPENDS),
    "unbatch": (lambda: mapped().batch(6).unbatch().batch(4), DEPENDS),
    "rebatch": (lambda: mapped().batch(6).rebatch(4), DEPENDS),
    "scan": (lambda: mapped().scan(tf.constant(0, tf.int64), lambda sum, x: (sum + x, sum)).batch(4), DEPENDS),
    "take_while": (lambda: mapped().take_while(lambda x: x < 20).batch(4), DEPENDS),
    "unique behind map": (lambda: mapped().unique().batch(4), DEPENDS),
    "group_by_window": (lambda: mapped().group_by_window(
        lambda x: x % 3, lambda key, window: window.batch(3), window_size=3), DEPENDS),
    "bucket_by_sequence_length": (lambda: Dataset.range(13).map(longer).bucket_by_sequence_length(
        tf.size, [3], [2, 3]), DEPENDS),
    "ignore_errors": (lambda: Dataset.range(13).map(lambda x: 12 // (x % 5)).ignore_errors().batch(4), DEPENDS),
    "ignore_errors of batches":
        (lambda: Dataset.range(13).map(lambda x: 12 // (x % 10)).batch(3).ignore_errors(), DEPENDS),
    "choose_from_datasets": (lambda: Dataset.choose_from_datasets(
        [mapped(), mapped()], Dataset.range(20).map(lambda x: x % 2)).batch(4), DEPENDS),
    "rejection_resample": (lambda: mapped().rejection_resample(
        lambda x: tf.cast(x > 7, tf.int32), [0.5, 0.5], seed=3).batch(4), DEPENDS),
    "sample_from_datasets": (lambda: Dataset.sample_from_datasets([mapped(), mapped()], seed=3).batch(4), DEPENDS),
    "pad_to_cardinality": (lambda: mapped().map(lambda x: {"x": x}).apply(
        tf.data.experimental.pad_to_cardinality(16)).batch(4), "the elements of one"),
    "load": (lambda: Dataset.load(saved(mapped())).batch(4), ""),
    "elements on a device": (lambda: mapped().apply(
        tf.data.experimental.copy_to_device("/cpu:0")).batch(4), "copy batches"),
    "batches shuffled on a device": (lambda: mapped().batch(4).apply(
        tf.data.experimental.copy_to_device("/cpu:0")).shuffle(3, seed=1), "copy behind it"),
    "mapped elements shuffled on a device": (lambda: Dataset.range(13).apply(
        tf.data.experimental.copy_to_device("/cpu:0")).map(double).shuffle(3, seed=1).batch(4), "copy behind it"),
    "map_and_batch": (lambda: mapped().apply(tf.data.experimental.map_and_batch(double, 4)), DEPENDS),
    "shuffle_and_repeat": (lambda: mapped().apply(tf.data.experimental.shuffle_and_repeat(4, 2, 1)).batch(4), DEPENDS),
    "concatenated elements": (lambda: mapped().concatenate(mapped()).batch(4), "the elements of one"),
    "enumerated batches": (lambda: mapped().batch(4).enumerate().map(lambda i, x: x + i), "elements of other ones"),
    "padded to the longest": (lambda: Dataset.range(13).map(longer).padded_batch(4), "the longest row of a batch"),
    "ragged": (lambda: Dataset.range(13).map(longer).ragged_batch(4), DENSE),
    "sparse batches": (lambda: Dataset.range(13).map(longer).sparse_batch(4, [9]), DEPENDS),
    "sparse": (lambda: Dataset.range(13).map(lambda x: tf.sparse.from_dense([x, 0])).batch(4), DENSE),
    "nothing beside a tensor": (lambda: Dataset.range(13).map(lambda x: (x, None)).batch(4), DENSE),
    "strings": (lambda: Dataset.range(13).map(tf.strings.as_string).batch(4), "a string"),
    "map of full batches": (lambda: mapped().batch(4, drop_remainder=True).map(double), "batches of one size"),
    "map of batches of unknown rank": (lambda: Dataset.range(13).map(
        lambda x: tf.numpy_function(double, [x], tf.int64, False)).batch(4).map(double), "unknown rank"),
    "map of all rows": (lambda: mapped().batch(4).map(lambda x: tf.roll(x, 1, 0)), "may need all rows"),
    "texts": (lambda: Dataset.range(13).map(tf.as_string).batch(4).map(lambda x: TEXTS(x)), "has a StringSplitV2"),
    "strings of batches": (lambda: mapped().batch(4).map(tf.as_string).map(tf.strings.length), "returns a string"),
    "random layer of batches": (lambda: Dataset.range(13).map(image).batch(4).map(layers.RandomFlip(seed=1)),
                                "so what it makes of an element depends on those before"),
    "map to fewer rows": (lambda: mapped().batch(4).map(lambda x: x[:2]), "may need all rows"),
    "one shuffle of two": (lambda: (lambda shuffled: Dataset.zip(shuffled.map(double), shuffled.map(pair)))(
        Dataset.range(13).shuffle(9, seed=1)).batch(4), "two datasets read it"),
    "zipped batches of different sizes": (lambda: Dataset.zip(mapped().batch(4), mapped().batch(3)).map(
        lambda x, y: x), "batches of different sizes"),
    "of tf.compat.v1": (lambda: tf.compat.v1.data.Dataset.range(13).map_with_legacy_function(double).batch(4), ""),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_moved_stays_whole(name):
    build, reason = LEFT[name]
    report = check(build, (1, 1))
    assert not report.is_divided and reason in str(report), report
    if name != "nothing beside a tensor":  # else only so many parts are `OwnRows`
        check_split(build, epochs=1)


# What says something of a dataset, or reads it, but makes no other one; and what calls a function that does.
NO_DATASETS = {"apply", "as_numpy_iterator", "cardinality", "element_spec", "fingerprint", "get_single_element",
               "options", "reduce", "save"}


def test_every_method_of_datasets_is_documented_and_tested():
    here = pathlib.Path(__file__)
    table = (here.parents[2] / "docs" / "semantics.md").read_text()
    tests = here.read_text() + (here.parent / "test_published_inputs.py").read_text()
    methods = {name for name in dir(Dataset) if not name.startswith("_")} - NO_DATASETS
    assert not {name for name in methods if f"`{name}`" not in table or f".{name}(" not in tests}


@pytest.mark.parametrize("build", [
    lambda: Dataset.range(12).shuffle(12, seed=1).map(double).batch(4),
    lambda: Dataset.range(12).map(double).shuffle(12, seed=1).batch(4),
    lambda: Dataset.range(12).map(double).batch(4).shuffle(3, seed=1),
], ids=["in front of map", "behind map", "of batches"])
def test_iterators_of_the_user_and_of_each_fit_take_the_seeds_in_turn(build):
    whole, of_rank = build(), build()
    expected = [[values(batch)[0] for batch in whole] for _ in range(6)]
    with job_of_one():
        def select():
            return row_selection.select(of_rank, row_selection.Ranks(0, (1, 1), "data"))[0].dataset

        first, found = select(), [list(of_rank)]
        found += [[own for _, own in first], list(of_rank), [own for _, own in first]]
        found += [[own for _, own in select()], [own for _, own in first]]
    for epoch, (batches, own) in enumerate(zip(expected, found, strict=True)):
        rows = 4 if epoch in (0, 2) else 2
        np.testing.assert_array_equal([batch[:rows] for batch in batches], own)


@pytest.mark.parametrize("build", [
    lambda offset: Dataset.range(9).map(lambda x: x + offset).batch(4),
    lambda offset: Dataset.range(9).batch(4).map(lambda x: x + offset)], ids=["elements", "batches"])
def test_elements_of_an_epoch_see_what_was_assigned_in_front_of_it(build):
    offset = tf.Variable(0, dtype=tf.int64)
    with job_of_one():
        selected, _ = row_selection.select(build(offset), row_selection.Ranks(
            1, (1, 1), "data", by_rows=row_maps.by_rows))
        for epoch in range(2):
            offset.assign(100 * epoch)
            found = [own.numpy().tolist() for _, own in selected.dataset]
            assert found == [[100 * epoch + x for x in rows] for rows in ([2, 3], [6, 7], [8])]


def test_each_rank_has_a_file_of_its_cache(tmp_path):
    with job_of_one():
        own = [iter(row_selection.select(Dataset.range(12).map(double).batch(4).cache(str(tmp_path / "cache")),
                                         row_selection.Ranks(rank, (1, 1), "data"))[0].dataset) for rank in range(2)]
        read = [np.concatenate([next(rows)[1] for rows in own]) for _ in range(3)]
        assert [next(rows, None) for rows in own] == [None, None]
    np.testing.assert_array_equal(np.concatenate(read), 2 * np.arange(12))
    assert sorted(os.listdir(tmp_path)) == [f"cache.rank{rank}of2.batches.{file}" for rank in range(2) for file in (
        "data-00000-of-00001", "index")]


def test_a_cache_is_that_of_the_fit_before():
    communicator, = join_loopback(1)
    communicator.use_for_ops()
    try:
        dataset = Dataset.range(12).shuffle(12, seed=1).map(double).batch(4).cache()
        found = [[rows.value.numpy() for rows in datasets.split_dataset(
            dataset, row_selection.Ranks(0, (1, 1), "data"), communicator)] for _ in range(2)]
    finally:
        communicator.goodbye()
        communicator.leave()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("build", [
    lambda check: Dataset.range(13).apply(check).take(20).map(double).batch(4),
    lambda check: mapped().apply(check).batch(4), lambda check: mapped().batch(1).apply(check)],
    ids=["in front of map", "behind map", "of batches"])
@pytest.mark.parametrize("number", [12, 14])
def test_other_numbers_of_elements_than_asserted_are_an_error(build, number):
    """Of some rank."""
    dataset = build(tf.data.experimental.assert_cardinality(number))
    with pytest.raises(tf.errors.FailedPreconditionError, match=f"expected to contain {number} elements"):
        for rank in range(2):
            list(row_selection.select(dataset, row_selection.Ranks(rank, (1, 1), "data"))[0].dataset)


def test_zipped_batches_of_other_sizes_are_an_error():
    with job_of_one():
        dataset = Dataset.zip(mapped().batch(4), Dataset.range(14).batch(4))
        selected, _ = row_selection.select(dataset, row_selection.Ranks(0, (1, 1), "data"))
        with pytest.raises(tf.errors.InvalidArgumentError, match="must have the same first dimension"):
            list(selected.dataset)


def test_a_dataset_made_in_a_function_stays_whole():
    @tf.function
    def traced(size):
        dataset = Dataset.range(size).map(double).shuffle(3, seed=1).batch(size)
        selected, report = row_selection.select(dataset, row_selection.Ranks(0, (1, 1), "data"))
        assert selected is None and "make it outside" in report.sentence()
        return size

    traced(tf.constant(3, tf.int64))


def test_files_of_cached_elements_are_of_one_size_of_batches(tmp_path):
    """Which elements a rank has depends on it, so others' are not read."""
    for batch_size in (4, 6):
        check(lambda size=batch_size: mapped().cache(str(tmp_path / "cache")).batch(size), (1, 1))


@pytest.mark.parametrize("batch_size, rows", [(6, 3), (5, None)])
def test_sizes_are_static_where_all_ranks_have_as_many(batch_size, rows):
    for rank in range(2):
        selected, _ = row_selection.select(mapped().batch(batch_size, drop_remainder=True),
                                           row_selection.Ranks(rank, (1, 1), "data"))
        assert selected.dataset.element_spec[1].shape == (rows,)


def doubled(count):
    return Dataset.range(count).map(double)


def warm():
    options = tf.data.Options()
    options.experimental_warm_start = True
    return doubled(13).batch(4).with_options(options)


CHANGING = {
    "batches": lambda: doubled(500).shuffle(9, seed=4).map(double, 3).batch(7),
    "batches, repeated": lambda: doubled(30).batch(7).map(double).repeat(16),
    "batches, shuffled": lambda: doubled(500).repeat().batch(7, drop_remainder=True).shuffle(5, seed=1),
    "padded batches": lambda: doubled(500).padded_batch(7, [])}


@pytest.mark.parametrize("build", CHANGING.values(), ids=CHANGING)
def test_shares_change_while_ranks_read_ahead(build):
    begin, *later = (1, 1, 1), (4, 1, 2), (1, 9, 1)
    changing = [changing_shares.ChangingShares(begin) for _ in begin]
    with job_of_one(), concurrent.futures.ThreadPoolExecutor(len(begin)) as pool:
        readers = []
        for rank, each in enumerate(changing):
            selected, _ = row_selection.select(build().prefetch(1 + 3 * rank), row_selection.Ranks(
                rank, begin, "data", by_rows=row_maps.by_rows, changing=each))
            assert selected.follows_changes
            readers.append(iter(selected.dataset))
        used = []
        for step, whole in enumerate(build().take(70)):
            if step and step % 20 == 0 and later:
                begun, barrier, shares = [], threading.Barrier(len(begin)), later.pop(0)

                def largest(number, begun=begun, barrier=barrier):
                    begun.append(number)
                    barrier.wait(10)
                    return max(begun)

                list(pool.map(lambda each, shares=shares, largest=largest: each.change(shares, largest), changing))
            tags, batches = zip(*map(next, readers))
            np.testing.assert_array_equal(np.concatenate([
                batch[:tag[2]] for tag, batch in zip(tags, batches)]), whole)
            used.append(tuple(int(tag[2]) for tag in tags if int(tag[0]) == 7))
    assert [counts for counts in dict.fromkeys(used) if counts] == [(3, 2, 2), (4, 1, 2), (0, 7, 0)]


@pytest.mark.parametrize("build", [
    lambda: mapped().batch(4).prefetch(2).take(2), lambda: mapped().cache().batch(4), lambda: mapped().batch(4).cache(),
    lambda: mapped().batch(4).concatenate(mapped().batch(4)),
    lambda: Dataset.zip((mapped().batch(4), mapped().batch(4))),
    lambda: Dataset.range(13).filter(lambda x: x >= 0).map(double).batch(4), warm])
def test_shares_stay_where_ranks_may_have_made_unequally_many_batches(build):
    ranks = row_selection.Ranks(0, (1, 1), "data", changing=changing_shares.ChangingShares((1, 1)))
    selected, _ = row_selection.select(build(), ranks)
    assert not selected.follows_changes


def tags(elements, batch_size=2):
    """Returns the tags that a rank has with its elements."""
    with job_of_one():
        shares = Dataset.from_tensors(np.array([1, 1])).repeat()
        return [tag.numpy().tolist() for tag, _ in ops.own_elements(
            Dataset.from_tensor_slices((elements,)), shares, batch_size, False, 1)]


def test_tags_tell_elements_of_the_first_batch_from_others():
    (first, *others), seen = tags(["/a/x/1", "/a/x/2", "/a/x/3", "/a/x/4"]), set()
    assert first[:3] == [2, 1, 1] and others == [[2, 1, 1, 0]]
    assert tags(["/b/x/1", "b/x/2", "/a/x/4"]) == [first, [1, 0, 0, 0]]  # hosts may have folders elsewhere
    for elements in (["/a/x/2", "/a/x/1"], ["/a/y/1", "/a/x/2"], ["1", "2"], ["2", "1"], [1, 2], [2, 1], [[1], [3]]):
        seen.add(tags(elements)[0][3])
    assert len(seen | {0, first[3]}) == 9


def test_readers_of_own_elements_continue_where_they_were(tmp_path):
    with job_of_one():
        own = ops.own_elements(Dataset.from_tensor_slices((list(range(11)), [f"{i}" for i in range(11)])),
                               Dataset.from_tensors(np.array([1, 3])).repeat(), 4, False, 1)
        expected = [(int(number), text.numpy()) for _, number, text in own]
        assert [number for number, _ in expected] == [1, 2, 3, 5, 6, 7, 9, 10]
        for position in range(len(expected)):
            iterator = iter(own)
            for _ in range(position):
                next(iterator)
            saved = tf.train.Checkpoint(iterator=iterator).save(tmp_path / f"{position}" / "iterator")
            left = [(tag.numpy().tolist(), int(number), text.numpy()) for tag, number, text in iterator]
            assert [element[1:] for element in left] == expected[position:]
            restored = iter(own)
            tf.train.Checkpoint(iterator=restored).restore(saved)
            assert [(tag.numpy().tolist(), int(number), text.numpy()) for tag, number, text in restored] == left


def test_a_graph_that_cannot_be_rebuilt_is_read_whole(monkeypatch, caplog):
    def fails(*_):
        raise TypeError("no such attribute")

    monkeypatch.setattr(ops, "own_elements", fails)
    check_split(lambda: mapped().batch(4), epochs=1)
    assert "could not be rebuilt (TypeError: no such attribute)" in caplog.text


def test_input_independent_maps_with_python_and_random_numbers_of_own_rows():
    report = check(lambda: Dataset.range(13).map(lambda x: tf.ensure_shape(
        tf.py_function(double, [x], tf.int64), [])).batch(4), (1, 1, 1), is_independent=True)
    assert not report.undivided_maps
    ranks = row_selection.Ranks(1, (1, 1), "data", is_independent=True)
    with job_of_one():
        assert row_selection.select(Dataset.range(13).map(drawn).batch(4), ranks)[0] is not None
