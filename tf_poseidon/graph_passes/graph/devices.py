"""Devices: which ones have a kernel for an op, and the host of each.

Tests: tests/graphs/test_placement.py, tests/communicator/test_ops.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError

# The lowest compute capability that the kernels are compiled for.
OLDEST_GPU = (8, 0)


def has_kernel(op: str, device: str, **types: int) -> bool:
    """Whether an op has a kernel for a device.

    Args:
        op: Name of the op.
        device: Name of the device. If it names none, TensorFlow chooses one with a kernel.
        **types: DataTypes by name of the op's attribute; only those in which kernels differ.
    """
    kind = _parsed(device).device_type
    return kind is None or any(
        kernel.device_type in (kind, "DEFAULT") and _takes(kernel, types)
        for kernel in _kernels(op))


def can_multiply(device: str, **types: int) -> bool:
    """Whether a device can multiply factors: it has a kernel, and GPUs that this process sees are recent enough.

    Args:
        device: Name of the device.
        **types: Same as in `has_kernel`.
    """
    if not has_kernel("SufficientFactorOuterProduct", device, **types):
        return False
    return _parsed(device).device_type != "GPU" or all(
        tf.config.experimental.get_device_details(gpu).get("compute_capability", OLDEST_GPU) >= OLDEST_GPU
        for gpu in tf.config.get_visible_devices("GPU"))


def host_of(device: str) -> str:
    """Returns the first CPU of a device's task; a CPU, or a device that TensorFlow chooses, is returned unchanged."""
    spec = _parsed(device)
    if spec.device_type in (None, "CPU"):
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()


@functools.cache  # TensorFlow looks through all kernels that there are
def _kernels(op: str) -> Sequence[kernel_def_pb2.KernelDef]:
    return tuple(tf_compat.kernels(op))


@functools.cache
def _parsed(device: str) -> tf.DeviceSpec:
    try:
        return tf.DeviceSpec.from_string(device)
    except ValueError as error:
        raise GraphError(f"The graph places nodes on '{device}', which is not a valid device name.") from error


def _takes(kernel: kernel_def_pb2.KernelDef, types: Mapping[str, int]) -> bool:
    return all(types[constraint.name] in constraint.allowed_values.list.type
               for constraint in kernel.constraint if constraint.name in types)
