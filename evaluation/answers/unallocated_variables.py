"""Variables that have a shape and a type, but no value: a model of any size takes no memory, and can be traced.

Tests: tests/scripts/test_answers.py.
"""

import contextlib

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops


@contextlib.contextmanager
def scope():
    """Lets variables that are created from functions, as those of Keras' layers and optimizers are, have no value."""
    with tf.variable_creator_scope(_unallocated):
        yield


def _unallocated(create, **arguments):
    initial_value = arguments["initial_value"]
    if not callable(initial_value):
        return create(**arguments)
    with tf.Graph().as_default():  # where it is not computed
        value = tf.convert_to_tensor(initial_value())
    given = {name: arguments.get(name) for name in ("trainable", "name", "synchronization", "aggregation")}
    return resource_variable_ops.UninitializedVariable(shape=value.shape, dtype=value.dtype, **{
        name: value for name, value in given.items() if value is not None})
