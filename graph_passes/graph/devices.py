"""What the passes know of devices: which have a kernel, and where their host is."""

from collections.abc import Mapping

import tensorflow as tf
from tensorflow.core.framework import kernel_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError

# The compute capability from which on GPUs have what the kernels are compiled for.
OLDEST_GPU = (8, 0)


def has_kernel(op: str, device: str, **types: int) -> bool:
    """Whether an op has a kernel for a device.

    Args:
        op: Name of the op.
        device: Name of the device. Where it leaves the choice to TensorFlow, that finds one with a kernel.
        **types: DataTypes by the name of the op's attribute, as far as kernels differ in them.
    """
    kind = _parsed(device).device_type
    return kind is None or any(
        kernel.device_type in (kind, "DEFAULT") and _takes(kernel, types)
        for kernel in tf_compat.kernels(op))


def can_multiply(device: str, **types: int) -> bool:
    """Whether a device multiplies factors: it has a kernel, and if this process sees it, it is new enough.

    Args:
        device: Name of the device.
        **types: As for `has_kernel`.
    """
    if not has_kernel("SufficientFactorOuterProduct", device, **types):
        return False
    return _parsed(device).device_type != "GPU" or all(
        tf.config.experimental.get_device_details(gpu).get("compute_capability", OLDEST_GPU) >= OLDEST_GPU
        for gpu in tf.config.get_visible_devices("GPU"))


def host_of(device: str) -> str:
    """Returns the first CPU of a device's task; what is a CPU, or left to TensorFlow, as it is."""
    spec = _parsed(device)
    if spec.device_type in (None, "CPU"):
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _takes(kernel: kernel_def_pb2.KernelDef, types: Mapping[str, int]) -> bool:
    return all(types[constraint.name] in constraint.allowed_values.list.type
               for constraint in kernel.constraint if constraint.name in types)


def _parsed(device: str) -> tf.DeviceSpec:
    try:
        return tf.DeviceSpec.from_string(device)
    except ValueError as error:
        raise GraphError(f"The graph places nodes on '{device}', which is no name of a device.") from error
