"""Variables that a step assigns: moving statistics, metrics, the seeds of random layers; and those that Keras drops.

Tests: tests/training/test_training.py, tests/training/test_unusual_programs.py.
"""

from collections.abc import Callable
import contextlib
from typing import Any

import keras
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.keras_hook.keras_objects import batch_normalization
from tf_poseidon.keras_hook.keras_objects import sharded_slots
from tf_poseidon.keras_hook.keras_objects.hook_tools import is_ours
from tf_poseidon.loops import loop_variables
from tf_poseidon.loops import step as step_lib


def initialize(original: Callable[..., Any], variable: keras.Variable, value: Any) -> None:
    """Creates a variable whose aggregation is left to Keras, or one of which each rank holds a shard."""
    value = sharded_slots.variable_for(variable, value)
    with loop_variables.of_keras():
        original(variable, value)


def assign(original: Callable[..., Any], variable: keras.Variable, value: tf.Tensor) -> Any:
    """Keeps the results of padding rows out of state, and moving statistics equal on all ranks."""
    if batch_normalization.is_own():
        return original(variable, ops.join(value, by="mean"))
    step = step_lib.current()
    if step is None or step.is_applying:
        return original(variable, value)
    # Not variable.value: if layers compute in half precision, that is a copy in half precision.
    native = keras_compat.value(variable)
    if variable.aggregation != "sum":
        if not native.dtype.is_floating:  # seeds and counters of steps, the same on all ranks
            return original(variable, value)
        step.note_state(variable.path, native)
    return original(variable, step.select(tf.cast(value, native.dtype), native))


def get_attr_skipset(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Does not count the variables that Keras creates when it saves a model, and drops."""
    strategy = tf.distribute.get_strategy()
    with strategy.extended.job.new_variables.left_out() if is_ours(strategy) else contextlib.nullcontext():
        return original(*args, **kwargs)


def next_seed(original: Callable[..., Any], generator: keras.random.SeedGenerator, *args: Any,
              **kwargs: Any) -> tf.Tensor:
    """Draws different random numbers on every rank, from state that is equal on all ranks."""
    seed = original(generator, *args, **kwargs)
    if step_lib.current() is None:
        return seed
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    # Any odd constant works: it spreads the ranks over the range of seeds.
    return seed + tf.cast([(rank * 0x9E3779B1) % 2**31, 0], seed.dtype)
