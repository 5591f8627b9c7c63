"""Variables that optimizers have for each variable that they train: each rank holds the part that it updates.

Accumulated gradients are not among them: they hold summands (job/job_variables/held_variables.py).

Tests: tests/training/test_sharded_update.py.
"""

from collections.abc import Callable
import contextvars
from typing import Any

import keras
import tensorflow as tf

from tf_poseidon.base.context_values import holding
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.job.joined_job import Job
from tf_poseidon.keras_hook.keras_objects.hook_tools import is_ours
from tf_poseidon.one_process.sharded_variables import Initial
from tf_poseidon.one_process.sharded_variables import ShardedVariable

_ACCUMULATOR = "gradient_accumulator"
# Initializers that give all elements the same value.
_CONSTANT = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
# What a variable under construction is made for: (path of the trained variable, its initializer, the job).
_reference: contextvars.ContextVar[tuple[str, Any, Job] | None] = contextvars.ContextVar("reference", default=None)


def add_variable_from_reference(original: Callable[..., Any], optimizer: keras.optimizers.Optimizer,
                                reference_variable: keras.Variable, name: str | None = None,
                                initializer: Any = "zeros") -> keras.Variable:
    """Adds a variable of which each rank holds a shard, if the strategy says so."""
    strategy = tf.distribute.get_strategy()
    job = strategy.extended.job if is_ours(strategy) else None
    path = getattr(reference_variable, "path", None)
    reference: tuple[str, Any, Job] | None = None
    if job is not None and job.shard_update and path is not None and name != _ACCUMULATOR:
        reference = path, keras.initializers.get(initializer), job
    with holding(_reference, reference):
        return original(optimizer, reference_variable, name=name, initializer=initializer)


def variable_for(variable: keras.Variable, value: Any) -> Any:
    """Returns what a Keras variable is initialised with: in `add_variable_from_reference`, a sharded variable."""
    reference = _reference.get()
    if reference is None or not callable(value) or isinstance(value, tf.Variable):
        return value
    path, initializer, job = reference
    of_size = (lambda size: initializer((size,), dtype=variable.dtype)) if isinstance(initializer, _CONSTANT) else None
    return ShardedVariable(variable.path, path, tf.TensorShape(variable.shape), tf.as_dtype(variable.dtype),
                           Initial(value, of_size), job)


def layouts(optimizer: keras.optimizers.Optimizer) -> dict[int, str]:
    """Returns the path of the trained variable for each variable of a built optimizer that may hold a shard of it.

    They are told by their names, which Keras makes of that of the trained one.

    Returns:
        {identity of the `tf.Variable`: path}.
    """
    found = {}
    trained = sorted(keras_compat.trainable_variables(optimizer), key=lambda variable: len(variable.path))
    for reference in trained:  # the longest path that fits counts
        prefix = f"{reference.path.replace('/', '_')}_"
        for variable in optimizer.variables:
            name = variable.name.removeprefix(prefix)
            if name not in (variable.name, _ACCUMULATOR) and tuple(variable.shape) == tuple(reference.shape):
                found[id(variable.value)] = reference.path
    return found
