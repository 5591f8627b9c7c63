"""Losses: each rank's mean is scaled by its share of what the mean is taken over.

In the steps of fit and evaluate, this rank's share of the rows is put on the gradient alone. Values are
what a mean over ranks, weighted by their rows, makes the value of the whole batch: that is what metrics
take. The loss that `compute_loss` returns gets the share as a whole, with whatever the user has added
to it. In loops of the user's own, value and gradient are scaled alike, as everywhere in tf.distribute.
"""

import contextlib
import dataclasses
import functools
import importlib
import threading

import tensorflow as tf

from tf_poseidon import step as step_lib
from tf_poseidon.keras_hook.common import replaced

LOSS_MODULE = "keras.src.losses.loss"

# The loss that is being computed on this thread, see _Loss.
_loss = threading.local()


@dataclasses.dataclass
class _Loss:
    """One call of a Keras loss.

    Attributes:
        divisor: What its mean is divided by on this rank, when that is not the rows: the number of
            valid entries of a mask, the sum of the weights.
        is_scaled: Whether Keras has asked for the scale.
    """

    divisor: tf.Tensor | None
    is_scaled: bool = False


def reduce_weighted_values(original, values, sample_weight=None, mask=None,
                            reduction="sum_over_batch_size", dtype=None):
    """Gives each loss the share of what its mean is taken over, and scalar losses the rows'."""
    step = step_lib.current()
    if step is None:
        return original(values, sample_weight, mask, reduction, dtype)
    outer = getattr(_loss, "current", None)
    _loss.current = loss = _Loss(_divisor_of_mean(values, sample_weight, mask, reduction))
    try:
        result = original(values, sample_weight, mask, reduction, dtype)
    finally:
        _loss.current = outer
    if loss.is_scaled or result.shape.rank != 0:
        return result
    if reduction == "sum":
        return _scaled(step, result, tf.ones((), result.dtype))
    # A function of the user's that returns a scalar: Keras leaves that alone, and every rank would
    # add its own mean.
    return _scaled(step, result)


def _scaled(step, value, scale=None):
    """Returns a loss that counts `scale` in the sum over the ranks.

    Args:
        step: The step.
        value: The loss.
        scale: A scalar; None for this rank's share of the rows.
    """
    step.has_scaled_loss = True
    share = step.share(value.dtype)
    scale = None if scale is None else tf.cast(scale, value.dtype)
    if not step.is_keras_step:
        return value * (share if scale is None else scale)
    value = value if scale is None else tf.math.divide_no_nan(value * scale, share)
    return value if step.is_computing_loss else _with_shared_gradient(step, value)


def _with_shared_gradient(step, value):
    """Returns a loss of which the gradient is this rank's share."""
    share = step.share(value.dtype)
    return tf.custom_gradient(lambda x: (tf.identity(x), lambda upstream: upstream * share))(value)


@contextlib.contextmanager
def scaled_as_a_whole(model, step):
    """While what the model's `compute_loss` returns, the user's or Keras', is scaled as a whole."""
    compute_loss = model.compute_loss

    @functools.wraps(compute_loss)
    def scaled(*args, **kwargs):
        if step.is_computing_loss:
            return compute_loss(*args, **kwargs)
        step.is_computing_loss = True
        try:
            loss = compute_loss(*args, **kwargs)
        finally:
            step.is_computing_loss = False
        step.has_scaled_loss = True
        # Losses of rows, which nobody has reduced: their gradients are added up.
        is_scalar = tf.is_tensor(loss) and loss.shape.rank == 0
        return _with_shared_gradient(step, loss) if is_scalar else loss

    with replaced(model, "compute_loss", scaled):
        yield


def _divisor_of_mean(values, sample_weight, mask, reduction):
    """Returns what a loss's mean is divided by on this rank, or None when it is the rows."""
    wide = "float64" if values.dtype == tf.float64 else "float32"
    if reduction in ("sum_over_batch_size", "mean") and mask is not None:
        return tf.reduce_sum(tf.cast(mask, wide))
    if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        weight = None if sample_weight is None else tf.cast(sample_weight, wide)
        apply_mask = importlib.import_module(LOSS_MODULE).apply_mask
        return tf.reduce_sum(apply_mask(weight, mask, wide, reduction))
    return None


def scale_loss(original, value):
    """Scales a mean over this rank's part by its share of the whole."""
    step = step_lib.current()
    if step is None:
        return original(value)
    loss = getattr(_loss, "current", None)
    if loss is None:  # regularizers and add_loss: the shares of the rows add up to one
        return _scaled(step, value)
    loss.is_scaled = True
    return _scaled(step, value, None if loss.divisor is None else step.share_of(loss.divisor))


def unscale_loss(original, value):
    """Gives metrics, which weight their mean by rows, the value of a loss."""
    step = step_lib.current()
    if step is None:
        return original(value)
    return value if step.is_keras_step else tf.math.divide_no_nan(value, step.share(value.dtype))
