"""Callbacks: one rank writes files, and all ranks stop together and begin with the same state.

Callbacks run on every rank, where they see the same logs of epochs. Callbacks that write files only run
on rank 0. Two of our callbacks enclose the user's: the first completes the state of rank 0 before it
can be written, the last has ranks agree on what the others have decided or restored.

Tests: tests/training/test_training.py, tests/training/test_saving.py, tests/training/test_summary.py.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Set
import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.joined_job import Job
from tf_poseidon.keras_hook.checkpoints import resuming
from tf_poseidon.keras_hook.coordination import communication
from tf_poseidon.keras_hook.coordination import comparing
from tf_poseidon.keras_hook.coordination import rebalancing
from tf_poseidon.keras_hook.coordination import summary
from tf_poseidon.keras_hook.keras_objects import optimizers
from tf_poseidon.one_process.sharding import master_weights
from tf_poseidon.one_process.sharding import sharded_variables
from tf_poseidon.one_process.sharding.sharded_variables import ShardedVariable

_log = logging.getLogger("tf_poseidon")

_WRITERS = tuple(
    getattr(keras.callbacks, name)
    for name in ("BackupAndRestore", "CSVLogger", "ModelCheckpoint", "OrbaxCheckpoint",
                 "RemoteMonitor", "TensorBoard") if hasattr(keras.callbacks, name))

# Classes whose batch methods read no logs; their subclasses may.
_UNSEEING = {keras.callbacks.History, keras.callbacks.ProgbarLogger, communication.Communication,
             communication.EnvironmentMetrics, summary.Summary}
# The same of those that never stop training.
_PASSIVE = {*_WRITERS, *_UNSEEING}

_BATCH_METHODS = {
    "train": ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end"),
    "test": ("on_test_batch_begin", "on_test_batch_end"),
    "predict": ("on_predict_batch_begin", "on_predict_batch_end"),
}
# Other methods in which a callback may run the steps of a phase, whose outputs are its own then.
_AROUND_BATCHES = {"predict": ("on_predict_begin", "on_predict_end")}
_STOP = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


def coordinate(callbacks: Any, job: Job, method: str,
               verbose: Any) -> keras.callbacks.CallbackList | list[keras.callbacks.Callback]:
    """Returns the callbacks that this rank runs.

    Args:
        callbacks: The user's argument of fit, evaluate or predict.
        job: The job.
        method: Name of that method.
        verbose: The user's argument.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if any(isinstance(callback, _Agree) for callback in callbacks.callbacks):
            return callbacks  # evaluate, called by fit
        callbacks = callbacks.callbacks
    callbacks = keras.tree.flatten(callbacks) if callbacks else []
    if method == "fit":
        callbacks = [*callbacks, *communication.of_environment(callbacks)]
    communicator = job.communicator
    if communicator.rank != 0:
        callbacks = [callback for callback in callbacks if not isinstance(callback, _WRITERS)]
    own_needs = {
        **{phase: any(_acts_on_batches(c, phase, _PASSIVE) for c in callbacks) for phase in _STOP},
        **{f"logs of {phase}": any(_acts_on_batches(c, phase, _UNSEEING, _AROUND_BATCHES.get(phase, ()))
                                   and not _writes_epochs(c) for c in callbacks) for phase in _STOP},
        "restore": resuming.has_backup(callbacks),
        "write in epochs": any(getattr(c, "save_freq", "epoch") not in ("epoch", False)
                               for c in callbacks),
        "show progress": verbose in ("auto", 1) and communicator.rank == 0,
    }
    # Users may give callbacks to a single rank.
    sums = communicator.sum(f"callbacks of {method}", np.array(list(own_needs.values()), np.int64))
    needs = {name for name, total in zip(own_needs, sums) if total}
    writes: list[keras.callbacks.Callback] = [resuming.WriteBackup()] if resuming.has_backup(callbacks) else []
    return [_Complete(communicator, needs), *callbacks, *writes, _Agree(communicator, needs)]


def needs_of(callbacks: keras.callbacks.CallbackList | list[keras.callbacks.Callback]) -> Set[str]:
    """Returns what the callbacks of all ranks need, given what `coordinate` has returned.

    Among it are "logs of train", "logs of test" and "logs of predict": after a batch; and "show progress": of the
    method that has called it.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):  # evaluate, called by fit, shows nothing
        return needs_of(callbacks.callbacks) - {"show progress"}
    *_, last = (callback for callback in callbacks if isinstance(callback, _Agree))
    return last.needs


def _writes_epochs(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback of Keras that writes files reads nothing before the end of an epoch."""
    frequency = getattr(callback, "save_freq", getattr(callback, "update_freq", "epoch"))
    return type(callback) in _WRITERS and frequency in ("epoch", False)


def _acts_on_batches(callback: keras.callbacks.Callback, phase: str, others: Collection[type],
                     also: Collection[str] = ()) -> bool:
    """Whether a callback has a method for batches, or one of those in `also`, unless its class is one of others."""
    return type(callback) not in others and any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(keras.callbacks.Callback, name)
        for name in (*_BATCH_METHODS[phase], *also))


class _Complete(keras.callbacks.Callback):
    """Runs first: makes the state of rank 0 that of the job, for callbacks that write it."""

    def __init__(self, communicator: Communicator, needs: Set[str]) -> None:
        super().__init__()
        self._communicator = communicator
        self._restores = "restore" in needs
        if "write in epochs" in needs:
            self.on_train_batch_end = self._fold

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._restores:  # on rank 0 alone
            resuming.build_optimizer(self.model)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._fold()

    def _fold(self, *_: object, **__: object) -> None:
        fold_accumulators(self.model, self._communicator)


class _Agree(keras.callbacks.Callback):
    """Runs last: makes all ranks begin with the state of rank 0, and stop if one of them stops.

    Attributes:
        needs: What the callbacks of all ranks need.
    """

    def __init__(self, communicator: Communicator, needs: Set[str]) -> None:
        super().__init__()
        self._communicator = communicator
        self.needs = needs
        self._restores = "restore" in needs
        # Batch methods are defined only if they are needed: each costs a small exchange.
        for phase in needs & _STOP.keys():
            setattr(self, f"on_{phase}_batch_end", lambda *_, p=phase, **__: self._agree(p))
        self._has_shared = False

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._share()

    def on_predict_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._share()

    def _share(self) -> None:
        if not self._has_shared:  # fit has already, when it evaluates
            self._has_shared = True
            share_state(self.model, self._communicator, self._restores)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self._share()
        comparing.begin(self.model)
        rebalancing.before_training(self.model)
        share_accumulators(self.model, self._communicator)
        epoch = self._communicator.broadcast("initial_epoch", np.array(keras_compat.initial_epoch(self.model) or 0))
        keras_compat.set_initial_epoch(self.model, int(epoch) or None)
        if self._restores:
            resuming.agree(self._communicator)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._agree("train")
        _hold_wanted(self.model, self._communicator)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._agree("train")  # also waits until rank 0 has written its files of this epoch
        compare_state(self.model, f"the end of epoch {epoch + 1}")
        rebalancing.after_epoch(self.model)

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        self._agree("train")

    def _agree(self, phase: str) -> None:
        name = _STOP[phase]
        stops = np.array(bool(getattr(self.model, name)), np.int64)
        setattr(self.model, name, bool(self._communicator.sum(f"model.{name}", stops)))


def share_state(model: keras.Model, communicator: Communicator, is_expected: bool) -> None:
    """Gives all ranks rank 0's variables, where they differ.

    Args:
        model: The model.
        communicator: This rank's communicator.
        is_expected: Whether differences are normal, since rank 0 may have restored a checkpoint.
    """
    job = model.distribute_strategy.extended.job
    job.new_variables.broadcast()
    sharded_variables.check_assigned(sharded_variables.among(map(keras_compat.value, _variables(model))))
    _hold_wanted(model, communicator)
    variables = common_variables(model)
    differs = communicator.sum("state/differs", comparing.differ_from_rank_0(variables, communicator)) > 0
    waits = [(v, communicator.submit(f"state/{i}", v.numpy(), root=0))
             for i, v in enumerate(variables) if differs[i]]
    for variable, wait in waits:
        value = wait()
        if communicator.rank != 0:
            variable.assign(value)
    if waits and not is_expected and communicator.rank == 0:
        _log.warning("%d variables of the model differed between the ranks, the first of them '%s'; "
                     "all ranks continue with rank 0's.", len(waits), waits[0][0].path)


def _hold_wanted(model: keras.Model, communicator: Communicator) -> None:
    """Makes every rank hold the whole of the variables that a graph of some rank's program reads."""
    sharded_variables.hold_wanted(sharded_variables.among(map(keras_compat.value, _variables(model))), communicator)


def compare_state(model: keras.Model, when: str) -> None:
    """Ends the job if state differs that must be the same on all ranks; `when` describes the time of the check."""
    copied = [v for v in model.variables if isinstance(value := keras_compat.value(v), master_weights.MasterWeight)
              and value.holds_shard and value.copy is not None]
    comparing.compare(model, [*common_variables(model), *copied], when)


def common_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of a model and of its optimizers that are the same on all ranks."""
    held = model.distribute_strategy.extended.job.held
    return [v for v in _variables(model) if not held.holds(value := keras_compat.value(v))
            and (not isinstance(value, sharded_variables.ShardedVariable) or value.is_whole)]


def _variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of a model and of its optimizers, each of them once."""
    candidates = (*model.variables, *(v for optimizer in optimizers_of(model) for v in optimizer.variables))
    return list({id(v): v for v in candidates}.values())


def share_accumulators(model: keras.Model, communicator: Communicator) -> None:
    """Moves accumulated gradients to rank 0; gradients that all ranks have loaded count once."""
    accumulators = _held_accumulators(model)
    differs = comparing.differ_from_rank_0(accumulators, communicator)
    for variable, is_own in zip(accumulators, differs):
        if communicator.rank != 0 and not is_own:
            variable.assign(np.zeros(variable.shape, variable.dtype))
    fold_accumulators(model, communicator)


def fold_accumulators(model: keras.Model, communicator: Communicator) -> None:
    """Moves the gradients that ranks have accumulated to rank 0; their sum does not change.

    Rank 0 therefore saves what one process would, and any number of ranks can continue with it.
    """
    accumulators = _held_accumulators(model)
    waits = [communicator.submit(f"accumulator {i}", variable.numpy())
             for i, variable in enumerate(accumulators)]
    for variable, wait in zip(accumulators, waits):
        total = wait()
        variable.assign(total if communicator.rank == 0 else np.zeros_like(total))


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the optimizers of a model: the compiled one, and those in other attributes."""
    optimizers = {}
    for value in vars(model).values():
        values = value.values() if isinstance(value, dict) else value
        for leaf in values if isinstance(value, (dict, list, tuple)) else [value]:
            if isinstance(leaf, keras.optimizers.Optimizer):
                optimizers[id(leaf)] = leaf
    return list(optimizers.values())


def accumulators(model: keras.Model) -> list[tf.Variable]:
    """Returns the `tf.Variable`s in which the optimizers of a model accumulate gradients that are summands."""
    return [variable.value for variable in _accumulators(model) if not isinstance(variable.value, ShardedVariable)]


def _held_accumulators(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables in which each rank accumulates the gradients of its own rows."""
    held = model.distribute_strategy.extended.job.held
    return [variable for variable in _accumulators(model) if held.holds(variable.value)]


def _accumulators(model: keras.Model) -> list[keras.Variable]:
    return [variable for optimizer in optimizers_of(model) for o in optimizers.with_inner(optimizer)
            if o.gradient_accumulation_steps and o.built for variable in keras_compat.accumulated_gradients(o)]
