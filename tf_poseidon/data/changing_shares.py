"""Shares of batches that change while a dataset is read.

A rank makes its rows ahead of the steps that take them, each rank as far as it comes. Ranks that are to share rows in
another way have to agree on a batch from which on they do: one that none of them has begun to make. They find it by one
exchange, for which each holds its next batch up.

Batches are counted in all passes over the dataset together. So a pass must be made to its end, or be the last one: then
all ranks have counted as many when the next one begins.

Tests: tests/unit/test_row_selection.py, tests/training/test_row_shares.py.
"""

from collections.abc import Callable
import threading

import numpy as np
import tensorflow as tf


class ChangingShares:
    """How ranks share the batches of a dataset."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self._shares = shares
        self._next_shares: list[tuple[int, tuple[int, ...]]] = []  # (from which batch on, shares), in order
        self._begun = 0  # batches
        self._lock = threading.Lock()

    def of_batches(self) -> tf.data.Dataset:
        """Returns a dataset of shares, [P] int64: an element is read when a batch is begun, and not before."""
        @tf.autograph.experimental.do_not_convert
        def shares(_: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(self._of_next, [], tf.int64), [len(self._shares)])

        return tf.data.Dataset.from_tensors(0).repeat().map(shares)

    def change(self, shares: tuple[int, ...], largest: Callable[[int], int]) -> None:
        """Has ranks share batches in another way, from the first one on that none has begun.

        All ranks call it after the same step.

        Args:
            shares: The shares.
            largest: Returns the largest of the numbers that ranks give it.
        """
        with self._lock:
            self._next_shares.append((largest(self._begun), shares))

    def _of_next(self) -> np.ndarray:
        with self._lock:
            while self._next_shares and self._next_shares[0][0] <= self._begun:
                _, self._shares = self._next_shares.pop(0)
            self._begun += 1
            return np.array(self._shares, np.int64)
