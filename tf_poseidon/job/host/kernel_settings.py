"""What of a process's environment changes the bits that TensorFlow's kernels compute.

Ranks compute some tensors each for itself, such as an optimizer's update, and rely on getting the same bits: with other
settings on one rank, their variables would drift apart.

Tests: tests/unit/test_kernel_settings.py.
"""

from collections.abc import Mapping
import os
import re

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat

# Read by TensorFlow, oneDNN, CUDA's libraries and XLA when they choose a kernel, or its precision.
_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TF_CUDNN_DETERMINISTIC", "TF_CUDNN_USE_AUTOTUNE", "TF_ENABLE_AUTO_MIXED_PRECISION",
    "TF_ENABLE_CUBLAS_TENSOR_OP_MATH_FP32", "TF_ENABLE_CUDNN_TENSOR_OP_MATH_FP32",
    "TF_ENABLE_CUDNN_RNN_TENSOR_OP_MATH_FP32", "TF_ENABLE_WINOGRAD_NONFUSED", "TF_SET_ONEDNN_FPMATH_MODE",
    "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "TF_XLA_FLAGS", "XLA_FLAGS")
# Flags that say what to write, or where files are.
_FILES = re.compile(r"--xla_dump|--\w+_(dir|path)=")
_THREADS = "TF_NUM_INTRAOP_THREADS"


def settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the settings that must be the same on all ranks, by what they are called in messages."""
    return {
        "deterministic ops (TF_DETERMINISTIC_OPS, tf.config.experimental.enable_op_determinism)": _switch(
            tf_compat.is_deterministic()),
        "oneDNN (TF_ENABLE_ONEDNN_OPTS)": _switch(tf_compat.uses_onednn()),
        "TensorFloat-32 (tf.config.experimental.enable_tensor_float_32_execution)": _switch(
            tf.config.experimental.tensor_float_32_execution_enabled()),
        "automatic clustering by XLA (tf.config.optimizer.set_jit)": str(tf.config.optimizer.get_jit()) or "disabled",
        "options of the graph optimizer (tf.config.optimizer.set_experimental_options)": str(
            {name: value for name, value in sorted(tf.config.optimizer.get_experimental_options().items()) if value}),
        **{f"the environment variable {name}": _words(environment.get(name)) for name in _VARIABLES},
    }


def threads() -> int:
    """Returns the number of threads of an op: the chosen one, or that of the processors that this process may use."""
    return chosen_threads() or len(os.sched_getaffinity(0))


def chosen_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of threads of an op that the program or its environment has chosen, 0 if none is."""
    given = environment.get(_THREADS, "")
    return tf.config.threading.get_intra_op_parallelism_threads() or (int(given) if given.isdecimal() else 0)


def _switch(is_on: bool) -> str:
    return "enabled" if is_on else "disabled"


def _words(value: str | None) -> str:
    """Returns the value of a variable without the order of its flags, and without those that only name files."""
    words = sorted(word for word in (value or "").split() if not _FILES.match(word))
    return f"'{' '.join(words)}'" if words else "not set"
