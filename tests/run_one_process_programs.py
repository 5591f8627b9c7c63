"""Runs programs of one_process_programs.py on all ranks of a job: DIRECTORY POLICY [NAME ...].

Each rank writes, for each program, what it was before, and after each step, to NAME.RANK.npz.
"""

import pathlib
import sys

import keras
import numpy as np
import one_process_programs
import tensorflow as tf

import tf_poseidon as poseidon


def main(directory, policy, *names):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    strategy = poseidon.PoseidonStrategy(policy=policy)
    for name in names or one_process_programs.PROGRAMS:
        step, variables, batches = one_process_programs.PROGRAMS[name]()
        distributed = poseidon.distribute(tf.function(step, reduce_retracing=True))
        arrays = {}

        def note(when):
            arrays.update({f"{when}/variable {i}": v.numpy() for i, v in enumerate(variables)})

        note("before")
        for i, batch in enumerate(batches):
            results = distributed(*batch)
            note(f"step {i}")
            arrays.update({f"step {i}/result {j}": r.numpy() for j, r in enumerate(tf.nest.flatten(results))})
        np.savez(pathlib.Path(directory) / f"{name}.{strategy.rank}.npz", **arrays)
        if strategy.rank == 0 and strategy.num_replicas_in_sync > 1:
            report = distributed.report
            print(f"{name}: {report if report else 'runs whole'}", flush=True)
    print(f"all of rank {strategy.rank} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
