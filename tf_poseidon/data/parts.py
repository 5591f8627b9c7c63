"""Which rows of a global batch are a rank's.

Tests: tests/unit/test_data.py.
"""

from typing import Any

import tensorflow as tf


def of_rank(total: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Returns (begin, count): the contiguous part of `total` rows that is this rank's.

    The parts differ by at most one row, and lower ranks get the larger ones. So of fewer rows, no rank has more.
    `total` may be an int or a scalar tensor.
    """
    base, extra = total // size, total % size
    smaller = tf.minimum if tf.is_tensor(total) else min
    one_more = rank < extra
    count = base + (tf.cast(one_more, total.dtype) if tf.is_tensor(total) else one_more)
    return rank * base + smaller(extra, rank), count
