"""Compares the state that must be the same on all ranks: weights, statistics, optimizer states, learning rates.

Steps keep it the same. A change on one rank only, for example by a callback, is found at the end of the epoch, or
after a number of steps, before the result is used.

Tests: tests/faults/test_failures.py.
"""

from collections.abc import Sequence
import weakref

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.errors import JobError
from tf_poseidon.job import agreement
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.one_process.sharding.master_weights import MasterWeight

# Calls of a training function from one comparison to the next: rare enough that the cost is negligible.
EVERY = 1000

# By model: when its variables were compared last.
_last: weakref.WeakKeyDictionary[keras.Model, str] = weakref.WeakKeyDictionary()


def begin(model: keras.Model) -> None:
    """Notes that the variables of a model are now the same on all ranks."""
    _last[model] = "the start of training"


def compare(model: keras.Model, variables: Sequence[keras.Variable], when: str) -> None:
    """Compares variables of a model between ranks.

    Args:
        model: A Keras model in the scope of a `PoseidonStrategy`.
        variables: Keras variables, the same ones on all ranks.
        when: Text that describes the time of the comparison.

    Raises:
        PoseidonError: On all ranks, if some variable differs on some rank.
    """
    communicator = model.distribute_strategy.extended.job.communicator
    of_ranks = communicator.gather("compare/differs", differ_from_rank_0(variables, communicator)[np.newaxis])
    if not of_ranks.any():
        _last[model] = when
        return
    # The smallest is most likely the cause: for example a learning rate, which has made all weights differ.
    differing = sorted(map(int, np.flatnonzero(of_ranks.any(0))), key=lambda i: np.prod(variables[i].shape))
    first, count = differing[0], len(differing)
    rank = int(np.flatnonzero(of_ranks[:, first])[0])
    difference = agreement.difference_of_kernels(communicator)
    cause = ("Something outside the training step has changed it on some ranks: for example a callback that depends on "
             "the time or a file. Make it do the same on all ranks.")
    if difference is not None:
        cause = f"The kernels of ranks may compute other bits, since {difference}. Make that the same on all ranks."
    raise JobError(
        f"'{variables[first].path}' differs between rank {rank} and rank 0 at {when}"
        + (f", and {count - 1} other variables differ" if count > 1 else "")
        + f"; they were the same at {_last.get(model, 'the start of training')}. {cause}")


def differ_from_rank_0(variables: Sequence[keras.Variable], communicator: Communicator) -> np.ndarray:
    """Returns an array with 1 for each variable whose value on this rank differs from rank 0's, else 0.

    Args:
        variables: Keras variables, as many on all ranks.
        communicator: This rank's communicator.
    """
    if not variables:
        return np.zeros([0], np.int64)
    # For hundreds of variables three times as fast as to convert each to a tensor.
    values = [tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in map(_held_by_all, variables)]
    own_digests = ops.digests(values).numpy()
    return (own_digests != communicator.broadcast("state/digests", own_digests)).astype(np.int64)


def _held_by_all(variable: keras.Variable) -> tf.Variable:
    """Returns what all ranks hold of a variable: itself, or its working copy."""
    value = keras_compat.value(variable)
    return value.copy if isinstance(value, MasterWeight) and value.holds_shard else value
