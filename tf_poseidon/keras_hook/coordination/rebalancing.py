"""Shares of global batches that follow the speeds of ranks, within epochs and from one to the next.

Tests: tests/training/test_row_shares.py.
"""

import logging
from typing import Any
import weakref

import keras
import tensorflow as tf

from tf_poseidon.compat import keras as keras_compat
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
    """Gives ranks other shares within an epoch, if each makes whole batches: it may take other rows of the next one.

    Own rows are made ahead, by each rank as far as it comes: their shares change with the iterator.
    """
    job = _balanced_job(model)
    if job is not None and len(watch.of(job).history.windows) >= _LEAST_WINDOWS and not _has_own_rows(batches):
        _decide(job, "the next step on")


def after_epoch(model: keras.Model) -> None:
    """Gives ranks other shares, unless one iterator reads rows that ranks make themselves in all epochs."""
    job, iterator = _balanced_job(model), resuming.iterator()
    if job is None:
        return
    if iterator is None or iterator.steps_per_epoch is None or not datasets.has_own_rows(
            keras_compat.distributed_dataset(iterator)):
        _decide(job, "the next epoch on")
    elif job.rank == 0 and job not in _told:
        _told.add(job)
        _log.warning("rows='balanced', but ranks keep their shares %s: with steps_per_epoch, one iterator makes their "
                     "rows ahead in all epochs; leave steps_per_epoch out, and repeat() out of the dataset.",
                     job.row_shares.current)


def _balanced_job(model: keras.Model) -> Job | None:
    """Returns the job of a model whose ranks have balanced shares, None if they have not."""
    if not is_ours(model.distribute_strategy):
        return None
    job: Job = model.distribute_strategy.extended.job
    return job if job.row_shares.is_balanced else None


def _has_own_rows(batches: Any) -> bool:
    return isinstance(batches, tf.data.Iterator) and datasets.has_own_rows(batches)


def _decide(job: Job, begin: str) -> None:
    """Gives ranks other shares, if these promise faster steps.

    All ranks have measured the same, and decide alike.

    Args:
        job: The job.
        begin: From when on they have them.
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
    watched.forget_windows()
    if job.rank == 0:
        shown = row_shares.usual_rows or 100
        reason = ("Ranks took unequally long for their rows of a batch" if _balances[job].settled_seconds is None else
                  "Steps were no shorter with the ranks' last shares of a batch")
        _log.warning("%s; from %s they have %s of every %s rows.", reason, begin,
                     ", ".join(map(str, parts.counts_of(shown, shares))), shown)
