"""Batch normalisation, whose moments are those of each rank's rows unless it is synchronized.

Only here, steps of `fit` on N processes differ from those of one process by more than rounding. The layer runs between
`ops.own` and `ops.join`, and its moving statistics are averaged over the ranks.

Tests: tests/training/test_training.py, tests/training/test_keras_programs.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import threading
from typing import Any

import keras
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.keras_hook.keras_objects.hook_tools import replaced
from tf_poseidon.one_process import context

_thread = threading.local()


def call(original: Callable[..., Any], layer: keras.layers.Layer, inputs: tf.Tensor, training: bool | None = None,
         mask: tf.Tensor | None = None) -> tf.Tensor:
    """Normalises each rank's rows separately."""
    is_of_all = layer.synchronized or getattr(_thread, "is_of_all", False) or getattr(
        tf.distribute.get_strategy().extended, "global_batch_norm", False)
    if not (training and layer.trainable and context.is_step()) or is_of_all or is_own():
        return original(layer, inputs, training=training, mask=mask)
    mask = None if mask is None else ops.own(mask)
    with contextlib.ExitStack() as stack:
        for name in ("gamma", "beta"):
            variable = getattr(layer, name, None)
            if variable is not None:
                stack.enter_context(replaced(layer, name, ops.own(variable.value, joins="sum")))
        stack.enter_context(_own())
        outputs = original(layer, ops.own(inputs), training=training, mask=mask)
    return ops.join(outputs, by="rows")


@contextlib.contextmanager
def of_all_rows() -> Iterator[None]:
    """A context in which layers are traced as in a job with `global_batch_norm=True`."""
    _thread.is_of_all = True
    try:
        yield
    finally:
        _thread.is_of_all = False


def is_own() -> bool:
    """Whether this thread is in a layer that computes each rank's rows separately."""
    return getattr(_thread, "is_own", False)


@contextlib.contextmanager
def _own() -> Iterator[None]:
    _thread.is_own = True
    try:
        yield
    finally:
        _thread.is_own = False
