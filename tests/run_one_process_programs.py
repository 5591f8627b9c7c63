"""Runs programs of one_process_programs.py on all ranks of a job: DIRECTORY POLICY [OPTION ...] [NAME ...].

Options: --scope makes them in the strategy's scope; --verify verifies every exchange; --rounded rounds them. Each rank writes, for each program, what it was before, and after each step, to NAME.RANK.npz.
"""

import contextlib
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
    in_scope = "--scope" in names
    strategy = poseidon.PoseidonStrategy(policy=policy, verify=1 if "--verify" in names else None,
                                         wire_dtype="bfloat16" if "--rounded" in names else None)
    names = [name for name in names if not name.startswith("--")]
    for name in names or one_process_programs.PROGRAMS:
        with strategy.scope() if in_scope else contextlib.nullcontext():
            step, variables, batches = one_process_programs.PROGRAMS[name]()
        distributed = poseidon.distribute(tf.function(step, reduce_retracing=True))
        arrays = {}

        def note(when):
            arrays.update({f"{when}/variable {i}": v.numpy() for i, v in enumerate(variables)})

        note("before")
        for i, batch in enumerate(batches):
            with strategy.scope() if in_scope else contextlib.nullcontext():
                results = distributed(*batch)
            note(f"step {i}")
            arrays.update({f"step {i}/result {j}": r.numpy() for j, r in enumerate(tf.nest.flatten(results))})
        np.savez(pathlib.Path(directory) / f"{name}.{strategy.rank}.npz", **arrays)
        if strategy.rank == 0 and strategy.num_replicas_in_sync > 1:
            report = distributed.report
            print(f"{name}: {report if report else 'runs whole'}", flush=True)
    for site, counts in strategy.stats()["sites"].items():
        print(f"site {site}: {counts['count']} times, {counts['sent_bytes']} bytes", flush=True)
    print(f"all of rank {strategy.rank} done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
