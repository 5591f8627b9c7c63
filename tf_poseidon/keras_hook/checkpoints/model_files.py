"""Files of models: each is complete or absent, whenever the process is ended, and backups hold what belongs together.

Keras overwrites a file in place. So a job that ends while rank 0 writes its only backup would lose it.

Tests: tests/unit/test_files.py.
"""

from collections.abc import Callable
import contextlib
import contextvars
import filecmp
import inspect
import json
import logging
import os
from typing import Any

import h5py
import keras

from tf_poseidon.base import files
from tf_poseidon.base.context_values import holding
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.errors import JobError
from tf_poseidon.job import runtime
from tf_poseidon.keras_hook.checkpoints import resuming

_log = logging.getLogger("tf_poseidon")

_SUFFIXES = (".keras", ".weights.h5")

# Where a backup's weights carry the epoch that they belong to: a file of its own could be older or newer than they are.
_ATTRIBUTE = "training_metadata"

# The `keras.callbacks.BackupAndRestore` that writes.
_writing: contextvars.ContextVar[keras.callbacks.BackupAndRestore | None] = contextvars.ContextVar(
    "writing", default=None)


def save(original: Callable[..., Any], model: keras.Model, filepath: Any, *args: Any, **options: Any) -> Any:
    """Writes a file beside its place, and moves it there when it is complete."""
    target = os.path.realpath(filepath) if isinstance(filepath, str | os.PathLike) else ""
    given = inspect.signature(original).bind(model, filepath, *args, **options).arguments
    in_one_file = given.get("max_shard_size") is None and given.get("zipped", True)
    if not in_one_file or not target.endswith(_SUFFIXES) or "://" in str(filepath) or os.path.isdir(target):
        return original(model, filepath, *args, **options)
    joined = runtime.communicator()
    with files.replacing(target, joined.rank if joined else 0) as partial:
        result = original(model, partial, *args, **options)
        if _writing.get() is not None:
            _attach_metadata(partial, _writing.get())
    return result


def back_up(original: Callable[..., Any], callback: keras.callbacks.BackupAndRestore) -> None:
    """Writes a backup whose weights say which epoch they belong to, and hold what else is needed to resume."""
    def write() -> None:
        with holding(_writing, callback):
            original(callback)

    if not resuming.deferred(write, callback):
        write()


def restore(original: Callable[..., Any], callback: keras.callbacks.BackupAndRestore) -> None:
    """Restores a backup; names one that cannot be read.

    Raises:
        JobError: If it cannot be read, and there is none before it.
        OSError: If it cannot be read; then Keras restores the one before.
    """
    weights, metadata = keras_compat.backup_paths(callback)
    former = f"{weights}.bkp"
    try:
        if os.path.exists(weights):
            _write_metadata(callback)
        elif os.path.exists(metadata):  # what is left of a backup that was deleted
            os.remove(metadata)
        resuming.build_optimizer(callback.model)
        state = resuming.optimizer_state(callback.model)
        with _assigning_for_all_ranks(callback.model):
            original(callback)
            if os.path.exists(weights):
                resuming.detach(weights, callback, state)
    except OSError as error:
        # Keras puts the backup before in place of the latest, and tries again.
        if callback.double_checkpoint and os.path.exists(former) and not filecmp.cmp(weights, former, shallow=False):
            _log.warning("The backup '%s' cannot be read (%s); the one before it is restored.", weights, error)
            raise
        raise JobError(
            f"The backup '{weights}' cannot be read ({error}), and there is none before it; remove it to begin anew. "
            "BackupAndRestore(double_checkpoint=True) keeps the one before.") from error


def _assigning_for_all_ranks(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """A context in which rank 0 alone restores a model, with what other ranks hold of its optimizer."""
    job = getattr(getattr(model.distribute_strategy, "extended", None), "job", None)
    return contextlib.nullcontext() if job is None else job.shards.restoring()


def _attach_metadata(path: str, callback: keras.callbacks.BackupAndRestore) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs[_ATTRIBUTE] = json.dumps(keras_compat.backup_position(callback))
        resuming.attach(file, callback)


def _write_metadata(callback: keras.callbacks.BackupAndRestore) -> None:
    """Writes the file with a backup's epoch anew, from its weights; those of plain Keras do not say it."""
    weights, path = keras_compat.backup_paths(callback)
    with h5py.File(weights, "r") as file:
        metadata = file.attrs.get(_ATTRIBUTE)
    if metadata is not None:
        with open(path, "w") as file:
            file.write(metadata)
