"""Runs a program of the tests, with Keras imported in half the time: start.py PROGRAM ARGUMENT…

Every rank of every job imports TensorFlow and Keras, which takes as long as what most of them do.
Keras also imports scikit-learn if it is installed, for wrappers that we do not use; and the garbage
collector searches what is imported for garbage, again and again, now and later.
"""

import gc
import runpy
import sys

gc.disable()
sys.modules["sklearn"] = None  # as if it was not installed
import keras  # noqa: F401
del sys.modules["sklearn"]
gc.freeze()
gc.enable()

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
