"""Softmax and cross-entropy of logits in columns: ranks exchange three numbers for each row.

Each rank finds the largest of its logits, m, and the sum s of exp(logit - m). With those of all ranks, in rank order,
each computes the largest, M, and the sum over all columns, S = sum of s exp(m - M); the probabilities are then
exp(logit - m) exp(m - M) / S. Halves are computed in float.

Tests: tests/graphs/test_partition_columns.py.
"""

import functools

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules.columns import column_nodes
from tf_poseidon.graph_passes.partition.rules.columns import like_rows
from tf_poseidon.graph_passes.partition.rules.columns.column_shapes import size_of
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import WHOLE

_INT32 = types_pb2.DT_INT32


def softmax(case: Case) -> Outcome | None:
    """Softmax, LogSoftmax: along the last dimension."""
    state, rank = case.states[0], case.rank(0)
    if not isinstance(state, Columns) or rank is None:
        return None
    if state.dimension != rank - 1:
        return like_rows.RULES[case.node.op](case)
    return case.all({0: state}, state, write=functools.partial(_write_softmax, dimension=state.dimension))


def cross_entropy(case: Case) -> Outcome | None:
    """SoftmaxCrossEntropyWithLogits(logits [K, N], labels [K, N]) returns losses [K], and gradients [K, N]."""
    if Columns(1) not in case.states or case.shape(0) != case.shape(1):
        return None
    return Outcome((Columns(1), Columns(1)), (WHOLE, Columns(1)), write=_write_cross_entropy)


def cross_entropy_of_classes(case: Case) -> Outcome | None:
    """SparseSoftmaxCrossEntropyWithLogits(logits [K, N], labels [K]) returns losses [K], and gradients [K, N]."""
    if case.states[0] != Columns(1):
        return None
    return Outcome((Columns(1), WHOLE), (WHOLE, Columns(1)), write=functools.partial(
        _write_cross_entropy_of_classes, columns=size_of(case, 0)))


class _Normaliser:
    """Writes what the columns of a tensor are normalised with.

    Attributes:
        dtype: The type in which it computes.
        x: The logits, in this type.
        shifted, exponentials: x - largest, and exp of that, in columns.
        largest: The largest of the rank's own, [..., 1].
        below: m - M of all ranks, [ranks, ..., 1], when these have been exchanged.
    """

    def __init__(self, writer: NodeWriter, dimension: int) -> None:
        self._writer, self._dimension = writer, dimension
        given = writer.node.attr["T"].type
        self.dtype = types_pb2.DT_FLOAT if given in graph_lib.HALVES else given
        self.x = self.real("x", writer.inputs[0])
        self._last = writer.constant("last", np.array([dimension], np.int32), self.x)
        # At least the least finite number: minus infinity less itself would be none.
        least = self.number("least", tf.as_dtype(self.dtype).limits[0])
        self.largest = self.binary("largest", "Maximum", self._reduced("of_own", "Max", self.x), least)
        self.shifted = self.binary("shifted", "Sub", self.x, self.largest)
        self.exponentials = self.unary("exponentials", "Exp", self.shifted)

    def real(self, name: str, tensor: str) -> str:
        """Casts a tensor of the op's type to that in which it computes."""
        given = self._writer.node.attr["T"].type
        return tensor if given == self.dtype else self._writer.add(name, "Cast", [tensor], SrcT=given, DstT=self.dtype)

    def result(self, name: str, tensor: str) -> str:
        """Casts a tensor to the op's type."""
        given = self._writer.node.attr["T"].type
        if given == self.dtype:
            return self._writer.add(name, "Identity", [tensor], T=given)
        return self._writer.add(name, "Cast", [tensor], SrcT=self.dtype, DstT=given)

    def number(self, name: str, value: float) -> str:
        return self._writer.constant(name, np.array(value, tf.as_dtype(self.dtype).as_numpy_dtype), self.x)

    def binary(self, name: str, op: str, x: str, y: str) -> str:
        return self._writer.add(name, op, [x, y], T=self.dtype)

    def unary(self, name: str, op: str, x: str) -> str:
        return self._writer.add(name, op, [x], T=self.dtype)

    def where(self, name: str, condition: str, x: str, y: str) -> str:
        return self._writer.add(name, "SelectV2", [condition, x, y], T=self.dtype)

    def added(self, name: str, x: str) -> str:
        """The sum of the rank's own columns, [..., 1]."""
        return self._reduced(name, "Sum", x)

    def _reduced(self, name: str, op: str, x: str) -> str:
        return self._writer.add(name, op, [x, self._last], T=self.dtype, Tidx=_INT32, keep_dims=True)

    def of_all(self, *others: str) -> tuple[str, str, list[str]]:
        """Exchanges what ranks have found, once.

        Args:
            *others: Other numbers for each row, [..., 1].

        Returns:
            (M, S, the others of all ranks), the first two [..., 1], those with a dimension of ranks before.
        """
        writer, sums = self._writer, self.added("sum_of_own", self.exponentials)
        numbers = [self.largest, sums, *others]
        packed = writer.add("numbers", "Pack", numbers, T=self.dtype, N=len(numbers), axis=0)
        apart = writer.add("apart", "Unpack", [writer.of_all_ranks("found", packed, self.dtype)], T=self.dtype,
                           num=len(numbers), axis=1)
        each = [tensors.tensor_of(apart, i) for i in range(len(numbers))]
        largest = self.over_ranks("largest_of_all", "Max", each[0])
        self.below = self.binary("below", "Sub", each[0], largest)
        factors = self.unary("factors", "Exp", self.below)
        return largest, self.over_ranks("total", "Sum", self.binary("terms", "Mul", each[1], factors)), each[2:]

    def over_ranks(self, name: str, op: str, x: str) -> str:
        """Reduces what all ranks have found."""
        ranks = self._writer.constant(f"{name}/ranks", np.zeros(1, np.int32), x)
        return self._writer.add(name, op, [x, ranks], T=self.dtype, Tidx=_INT32, keep_dims=False)

    def probabilities(self, largest: str, total: str) -> str:
        """Returns the softmax of the rank's columns."""
        factor = self.unary("factor", "Exp", self.binary("own_below", "Sub", self.largest, largest))
        return self.binary("probabilities", "Mul", self.exponentials, self.binary("scale", "RealDiv", factor, total))


def _write_softmax(writer: NodeWriter, dimension: int) -> list[str]:
    of = _Normaliser(writer, dimension)
    largest, total, _ = of.of_all()
    if writer.node.op == "Softmax":
        return [of.result("", of.probabilities(largest, total))]
    shifted = of.binary("of_largest", "Sub", of.x, largest)
    return [of.result("", of.binary("log", "Sub", shifted, of.unary("log_of_total", "Log", total)))]


def _write_cross_entropy(writer: NodeWriter) -> list[str]:
    """sum of l (log S - (x - M)), in which x - M is (x - m) + (m - M)."""
    of = _Normaliser(writer, 1)
    labels = of.real("labels", writer.inputs[1])
    products = of.binary("products", "Mul", labels, of.shifted)
    largest, total, (product, weight) = of.of_all(of.added("product", products), of.added("weight", labels))
    terms = of.binary("of_ranks", "AddV2", product, of.binary("offset", "Mul", weight, of.below))
    weight = of.over_ranks("weights", "Sum", weight)
    loss = of.binary("loss", "Sub", of.binary("logs", "Mul", of.unary("log", "Log", total), weight),
                     of.over_ranks("products_of_all", "Sum", terms))
    gradient = of.binary("gradient", "Sub", of.probabilities(largest, total), labels)
    return [of.result("", _without_last(writer, loss, of.dtype)), of.result("backprop", gradient)]


def _write_cross_entropy_of_classes(writer: NodeWriter, columns: int) -> list[str]:
    """log S + M - x of the label, which one rank has."""
    of = _Normaliser(writer, 1)
    labels = column_nodes.checked(writer, "label", writer.inputs[1], writer.type_of_input(1), columns)
    mask = column_nodes.mask(writer, "label", labels, columns)
    zero = of.number("zero", 0)
    largest, total, (of_label,) = of.of_all(of.added("of_label", of.where("masked", mask, of.x, zero)))
    of_label = of.over_ranks("of_labels", "Sum", of_label)
    loss = of.binary("loss", "AddV2", of.binary("less", "Sub", largest, of_label), of.unary("log", "Log", total))
    probabilities = of.probabilities(largest, total)
    gradient = of.where("gradient", mask, of.binary("less_one", "Sub", probabilities, of.number("one", 1)),
                        probabilities)
    return [of.result("", _without_last(writer, loss, of.dtype)), of.result("backprop", gradient)]


def _without_last(writer: NodeWriter, tensor: str, dtype: int) -> str:
    flat = writer.constant("flat", np.array([-1], np.int32), tensor)
    return writer.add("of_rows", "Reshape", [tensor, flat], T=dtype, Tshape=_INT32)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), softmax),
    "SoftmaxCrossEntropyWithLogits": cross_entropy,
    "SparseSoftmaxCrossEntropyWithLogits": cross_entropy_of_classes,
}
