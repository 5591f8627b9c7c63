"""Checks the kernels that the op library has for GPUs, and measures copies within the GPU, to the host and back."""

from collections.abc import Sequence
import pathlib
import subprocess

from absl import app
from absl import flags
import numpy as np
import tensorflow as tf

from evaluation import modules
from evaluation.gpu import gpu_device
from evaluation.gpu import gpu_outer_product as outer_product
from evaluation.gpu import gpu_setting
from tf_poseidon import ops
from tf_poseidon.job import communicator
from tf_poseidon.ops import library

_SEED = flags.DEFINE_integer("seed", 0, "Of random cases.")
_EMULATED = modules.ROOT / "tests" / "gpu" / "emulated_gpu.cc"


def _checked(path: pathlib.Path, memory: object) -> dict[str, object]:
    """Returns the largest error of each kind, as a share of its bound; all cases, and sums that are exact."""
    kernels, worst = outer_product.Library(path, memory), {}
    rng = np.random.default_rng(_SEED.value)
    for case in outer_product.cases():
        kind = f"{case.factors} to {case.out}"
        worst[kind] = max(worst.get(kind, 0.0), outer_product.check(kernels, case, rng))
    for exact in outer_product.exact_cases():
        outer_product.check_exact(kernels, *exact)
    return {"worst": worst, "cases": len(outer_product.cases())}


# What ops make of a tensor, in a job of one rank.
_OPS = {
    "sums of slices": lambda x: ops.dense_slices(tf.IndexedSlices(x, tf.range(x.shape[0]) // 7), x.shape),
    "exchanged slices": lambda x: ops.sync_slices(
        tf.IndexedSlices(x, tf.range(x.shape[0]) // 7), x.shape, "slices").values,
    "sums": lambda x: ops.all_reduce(x, "sum"),
    "sums in bfloat16": lambda x: ops.sync(x, "narrow", wire_dtype="bfloat16"),
    "broadcasts": lambda x: ops.broadcast(x, "broadcast"),
    "gathered rows": lambda x: ops.all_gather(x, "rows"),
}


def _check_ops(device: str) -> None:
    """Compares what ops make on a device with what they make on the host, bit by bit."""
    values = np.random.default_rng(_SEED.value).normal(size=(2000, 37))
    values[:20] *= 1e-39  # subnormal as float
    rank, = communicator.join_loopback(1)
    rank.use_for_ops()
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        for what, op in _OPS.items():
            bits = []
            for place in ("CPU:0", device):
                with tf.device(place):
                    result = op(tf.constant(values.astype(dtype.as_numpy_dtype)))
                if not result.device.endswith(place):
                    raise SystemExit(f"gpu_train: {what} in {dtype.name} were computed on {result.device}, expected "
                                     f"{place}; look whether the op has a kernel there.")
                bits.append(result.numpy().tobytes())
            if bits[0] != bits[1]:
                raise SystemExit(f"gpu_train: {what} in {dtype.name} on {device} have other bits than on the host, "
                                 "expected the same; look into kernels/cuda.")
    rank.leave()


def _rehearsed() -> dict[str, object]:
    """The same on the emulated GPU."""
    path = gpu_setting.path("emulated.so")
    subprocess.run(["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wno-unknown-pragmas", _EMULATED, "-o", path],
                   check=True)
    _check_ops("CPU:0")
    return _checked(path, outer_product.HostMemory())


def _on_gpu() -> dict[str, object]:
    if problem := library.gpu_problem():
        raise SystemExit(f"gpu_train: {problem}.")
    driver = gpu_device.Driver()
    copies = gpu_device.Copies(driver)
    pieces = {"whole": copies.BYTES, "2 MiB": 2 << 20}
    rates = {f"{name}, {' and '.join(directions)}": copies.measure(piece, directions)
             for name, piece in pieces.items() for directions in (("down",), ("up",), ("down", "up"), ("within",))}
    _check_ops("GPU:0")
    found = _checked(library.path_for(tf.__version__), gpu_device.DeviceMemory(driver))
    return found | {"gpu": driver.name, "copied_bytes_per_s": rates}


def main(_: Sequence[str]) -> None:
    gpu_setting.save("kernels", _rehearsed() if gpu_setting.REHEARSE.value else _on_gpu())


if __name__ == "__main__":
    app.run(main)
