"""Every function of Keras that is wrapped, and why."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
from typing import Callable

import keras

from tf_poseidon import supported
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook import logs
from tf_poseidon.keras_hook import losses
from tf_poseidon.keras_hook import optimizers
from tf_poseidon.keras_hook import state
from tf_poseidon.keras_hook import trainer

_TRAINER = "keras.src.backend.tensorflow.trainer"


@dataclasses.dataclass(frozen=True)
class Hook:
    """One wrapped function of Keras.

    Attributes:
        module: Where it is defined.
        name: Its name there, with its class.
        parameters: The parameters that it must have, or this Keras is another than we know.
        why: What the wrapper changes.
        wrapper: Called as wrapper(original, *args, **kwargs) in its place.
        alone: Whether it is also of use to one process.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    why: str
    wrapper: Callable
    alone: bool = False


HOOKS = (
    *(Hook(_TRAINER, f"TensorFlowTrainer.{name}", ("verbose", "callbacks"),
           "refuse models that cannot be synchronised; coordinate callbacks; progress on rank 0 only",
           trainer.run) for name in ("fit", "evaluate", "predict")),
    *(Hook(_TRAINER, f"TensorFlowTrainer.{name}", ("x", "return_dict"),
           "logs of all ranks", trainer.on_batch) for name in ("train_on_batch", "test_on_batch")),
    Hook(_TRAINER, "TensorFlowTrainer.predict_on_batch", ("x",), "refuse as fit",
         trainer.predict_on_batch),
    Hook(_TRAINER, "TensorFlowTrainer.make_predict_function", ("self", "force"),
         "split the batch of predict_on_batch", trainer.make_predict_function),
    Hook(_TRAINER, "reduce_per_replica", ("values", "strategy", "reduction"),
         "whole predictions on every rank", trainer.reduce_per_replica),
    Hook(_TRAINER, "TensorFlowTrainer._maybe_symbolic_build", ("self", "iterator", "data_batch"),
         "build models without reading a batch of data", trainer.maybe_symbolic_build, alone=True),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter.get_tf_dataset",
         ("self",), "know the batch size that gradients are planned for", trainer.get_tf_dataset),
    Hook(_TRAINER, "TensorFlowTrainer._make_function", ("self", "step_function"),
         "tell Keras' steps from those of users' own loops", trainer.make_function),
    Hook("keras.src.trainers.trainer", "Trainer._get_metrics_result_or_logs", ("self", "logs"),
         "logs of epochs and of evaluate are global", logs.get_metrics_result_or_logs),
    Hook(losses.LOSS_MODULE, "reduce_weighted_values",
         ("values", "sample_weight", "mask", "reduction", "dtype"),
         "know what a loss's mean is taken over; scale scalar losses",
         losses.reduce_weighted_values),
    Hook(losses.LOSS_MODULE, "scale_loss_for_distribution", ("value",),
         "scale gradients by the share of the rows, not by 1 / ranks", losses.scale_loss),
    Hook(losses.LOSS_MODULE, "unscale_loss_for_distribution", ("value",),
         "give metrics the value", losses.unscale_loss),
    Hook("keras.src.metrics.reduction_metrics", "Mean.update_state",
         ("self", "values", "sample_weight"),
         "weight scalars by the rows that they stand for", logs.update_mean),
    Hook("keras.src.backend.tensorflow.core", "Variable._direct_assign", ("self", "value"),
         "average moving statistics; leave borrowed rows out of metrics", state.assign),
    Hook("keras.src.random.seed_generator", "SeedGenerator.next", ("self",),
         "other random numbers on every rank", state.next_seed),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "synchronise before clipping and accumulation", optimizers.apply),
    Hook("keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "synchronise before deciding whether gradients are finite", optimizers.apply),
    Hook("keras.src.optimizers.multi_optimizer", "MultiOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "synchronise once for all inner optimizers", optimizers.apply),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer._backend_apply_gradients",
         ("self", "grads", "trainable_variables"),
         "know whose gradients are clipped", optimizers.backend_apply_gradients),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer._clip_gradients",
         ("self", "grads"),
         "synchronise accumulated gradients, once for each update", optimizers.clip_gradients),
    Hook("keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer.check_finite",
         ("self", "grads"),
         "agree on it where each rank accumulates its own gradients", optimizers.check_finite),
)


@contextlib.contextmanager
def installed():
    """While the functions of HOOKS are wrapped."""
    replaced = install()
    try:
        yield
    finally:
        for owner, attribute, original in replaced:
            setattr(owner, attribute, original)


def install(alone=False):
    """Wraps the functions of HOOKS, once per process.

    Args:
        alone: Wrap only those that are of use to one process.

    Returns:
        (owner, attribute, function) of each that was not wrapped before.

    Raises:
        PoseidonError: If this Keras is not one that the hooks were made for.
    """
    replaced = []
    for hook in HOOKS:
        if alone and not hook.alone:
            continue
        owner, attribute, original = resolve(hook)
        if getattr(original, "_is_poseidon_hook", False):
            continue

        @functools.wraps(original)
        def wrapped(*args, _original=original, _wrapper=hook.wrapper, **kwargs):
            return _wrapper(_original, *args, **kwargs)

        wrapped._is_poseidon_hook = True
        setattr(owner, attribute, wrapped)
        replaced.append((owner, attribute, original))
    return replaced


def resolve(hook):
    """Returns (owner, attribute, function) of a hook.

    Raises:
        PoseidonError: If this Keras has no such function, or one with other parameters.
    """
    *path, attribute = hook.name.split(".")
    owner = importlib.import_module(hook.module)
    for name in path:
        owner = getattr(owner, name, None)
    function = vars(owner).get(attribute) if owner is not None else None
    known = set(inspect.signature(function).parameters) if function else set()
    if not known.issuperset(hook.parameters):
        raise PoseidonError(
            f"Keras {keras.__version__} has no {hook.module}.{hook.name}"
            f"({', '.join(hook.parameters)}), which PoseidonStrategy needs to {hook.why}; install "
            f"'keras>={supported.KERAS_FROM},<{supported.KERAS_BELOW}'.")
    return owner, attribute, function
