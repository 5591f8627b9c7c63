"""Optimizers: gradients are synchronised before anything is made of them."""

from tf_poseidon import step as step_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook.trainer import is_ours


def apply(original, optimizer, grads, trainable_variables=None):
    """Synchronises gradients before the outermost optimizer clips, decides or accumulates."""
    step = step_lib.current()
    if step is None:
        if is_ours(optimizer._distribution_strategy):
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
