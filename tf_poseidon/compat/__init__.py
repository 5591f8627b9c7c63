"""The private names of TensorFlow and Keras that we use: one table per library, checked as a whole before first use.

Nothing outside this package names them; `tests/unit/test_compat.py` checks that.
"""
