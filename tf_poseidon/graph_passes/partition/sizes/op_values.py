"""Values of ops whose inputs are known.

Tests: tests/graphs/test_sizes.py.
"""

from collections.abc import Sequence
import functools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import op_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat

# The most computations of values that are remembered.
_MAX_EXECUTED = 4096


def type_of(node: node_def_pb2.NodeDef, argument: op_def_pb2.OpDef.ArgDef) -> int:
    """Returns the type of an argument of a node, 0 for lists of different types."""
    if argument.type:
        return argument.type
    return node.attr[argument.type_attr].type if argument.type_attr else 0


def execute(node: node_def_pb2.NodeDef, values: Sequence[np.ndarray]) -> Sequence[np.ndarray] | None:
    """Returns the outputs of a stateless op on the CPU, None if it fails."""
    op = tf_compat.op_def(node.op)
    assert op is not None  # `_is_small_integer`
    attributes: list[Any] = []
    for attribute in op.attr:
        value = node.attr[attribute.name]
        kind = value.WhichOneof("value")
        if kind not in ("type", "i", "b", "s"):
            return None
        attributes += [attribute.name, getattr(value, kind)]
    types = [type_of(node, argument) for argument in op.input_arg
             for _ in range(node.attr[argument.number_attr].i if argument.number_attr else 1)]
    num_outputs = sum(node.attr[a.number_attr].i if a.number_attr else 1 for a in op.output_arg)
    return _executed(node.op, num_outputs, tuple(attributes), tuple(
        (value.tobytes(), value.dtype.str, value.shape, dtype) for value, dtype in zip(values, types, strict=True)))


@functools.lru_cache(_MAX_EXECUTED)  # layers that are alike compute the same
def _executed(op: str, num_outputs: int, attributes: tuple[Any, ...],
              inputs: tuple[tuple[bytes, str, tuple[int, ...], int], ...]) -> Sequence[np.ndarray] | None:
    """Returns the outputs of an op, None if it fails; inputs are (bytes, NumPy's type, shape, the op's type)."""
    try:
        with tf.init_scope(), tf.device("CPU:0"):
            tensors = [tf.constant(np.frombuffer(value, of_value).reshape(shape), dtype)
                       for value, of_value, shape, dtype in inputs]
            return [output.numpy() for output in tf_compat.execute(op, num_outputs, tensors, attributes)]
    except Exception:  # if TensorFlow cannot compute it, its value is unknown
        return None
