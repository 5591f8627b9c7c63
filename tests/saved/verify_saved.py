"""Verifies rewritten graphs: verify_saved.py CASES OUT, on some ranks.

CASES is a pickled dictionary of arguments of `verifying.verify`; OUT gets a pickled one of the findings.
"""

import pickle
import sys

import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.saved_graphs import verifying


def main(cases, out):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with open(cases, "rb") as file:
        cases = pickle.load(file)
    found = {name: verifying.verify(**arguments) for name, arguments in cases.items()}
    if poseidon.load_ops().rank == 0:
        with open(out, "wb") as file:
            pickle.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
