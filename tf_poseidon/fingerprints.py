"""Fingerprints of batches, by which ranks find that their data differ, and how.

Tests: tests/unit/test_data.py, tests/faults/test_failures.py.
"""

import hashlib
from typing import Any

import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.communicator import Communicator
from tf_poseidon.errors import GraphError

_GLOBAL = "Every rank takes the whole global batch and computes its part of it"
_SEED = ("Seed whatever shuffles or generates the data: keras.utils.set_random_seed(...) before the dataset is "
         "created, shuffle(seed=...), a seeded generator; in a parallel map, take random numbers from seeds of the "
         "elements (docs/semantics.md, 'Augmentation')")


def fingerprint(batch: Any) -> tf.Tensor:
    """Returns [4] int64 that say of a nested structure of tensors: its structure and types, rows, shapes, and values.

    Args:
        batch: The structure; None and `tf.experimental.Optional` belong to its structure.
    """
    leaves = _leaves(batch)
    parts = tf.nest.flatten(leaves, expand_composites=True)
    structure = repr((tf.nest.map_structure(lambda leaf: "." if is_missing(leaf) else "*", batch),
                      [(type(leaf).__name__, leaf.dtype.name) for leaf in leaves]))
    shapes = tf.concat([tf.shape(part, tf.int64) for part in parts], 0) if parts else tf.constant([], tf.int64)
    rows = tf.cast(num_rows(leaves[0]), tf.int64) if leaves and leaves[0].shape.rank != 0 else tf.constant(-1, tf.int64)
    return tf.stack([
        tf.constant(int.from_bytes(hashlib.blake2b(structure.encode(), digest_size=7).digest(), "big"), tf.int64), rows,
        ops.digests([shapes])[0], ops.digests([ops.digests(parts)])[0]])


def difference(what: str, mine: tf.Tensor, of_rank_0: tf.Tensor) -> tf.Tensor:
    """Returns how a rank's data differ from rank 0's and what to do about it, empty if they are the same.

    Args:
        what: What the fingerprints are of, for example "the first batch of dataset 0".
        mine: The rank's `fingerprint`.
        of_rank_0: Rank 0's.
    """
    texts = (
        f"{what} has other parts, or parts of other types. Give all ranks the same arguments.",
        tf.strings.format(what + " has {} rows, rank 0's has {}. " + _GLOBAL + ": give all ranks the same data and the "
                          "same batch size.", (mine[1], of_rank_0[1])),
        f"{what} has parts of other shapes. Give all ranks the same data, prepared alike.",
        f"{what} has other values. {_GLOBAL}, so all must read the same data in the same order. {_SEED}.")
    text = tf.constant("")
    for number, each in reversed(list(enumerate(texts))):  # the first difference explains the others
        text = tf.where(mine[number] == of_rank_0[number], text, each)
    return text


def compare(batch: Any, communicator: Communicator, what: str) -> None:
    """Compares a batch with rank 0's.

    Args:
        batch: A nested structure of tensors or arrays.
        communicator: This rank's communicator.
        what: What it is, the same on all ranks: "call 1 of train_on_batch".

    Raises:
        PoseidonError: If it differs from rank 0's.
    """
    with tf.init_scope():
        mine = fingerprint(batch)
        of_rank_0 = communicator.broadcast(f"data/{what}", mine.numpy())
        text = difference(what, mine, tf.constant(of_rank_0)).numpy().decode()
    if text:
        raise GraphError(f"Rank {communicator.rank} has different data than rank 0: {text}")


def is_missing(leaf: Any) -> bool:
    """Whether a part of a batch is absent."""
    return leaf is None or isinstance(leaf, tf.experimental.Optional)


def num_rows(leaf: Any) -> tf.Tensor:
    """Returns the number of rows of a dense, ragged or sparse tensor: a scalar int32."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def _leaves(batch: Any) -> list[Any]:
    composite = (tf.RaggedTensor, tf.SparseTensor)
    return [leaf if isinstance(leaf, composite) else tf.convert_to_tensor(leaf)
            for leaf in tf.nest.flatten(batch) if not is_missing(leaf)]
