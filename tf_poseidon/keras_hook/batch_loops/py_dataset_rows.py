"""Lets each rank make its own rows of the batches of a `keras.utils.PyDataset`, if that offers to.

It offers so by two methods: `num_rows(index)` returns how many rows a batch has, and `rows(index, start, stop)` makes
some of them, in the form in which `__getitem__` makes all.

Tests: tests/unit/test_keras_hook.py, tests/training/test_own_rows.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import inspect
import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.data import datasets
from tf_poseidon.data import fingerprints
from tf_poseidon.data import parts
from tf_poseidon.data import row_selection
from tf_poseidon.errors import GraphError
from tf_poseidon.job import runtime

_log = logging.getLogger("tf_poseidon")


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Some rows of a batch.

    Attributes:
        tag: As in `row_selection.Selected`; the fingerprint has only the number of the batch yet.
        values: The rows, as the user's `rows` has made them.
    """

    tag: np.ndarray
    values: Any


class RowsOfRank(keras.utils.PyDataset):
    """A rank's rows of the batches of a PyDataset; Keras may copy it to other processes, in each epoch anew.

    Attributes:
        batches: The user's PyDataset.
    """

    def __init__(self, batches: keras.utils.PyDataset, rank: int, shares: tuple[int, ...]) -> None:
        super().__init__(batches.workers, batches.use_multiprocessing, batches.max_queue_size)
        self.batches, self._rank, self._shares = batches, rank, shares

    def share(self, ranks: row_selection.Ranks) -> None:
        """Makes rows of batches as ranks share them from now on."""
        self._rank, self._shares = ranks.rank, ranks.shares

    @property
    def num_batches(self) -> int | None:
        return self.batches.num_batches

    def __getitem__(self, index: int) -> _Rows:
        total = int(self.batches.num_rows(index))
        begin, count = parts.of_rank(total, self._rank, self._shares)
        begin = begin if count else 0
        tag = np.array([total, begin, count, index, 0, 0, 0], np.int64)
        return _Rows(tag, self.rows(index, begin, begin + max(count, 1)))

    def rows(self, index: int, start: int, stop: int) -> Any:
        """Returns some rows of a batch.

        Raises:
            PoseidonError: If there are fewer or more.
        """
        rows = self.batches.rows(index, start, stop)
        for part in tf.nest.flatten(rows):
            shape = np.shape(part)
            if part is not None and shape[:1] != (stop - start,):
                raise GraphError(
                    f"{_name(self.batches)}.rows({index}, {start}, {stop}) returned a part of shape {tuple(shape)}, "
                    f"expected {stop - start} rows; return the rows from start to stop - 1 of batch {index}.")
        return rows

    def on_epoch_begin(self) -> None:
        self.batches.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self.batches.on_epoch_end()


def make_adapter(original: Callable[..., None], adapter: Any, x: keras.utils.PyDataset, *args: Any,
                 **kwargs: Any) -> None:
    """Takes this rank's rows of a PyDataset in its place, if it makes them."""
    communicator = runtime.communicator()
    if communicator is not None and _makes_rows(x, communicator.rank):
        x = RowsOfRank(x, communicator.rank, (1,) * communicator.size)
    original(adapter, x, *args, **kwargs)


def standardize_batch(original: Callable[..., Any], adapter: Any, batch: Any) -> Any:
    """Returns (the tag, the batch) for rows of a rank."""
    return (batch.tag, original(adapter, batch.values)) if isinstance(batch, _Rows) else original(adapter, batch)


def get_iterator(original: Callable[..., Iterator[Any]], adapter: Any) -> Iterator[Any]:
    """Makes the first row of the first batch, by which ranks find that their data differ."""
    source = keras_compat.py_dataset(adapter)
    return _with_fingerprint(original(adapter), source) if isinstance(source, RowsOfRank) else original(adapter)


def _with_fingerprint(batches: Iterator[Any], source: RowsOfRank) -> Iterator[Any]:
    for number, (tag, batch) in enumerate(batches):
        if number == 0:
            index = int(tag[row_selection.PART])
            row = source.rows(index, 0, 1)
            _check_shapes(source, index, row, batch)
            first = fingerprints.fingerprint((tf.constant(index, shape=[1]), row))
            tag = np.concatenate([tag[:row_selection.PART], first.numpy()])
        yield tag, batch


def _check_shapes(source: RowsOfRank, index: int, row: Any, batch: Any) -> None:
    """Raises PoseidonError if the first row of a batch has another shape than those of this rank."""
    for alone, among_others in zip(tf.nest.flatten(row), tf.nest.flatten(batch)):  # which ends with weights of classes
        if np.shape(alone)[1:] != np.shape(among_others)[1:]:
            raise GraphError(
                f"{_name(source.batches)}.rows({index}, 0, 1) returned a row of shape {np.shape(alone)[1:]}, but with "
                f"others of batch {index} it has shape {np.shape(among_others)[1:]}; return the same rows whichever "
                "are asked for, as padded to the longest of the batch.")


def get_tf_dataset(original: Callable[..., tf.data.Dataset], adapter: Any) -> tf.data.Dataset:
    """Says of a dataset that its elements are this rank's rows.

    Raises:
        PoseidonError: If they are of a type that a step could not gather from all ranks.
    """
    dataset, source = original(adapter), keras_compat.py_dataset(adapter)
    if isinstance(source, RowsOfRank):
        if reason := row_selection.refused_types(dataset):
            raise GraphError(f"{_name(source.batches)}.rows cannot be divided: {reason}, or rename `rows`.")
        datasets.row_sources[dataset] = source.share
    return dataset


def _makes_rows(batches: keras.utils.PyDataset, rank: int) -> bool:
    """Whether a PyDataset makes rows of batches; rank 0 says if it seems that it should."""
    rows, num_rows = getattr(batches, "rows", None), getattr(batches, "num_rows", None)
    if not callable(rows):
        return False
    takes = list(inspect.signature(rows).parameters)
    is_known = takes == ["index", "start", "stop"]
    if is_known == callable(num_rows):
        return is_known
    if rank == 0:
        _log.warning("%s has rows(%s)%s, but every rank makes whole batches: %s.", _name(batches), ", ".join(takes), *(
            ("", "how many rows a batch has is not known; add num_rows(index)") if is_known else
            (" and num_rows", "expected rows(index, start, stop); name its parameters so")))
    return False


def _name(batches: keras.utils.PyDataset) -> str:
    return type(batches).__name__
