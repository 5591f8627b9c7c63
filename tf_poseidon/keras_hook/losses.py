"""Losses: each rank's mean is scaled by its share of what the mean is taken over."""

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
        return value * step.share(value.dtype)
    loss.is_scaled = True
    share = step.share(value.dtype) if loss.part is None else step.share_of(loss.part)
    return value * tf.cast(share, value.dtype)


def unscale_loss(original, value):
    """Undoes the scale, for metrics that weight their mean by rows."""
    step = step_lib.current()
    if step is None:
        return original(value)
    return tf.math.divide_no_nan(value, step.share(value.dtype))


def compute_loss(original, model, *args, **kwargs):
    """Remembers that the loss of a user's own train_step is scaled."""
    loss = original(model, *args, **kwargs)
    step = step_lib.current()
    if step is not None:
        step.scaled_losses.append(loss)
    return loss
