"""The private names of Keras that are used beside the functions of `keras_hook.HOOKS`.

They are those of one version of Keras: creating a strategy under another is refused. Nothing here imports Keras.

Tests: tests/unit/test_compat.py.
"""

from collections.abc import Callable
from typing import Any
from typing import TYPE_CHECKING

from tf_poseidon import supported
from tf_poseidon.compat.table import Name
from tf_poseidon.compat.table import Table

if TYPE_CHECKING:
    import tensorflow as tf

_COUNTS = "resume what callbacks have counted"
_PAST = "read past the data that a backup was trained on"
_ONCE = "trace the first step once"
_OPTIMIZER = "keras.src.optimizers.base_optimizer"

TABLE = Table("Keras", supported.KERAS, f"install '{supported.KERAS}'", (
    Name("keras.src.backend.tensorflow.core", "Variable._value",
         "assign state in its own precision: the public value is a copy where layers compute in half precision"),
    Name("keras.src.backend.tensorflow.optimizer", "TFOptimizer._distribution_strategy",
         "refuse optimizers that were created outside strategy.scope()"),
    Name(_OPTIMIZER, "BaseOptimizer._trainable_variables", "synchronise gradients that come without variables"),
    Name(_OPTIMIZER, "BaseOptimizer._accumulated_gradients",
         "let every rank accumulate the gradients of its own rows"),
    Name("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter.batch_size",
         "know the batch size that gradients are planned for"),
    Name("keras.src.trainers.data_adapters.py_dataset_adapter", "PyDatasetAdapter.py_dataset",
         "let each rank make its own rows"),
    Name("keras.src.trainers.trainer", "Trainer._initial_epoch",
         "let all ranks continue at the epoch that rank 0 has restored"),
    *(Name("keras.src.callbacks.backup_and_restore", f"BackupAndRestore.{name}",
           "keep the weights of a backup together with the epoch that they belong to")
      for name in ("_weights_path", "_training_metadata_path", "_current_epoch", "_last_batch_seen")),
    *(Name(f"keras.src.callbacks.{module}", name, _COUNTS) for module, name in (
        ("backup_and_restore", "BackupAndRestore._batches_seen_since_last_saving"),
        ("early_stopping", "EarlyStopping.wait"), ("early_stopping", "EarlyStopping.stopped_epoch"),
        ("early_stopping", "EarlyStopping.best_epoch"), ("early_stopping", "EarlyStopping.best_weights"),
        ("model_checkpoint", "ModelCheckpoint._batches_seen_since_last_saving"),
        ("model_checkpoint", "ModelCheckpoint._last_batch_seen"), ("monitor_callback", "MonitorCallback.best"),
        ("reduce_lr_on_plateau", "ReduceLROnPlateau.wait"),
        ("reduce_lr_on_plateau", "ReduceLROnPlateau.cooldown_counter"))),
    Name("keras.src.saving.saving_lib", "H5IOStore._h5_entry_group", "write large values some rows at a time"),
    Name("keras.src.trainers.trainer", "Trainer._symbolic_build", "restore metrics before the first step",
         ("self", "iterator", "data_batch")),
    Name("keras.src.backend.common.symbolic_scope", "in_symbolic_scope", "divide weights of layers of any class"),
    Name("keras.src.trainers.trainer", "Trainer._should_eval", _PAST, ("self", "epoch", "validation_freq")),
    Name("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer._eval_epoch_iterator", _PAST),
    Name("keras.src.trainers.data_adapters.tf_dataset_adapter", "TFDatasetAdapter._dataset", _PAST),
    Name("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter._shuffle", _PAST),
    *(Name("keras.src.backend.tensorflow.trainer", f"TFEpochIterator.{name}", "share rows anew in another epoch")
      for name in ("_distribute_strategy", "_distributed_dataset")),
    Name("keras.src.trainers.trainer", "Trainer._get_metrics_result_or_logs", "add up metrics when they are read",
         ("self", "logs")),
    Name("keras.src.models.sequential", "Sequential._functional", "explain Sequential models by their inputs"),
    Name("keras.src.ops.function", "Function._outputs_struct", _ONCE),
    Name("keras.src.trainers.trainer", "Trainer._compile_metrics", _ONCE),
    Name("keras.src.layers.layer", "Layer._flatten_layers", _ONCE, ("self", "include_self", "recursive")),
))


# By the class of a callback, its attributes that change while it runs.
_COUNTED = {
    "BackupAndRestore": ("_batches_seen_since_last_saving",),
    "EarlyStopping": ("wait", "best", "stopped_epoch", "best_epoch"),
    "ModelCheckpoint": ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
}


def reads_logs_at_end(model: Any) -> bool:
    """Whether Keras' own method reads the logs of an epoch; a model with its own may read what it likes in loops."""
    owner = next(cls for cls in type(model).__mro__ if "_get_metrics_result_or_logs" in vars(cls))
    return owner.__module__.startswith("keras.")


def value(variable: Any) -> "tf.Variable":
    """Returns the `tf.Variable` of a Keras variable."""
    return variable._value


def group(store: Any) -> Any:
    """Returns the group of HDF5 to which a file of weights adds values."""
    return store._h5_entry_group


def is_symbolic() -> bool:
    """Whether Keras calls layers for the shapes of their outputs alone, in a graph that never runs."""
    return bool(TABLE["symbolic_scope.in_symbolic_scope"]())


def strategy_of(optimizer: Any) -> "tf.distribute.Strategy":
    """Returns the strategy in whose scope an optimizer was created."""
    return optimizer._distribution_strategy


def trainable_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return optimizer._trainable_variables


def accumulated_gradients(optimizer: Any) -> list[Any]:
    """Returns the variables in which a built optimizer accumulates gradients; only for one that accumulates."""
    return optimizer._accumulated_gradients


def py_dataset(adapter: Any) -> Any:
    """Returns the PyDataset that an adapter reads."""
    return adapter.py_dataset


def initial_epoch(model: Any) -> int | None:
    """Returns the epoch at which `fit` begins, None for its argument."""
    return model._initial_epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Makes `fit` begin at another epoch, None for its argument."""
    model._initial_epoch = epoch


def backup_paths(callback: Any) -> tuple[str, str]:
    """Returns where a BackupAndRestore writes the weights, and where the epoch that they belong to."""
    return str(callback._weights_path), str(callback._training_metadata_path)


def backup_position(callback: Any) -> dict[str, int]:
    """Returns what a BackupAndRestore writes about the epoch, as Keras does."""
    return {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}


def set_backup_position(callback: Any, epoch: int) -> None:
    """Makes a BackupAndRestore continue with an epoch; Keras' begins to count at 0."""
    callback._current_epoch = epoch


def callback_state(callback: Any) -> dict[str, Any]:
    """Returns what a callback of Keras has counted, except the best weights; nothing of other callbacks."""
    attributes = {name: getattr(callback, name) for kind, names in _COUNTED.items() for cls in type(callback).__mro__
                  if cls.__name__ == kind and cls.__module__.startswith("keras.") for name in names}
    return {name: None if value is None else int(value) if isinstance(value, int) else float(value)
            for name, value in attributes.items()}


def set_callback_state(callback: Any, state: dict[str, Any]) -> None:
    """Restores what `callback_state` has returned."""
    for name, value in state.items():
        setattr(callback, name, value)


def build_metrics(model: Any, batch: Any) -> None:
    """Makes the metrics of a compiled model, and what else it lacks for a batch."""
    model._symbolic_build(data_batch=batch)


def outputs(model: Any) -> Any:
    """Returns what the `call` of a built Functional or Sequential model returns; None for other models."""
    functional = getattr(model, "_functional", model)
    if not type(model).call.__module__.startswith("keras.") or not hasattr(functional, "_outputs_struct"):
        return None
    structure = functional._outputs_struct
    return structure[0] if isinstance(structure, list | tuple) and len(structure) == 1 else structure


def are_layers_built(model: Any) -> bool:
    """Whether all layers of a model are built."""
    return all(layer.built for layer in model._flatten_layers())


def unbuilt_metrics(model: Any) -> Any:
    """Returns the metrics that were given to `compile`, None if there are none, or they are built."""
    metrics = model._compile_metrics
    return None if metrics is None or metrics.built else metrics


def validates(model: Any, epoch: int, frequency: Any) -> bool:
    """Whether `fit` validates after an epoch."""
    return model._should_eval(epoch, frequency)


def validation_iterator(model: Any) -> Any:
    """Returns the iterator of the validation data of a running `fit`, None if it has none yet."""
    return getattr(model, "_eval_epoch_iterator", None)


def given_dataset(iterator: Any) -> "tf.data.Dataset | None":
    """Returns the dataset that `fit` was given, None if it was given something else."""
    return getattr(iterator.data_adapter, "_dataset", None)


def distributed_dataset(iterator: Any) -> "tf.data.Dataset":
    """Returns the dataset that an epoch iterator reads."""
    return iterator._distributed_dataset


def distribute_anew(iterator: Any, distribute: "Callable[[tf.distribute.Strategy, tf.data.Dataset], tf.data.Dataset]",
                    ) -> None:
    """Gives an epoch iterator another dataset, which it reads from its next epoch on.

    Args:
        iterator: The iterator.
        distribute: Returns the dataset, given the iterator's strategy and the dataset that it has.
    """
    iterator._distributed_dataset = distribute(iterator._distribute_strategy, iterator._distributed_dataset)


def reads_arrays_in_order(iterator: Any) -> bool:
    """Whether `fit` reads arrays that it does not shuffle."""
    return getattr(iterator.data_adapter, "_shuffle", True) is False


def functional(sequential: Any) -> Any:
    """Returns the functional model inside a `keras.Sequential`, None if it is not built."""
    return sequential._functional
