"""The one place that says which versions tf_poseidon works with (setup.py reads it too)."""

# The op library is compiled against one TensorFlow; its C++ interface changes between series.
TENSORFLOW_SERIES = "2.21"

# The hook points in keras_hook/ are those of these Keras versions: from, and below.
KERAS_FROM = "3.15"
KERAS_BELOW = "3.16"
