"""Shares of global batches that follow the speeds of ranks, from epoch to epoch.

Tests: tests/training/test_row_shares.py.
"""

import logging
from typing import Any
import weakref

import keras

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

_log = logging.getLogger("tf_poseidon")


def before_training(model: keras.Model) -> None:
    """Forgets what was measured for other data or another model."""
    if is_ours(model.distribute_strategy) and model.distribute_strategy.extended.job.row_shares.is_balanced:
        watch.of(model.distribute_strategy.extended.job).forget_windows()
        _balances[model.distribute_strategy.extended.job] = balancing.Balance()


def _keeps_rows(iterator: Any) -> bool:
    """Whether training data keep the rows that ranks make of them: one iterator reads them in all epochs."""
    return iterator is not None and iterator.steps_per_epoch is not None and datasets.has_own_rows(
        keras_compat.distributed_dataset(iterator))


def after_epoch(model: keras.Model) -> None:
    """Gives ranks other shares, if these are to be balanced and other ones promise faster steps.

    All ranks have measured the same, and decide alike.
    """
    if not is_ours(model.distribute_strategy):
        return
    job: Job = model.distribute_strategy.extended.job
    row_shares, watched = job.row_shares, watch.of(job)
    if not row_shares.is_balanced or _keeps_rows(resuming.iterator()):
        return
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
        _log.warning("%s; from the next epoch on they have %s of every %s rows.", reason,
                     ", ".join(map(str, parts.counts_of(shown, shares))), shown)
