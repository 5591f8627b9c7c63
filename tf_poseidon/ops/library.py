"""Loads the op library, into TensorFlow and for ctypes.

Tests: tests/unit/test_package.py.
"""

import atexit
import ctypes
import functools
import logging
import pathlib
import types

import tensorflow as tf

from tf_poseidon import supported
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import ConfigurationError

_log = logging.getLogger("tf_poseidon")
_Warn = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_DIRECTORY = pathlib.Path(__file__).parent

_REBUILD = ("Build it for the installed TensorFlow: `pip install --no-build-isolation "
            "--force-reinstall --no-deps .` in its source tree.")


@functools.cache
def load() -> tuple[types.ModuleType, ctypes.CDLL]:
    """Loads the op library once per process.

    Returns:
        (ops, functions): the module of raw ops that TensorFlow generates, and the same library
        as a `ctypes.CDLL` for its C functions.

    Raises:
        PoseidonError: If the installed TensorFlow is not supported; or if there is no library for it.
    """
    tf_compat.TABLE.check()
    path = path_for(tf.__version__)
    try:
        # TensorFlow first: it creates wrappers only for ops that its own loading registers.
        ops, functions = tf.load_op_library(str(path)), ctypes.CDLL(str(path))
    except (tf.errors.NotFoundError, OSError) as error:
        raise ConfigurationError(f"tf_poseidon's op library cannot be loaded beside TensorFlow "
                                 f"{tf.__version__}: {error}. {_REBUILD}") from error
    functions.poseidon_set_warn.argtypes = [_Warn]
    functions.poseidon_set_warn(_warn)
    atexit.register(functions.poseidon_set_warn, _Warn())  # no thread may enter Python after it ends
    return ops, functions


@_Warn
def _warn(text: bytes) -> None:
    """Logs a warning of a kernel; called on any thread."""
    _log.warning("%s", text.decode(errors="replace"))


def gpu_problem() -> str:
    """Returns why the library has no kernels for this machine's GPUs, and what to do; nothing if it has."""
    functions = load()[1]
    try:
        is_too_old = functions.poseidon_is_driver_too_old
    except AttributeError:
        return ("tf_poseidon was built without GPU kernels; build a wheel, or from source with TF_POSEIDON_CUDA=1, "
                "where nvcc is in PATH")
    is_too_old.restype = ctypes.c_bool
    driver, compiler = ctypes.c_int(), ctypes.c_int()
    if not is_too_old(ctypes.byref(driver), ctypes.byref(compiler)):
        return ""
    has, needed = (f"{version.value // 1000}.{version.value % 1000 // 10}" for version in (driver, compiler))
    return (f"the GPUs' driver supports CUDA {has}, and tf_poseidon's GPU kernels were built by CUDA {needed}; "
            f"update the driver, or build from source with CUDA_HOME naming a toolkit of CUDA {driver.value // 1000}")


def built_for(directory: pathlib.Path = _DIRECTORY) -> dict[str, pathlib.Path]:
    """Returns {series of TensorFlow: the op library that was built for it}, as they were installed."""
    paths = {series: directory / f"{supported.library(series)}.so" for series in supported.TENSORFLOW_SERIES}
    return {series: path for series, path in paths.items() if path.exists()}


def path_for(version: str, directory: pathlib.Path = _DIRECTORY) -> pathlib.Path:
    """Returns the op library for a version of TensorFlow; another series' may not survive being loaded.

    Raises:
        PoseidonError: If there is none.
    """
    built = built_for(directory)
    if not built:
        raise ConfigurationError(
            f"tf_poseidon's op library is missing: {directory} has none. Run `make setup`, or "
            "`pip install .`, in its source tree.")
    series = ".".join(version.split(".")[:2])
    if series not in built:
        raise ConfigurationError(
            f"tf_poseidon was built for TensorFlow {', '.join(built)}, but TensorFlow {version} is running. {_REBUILD}")
    return built[series]
