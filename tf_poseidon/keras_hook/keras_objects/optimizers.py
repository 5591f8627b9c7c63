"""Optimizers in steps of `strategy.run`: gradients are synchronised before they are used.

Keras itself clips first and then sums, and each replica decides whether its own gradients are finite. Steps of `fit`
are those of one process, and need none of this.

Tests: tests/training/test_training.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.keras_hook.keras_objects.hook_tools import is_ours
from tf_poseidon.loops import step as step_lib
from tf_poseidon.one_process import context


def apply(original: Callable[..., Any], optimizer: keras.optimizers.Optimizer, grads: Sequence[step_lib.Gradient],
          trainable_variables: Iterable[keras.Variable] | None = None) -> Any:
    """In a program's `strategy.run`, synchronises gradients before the outermost optimizer clips or accumulates."""
    step = step_lib.current()
    if step is None:
        if is_ours(keras_compat.strategy_of(optimizer)) and not context.is_inside():
            raise GraphError(
                f"The optimizer '{optimizer.name}' was asked to apply gradients outside "
                "strategy.run, where they cannot be synchronised; decorate the training step with "
                "@poseidon.distribute, which takes it as written for one process, or call it as "
                "strategy.run(step, args=(batch,)).")
        return original(optimizer, grads, trainable_variables)
    if step.is_applying or len(grads) == 0:
        return original(optimizer, grads, trainable_variables)
    step.check_unconditional(f"The optimizer '{optimizer.name}' was asked to apply gradients")
    variables = list(keras_compat.trainable_variables(optimizer) if trainable_variables is None
                     else trainable_variables)
    _check_variables(variables)
    if not optimizer.built:  # some only know their inner optimizers after this
        optimizer.build(variables)
        optimizer.built = True
    grads = step.synchronize(grads, variables)
    if any(o.loss_scale_factor is not None for o in with_inner(optimizer)):
        # Keras divides by it, which slices cannot do.
        grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    with step.applying():
        return original(optimizer, grads, variables)


def with_inner(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """Returns an optimizer and those that it wraps."""
    inner = [*getattr(optimizer, "optimizers", ()), getattr(optimizer, "inner_optimizer", None)]
    return [optimizer, *(inner_optimizer for o in inner if o is not None for inner_optimizer in with_inner(o))]


def _check_variables(variables: Iterable[keras.Variable]) -> None:
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise GraphError(
                f"The variable '{variable.path}' is overwritten with its gradient, as in layers that "
                "compute in float8, and such gradients cannot be summed over ranks; use another "
                "dtype policy, such as mixed_bfloat16.")
