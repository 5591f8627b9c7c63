"""Logs and metrics of all ranks: their states are summed, and means weighted by rows."""

import contextlib
import functools
import weakref

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon import step as step_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook.common import is_ours
from tf_poseidon.keras_hook.common import replaced


def get_metrics_result_or_logs(original, model, logs):
    """Computes metrics from the states of all ranks."""
    strategy = model.distribute_strategy
    if not is_ours(strategy):
        return original(model, logs)
    communicator = strategy.extended.communicator

    def reduce(variables):
        waits = [communicator.submit(f"metric {i}/{v.path}", v.numpy())
                 for i, v in enumerate(variables)]
        return [wait() for wait in waits]

    with strategy.scope(), _global_state(model.metrics_variables, reduce):
        result = original(model, logs)
        # Now, not later: some metrics return the variable that holds their state.
        if result is not logs:
            return keras.tree.map_structure(_value, result)
        of_metrics = keras.tree.map_structure(_value, _results(model, logs))
    others = {name: value for name, value in logs.items() if name not in of_metrics}
    averages = _average_logs(communicator, strategy.extended.last_share, others)
    return {name: of_metrics.get(name, averages.get(name)) for name in logs}


# By model and by the names of the logs that its train_step or test_step returns: functions that give
# those of them that are results of metrics. Names alone do not say.
_sources = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def noting_sources(model):
    """Yields a function that is to be called with the logs that a step returns."""
    seen = []  # (result, function that gives it anew)

    def watched(metric):
        original = metric.result

        @functools.wraps(original)
        def result(*args, **kwargs):
            value = original(*args, **kwargs)
            seen.append((value, original))
            if isinstance(value, dict):  # of all metrics that were compiled
                seen.extend((part, lambda name=name: original()[name])
                            for name, part in value.items())
            return value

        return result

    def note(logs):
        if isinstance(logs, dict):
            _sources.setdefault(model, {})[frozenset(logs)] = {
                name: source for name, value in logs.items() for result, source in seen
                if value is result}

    with contextlib.ExitStack() as stack:
        for metric in model.metrics:
            stack.enter_context(replaced(metric, "result", watched(metric)))
        yield note


def _results(model, logs):
    """Returns the results, from their present states, of the metrics that are in the logs."""
    sources = _sources.get(model, {}).get(frozenset(logs), {})
    return {name: source() for name, source in sources.items()}


def _value(x):
    return keras.ops.convert_to_tensor(x).numpy() if keras.ops.is_tensor(x) else x


def _average_logs(communicator, share, logs):
    """Averages logs that are not of metrics over ranks, by their rows of the last batch."""
    if not logs:
        return {}
    values = keras.tree.map_structure(_value, logs)
    # A name, say: anything else than a number is left as it is.
    is_number = [isinstance(v, (int, float)) or getattr(v, "shape", None) == ()
                 for v in keras.tree.flatten(values)]
    mine = [float(v) if n else 0.0 for v, n in zip(keras.tree.flatten(values), is_number)]
    share = float(share.numpy())
    weighted = np.array(mine) * share if share else np.zeros(len(mine))
    averages = communicator.sum("logs", weighted)
    return keras.tree.pack_sequence_as(values, [
        float(a) if n else v
        for v, a, n in zip(keras.tree.flatten(values), averages, is_number)])


def _global_state(variables, reduce):
    """Returns a scope in which the variables have the values of all ranks together.

    Args:
        variables: Variables of metrics.
        reduce: A function of the variables that returns their sums over the ranks.
    """
    for variable in variables:
        if variable.aggregation not in ("sum", "mean"):
            raise PoseidonError(
                f"The metric variable '{variable.path}' has aggregation="
                f"'{variable.aggregation}', so its values on several processes cannot be put "
                "together; give it aggregation='sum' or 'mean'.")
    size = tf.distribute.get_strategy().num_replicas_in_sync
    return keras.StatelessScope(state_mapping=[
        (variable, total / size if variable.aggregation == "mean" else total)
        for variable, total in zip(variables, reduce(variables))])


def global_batch_logs(model, step, logs):
    """Returns the logs of a step of Keras from the states and rows of all ranks."""
    def reduce(variables):
        # Also of ranks that have no rows in this batch: they had some before.
        return [ops.all_reduce(tf.convert_to_tensor(v.value), step.site(f"batch_logs/{v.path}"))
                for v in variables]

    with _global_state(model.metrics_variables, reduce):
        of_metrics = keras.tree.map_structure(tf.convert_to_tensor, _results(model, logs))

    def mean(value):
        if not tf.is_tensor(value) or value.shape.rank != 0 or not value.dtype.is_floating:
            return value
        return step.all_reduce(value * step.share(value.dtype), "batch_logs")

    return {name: of_metrics[name] if name in of_metrics else keras.tree.map_structure(mean, value)
            for name, value in logs.items()}


def update_mean(original, metric, values, sample_weight=None):
    """Lets scalars count as much as the rows that they are computed from.

    A scalar without weight counts once a batch in one process, so the ranks' parts of the batch have
    to count by their share.
    """
    step = step_lib.current()
    if step is not None and step.is_keras_step:
        values = tf.convert_to_tensor(values)
        if sample_weight is None and values.shape.rank == 0 and values.dtype.is_floating:
            sample_weight = step.share(values.dtype)
    return original(metric, values, sample_weight)
