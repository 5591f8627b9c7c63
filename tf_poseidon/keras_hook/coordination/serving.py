"""Callbacks on rank 0 that save optimizers, while the other ranks give it their shards of these.

Where each rank holds shards of an optimizer's variables, they run one after the other behind all other callbacks, so
that the others know when to serve rank 0.

Tests: tests/training/test_saving.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras

from tf_poseidon.job.job_variables.shard_service import ShardService

_SAVERS = tuple(getattr(keras.callbacks, name) for name in ("BackupAndRestore", "ModelCheckpoint", "OrbaxCheckpoint")
                if hasattr(keras.callbacks, name))


def are_among(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Whether some callbacks save optimizers."""
    return any(isinstance(callback, _SAVERS) for callback in callbacks)


def arranged(callbacks: Sequence[keras.callbacks.Callback], shards: ShardService, rank: int,
             in_epochs: bool) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a rank runs: those that save last, on rank 0, while the others serve it.

    Args:
        callbacks: The callbacks of this rank.
        shards: The job's `ShardService`.
        rank: This rank.
        in_epochs: Whether some of them may save within epochs.
    """
    if rank != 0:
        return [*callbacks, Around(shards.serve, in_epochs)]
    savers = [callback for callback in callbacks if isinstance(callback, _SAVERS)]
    others = [callback for callback in callbacks if not isinstance(callback, _SAVERS)]
    return [*others, Around(shards.begin, in_epochs), *savers]


class Around(keras.callbacks.Callback):
    """Calls a function where callbacks that save are called."""

    def __init__(self, function: Callable[[], None], in_epochs: bool) -> None:
        """Makes a callback; `in_epochs` is the same as in `arranged`."""
        super().__init__()
        self._function = function
        if in_epochs:
            self.on_train_batch_end = self._call

    def on_train_begin(self, logs: Any = None) -> None:
        self._function()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._function()

    def on_train_end(self, logs: Any = None) -> None:
        self._function()

    def _call(self, *_: object, **__: object) -> None:
        self._function()
