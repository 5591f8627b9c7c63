"""Large variables that have a shape and a type, but no value: a model of any size takes no memory, and can be traced.

Tests: tests/scripts/test_answers.py.
"""

import contextlib

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

_SMALL = 1 << 16  # elements of variables that have values all the same: layers that normalize read theirs


@contextlib.contextmanager
def scope():
    """Lets large variables that are created from functions, as those of Keras are, have no value."""
    with tf.variable_creator_scope(_unallocated):
        yield


def _unallocated(create, **arguments):
    initial_value = arguments["initial_value"]
    if not callable(initial_value):
        return create(**arguments)
    with tf.Graph().as_default():  # where it is not computed
        value = tf.convert_to_tensor(initial_value())
    if value.shape.num_elements() <= _SMALL:
        return create(**arguments)
    given = {name: arguments.get(name) for name in ("trainable", "name", "synchronization", "aggregation")}
    return resource_variable_ops.UninitializedVariable(shape=value.shape, dtype=value.dtype, **{
        name: value for name, value in given.items() if value is not None})
