"""Loads the op library, into TensorFlow and for ctypes."""

import ctypes
import functools
import pathlib

import tensorflow as tf

from tf_poseidon.errors import PoseidonError

_PATH = pathlib.Path(__file__).with_name("libposeidon_ops.so")


@functools.cache
def load():
    """Loads the op library once per process.

    Returns:
        (ops, functions): the module of raw ops that TensorFlow generates, and the same library
        as a `ctypes.CDLL` for its C functions.

    Raises:
        PoseidonError: If the library is missing, or built for another TensorFlow.
    """
    if not _PATH.exists():
        raise PoseidonError(
            f"tf_poseidon's op library is missing ({_PATH.name} is not beside {__file__}); run "
            "`pip install .` in its source tree (or `make setup`), and do not import it from an "
            "unbuilt checkout.")
    try:
        functions = ctypes.CDLL(str(_PATH))
    except OSError as error:
        raise PoseidonError(
            f"tf_poseidon's op library cannot be loaded beside TensorFlow {tf.__version__}: "
            f"{error}. {_REBUILD}") from error
    functions.poseidon_built_for_tensorflow.restype = ctypes.c_char_p
    check_version(functions.poseidon_built_for_tensorflow().decode(), tf.__version__)
    return tf.load_op_library(str(_PATH)), functions


_REBUILD = ("Build it again for the installed TensorFlow: `pip install --no-build-isolation "
            "--force-reinstall --no-deps .` in its source tree.")


def check_version(built_for, running):
    """Raises PoseidonError unless the library was built for the TensorFlow that runs."""
    if built_for != running:
        raise PoseidonError(
            f"tf_poseidon's op library was built for TensorFlow {built_for}, but TensorFlow "
            f"{running} is running. {_REBUILD}")
