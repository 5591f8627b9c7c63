"""Loads the op library, into TensorFlow and for ctypes."""

import atexit
import ctypes
import functools
import logging
import pathlib
import re
import types

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import ConfigurationError

_log = logging.getLogger("tf_poseidon")
_Warn = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_PATH = pathlib.Path(__file__).with_name("libposeidon_ops.so")

_REBUILD = ("Rebuild it for the installed TensorFlow: `pip install --no-build-isolation "
            "--force-reinstall --no-deps .` in its source tree.")


@functools.cache
def load() -> tuple[types.ModuleType, ctypes.CDLL]:
    """Loads the op library once per process.

    Returns:
        (ops, functions): the module of raw ops that TensorFlow generates, and the same library
        as a `ctypes.CDLL` for its C functions.

    Raises:
        PoseidonError: If the library is missing, or built for another TensorFlow; or if the installed TensorFlow is
            not supported.
    """
    if not _PATH.exists():
        raise ConfigurationError(
            f"tf_poseidon's op library is missing: {_PATH} does not exist. Run `make setup`, or "
            "`pip install .`, in its source tree.")
    check_version(built_for(_PATH.read_bytes()), tf.__version__)
    tf_compat.TABLE.check()
    try:
        # TensorFlow first: it creates wrappers only for ops that its own loading registers.
        ops, functions = tf.load_op_library(str(_PATH)), ctypes.CDLL(str(_PATH))
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


def built_for(library_bytes: bytes) -> str:
    """Returns the TensorFlow version that the library's file names (kernels/version.cc)."""
    return re.search(rb"poseidon built for TensorFlow ([\w.+-]+)", library_bytes)[1].decode()


def check_version(built_for_version: str, running: str) -> None:
    """Raises PoseidonError unless the library was built for the TensorFlow that runs."""
    if built_for_version != running:
        raise ConfigurationError(
            f"tf_poseidon's op library was built for TensorFlow {built_for_version}, but "
            f"TensorFlow {running} is running. {_REBUILD}")
