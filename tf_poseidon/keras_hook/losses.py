"""Losses: each rank's mean is scaled by its share of what the mean is taken over.

In the steps of fit and evaluate, the scale is put on the gradient of the loss alone. The value is what
a mean over ranks, weighted by their rows, makes the value of the whole batch: that is what metrics
take. In loops of the user's own, value and gradient are scaled alike, as everywhere in tf.distribute.
"""

import dataclasses
import importlib
import threading

import tensorflow as tf

from tf_poseidon import step as step_lib

LOSS_MODULE = "keras.src.losses.loss"

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


def reduce_weighted_values(original, values, sample_weight=None, mask=None,
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
    step.has_scaled_loss = True
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
    share = step.share(value.dtype)
    if not step.is_keras_step:
        return value * (share if scale is None else tf.cast(scale, value.dtype))

    @tf.custom_gradient
    def scaled(x):
        if scale is None:
            return tf.identity(x), lambda upstream: upstream * share
        factor = tf.cast(scale, x.dtype)
        return tf.math.divide_no_nan(x * factor, share), lambda upstream: upstream * factor

    return scaled(value)


def _part_of_mean(values, sample_weight, mask, reduction):
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
    step.has_scaled_loss = True
    loss = getattr(_loss, "current", None)
    if loss is None:  # regularizers and add_loss: the shares of the rows add up to one
        return _scaled(step, value)
    loss.is_scaled = True
    return _scaled(step, value, None if loss.part is None else step.share_of(loss.part))


def unscale_loss(original, value):
    """Gives metrics, which weight their mean by rows, the value of a loss."""
    step = step_lib.current()
    if step is None:
        return original(value)
    return value if step.is_keras_step else tf.math.divide_no_nan(value, step.share(value.dtype))
