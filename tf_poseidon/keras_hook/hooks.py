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
from tf_poseidon.keras_hook import batch_normalization
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
    *(Hook(_TRAINER, f"TensorFlowTrainer.{name}", ("x",), "refuse as fit", trainer.on_batch)
      for name in ("train_on_batch", "test_on_batch", "predict_on_batch")),
    Hook(_TRAINER, "TensorFlowTrainer._make_function", ("self", "step_function"),
         "partition the steps of fit and evaluate", trainer.make_function),
    Hook(_TRAINER, "TensorFlowTrainer.make_predict_function", ("self", "force"),
         "partition the steps of predict", trainer.make_predict_function),
    Hook(_TRAINER, "TFEpochIterator.__init__", ("self", "distribute_strategy"),
         "read global batches", trainer.make_iterator),
    Hook(_TRAINER, "TensorFlowTrainer._maybe_symbolic_build", ("self", "iterator", "data_batch"),
         "build models without reading a batch of data", trainer.maybe_symbolic_build, alone=True),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter.get_tf_dataset",
         ("self",), "know the batch size that gradients are planned for", trainer.get_tf_dataset),
    Hook("keras.src.layers.normalization.batch_normalization", "BatchNormalization.call",
         ("self", "inputs", "training", "mask"), "normalise each rank's rows by themselves, unless synchronized",
         batch_normalization.call),
    Hook("keras.src.backend.tensorflow.core", "Variable._direct_assign", ("self", "value"),
         "average moving statistics; in strategy.run, leave borrowed rows out of what is assigned", state.assign),
    Hook("keras.src.random.seed_generator", "SeedGenerator.next", ("self",),
         "in strategy.run, other random numbers on every rank", state.next_seed),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "in strategy.run, synchronise before clipping and accumulation", optimizers.apply),
    Hook("keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "in strategy.run, synchronise before deciding whether gradients are finite", optimizers.apply),
    Hook("keras.src.optimizers.multi_optimizer", "MultiOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "in strategy.run, synchronise once for all inner optimizers", optimizers.apply),
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
