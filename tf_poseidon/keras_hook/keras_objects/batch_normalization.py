"""Batch normalisation, whose moments are those of each rank's rows unless it is synchronized.

Only here, steps of `fit` on N processes differ from those of one process by more than rounding. The layer runs between
`ops.own` and `ops.join`, and its moving statistics are averaged over the ranks.

Tests: tests/training/test_training.py, tests/training/test_keras_programs.py.
"""

from collections.abc import Callable
import contextlib
import contextvars
from typing import Any

import keras
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.base.context_values import holding
from tf_poseidon.keras_hook.keras_objects.hook_tools import replaced
from tf_poseidon.one_process import context

_is_of_all_rows = contextvars.ContextVar("is_of_all_rows", default=False)
_is_own = contextvars.ContextVar("is_own", default=False)


def call(original: Callable[..., Any], layer: keras.layers.Layer, inputs: tf.Tensor, training: bool | None = None,
         mask: tf.Tensor | None = None) -> tf.Tensor:
    """Normalises each rank's rows separately."""
    is_of_all = layer.synchronized or _is_of_all_rows.get() or getattr(
        tf.distribute.get_strategy().extended, "global_batch_norm", False)
    if not (training and layer.trainable and context.is_step()) or is_of_all or is_own():
        return original(layer, inputs, training=training, mask=mask)
    mask = None if mask is None else ops.own(mask)
    with contextlib.ExitStack() as stack:
        for name in ("gamma", "beta"):
            variable = getattr(layer, name, None)
            if variable is not None:
                stack.enter_context(replaced(layer, name, ops.own(variable.value, joins="sum")))
        stack.enter_context(holding(_is_own, True))
        outputs = original(layer, ops.own(inputs), training=training, mask=mask)
    return ops.join(outputs, by="rows")


def of_all_rows() -> contextlib.AbstractContextManager[None]:
    """A context in which layers are traced as in a job with `global_batch_norm=True`."""
    return holding(_is_of_all_rows, True)


def is_own() -> bool:
    """Whether this thread is in a layer that computes each rank's rows separately."""
    return _is_own.get()
