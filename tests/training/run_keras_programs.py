"""Trains programs of keras_programs.py with fit, on all ranks of a job: DIRECTORY POLICY [NAME ...].

For each program, each rank writes its state before and after each step to NAME.RANK.npz.
"""

import json
import pathlib
import sys

import keras
import keras_programs
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon


class Note(keras.callbacks.Callback):
    """Notes the weights, and the logs, of each step."""

    def __init__(self):
        super().__init__()
        self.arrays = {}

    def on_train_begin(self, logs=None):
        self._note("before")

    def on_train_batch_end(self, batch, logs=None):
        self._note(f"step {batch}")
        self.arrays |= {f"step {batch}/result {name}": np.float64(value) for name, value in logs.items()}

    def _note(self, when):
        self.arrays |= {f"{when}/variable {i} {v.path}": v.numpy() for i, v in enumerate(self.model.weights)}


def main(directory, policy, *names):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = poseidon.PoseidonStrategy(policy=policy, strict=True, timeout_s=60)
    whole = {}
    for name in names or keras_programs.PROGRAMS:
        precision = "float32" if name in keras_programs.SINGLE else "float64"
        keras.config.set_floatx(precision)
        keras.config.set_dtype_policy(precision)
        keras.backend.clear_session()  # whose names do not depend on the programs before
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model, x, y, *options = keras_programs.PROGRAMS[name]()
        note = Note()
        model.fit(x, y, batch_size=keras_programs.BATCH, shuffle=False, verbose=0, callbacks=[note],
                  **(options[0] if options else {}))
        np.savez(pathlib.Path(directory) / f"{name}.{strategy.rank}.npz", **note.arrays)
        if strategy.plan:
            whole[name] = sorted({op.op for op in strategy.plan.whole})
    (pathlib.Path(directory) / f"whole.{strategy.rank}.json").write_text(json.dumps(whole))


if __name__ == "__main__":
    main(*sys.argv[1:])
