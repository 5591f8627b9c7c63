"""Which rows of a global batch are a rank's: successive rows, as many as its share says.

Rows are given out one by one, each to the rank that would have the fewest for its share, the lowest if several would
(the method of D'Hondt). So the rank that takes longest, if a rank's speed is its share, takes as short as possible; of
a smaller batch no rank has more rows; and equal shares give parts that differ by at most one row, the larger ones on
the lower ranks. The kernel of PoseidonPart does the same (kernels/communicator/row_shares.h).

Tests: tests/unit/test_data.py, tests/communicator/test_row_ops.py.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def of_rank(total: Any, rank: int, shares: Sequence[int]) -> tuple[Any, Any]:
    """Returns (begin, count): the rows of `total` that are a rank's.

    Args:
        total: Rows of a global batch, an int or a scalar tensor.
        rank: The rank.
        shares: Of all ranks, positive.
    """
    counts = _counts_of_tensor(total, shares) if tf.is_tensor(total) else counts_of(total, shares)
    return (tf.reduce_sum if tf.is_tensor(total) else sum)(counts[:rank]), counts[rank]


def counts_of(total: int, shares: Sequence[int]) -> list[int]:
    """Returns how many rows each rank has of a global batch."""
    whole = sum(shares)
    # What each rank is due, rounded down, it has in any case, and fewer rows than there are ranks are left.
    counts = [total * share // whole for share in shares]
    for _ in range(total - sum(counts)):
        most = 0
        for rank, share in enumerate(shares):
            if share * (counts[most] + 1) > shares[most] * (counts[rank] + 1):
                most = rank
        counts[most] += 1
    return counts


def _counts_of_tensor(total: tf.Tensor, shares: Sequence[int]) -> tf.Tensor:
    """Returns `counts_of` as a tensor of the total's type."""
    size = len(shares)
    if len(set(shares)) == 1:
        return total // size + tf.cast(tf.range(size) < tf.cast(total % size, tf.int32), total.dtype)
    due = tf.cast(total, tf.int64) * tf.constant(shares, tf.int64)
    counts = due // sum(shares)
    # Candidates for the rows that are left, by rank: what a rank's next rows, as many as may be left, would give it.
    quotients = tf.constant(shares, tf.float64)[:, None] / tf.cast(
        counts[:, None] + tf.range(1, size, dtype=tf.int64), tf.float64)
    order = tf.argsort(tf.reshape(quotients, [-1]), direction="DESCENDING", stable=True)
    left = tf.cast(total, tf.int64) - tf.reduce_sum(counts)
    ranks = order[:left] // (size - 1)
    return tf.cast(counts + tf.reduce_sum(tf.one_hot(ranks, size, dtype=tf.int64), 0), total.dtype)


def contributors(total: Any, shares: Sequence[int]) -> Any:
    """Returns how many ranks have rows of a global batch: an int, or a scalar int32 for a scalar tensor."""
    if not tf.is_tensor(total):
        return sum(count > 0 for count in counts_of(total, shares))
    return tf.math.count_nonzero(_counts_of_tensor(total, shares), dtype=tf.int32)
