"""The one module that touches Keras: where its trainer, losses and optimizers meet the job.

Keras 3 scales losses by the number of replicas, not by their rows; it clips gradients before it
reduces them; and its metrics know one process only. `HOOKS` lists every function that is wrapped
to put that right, and why. In a job of several processes, models can be trained and used under
PoseidonStrategy only; whatever else Keras does passes through.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import threading
from typing import Callable

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon import data
from tf_poseidon import runtime
from tf_poseidon import step as step_lib
from tf_poseidon import supported
from tf_poseidon.errors import PoseidonError

_TRAINER = "keras.src.backend.tensorflow.trainer"
_LOSS = "keras.src.losses.loss"


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


# ---- fit, evaluate, predict ---------------------------------------------------------------------


def _train_or_evaluate(original, model, *args, **kwargs):
    """Checks the model, and shows progress on rank 0 only."""
    strategy = _check_model(model)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    if strategy.rank != 0:
        bound.arguments["verbose"] = 0
    return original(*bound.args, **bound.kwargs)


def _on_batch(original, model, *args, **kwargs):
    """Checks the model; every rank computes the whole batch."""
    _check_model(model)
    return original(model, *args, **kwargs)


def _predict(original, model, *args, **kwargs):
    """Computes all rows on every rank: the result is whole, and the same everywhere."""
    extended = _check_model(model).extended
    extended.replicates_input = True
    try:
        return _train_or_evaluate(original, model, *args, **kwargs)
    finally:
        extended.replicates_input = False


def _check_model(model):
    """Returns the strategy of a model that can be used in this job, or says why it cannot."""
    strategy = model.distribute_strategy
    if not _is_ours(strategy):
        raise PoseidonError(
            f"The model '{model.name}' was built outside of strategy.scope(), so its "
            f"{runtime.communicator().size} processes would train apart from each other; build "
            "and compile it inside `with strategy.scope():`.")
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise PoseidonError(
                f"The variable '{variable.path}' of model '{model.name}' was created outside of "
                "strategy.scope(), so it may differ between processes; create all layers inside "
                "`with strategy.scope():`.")
    if model.optimizer is not None and not _is_ours(model.optimizer._distribution_strategy):
        raise PoseidonError(
            f"The optimizer '{model.optimizer.name}' of model '{model.name}' was created outside of "
            "strategy.scope(); create it inside `with strategy.scope():`, as the model.")
    if model.jit_compile:
        raise PoseidonError(
            f"The model '{model.name}' is compiled with jit_compile=True, but XLA cannot compile "
            "the exchange with other processes; use compile(jit_compile=False).")
    return strategy


def _maybe_symbolic_build(original, model, iterator=None, data_batch=None):
    """Builds the model by the shapes of the data; Keras would read a batch, and a generator lose it."""
    if iterator is not None and hasattr(model.distribute_strategy.extended, "communicator"):
        specs = keras.tree.map_structure(_tensor_spec, iterator._distributed_dataset.element_spec)
        shapes = [spec.shape for spec in keras.tree.flatten(specs) if spec is not None]
        if all(shape.rank is not None and shape[1:].is_fully_defined() for shape in shapes):
            return original(model, data_batch=specs)
    return original(model, iterator, data_batch)


def _tensor_spec(spec):
    """Returns the spec of one part of a batch as Keras' steps see it."""
    if isinstance(spec, data.Rows.Spec):
        return spec.value
    return None if isinstance(spec, tf.OptionalSpec) else spec


def _get_tf_dataset(original, adapter):
    """Remembers the batch size of arrays, which their dataset does not tell."""
    dataset = original(adapter)
    data.batch_sizes[dataset] = adapter.batch_size
    return dataset


def _make_function(original, model, step_function):
    """Marks train and test steps, in which losses are scaled for the user."""

    @functools.wraps(step_function)
    def keras_step(batch):
        step = step_lib.current()
        if step is not None:
            step.is_keras_step = True
            model.distribute_strategy.extended.last_share.assign(step.share(tf.float64))
        return step_function(batch)

    return original(model, keras_step)


def _get_metrics_result_or_logs(original, model, logs):
    """Computes metrics from the states of all ranks."""
    strategy = model.distribute_strategy
    if not _is_ours(strategy):
        return original(model, logs)
    communicator = strategy.extended.communicator
    with _global_state(communicator, model.metrics_variables):
        result = original(model, logs)
        if result is logs and set(logs) == {metric.name for metric in model.metrics}:
            result = {metric.name: metric.result() for metric in model.metrics}
        if result is not logs:
            # Now, not later: some metrics return the variable that holds their state.
            return keras.tree.map_structure(_value, result)
    return _average_logs(communicator, strategy.extended.last_share, logs)


def _value(x):
    return keras.ops.convert_to_numpy(x) if keras.ops.is_tensor(x) else x


def _average_logs(communicator, share, logs):
    """Averages the logs of a user's own train_step over ranks, by their rows of the last batch."""
    values = keras.tree.map_structure(_value, logs)
    # A metric of all ranks, or a name: anything else than a number is left as it is.
    is_number = [isinstance(v, (int, float)) or getattr(v, "shape", None) == ()
                 for v in keras.tree.flatten(values)]
    mine = [float(v) if n else 0.0 for v, n in zip(keras.tree.flatten(values), is_number)]
    share = float(share.numpy())
    weighted = np.array(mine) * share if share else np.zeros(len(mine))
    averages = communicator.sum("logs", weighted)
    return keras.tree.pack_sequence_as(values, [
        float(a) if n else v
        for v, a, n in zip(keras.tree.flatten(values), averages, is_number)])


@contextlib.contextmanager
def _global_state(communicator, variables):
    """While the variables hold the sum, or mean, of their values on all ranks."""
    local = [variable.numpy() for variable in variables]
    waits = []
    for i, (variable, value) in enumerate(zip(variables, local)):
        if variable.aggregation not in ("sum", "mean"):
            raise PoseidonError(
                f"The metric variable '{variable.path}' has aggregation="
                f"'{variable.aggregation}', so its values on several processes cannot be put "
                "together; give it aggregation='sum' or 'mean'.")
        waits.append(communicator.submit(f"metric {i}/{variable.path}", value))
    for variable, wait in zip(variables, waits):
        total = wait()
        variable.assign(total / communicator.size if variable.aggregation == "mean" else total)
    try:
        yield
    finally:
        for variable, value in zip(variables, local):
            variable.assign(value)


# ---- losses -------------------------------------------------------------------------------------

# The loss that is being computed on this thread, see _Loss.
_loss = threading.local()


@dataclasses.dataclass
class _Loss:
    """One call of a Keras loss.

    Attributes:
        part: What its mean is taken over on this rank, when that is not the rows: the number of
            valid entries of a mask, the sum of the weights.
        is_scaled: Whether Keras has asked for the scale.
    """

    part: tf.Tensor | None
    is_scaled: bool = False


def _reduce_weighted_values(original, values, sample_weight=None, mask=None,
                            reduction="sum_over_batch_size", dtype=None):
    """Gives each loss the share of what its mean is taken over, and scalar losses the rows'."""
    step = step_lib.current()
    if step is None:
        return original(values, sample_weight, mask, reduction, dtype)
    outer = getattr(_loss, "current", None)
    _loss.current = loss = _Loss(_part_of_mean(values, sample_weight, mask, reduction))
    try:
        result = original(values, sample_weight, mask, reduction, dtype)
    finally:
        _loss.current = outer
    if not loss.is_scaled and result.shape.rank == 0 and reduction != "sum":
        # A function of the user's that returns a scalar: Keras leaves that alone, and every rank
        # would add its own mean.
        result = result * step.share(result.dtype)
        loss.is_scaled = True
    step.has_scaled_loss = True
    if loss.is_scaled:
        step.scaled_losses.append(result)
    return result


def _part_of_mean(values, sample_weight, mask, reduction):
    """Returns what a loss's mean is divided by on this rank, or None when it is the rows."""
    wide = "float64" if values.dtype == tf.float64 else "float32"
    if reduction in ("sum_over_batch_size", "mean") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, wide))
    if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        weight = None if sample_weight is None else tf.cast(sample_weight, wide)
        apply_mask = importlib.import_module(_LOSS).apply_mask
        return tf.reduce_sum(apply_mask(weight, mask, wide, reduction))
    return None


def _scale_loss(original, value):
    """Scales a mean over this rank's part by its share of the whole."""
    step = step_lib.current()
    if step is None:
        return original(value)
    step.has_scaled_loss = True
    loss = getattr(_loss, "current", None)
    if loss is None:  # regularizers and add_loss: the shares of the rows add up to one
        return value * step.share(value.dtype)
    loss.is_scaled = True
    share = step.share(value.dtype) if loss.part is None else step.share_of(loss.part)
    return value * tf.cast(share, value.dtype)


def _unscale_loss(original, value):
    """Undoes the scale, for metrics that weight their mean by rows."""
    step = step_lib.current()
    if step is None:
        return original(value)
    return tf.math.divide_no_nan(value, step.share(value.dtype))


def _compute_loss(original, model, *args, **kwargs):
    """Remembers that the loss of a user's own train_step is scaled."""
    loss = original(model, *args, **kwargs)
    step = step_lib.current()
    if step is not None:
        step.scaled_losses.append(loss)
    return loss


def _update_mean(original, metric, values, sample_weight=None):
    """Lets scalars count as much as the rows that they are computed from, and losses unscaled.

    A scalar without weight counts once a batch in one process, so the ranks' parts of the batch have
    to count by their share.
    """
    step = step_lib.current()
    if step is not None and step.is_keras_step:
        if any(values is loss for loss in step.scaled_losses):
            values = tf.math.divide_no_nan(values, step.share(values.dtype))
        values = tf.convert_to_tensor(values)
        if sample_weight is None and values.shape.rank == 0 and values.dtype.is_floating:
            sample_weight = step.share(values.dtype)
    return original(metric, values, sample_weight)


# ---- state ----------------------------------------------------------------------------------------


def _assign(original, variable, value):
    """Keeps what a borrowed row computes out of state, and moving statistics equal on all ranks."""
    step = step_lib.current()
    if step is None or step.is_applying:
        return original(variable, value)
    # Not variable.value: where layers compute in half precision, that is a copy in half precision.
    native = variable._value
    if variable.aggregation != "sum":
        if not native.dtype.is_floating:  # seeds and counters of steps, the same on all ranks
            return original(variable, value)
        step.note_state(variable.path, native)
    return original(variable, step.select(tf.cast(value, native.dtype), native))


def _next_seed(original, generator, *args, **kwargs):
    """Draws other random numbers on every rank, from state that is equal on all of them."""
    seed = original(generator, *args, **kwargs)
    if step_lib.current() is None:
        return seed
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    # Any odd constant would do: it spreads the ranks over the range of seeds.
    return seed + tf.cast([(rank * 0x9E3779B1) % 2**31, 0], seed.dtype)


# ---- optimizers ---------------------------------------------------------------------------------


def _apply(original, optimizer, grads, trainable_variables=None):
    """Synchronises gradients before the outermost optimizer clips, decides or accumulates."""
    step = step_lib.current()
    if step is None:
        if _is_ours(optimizer._distribution_strategy):
            raise PoseidonError(
                f"The optimizer '{optimizer.name}' was asked to apply gradients outside of "
                "strategy.run, where they cannot be synchronised; call the training step as "
                "strategy.run(step, args=(batch,)).")
        return original(optimizer, grads, trainable_variables)
    if step.is_applying or len(grads) == 0:
        return original(optimizer, grads, trainable_variables)
    step.check_unconditional(f"The optimizer '{optimizer.name}' was asked to apply gradients")
    variables = list(optimizer._trainable_variables if trainable_variables is None
                     else trainable_variables)
    # In a train_step of the user's without any Keras loss, the mean is over this rank's rows.
    is_mean_of_rank = step.is_keras_step and not step.has_scaled_loss
    grads = step.synchronize(grads, variables, is_mean_of_rank)
    with step.applying():
        return original(optimizer, grads, variables)


HOOKS = (
    Hook(_TRAINER, "TensorFlowTrainer.fit", ("verbose",),
         "refuse models that cannot be synchronised; progress on rank 0 only", _train_or_evaluate),
    Hook(_TRAINER, "TensorFlowTrainer.evaluate", ("verbose",),
         "as fit", _train_or_evaluate),
    Hook(_TRAINER, "TensorFlowTrainer.predict", ("verbose",),
         "whole results on every rank", _predict),
    *(Hook(_TRAINER, f"TensorFlowTrainer.{name}", ("x",), "refuse as fit", _on_batch)
      for name in ("train_on_batch", "test_on_batch", "predict_on_batch")),
    Hook(_TRAINER, "TensorFlowTrainer._maybe_symbolic_build", ("self", "iterator", "data_batch"),
         "build models without reading a batch of data", _maybe_symbolic_build, alone=True),
    Hook("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter.get_tf_dataset",
         ("self",), "know the batch size that gradients are planned for", _get_tf_dataset),
    Hook(_TRAINER, "TensorFlowTrainer._make_function", ("self", "step_function"),
         "tell Keras' steps from those of users' own loops", _make_function),
    Hook("keras.src.trainers.trainer", "Trainer._get_metrics_result_or_logs", ("self", "logs"),
         "logs of epochs and of evaluate are global", _get_metrics_result_or_logs),
    Hook(_LOSS, "reduce_weighted_values",
         ("values", "sample_weight", "mask", "reduction", "dtype"),
         "know what a loss's mean is taken over; scale scalar losses", _reduce_weighted_values),
    Hook(_LOSS, "scale_loss_for_distribution", ("value",),
         "scale by the share of the rows, not by 1 / ranks", _scale_loss),
    Hook(_LOSS, "unscale_loss_for_distribution", ("value",),
         "the inverse", _unscale_loss),
    Hook("keras.src.metrics.reduction_metrics", "Mean.update_state",
         ("self", "values", "sample_weight"),
         "weight scalars by the rows that they stand for", _update_mean),
    Hook("keras.src.trainers.trainer", "Trainer.compute_loss", ("self", "x", "y", "y_pred"),
         "know a scaled loss when a metric is given one", _compute_loss),
    Hook("keras.src.backend.tensorflow.core", "Variable._direct_assign", ("self", "value"),
         "average moving statistics; leave borrowed rows out of metrics", _assign),
    Hook("keras.src.random.seed_generator", "SeedGenerator.next", ("self",),
         "other random numbers on every rank", _next_seed),
    Hook("keras.src.optimizers.base_optimizer", "BaseOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "synchronise before clipping and accumulation", _apply),
    Hook("keras.src.optimizers.loss_scale_optimizer", "LossScaleOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "synchronise before deciding whether gradients are finite", _apply),
    Hook("keras.src.optimizers.multi_optimizer", "MultiOptimizer.apply",
         ("self", "grads", "trainable_variables"),
         "synchronise once for all inner optimizers", _apply),
)


def install(alone=False):
    """Wraps the functions of HOOKS, once per process.

    Args:
        alone: Wrap only those that are of use to one process.

    Raises:
        PoseidonError: If this Keras is not one that the hooks were made for.
    """
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


def _is_ours(strategy):
    # By what it can do, since strategy.py imports this module.
    return getattr(strategy.extended, "communicator", None) is not None
