"""Logs and metrics of all ranks: their states are summed, and means weighted by rows."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon import step as step_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook.trainer import is_ours


def get_metrics_result_or_logs(original, model, logs):
    """Computes metrics from the states of all ranks."""
    strategy = model.distribute_strategy
    if not is_ours(strategy):
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


def update_mean(original, metric, values, sample_weight=None):
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
