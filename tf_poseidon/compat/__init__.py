"""The private names of TensorFlow and Keras that we use: one table for each, looked at as a whole before the first use.

Nothing outside of this package names them; `tests/unit/test_compat.py` sees to that.
"""
