"""What is the same in all processes of gpu_train.py: flags, devices, and what they compute with."""

from collections.abc import Iterator
import contextlib
import json
import pathlib
from typing import Any
from unittest import mock

from absl import flags
import keras
import numpy as np
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.graph_passes.graph import devices

OUT = flags.DEFINE_string("out", None, "Directory for results.", required=True)
MODELS = flags.DEFINE_list("models", [], "Names of models; all by default.")
UNIT = flags.DEFINE_integer("unit", 64, "Size of the models.")
MEMORY = flags.DEFINE_integer("memory_mib", 16384, "Memory of the GPU that this process may use.")
APART = flags.DEFINE_bool("apart", False, "Whether ranks exchange through the host, as those of several nodes.")
REHEARSE = flags.DEFINE_bool("rehearse", False, "Whether the CPU plays the GPU.")

# What tensors are multiplied with: Keras' policy, whether by TF32, and the last place of 1.
NUMBERS = {"float32": ("float32", False, 2.0 ** -23), "tf32": ("float32", True, 2.0 ** -10),
           "mixed": ("mixed_float16", False, 2.0 ** -10)}
_MOVING = ("PoseidonSend", "PoseidonRecv", "PoseidonSyncSlices", "PoseidonDenseSlices")


def prepare() -> None:
    """Lets TensorFlow use a part of the GPU, and compute the same bits in every run.

    Raises:
        SystemExit: If there is no GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus and not REHEARSE.value:
        raise SystemExit("gpu_train: TensorFlow sees no GPU here; '. TARGET/activate' sets the paths of its libraries, "
                         "and tf-poseidon doctor says more.")
    for gpu in gpus:
        tf.config.set_logical_device_configuration(
            gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=MEMORY.value)])
    tf.config.experimental.enable_op_determinism()


def ranks_per_node() -> int | None:
    """Returns the option of the strategy: ranks that do not combine do not use each other's GPUs."""
    return 1 if APART.value else None


def compute_with(numbers: str) -> None:
    """Sets what tensors are multiplied with, see `NUMBERS`."""
    policy, with_tf32, _ = NUMBERS[numbers]
    keras.mixed_precision.set_dtype_policy(policy)
    tf.config.experimental.enable_tensor_float_32_execution(with_tf32)


@contextlib.contextmanager
def moving_by(way: str) -> Iterator[None]:
    """Lets training functions that are made inside move gradients in a way.

    Args:
        way: "pieces", as usual; "whole", by TensorFlow's copies to the host and back.
    """
    has_kernel, rewrite = devices.has_kernel, grappler.GraphPass.rewrite

    def without_ours(op: str, device: str, **types: int) -> bool:
        return has_kernel(op, device, **types) and not (op in _MOVING and "GPU" in device)

    def with_emulated(self: grappler.GraphPass, graph_def: Any) -> Any:
        rewritten = rewrite(self, graph_def)
        for node in rewritten.node if rewritten is not None else ():
            if node.op in _MOVING:
                node.attr["_kernel"].s = b"emulated_gpu"
        return rewritten

    if way == "whole":
        with mock.patch.object(devices, "has_kernel", without_ours):
            yield
    elif REHEARSE.value:
        with mock.patch.object(grappler.GraphPass, "rewrite", with_emulated):
            yield
    else:
        yield


def path(name: str) -> pathlib.Path:
    """Returns a file of the results."""
    return pathlib.Path(OUT.value, name)


def save(name: str, values: Any) -> None:
    """Writes what gpu_train.py reads: JSON, of NumPy's numbers, too."""
    path(f"{name}.json").write_text(json.dumps(values, default=lambda number: np.asarray(number).item()))
