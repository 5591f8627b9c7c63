"""The values that a large weight begins with, of which each rank draws its part.

Random numbers that depend on a key and a counter alone (Philox: J. Salmon et al., SC 2011) can be drawn from any place
on, and what is computed from them element by element needs no others. So a rank draws its columns as one process would,
and no rank has the whole.

Tests: tests/unit/test_initial_values.py.
"""

from collections.abc import Callable
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

# By op: by how much the counter increases with each group of numbers.
_DRAWN = {"StatelessRandomUniformV2": 1, "StatelessRandomNormalV2": 1, "StatelessTruncatedNormalV2": 256}
_GROUP = 4  # numbers of float32 that are drawn together
_TOGETHER = 1 << 20  # of them, at most
_COMPUTED = ("Identity", "Mul", "Add", "AddV2", "Sub")
_PHILOX = 1
_VALUE = "value"


class InitialValue:
    """What an initializer returns, of float32, without having it.

    Attributes:
        source: The key and the counter that it is drawn with, [3] of int64; they may be set to those of another rank.
    """

    def __init__(self, op: str, source: np.ndarray, compute: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """Makes a value.

        Args:
            op: The op that draws its numbers.
            source: Its key and counter.
            compute: Returns what is computed from some of them, a vector.
        """
        self.source = source
        self._op, self._compute = op, compute

    def elements(self, first: int, count: int) -> tf.Tensor:
        """Returns some elements that follow one another, row by row, [count]; `first` is the number of the first."""
        key, low, high = (int(number) & _WORD for number in self.source)
        groups = first // _GROUP
        place = (low | high << 64) + groups * _DRAWN[self._op]
        before = first - groups * _GROUP
        with tf.device("CPU:0"):
            drawn = getattr(tf.raw_ops, self._op)(
                shape=[before + count], key=tf.constant([key], tf.uint64),
                counter=tf.constant([place & _WORD, place >> 64 & _WORD], tf.uint64), alg=_PHILOX, dtype=tf.float32)
            return self._compute(drawn[before:])

    def columns(self, shape: tuple[int, ...], dimension: int, begin: int, count: int) -> tf.Tensor:
        """Returns the elements of a range of columns, or rows, of a matrix, flat.

        Args:
            shape: The shape of the whole.
            dimension: The dimension that has this range.
            begin: Where it begins.
            count: Its size.
        """
        inner = math.prod(shape[dimension + 1:])
        length, own = shape[dimension] * inner, count * inner
        result = np.empty((math.prod(shape[:dimension]), own), np.float32)
        for line, numbers in enumerate(result):
            for first in range(0, own, _TOGETHER):  # not all at once: TensorFlow keeps memory that tensors have had
                some = numbers[first:first + _TOGETHER]
                some[:] = self.elements(line * length + begin * inner + first, len(some)).numpy()
        return tf.constant(result.reshape(-1))


_WORD = 2**64 - 1


def traced(initializer: Callable[[], Any]) -> InitialValue | None:
    """Returns what a function returns that draws nothing but by TensorFlow; None if its parts cannot be drawn alone."""
    concrete = tf.function(lambda: tf.identity(initializer(), name=_VALUE),
                           autograph=False).get_concrete_function()
    output, = concrete.outputs
    graph_def = concrete.graph.as_graph_def()
    graph = graph_lib.Graph(graph_def)
    drawn = [node for node in graph_def.node if node.op in _DRAWN]
    if concrete.captured_inputs or len(drawn) != 1 or output.dtype != tf.float32 or not _is_elementwise(
            graph, drawn[0].name, output.shape):
        return None
    name, _, key, counter, algorithm = drawn[0].name, *graph.inputs(drawn[0])

    def imported(numbers: tf.Tensor) -> tf.Tensor:
        result, = tf.graph_util.import_graph_def(graph_def, {name: numbers}, [f"{_VALUE}:0"], name="")
        return result

    source = tf.compat.v1.wrap_function(lambda: tf.graph_util.import_graph_def(
        graph_def, return_elements=[_with_output(key), _with_output(counter), _with_output(algorithm)], name=""), [])
    keys, counters, found = (tensor.numpy() for tensor in source())
    if found not in (_PHILOX, 3):  # 3 lets TensorFlow choose, which chooses Philox for processors
        return None
    return InitialValue(drawn[0].op, np.concatenate([keys, counters]).astype(np.int64), tf.compat.v1.wrap_function(
        imported, [tf.TensorSpec([None], tf.float32)]))


def _with_output(tensor: str) -> str:
    return tensor if ":" in tensor else f"{tensor}:0"


def _is_elementwise(graph: graph_lib.Graph, drawn: str, shape: tf.TensorShape) -> bool:
    """Whether a value is computed from random numbers of its shape, and single numbers, element by element."""
    queue, given = [_VALUE], graph.constant(graph.inputs(graph.nodes[drawn])[0])
    if given is None or list(given) != shape.as_list():
        return False
    while queue:
        node = graph.node(queue.pop())
        if node.name == drawn:
            continue
        if node.op not in _COMPUTED:
            return False
        for tensor in graph.inputs(node):
            if not _is_number(graph, tensor):
                queue.append(tensor)
    return True


def _is_number(graph: graph_lib.Graph, tensor: str) -> bool:
    """Whether a tensor is computed from constants alone that are single numbers."""
    node = graph.node(tensor)
    if node.op == "Const":
        value = graph.constant(tensor)
        return value is None or value.ndim == 0
    return node.op in _COMPUTED and all(_is_number(graph, each) for each in graph.inputs(node))
