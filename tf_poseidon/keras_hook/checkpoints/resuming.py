"""Resuming a `fit` where its backup was written, so that it ends where an undisturbed one would.

`keras.callbacks.BackupAndRestore` keeps the weights, the optimizer's variables and the epoch. Here, a backup also has
what else the rest of a `fit` depends on: how many batches the epoch has had, the seeds of random layers, metrics in the
middle of an epoch, and what callbacks have counted. The data are not kept: a `fit` that resumes reads past the batches
that it has trained on, so data that are the same in every run continue where they were.

Tests: tests/unit/test_resuming.py, tests/unit/test_files.py, tests/training/test_saving.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
import logging
from typing import Any

import h5py
import keras
import numpy as np

from tf_poseidon.base.context_values import holding
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.errors import JobError
from tf_poseidon.job import runtime
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.keras_hook.checkpoints import orders

_log = logging.getLogger("tf_poseidon")

_GROUP = "tf_poseidon"  # in the file of a backup's weights
_POSITION = "position"
_OPTIMIZER = "optimizer"


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a `fit` was when its backup was written.

    Attributes:
        epoch: The epoch to continue, counted as `fit` does.
        steps: Calls of the training function that the epoch has had.
        has_stopped: Whether a callback had ended the training.
        metrics: Number of the variables of metrics that the backup has; 0 at the end of an epoch.
        callbacks: What callbacks have counted, by their name and what it is.
        best_weights: Number of the arrays that each EarlyStopping has kept.
    """

    epoch: int
    steps: int
    has_stopped: bool
    metrics: int
    callbacks: dict[str, dict[str, Any]]
    best_weights: dict[str, int]


@dataclasses.dataclass
class Fit:
    """One call of `fit`.

    Attributes:
        model: The model.
        arguments: Of the call.
        callbacks: Those that run on this rank.
        iterator: Keras' iterator of the training data.
        position: Where it resumes, after the callbacks have begun; None to begin at the beginning.
        arrays: Of the backup, on the rank that has read it: metrics, and the best weights of each EarlyStopping.
        due: The backups to write when all callbacks have seen the batch or the epoch.
        has_read: The iterators of this `fit` that have read past what was before.
        has_resumed: Whether it has read past the steps of an epoch, and made none yet.
    """

    model: keras.Model
    arguments: dict[str, Any]
    callbacks: Sequence[keras.callbacks.Callback]
    iterator: Any = None
    position: Position | None = None
    arrays: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    due: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    has_read: list[Any] = dataclasses.field(default_factory=list)
    has_resumed: bool = False


_current: contextvars.ContextVar[Fit | None] = contextvars.ContextVar("fit", default=None)


class WriteBackup(keras.callbacks.Callback):
    """Writes backups when the callbacks of the user have seen the batch or the epoch: they may change what is kept."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._write()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._write()

    def _write(self) -> None:
        fit = _current.get()
        while fit is not None and fit.due:
            fit.due.pop(0)()


def has_backup(callbacks: Sequence[keras.callbacks.Callback]) -> bool:
    """Whether one of the callbacks writes backups."""
    return any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks)


def in_fit(model: keras.Model, arguments: dict[str, Any],
           callbacks: Sequence[keras.callbacks.Callback]) -> contextlib.AbstractContextManager[None]:
    """A context in which a backup that is restored belongs to this call of `fit`; its arguments and its callbacks."""
    return holding(_current, Fit(model, arguments, callbacks))


def alone(original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Runs `fit` in a job of one process."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    given = bound.arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):  # whose order is the user's
        return original(*bound.args, **bound.kwargs)
    callbacks = keras.tree.flatten(given) if given else []
    if not has_backup(callbacks):
        return original(*bound.args, **bound.kwargs)
    bound.arguments["callbacks"] = [*callbacks, WriteBackup()]
    with in_fit(model, bound.arguments, callbacks):
        return original(*bound.args, **bound.kwargs)


# ---- writing -----------------------------------------------------------------------------------------------------


def deferred(write: Callable[[], None], callback: keras.callbacks.BackupAndRestore) -> bool:
    """Whether a backup will be written by `WriteBackup`, rather than now."""
    fit = _current.get()
    if fit is None or fit.model is not callback.model:
        return False
    fit.due.append(write)
    return True


def attach(file: h5py.File, callback: keras.callbacks.BackupAndRestore) -> None:
    """Adds to the weights of a backup what else a `fit` needs to resume."""
    fit, model = _current.get(), callback.model
    if fit is None or fit.model is not model:
        return
    group = file.create_group(_GROUP)
    saved = keras_compat.backup_position(callback)
    # Keras counts batches from 0, and notes 0 at the end of an epoch, too.
    batches = 0 if callback.save_freq == "epoch" else saved["batch"] + 1
    metrics = model.metrics_variables if batches else []
    best = {name: list(user_callback.best_weights or ()) for name, user_callback in _named(fit.callbacks).items()
            if isinstance(user_callback, keras.callbacks.EarlyStopping)}
    arrays = {"metrics": [v.numpy() for v in metrics], "seeds": [v.numpy() for v in _seeds(model)], **best}
    for name, values in arrays.items():
        for number, value in enumerate(values):
            group.create_dataset(f"{name}/{number}", data=value)
    position = Position(
        saved["epoch"], -(-batches // model.steps_per_execution), bool(model.stop_training), len(metrics),
        {name: keras_compat.callback_state(user_callback) for name, user_callback in _named(fit.callbacks).items()},
        {name: len(values) for name, values in best.items()})
    group.attrs[_POSITION] = json.dumps(dataclasses.asdict(position))
    group.attrs[_OPTIMIZER] = _described_optimizer(model)


def _described_optimizer(model: keras.Model) -> str:
    """Returns what the state of a model's optimizer can be restored to."""
    optimizer = getattr(model, "optimizer", None)
    return "no optimizer" if optimizer is None else f"{type(optimizer).__name__}, {len(optimizer.variables)} variables"


def _named(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, keras.callbacks.Callback]:
    """Returns callbacks by their class and number: the same names in another run, and on other ranks."""
    named: dict[str, keras.callbacks.Callback] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        named[f"{kind} {sum(name.startswith(f'{kind} ') for name in named)}"] = callback
    return named


def _seeds(model: keras.Model) -> list[keras.Variable]:
    """Returns the states of random layers, which Keras does not save; they are variables of a model, but no weights."""
    others = {id(variable) for variable in (*model.weights, *model.metrics_variables)}
    return [variable for variable in model.variables if id(variable) not in others]


# ---- restoring ---------------------------------------------------------------------------------------------------


def build_optimizer(model: keras.Model) -> None:
    """Makes the variables of the optimizer that a backup holds; Keras does it outside of the scope."""
    optimizer = getattr(model, "optimizer", None)
    if model.built and optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def optimizer_state(model: keras.Model) -> list[np.ndarray]:
    """Returns the values of the variables of a model's optimizer."""
    return [variable.numpy() for variable in getattr(getattr(model, "optimizer", None), "variables", ())]


def detach(path: str, callback: keras.callbacks.BackupAndRestore, state: Sequence[np.ndarray]) -> None:
    """Restores what `attach` has added to the weights in a file, after Keras has restored these.

    Args:
        path: The file.
        callback: The callback that restores it.
        state: The `optimizer_state` before: Keras restores that of another optimizer, if it has as many variables.

    Raises:
        JobError: If it does not belong to this model.
    """
    fit, model = _current.get(), callback.model
    with h5py.File(path, "r") as file:
        if fit is None or fit.model is not model or _GROUP not in file:
            return
        group = file[_GROUP]
        position = Position(**json.loads(group.attrs[_POSITION]))
        optimizer = group.attrs.get(_OPTIMIZER)  # None in backups of earlier versions
        arrays = {name: [part[str(number)][()] for number in range(len(part))] for name, part in group.items()}
    if optimizer is not None and optimizer != (own := _described_optimizer(model)):
        for variable, value in zip(getattr(model.optimizer, "variables", ()), state):
            variable.assign(value)
        _log.warning("The backup '%s' was written with another optimizer (%s) than the model '%s' has now (%s); "
                     "training resumes with its weights, and this optimizer begins anew. Compile the model with the "
                     "optimizer of the backup to resume that, too.", path, optimizer, model.name, own)
    seeds = _seeds(model)
    if len(seeds) != len(arrays.get("seeds", ())):
        raise JobError(f"The backup '{path}' has the seeds of {len(arrays.get('seeds', ()))} random layers, but the "
                       f"model '{model.name}' has {len(seeds)}; remove it to begin anew.")
    for variable, value in zip(seeds, arrays.get("seeds", ())):
        variable.assign(value)
    keras_compat.set_backup_position(callback, position.epoch)
    if position.has_stopped:
        keras_compat.set_initial_epoch(model, fit.arguments.get("epochs", 1))
    fit.position, fit.arrays = position, arrays


def agree(communicator: Communicator) -> None:
    """Gives the position that rank 0 has restored to all ranks."""
    fit = _current.get()
    assert fit is not None  # it is called in `in_fit`
    own_position = json.dumps(None if fit.position is None else dataclasses.asdict(fit.position))
    of_rank_0 = json.loads(communicator.broadcast_text("backup", own_position))
    fit.position = None if of_rank_0 is None else Position(**of_rank_0)


# ---- reading past ------------------------------------------------------------------------------------------------


def make_iterator(original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Notes the iterator of the training data in a job of one process."""
    original(iterator, *args, **kwargs)
    note_iterator(iterator)


def note_iterator(iterator: Any) -> None:
    """Notes the iterator of the training data, the first that a `fit` creates."""
    fit = _current.get()
    if fit is not None and fit.iterator is None:
        fit.iterator = iterator


def iterator() -> Any:
    """Returns the iterator of the training data of the present `fit`, None if there is none yet."""
    fit = _current.get()
    return None if fit is None else fit.iterator


def enumerate_iterator(original: Callable[..., Iterator[Any]], iterator: Any) -> Iterator[Any]:
    """Makes the iterators of a `fit` that resumes read past what was before.

    Yields:
        The steps of an epoch, as Keras does.

    Raises:
        JobError: If the data have fewer batches than the backup has seen.
    """
    fit = _current.get()
    epoch = functools.partial(original, iterator)
    if fit is None or fit.position is None or any(iterator is read for read in fit.has_read):
        return epoch()
    is_training = iterator is fit.iterator
    if not is_training and iterator is not keras_compat.validation_iterator(fit.model):
        return epoch()  # of another method, which a callback has called
    fit.has_read.append(iterator)
    first, position = fit.arguments.get("initial_epoch", 0), fit.position
    epochs_before: Sequence[int] = range(first, position.epoch)
    if is_training:
        _restore_callbacks(fit, position)
    else:
        frequency = fit.arguments.get("validation_freq", 1)
        epochs_before = [number for number in epochs_before if keras_compat.validates(fit.model, number, frequency)]
    if not is_training or position.has_stopped:
        position = dataclasses.replace(position, steps=0)
    joined = runtime.communicator()
    if is_training and (joined is None or joined.rank == 0):
        _log.warning("Training resumes after %d epochs and %d steps of the next. Earlier data are read again, without "
                     "training, where later data depend on it.", len(epochs_before), position.steps)
    _read_epochs(iterator, epoch, len(epochs_before))
    return _rest(fit, iterator, epoch(), position.steps) if position.steps else epoch()


def _read_epochs(iterator: Any, epoch: Callable[[], Iterator[Any]], number: int) -> None:
    """Reads past epochs, as far as later ones depend on it."""
    order = _order(iterator)
    for _ in range(0 if order is orders.EpochOrder.SAME else number):
        with iterator.catch_stop_iteration():
            for _, _, batches in epoch():  # makes as many iterators as Keras does
                if order is orders.EpochOrder.CONTINUED:
                    for _ in range(iterator.steps_per_execution):
                        next(batches)


def _order(iterator: Any) -> orders.EpochOrder:
    if iterator.steps_per_epoch is not None or iterator.data_adapter.num_batches is None:
        # The next epoch continues where one has ended; or Keras makes iterators when it finds that one has.
        return orders.EpochOrder.CONTINUED
    if keras_compat.reads_arrays_in_order(iterator):
        return orders.EpochOrder.SAME
    dataset = keras_compat.given_dataset(iterator)
    return orders.EpochOrder.CONTINUED if dataset is None else orders.order(dataset)


def _rest(fit: Fit, iterator: Any, steps: Iterator[Any], number: int) -> Iterator[Any]:
    """Yields what follows a number of steps of an epoch."""
    batch = None
    for step in range(number):
        step_batch = _read_step(iterator, steps)
        if step_batch is None:
            raise JobError(
                f"The backup was written after step {number} of an epoch, but the data have only {step}; give fit the "
                "data with which it has begun, or remove the backup to begin anew.")
        batch = step_batch
    assert fit.position is not None
    _restore_metrics(fit, fit.position, batch)
    fit.has_resumed = True
    for step_in_epoch in steps:
        yield step_in_epoch
        fit.has_resumed = False  # the step has not found the end of the data


def _read_step(iterator: Any, steps: Iterator[Any]) -> Any:
    """Reads the batches of a step; returns the first of them, or None at the end of the data."""
    first_batch = None
    with contextlib.suppress(StopIteration):
        *_, batches = next(steps)
        for _ in range(iterator.steps_per_execution):
            batch = next(batches)
            first_batch = batch if first_batch is None else first_batch
    return first_batch


def results(original: Callable[..., Any], model: keras.Model, logs: Any) -> Any:
    """Returns the logs of an epoch: those of metrics, if it has resumed after its last step."""
    fit = _current.get()
    if fit is not None and fit.model is model and fit.has_resumed and not logs:
        fit.has_resumed, logs = False, model.get_metrics_result()
    return original(model, logs)


def _restore_metrics(fit: Fit, position: Position, batch: Any) -> None:
    model, number = fit.model, position.metrics
    if len(model.metrics_variables) != number:  # Keras makes those of `compile` for the first batch
        with model.distribute_strategy.scope():
            keras_compat.build_metrics(model, batch)
    variables = model.metrics_variables
    if len(variables) != number:
        raise JobError(f"The backup has {number} variables of metrics, but the model '{model.name}' has "
                       f"{len(variables)}; compile it with the same metrics, or remove the backup to begin anew.")
    for variable, value in zip(variables, _shared(fit, "metrics", [v.numpy() for v in variables])):
        variable.assign(value)


def _restore_callbacks(fit: Fit, position: Position) -> None:
    for name, callback in _named(fit.callbacks).items():
        keras_compat.set_callback_state(callback, position.callbacks.get(name, {}))
    model, named = fit.model, _named(fit.callbacks)
    for name, number in position.best_weights.items():
        if number:
            arrays = _shared(fit, name, model.get_weights())
            if name in named:
                named[name].best_weights = arrays


def _shared(fit: Fit, name: str, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays of the backup on all ranks; `like` has their shapes and types."""
    values, communicator = fit.arrays.get(name, like), runtime.communicator()
    if communicator is None:
        return list(values)
    waits = [communicator.submit(f"backup/{name}/{number}", value, root=0) for number, value in enumerate(values)]
    return [wait() for wait in waits]
