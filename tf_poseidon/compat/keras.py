"""The private names of Keras that are used beside the functions of `keras_hook.HOOKS`.

They are those of one version of Keras: creating a strategy under another is refused. Nothing here imports Keras.
"""

from typing import Any
from typing import TYPE_CHECKING

from tf_poseidon import supported
from tf_poseidon.compat.table import Name
from tf_poseidon.compat.table import Table

if TYPE_CHECKING:
    import tensorflow as tf

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
    Name("keras.src.trainers.trainer", "Trainer._initial_epoch",
         "let all ranks continue at the epoch that rank 0 has restored"),
    *(Name("keras.src.callbacks.backup_and_restore", f"BackupAndRestore.{name}",
           "keep the weights of a backup together with the epoch that they belong to")
      for name in ("_weights_path", "_training_metadata_path", "_current_epoch", "_last_batch_seen")),
    Name("keras.src.models.sequential", "Sequential._functional", "explain Sequential models by their inputs"),
))


def value(variable: Any) -> "tf.Variable":
    """Returns the `tf.Variable` of a Keras variable."""
    return variable._value


def strategy_of(optimizer: Any) -> "tf.distribute.Strategy":
    """Returns the strategy in whose scope an optimizer was created."""
    return optimizer._distribution_strategy


def trainable_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return optimizer._trainable_variables


def accumulated_gradients(optimizer: Any) -> list[Any]:
    """Returns the variables in which a built optimizer accumulates gradients; only for one that accumulates."""
    return optimizer._accumulated_gradients


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


def functional(sequential: Any) -> Any:
    """Returns the functional model inside a `keras.Sequential`, None if it is not built."""
    return sequential._functional
