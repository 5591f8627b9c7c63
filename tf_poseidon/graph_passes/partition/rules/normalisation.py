"""Batch normalisation as one op: FusedBatchNorm, and its gradient.

In training its moments are those of all rows, so its kernel is written out here, with sums over rows that the ranks
exchange. The mean is computed first, and the variance from the centred values: the mean of squares minus the square of
the mean would lose its digits if the mean is large.

Tests: tests/graphs/test_partition_families.py.
"""

import numpy as np
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_FLOAT = types_pb2.DT_FLOAT
_INT64 = types_pb2.DT_INT64


def normalised(case: Case) -> Outcome | None:
    """FusedBatchNorm(x, scale, offset, mean, variance)."""
    channels = _num_channels(case, 0)
    if case.states[0] != Rows(0) or channels is None:
        return None
    takes: tuple[State, ...] = (Rows(0), *(WHOLE,) * (len(case.inputs) - 1))
    gives: tuple[State, ...] = (Rows(0), *(WHOLE,) * (case.num_outputs - 1))
    if not _is_training(case.node):
        return Outcome(takes, gives)
    return Outcome(takes, gives, write=lambda writer: _write_normalised(writer, channels, case.num_outputs))


def gradient(case: Case) -> Outcome | None:
    """FusedBatchNormGrad(dy, x, scale, mean, variance), with the moments that the forward op reserved."""
    channels = _num_channels(case, 1)
    if case.states[1] != Rows(0) or channels is None:
        return None
    takes: tuple[State, ...] = (Rows(0), Rows(0), *(WHOLE,) * (len(case.inputs) - 2))
    rest = (WHOLE,) * (case.num_outputs - 3)
    if not _is_training(case.node):
        return Outcome(takes, (Rows(0), SUM, SUM, *rest))
    return Outcome(takes, (Rows(0), WHOLE, WHOLE, *rest),
                   write=lambda writer: _write_gradient(writer, channels, case.num_outputs))


def _is_training(node: node_def_pb2.NodeDef) -> bool:
    return "is_training" not in node.attr or node.attr["is_training"].b


def _channels_of(node: node_def_pb2.NodeDef, rank: int) -> int:
    """Returns the dimension of the channels."""
    return 1 if node.attr["data_format"].s.startswith(b"NC") else rank - 1


def _num_channels(case: Case, i: int) -> tuple[int, int] | None:
    shape = case.shape(i)
    if shape is None or len(shape) not in (4, 5):
        return None
    size = shape[_channels_of(case.node, len(shape))]
    return None if size is None or size.constant is None else (len(shape), size.constant)


class _Arithmetic:
    """Writes the arithmetic of one op, in float32."""

    def __init__(self, writer: NodeWriter, rank: int, channels: int) -> None:
        self.writer = writer
        self.channels = channels
        self._axes = [d for d in range(rank) if d != _channels_of(writer.node, rank)]
        self._broadcast = [1] * rank
        self._broadcast[_channels_of(writer.node, rank)] = channels

    def binary(self, name: str, op: str, x: str, y: str) -> str:
        return self.writer.add(name, op, [x, y], T=_FLOAT)

    def unary(self, name: str, op: str, x: str) -> str:
        return self.writer.add(name, op, [x], T=_FLOAT)

    def number(self, name: str, value: float, beside: str) -> str:
        return self.writer.constant(name, np.array(value, np.float32), beside)

    def real(self, name: str, tensor: str) -> str:
        """Casts a tensor of the type of the images to float32."""
        dtype = self.writer.node.attr["T"].type
        return tensor if dtype == _FLOAT else self.writer.add(name, "Cast", [tensor], SrcT=dtype, DstT=_FLOAT)

    def image(self, name: str, tensor: str) -> str:
        """Casts a tensor to the type of the images."""
        dtype = self.writer.node.attr["T"].type
        if dtype == _FLOAT:
            return self.writer.add(name, "Identity", [tensor], T=_FLOAT)
        return self.writer.add(name, "Cast", [tensor], SrcT=_FLOAT, DstT=dtype)

    def summed(self, name: str, tensor: str) -> str:
        """Sums over all dimensions except the channels, on this rank."""
        axes = self.writer.constant(f"{name}/axes", np.array(self._axes, np.int32), tensor)
        return self.writer.add(name, "Sum", [tensor, axes], T=_FLOAT, Tidx=types_pb2.DT_INT32, keep_dims=False)

    def over(self, name: str, tensor: str) -> str:
        """Reshapes a vector with one number per channel to the rank of images."""
        shape = self.writer.constant(f"{name}/shape", np.array(self._broadcast, np.int32), tensor)
        return self.writer.add(name, "Reshape", [tensor, shape], T=_FLOAT, Tshape=types_pb2.DT_INT32)

    def elements(self, i: int) -> str:
        """Returns the number of elements per channel in one process."""
        size = self.writer.global_shape(i, _INT64, is_size=True)
        size = self.writer.add("size", "Cast", [size], SrcT=_INT64, DstT=_FLOAT)
        return self.binary("elements", "RealDiv", size, self.number("channels", self.channels, size))

    def reciprocal_root(self, name: str, variance: str) -> str:
        epsilon = self.writer.node.attr["epsilon"].f if "epsilon" in self.writer.node.attr else 1e-4
        return self.unary(name, "Rsqrt", self.binary(f"{name}/of", "AddV2", variance, self.number(
            f"{name}/epsilon", epsilon, variance)))


def _write_normalised(writer: NodeWriter, shape: tuple[int, int], num_outputs: int) -> list[str]:
    rank, channels = shape
    do = _Arithmetic(writer, rank, channels)
    images, scale, offset, old_mean, old_variance = writer.inputs
    x, count = do.real("x", images), do.elements(0)
    total = writer.added_up("mean", do.summed("sum", x), _FLOAT, (channels,))
    mean = do.binary("mean", "RealDiv", total, count)
    centred = do.binary("centred", "Sub", x, do.over("means", mean))
    squares = do.summed("squares", do.unary("square", "Square", centred))
    variance = do.binary("variance", "RealDiv", writer.added_up("variance", squares, _FLOAT, (channels,)), count)
    factor = do.binary("factor", "Mul", do.reciprocal_root("root", variance), scale)
    product = do.binary("product", "Mul", centred, do.over("factors", factor))
    y = do.image("", do.binary("y", "AddV2", product, do.over("offsets", offset)))

    # The unbiased estimate of the variance, as the kernel returns it.
    one = do.number("one", 1, count)
    others = do.binary("others", "Maximum", do.binary("less", "Sub", count, one), one)
    unbiased = do.binary("unbiased", "Mul", variance, do.binary("ratio", "RealDiv", count, others))
    new = [_averaged(do, "new_mean", old_mean, mean), _averaged(do, "new_variance", old_variance, unbiased)]
    return [y, *new, mean, variance, *[do.number("reserved", 0, count)] * (num_outputs - 5)]


def _averaged(do: _Arithmetic, name: str, old: str, new: str) -> str:
    node = do.writer.node
    factor = node.attr["exponential_avg_factor"].f if "exponential_avg_factor" in node.attr else 1.0
    if factor == 1:
        return new
    kept = do.binary(f"{name}/kept", "Mul", old, do.number(f"{name}/rest", 1 - factor, old))
    added = do.binary(f"{name}/added", "Mul", new, do.number(f"{name}/factor", factor, new))
    return do.binary(name, "AddV2", kept, added)


def _write_gradient(writer: NodeWriter, shape: tuple[int, int], num_outputs: int) -> list[str]:
    """With the normalised x': scale * (dy - sum(dy) / n - x' * sum(dy * x') / n) / deviation."""
    rank, channels = shape
    do = _Arithmetic(writer, rank, channels)
    gradient_of_images, images, scale, mean, variance = writer.inputs[:5]
    dy, x, count = do.real("dy", gradient_of_images), do.real("x", images), do.elements(1)
    root = do.reciprocal_root("root", variance)
    centred = do.binary("centred", "Sub", x, do.over("means", mean))
    normal = do.binary("normal", "Mul", centred, do.over("roots", root))
    sums = writer.add("sums", "Pack", [do.summed("sum", dy), do.summed("product", do.binary(
        "products", "Mul", dy, normal))], T=_FLOAT, N=2, axis=0)
    sums = writer.add("both", "Unpack", [writer.added_up("sums", sums, _FLOAT, (2, channels))], T=_FLOAT, num=2, axis=0)
    of_offset, of_scale = sums, f"{sums}:1"
    shift = do.over("shift", do.binary("shifts", "RealDiv", of_offset, count))
    slope = do.over("slope", do.binary("slopes", "RealDiv", of_scale, count))
    rest = do.binary("rest", "Sub", do.binary("shifted", "Sub", dy, shift), do.binary("sloped", "Mul", normal, slope))
    factor = do.over("factors", do.binary("factor", "Mul", root, scale))
    dx = do.image("", do.binary("dx", "Mul", rest, factor))
    return [dx, of_scale, of_offset, *[do.number("reserved", 0, count)] * (num_outputs - 3)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), normalised),
    **dict.fromkeys(("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"), gradient),
}
