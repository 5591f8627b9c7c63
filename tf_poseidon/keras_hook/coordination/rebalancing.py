"""Shares of global batches that follow the speeds of ranks, within epochs and from one to the next.

Tests: tests/training/test_row_shares.py.
"""

import logging
from typing import Any
import weakref

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import changing_shares
from tf_poseidon.data import datasets
from tf_poseidon.data import parts
from tf_poseidon.job.joined_job import Job
from tf_poseidon.keras_hook.checkpoints import resuming
from tf_poseidon.keras_hook.keras_objects.hook_tools import is_ours
from tf_poseidon.stragglers import balancing
from tf_poseidon.stragglers import watch

# What decisions have come to in the present `fit`.
_balances: weakref.WeakKeyDictionary[Job, balancing.Balance] = weakref.WeakKeyDictionary()
_told: weakref.WeakSet[Job] = weakref.WeakSet()  # that shares stay as they are

# From so many windows on, shares may change within an epoch; few may hold a pause, or a checkpoint.
_LEAST_WINDOWS = 10

_log = logging.getLogger("tf_poseidon")


def before_training(model: keras.Model) -> None:
    """Forgets what was measured for other data or another model."""
    job = _balanced_job(model)
    if job is not None:
        watch.of(job).forget_windows()
        _balances[job] = balancing.Balance()


def after_window(model: keras.Model, batches: Any) -> None:
    """Gives ranks other shares within an epoch, if they take their rows of whole batches, or rows follow changes."""
    job = _balanced_job(model)
    if job is None or len(watch.of(job).history.windows) < _LEAST_WINDOWS:
        return
    has_own_rows = isinstance(batches, tf.data.Iterator) and datasets.has_own_rows(batches)
    changing = datasets.changing(tf_compat.dataset_of(batches))
    if changing is not None or not has_own_rows:
        _decide(job, "the next batches on", changing)


def after_epoch(model: keras.Model) -> None:
    """Gives ranks other shares, unless one iterator reads rows in all epochs that do not follow changes."""
    job, iterator = _balanced_job(model), resuming.iterator()
    if job is None:
        return
    dataset = None if iterator is None else keras_compat.distributed_dataset(iterator)
    changing = datasets.changing(dataset)
    keeps_shares = dataset is not None and changing is None and datasets.has_own_rows(dataset)
    if not keeps_shares or iterator.steps_per_epoch is None:
        _decide(job, "the next epoch on", changing)
    elif job.rank == 0 and job not in _told:
        _told.add(job)
        _log.warning("rows='balanced', but ranks keep their shares %s: with steps_per_epoch, one iterator makes their "
                     "rows ahead in all epochs, and cannot change them (docs/semantics.md, 'Shares of a batch'); leave "
                     "steps_per_epoch out, and repeat() out of the dataset.",
                     job.row_shares.current)


def _balanced_job(model: keras.Model) -> Job | None:
    """Returns the job of a model whose ranks have balanced shares, None if they have not."""
    if not is_ours(model.distribute_strategy):
        return None
    job: Job = model.distribute_strategy.extended.job
    return job if job.row_shares.is_balanced else None


def _decide(job: Job, begin: str, changing: changing_shares.ChangingShares | None) -> None:
    """Gives ranks other shares, if these promise faster steps.

    All ranks have measured the same, and decide alike.

    Args:
        job: The job.
        begin: From when on they have them.
        changing: How they share the batches of training data, if that may change while these are read.
    """
    row_shares, watched = job.row_shares, watch.of(job)
    # Where batches have no usual size, as if there were no remainders.
    rows = row_shares.usual_rows or 1000 * sum(row_shares.current)
    balance = _balances.get(job, balancing.Balance())
    _balances[job], shares = balancing.decide(balance, watched.history.windows, row_shares.current,
                                              lambda shares: parts.counts_of(rows, shares))
    if shares is None:
        return
    row_shares.set(shares)
    if changing is not None:
        changing.change(shares, lambda number: _largest(job, number))
    watched.forget_windows()
    if job.rank == 0:
        shown = row_shares.usual_rows or 100
        reason = ("Ranks took unequally long for their rows of a batch" if _balances[job].settled_seconds is None else
                  "Steps were no shorter with the ranks' last shares of a batch")
        _log.warning("%s; from %s they have %s of every %s rows.", reason, begin,
                     ", ".join(map(str, parts.counts_of(shown, shares))), shown)


def _largest(job: Job, number: int) -> int:
    """Returns the largest of the ranks' numbers."""
    numbers = np.zeros(job.size, np.int64)
    numbers[job.rank] = number
    return int(job.communicator.sum("row_shares/batch", numbers).max())
