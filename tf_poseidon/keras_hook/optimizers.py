"""Optimizers: gradients are synchronised before anything is made of them.

That is at the entrance of the outermost optimizer, before it clips them or decides whether they are
finite. Where gradients are accumulated over several steps, each rank adds up its own, and their sums
are synchronised in the step that updates the variables, again before clipping.
"""

import tensorflow as tf

from tf_poseidon import one_process
from tf_poseidon import step as step_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook.common import is_ours


def apply(original, optimizer, grads, trainable_variables=None):
    """Synchronises gradients before the outermost optimizer clips, decides or accumulates."""
    step = step_lib.current()
    if step is None:
        if is_ours(optimizer._distribution_strategy) and not one_process.is_inside():
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
    _check_variables(variables)
    # In a train_step of the user's without any Keras loss, the mean is over this rank's rows.
    is_mean_of_rank = step.is_keras_step and not step.has_scaled_loss
    if not optimizer.built:  # some do not know before whom they wrap
        optimizer.build(variables)
        optimizer.built = True
    accumulates = any(o.gradient_accumulation_steps for o in with_inner(optimizer))
    if accumulates:
        grads = step.own_parts(grads, is_mean_of_rank)
    else:
        grads = step.synchronize(grads, variables, is_mean_of_rank)
    if any(o.loss_scale_factor is not None for o in with_inner(optimizer)):
        # Keras divides by it, which slices cannot do.
        grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    with step.applying(own_parts=accumulates):
        return original(optimizer, grads, variables)


def backend_apply_gradients(original, optimizer, grads, trainable_variables):
    """Remembers whose gradients are going to be clipped."""
    step = step_lib.current()
    if step is not None:
        step.applied_variables = trainable_variables
    return original(optimizer, grads, trainable_variables)


def clip_gradients(original, optimizer, grads):
    """Synchronises accumulated gradients, in the step that updates the variables with them."""
    step = step_lib.current()
    if step is not None and step.applies_own_parts:
        grads = step.synchronize(grads, step.applied_variables, are_own_parts=True)
    return original(optimizer, grads)


def check_finite(original, optimizer, grads):
    """Lets all ranks take a step, or none, when each knows only its own gradients."""
    step = step_lib.current()
    is_finite = original(optimizer, grads)
    if step is None or not step.applies_own_parts:
        return is_finite
    return step.all_reduce(tf.cast(tf.logical_not(is_finite), tf.int32), "is_not_finite") == 0


def with_inner(optimizer):
    """Returns an optimizer and those that it wraps."""
    inner = [*getattr(optimizer, "optimizers", ()), getattr(optimizer, "inner_optimizer", None)]
    return [optimizer, *(found for o in inner if o is not None for found in with_inner(o))]


def _check_variables(variables):
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise PoseidonError(
                f"The variable '{variable.path}' is overwritten with its gradient, as in layers that "
                "compute in float8, and such gradients cannot be summed over ranks; use another "
                "dtype policy, such as mixed_bfloat16.")
