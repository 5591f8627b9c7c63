"""The only place that defines which versions tf_poseidon supports (setup.py reads it too)."""

# The op library is compiled against one TensorFlow; its C++ interface changes between series.
TENSORFLOW_SERIES = "2.21"
TENSORFLOW = f"tensorflow=={TENSORFLOW_SERIES}.*"

# The private names in compat/keras.py and keras_hook/ are those of these Keras versions: from KERAS_FROM, below
# KERAS_BELOW.
KERAS_FROM = "3.15"
KERAS_BELOW = "3.16"
KERAS = f"keras>={KERAS_FROM},<{KERAS_BELOW}"
