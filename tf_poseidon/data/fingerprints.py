"""Fingerprints of batches, by which ranks find that their data differ, and how.

Tests: tests/unit/test_data.py, tests/faults/test_failures.py.
"""

from collections.abc import Sequence
import hashlib
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.errors import GraphError
from tf_poseidon.job.communicator import Communicator

_GLOBAL = "Every rank takes the whole global batch and computes its part of it"
_SEED = ("Seed whatever shuffles or generates the data: keras.utils.set_random_seed(...) before the dataset is "
         "created, shuffle(seed=...), a seeded generator; in a parallel map, take random numbers from seeds of the "
         "elements (docs/semantics.md, 'Augmentation')")


def fingerprint(batch: Any) -> tf.Tensor:
    """Returns [4] int64 that say of a nested structure of tensors: its structure and types, rows, shapes, and values.

    Args:
        batch: The structure; None and `tf.experimental.Optional` belong to its structure.
    """
    return ops.fingerprint(*_described(batch))


def with_first_compared(index: tf.Tensor, batch: Any, site: str, what: str) -> Any:
    """Returns a batch; ends the job unless the first one is that of rank 0.

    Args:
        index: The number of the batch, a scalar int64; others than 0 are not compared.
        batch: A nested structure, as in `fingerprint`.
        site: The name of the comparison, the same on all ranks.
        what: What the first batch is.
    """
    rows, parts, structure = _described(batch)
    if not parts:
        return batch
    same = iter(ops.compare_first(index, rows, parts, structure, _texts(what), site))
    return tf.nest.map_structure(
        lambda leaf: leaf if is_missing(leaf) else tf.nest.pack_sequence_as(
            leaf, [next(same) for _ in tf.nest.flatten(leaf, expand_composites=True)], expand_composites=True), batch)


def with_elements_compared(index: tf.Tensor, rows: tf.Tensor, elements: tf.Tensor, site: str, what: str) -> tf.Tensor:
    """Returns what says of which elements a batch is made; ends the job unless the first one's are those of rank 0.

    Args:
        index, site, what: As in `with_first_compared`.
        rows: How many elements, a scalar int64.
        elements: int64 that depend on them.
    """
    compared, = ops.compare_first(index, rows, [elements], 0, _texts(what), site)
    return compared


def _described(batch: Any) -> tuple[tf.Tensor, list[tf.Tensor], int]:
    """Returns (the rows of a batch, -1 without any, its tensors, a digest of how they belong together)."""
    leaves = _leaves(batch)
    structure = repr((tf.nest.map_structure(lambda leaf: "." if is_missing(leaf) else "*", batch),
                      [(type(leaf).__name__, leaf.dtype.name) for leaf in leaves]))
    rows = tf.cast(num_rows(leaves[0]), tf.int64) if leaves and leaves[0].shape.rank != 0 else tf.constant(-1, tf.int64)
    return (rows, tf.nest.flatten(leaves, expand_composites=True),
            int.from_bytes(hashlib.blake2b(structure.encode(), digest_size=7).digest(), "big"))


def difference(what: str, of_rank: Sequence[int] | np.ndarray, of_rank_0: Sequence[int] | np.ndarray) -> str:
    """Returns how a rank's data differ from rank 0's and what to do about it, empty if they are the same.

    Args:
        what: What the fingerprints are of, for example "call 1 of train_on_batch".
        of_rank: The rank's `fingerprint`.
        of_rank_0: Rank 0's.
    """
    number = next((i for i, (own, first) in enumerate(zip(of_rank, of_rank_0, strict=True)) if own != first), None)
    if number is None:
        return ""
    values = {"0": str(of_rank[number]), "1": str(of_rank_0[number]), "$": "$"}
    return re.sub(r"\$([01$])", lambda found: values[found[1]], _texts(what)[number])


def _texts(what: str) -> list[str]:
    """Returns what is said if a part of a fingerprint is the first that differs; $0 is this rank's, $1 rank 0's."""
    what = what.replace("$", "$$")
    return [
        f"{what} has other parts, or parts of other types. Give all ranks the same arguments.",
        f"{what} has $0 rows, rank 0's has $1. {_GLOBAL}: give all ranks the same data and the same batch size.",
        f"{what} has parts of other shapes. Give all ranks the same data, prepared alike.",
        f"{what} has other values. {_GLOBAL}, so all must read the same data in the same order. {_SEED}."]


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
        own_fingerprint = fingerprint(batch).numpy()
        text = difference(what, own_fingerprint, communicator.broadcast(f"data/{what}", own_fingerprint))
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
