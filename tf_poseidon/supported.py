"""The only place that defines which versions tf_poseidon supports (setup.py reads it too).

scripts/test_matrix.py tests pairs of them; docs/results/versions.md says which were.

Tests: tests/unit/test_compat.py, tests/unit/test_keras_hook.py.
"""

# From the oldest to the newest. The op library is compiled for one of them each: their C++ interfaces differ.
TENSORFLOW_SERIES = ("2.18", "2.19", "2.20", "2.21")
TENSORFLOW = "tensorflow>=2.18,<2.22"

# The private names in compat/keras.py and keras_hook/ are those of these Keras versions: from KERAS_FROM, below
# KERAS_BELOW.
KERAS_FROM = "3.12"
KERAS_BELOW = "3.16"
KERAS = f"keras>={KERAS_FROM},<{KERAS_BELOW}"


def library(series: str) -> str:
    """Returns the name of the op library for a series of TensorFlow."""
    return f"libposeidon_ops_{series.replace('.', '_')}"
