"""Every function of Keras that is wrapped, and why.

Tests: tests/unit/test_keras_hook.py, tests/unit/test_compat.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import functools
from typing import Any

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.compat import table
from tf_poseidon.keras_hook.batch_loops import predicting
from tf_poseidon.keras_hook.batch_loops import py_dataset_rows
from tf_poseidon.keras_hook.batch_loops import trainer
from tf_poseidon.keras_hook.checkpoints import large_values
from tf_poseidon.keras_hook.checkpoints import model_files
from tf_poseidon.keras_hook.checkpoints import resuming
from tf_poseidon.keras_hook.keras_objects import batch_normalization
from tf_poseidon.keras_hook.keras_objects import optimizers
from tf_poseidon.keras_hook.keras_objects import sharded_slots
from tf_poseidon.keras_hook.keras_objects import state

_PY_DATASETS = "keras.src.trainers.data_adapters.py_dataset_adapter"
_TRAINER = "keras.src.backend.tensorflow.trainer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hook(table.Name):
    """One wrapped function of Keras; `why` is what the wrapper changes.

    Attributes:
        wrapper: Called as wrapper(original, *args, **kwargs) in its place.
        alone: The same in a job of one process; None if the function is not wrapped there.
    """

    wrapper: Callable[..., Any]
    alone: Callable[..., Any] | None = None


def _always(wrapper: Callable[..., Any]) -> dict[str, Any]:
    return {"wrapper": wrapper, "alone": wrapper}


HOOKS = tuple(hook for hook in (
    *(Hook(_TRAINER, f"TensorFlowTrainer.{name}",
           "refuse models that cannot be synchronised; coordinate callbacks; progress on rank 0 only",
           ("verbose", "callbacks"), wrapper=trainer.run, alone=resuming.alone if name == "fit" else None)
      for name in ("fit", "evaluate", "predict")),
    *(Hook(_TRAINER, f"TensorFlowTrainer.{name}", "refuse as fit", ("x",), wrapper=trainer.on_batch)
      for name in ("train_on_batch", "test_on_batch", "predict_on_batch")),
    Hook(_TRAINER, "TensorFlowTrainer._make_function", "run partitioned steps in fit and evaluate",
         ("self", "step_function"), wrapper=trainer.make_function),
    Hook(_TRAINER, "TensorFlowTrainer.make_predict_function", "run partitioned steps in predict", ("self", "force"),
         wrapper=trainer.make_predict_function),
    Hook(_TRAINER, "potentially_ragged_concat", "gather the rows that ranks have predicted, once", ("tensors",),
         wrapper=predicting.concatenated),
    Hook(_TRAINER, "TFEpochIterator.__init__", "read global batches", ("self", "distribute_strategy"),
         wrapper=trainer.make_iterator, alone=resuming.make_iterator),
    Hook("keras.src.trainers.epoch_iterator", "EpochIterator._enumerate_iterator",
         "read past the data that a backup was trained on; free iterators without waiting for it", ("self",),
         wrapper=trainer.enumerate_iterator, alone=resuming.enumerate_iterator),
    Hook("keras.src.trainers.trainer", "Trainer._get_metrics_result_or_logs",
         "read metrics, which all ranks do together; give the logs of an epoch that resumes after its last step",
         ("self", "logs"), wrapper=trainer.results, alone=resuming.results),
    Hook(_TRAINER, "TensorFlowTrainer._maybe_symbolic_build",
         "build models in their first step, without reading a batch of data", ("self", "iterator", "data_batch"),
         **_always(trainer.maybe_symbolic_build)),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter.get_tf_dataset",
         "know the batch size that gradients are planned for", ("self",), wrapper=trainer.get_tf_dataset),
    Hook(_PY_DATASETS, "PyDatasetAdapter.__init__", "read this rank's rows alone", ("self", "x"),
         wrapper=py_dataset_rows.make_adapter),
    Hook(_PY_DATASETS, "PyDatasetAdapter._standardize_batch", "know of which batch rows are", ("self", "batch"),
         wrapper=py_dataset_rows.standardize_batch),
    Hook(_PY_DATASETS, "PyDatasetAdapter._get_iterator", "compare the first batches of ranks", ("self",),
         wrapper=py_dataset_rows.get_iterator),
    Hook(_PY_DATASETS, "PyDatasetAdapter.get_tf_dataset", "know that its elements are this rank's rows", ("self",),
         wrapper=py_dataset_rows.get_tf_dataset),
    Hook("keras.src.layers.normalization.batch_normalization", "BatchNormalization.call",
         "normalise each rank's rows separately, unless synchronized", ("self", "inputs", "training", "mask"),
         wrapper=batch_normalization.call),
    Hook("keras.src.backend.tensorflow.core", "Variable._initialize",
         "leave aggregation to Keras and its hooks, except that of metrics", ("self", "value"),
         wrapper=state.initialize),
    Hook("keras.src.backend.tensorflow.core", "Variable._initialize_with_initializer",
         "draw parts of large weights on the ranks that hold these", ("self", "initializer"),
         wrapper=sharded_slots.initialize_with_initializer),
    Hook("keras.src.backend.tensorflow.core", "Variable._direct_assign",
         "average moving statistics; in strategy.run, keep the results of padding rows out of state", ("self", "value"),
         wrapper=state.assign),
    Hook("keras.src.saving.saving_lib", "get_attr_skipset",
         "save a model on one rank inside the scope: Keras makes an optimizer and metrics to list their attributes",
         ("obj_type",), wrapper=state.get_attr_skipset),
    *(Hook("keras.src.saving.saving_lib", name, "write files completely or not at all", ("model", "filepath"),
           **_always(model_files.save)) for name in ("save_model", "save_weights_only")),
    Hook("keras.src.saving.saving_lib", "H5IOStore.__setitem__", "write large values some rows at a time",
         ("self", "key", "value"), wrapper=large_values.set_value),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer.save_own_variables",
         "write large values some rows at a time", ("self", "store"), wrapper=large_values.save_optimizer),
    Hook("keras.src.callbacks.backup_and_restore", "BackupAndRestore._save_model",
         "keep the weights of a backup together with the epoch that they belong to", ("self",),
         **_always(model_files.back_up)),
    Hook("keras.src.callbacks.backup_and_restore", "BackupAndRestore._load_model",
         "restore what belongs together; name a backup that cannot be read", ("self",), **_always(model_files.restore)),
    Hook("keras.src.utils.io_utils", "is_interactive_logging_enabled",
         "print summaries and messages of callbacks on rank 0 only", (), wrapper=trainer.is_interactive),
    Hook("keras.src.random.seed_generator", "SeedGenerator.next",
         "in strategy.run, draw different random numbers on every rank", ("self",), wrapper=state.next_seed),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer.add_variable_from_reference",
         "let each rank hold the part of an optimizer's variable that it updates",
         ("self", "reference_variable", "name", "initializer"), wrapper=sharded_slots.add_variable_from_reference),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer.add_variable",
         "let one rank hold what only its updates use", ("self", "shape", "initializer"),
         wrapper=sharded_slots.add_variable),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply",
         "in strategy.run, synchronise before clipping and accumulation", ("self", "grads", "trainable_variables"),
         wrapper=optimizers.apply),
    Hook("keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer.apply",
         "in strategy.run, synchronise before deciding whether gradients are finite",
         ("self", "grads", "trainable_variables"), wrapper=optimizers.apply),
    Hook("keras.src.optimizers.multi_optimizer", "MultiOptimizer.apply",
         "in strategy.run, synchronise once for all inner optimizers", ("self", "grads", "trainable_variables"),
         since="3.15", wrapper=optimizers.apply),
) if keras_compat.TABLE.has(hook))


@contextlib.contextmanager
def installed(alone: bool = False) -> Iterator[None]:
    """A context in which the functions of HOOKS are wrapped; `alone` as in `install`."""
    replaced = install(alone)
    try:
        yield
    finally:
        for owner, attribute, original in replaced:
            setattr(owner, attribute, original)


def install(alone: bool = False) -> list[tuple[type, str, Callable[..., Any]]]:
    """Wraps the functions of HOOKS, once per process.

    Args:
        alone: Whether to wrap only those that are useful in a job of one process.

    Returns:
        (owner, attribute, function) of each that was not wrapped before.

    Raises:
        PoseidonError: If the hooks or `compat.keras` do not support this Keras; then none is wrapped.
    """
    keras_compat.TABLE.check()
    replaced = []
    for hook, (owner, attribute, original) in [(hook, resolve(hook)) for hook in HOOKS]:
        wrapper = hook.alone if alone else hook.wrapper
        if wrapper is None or getattr(original, "_is_poseidon_hook", False):
            continue

        @functools.wraps(original)
        def wrapped(*args: Any, _original: Callable[..., Any] = original, _wrapper: Callable[..., Any] = wrapper,
                    **kwargs: Any) -> Any:
            return _wrapper(_original, *args, **kwargs)

        wrapped._is_poseidon_hook = True  # type: ignore[attr-defined]
        setattr(owner, attribute, wrapped)
        replaced.append((owner, attribute, original))
    return replaced


def resolve(hook: Hook) -> tuple[type, str, Callable[..., Any]]:
    """Returns (owner, attribute, function) of a hook; raises PoseidonError as `table.Table.resolve`."""
    return keras_compat.TABLE.resolve(hook)
