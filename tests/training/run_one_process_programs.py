"""Runs programs of one_process_programs.py on all ranks of a job: DIRECTORY POLICY [OPTION ...] [NAME ...].

Options: --scope creates them in the strategy's scope; --fit makes each the training step of a Keras model; --verify
verifies every exchange; --rounded rounds exchanges. For each program, each rank writes its state before and after
each step to NAME.RANK.npz.
"""

import contextlib
import pathlib
import sys

import keras
import numpy as np
import one_process_programs
import tensorflow as tf

import tf_poseidon as poseidon


class Model(keras.Model):
    """A model of Keras whose training step is a program."""

    def __init__(self, step):
        super().__init__()
        self._step = step
        self.compile()

    def train_step(self, batch):
        results = self._step(*batch[0])
        return {f"{i}": result for i, result in enumerate(tf.nest.flatten(results))}


def main(directory, policy, *names):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.config.set_floatx("float64")
    in_fit = "--fit" in names
    in_scope = in_fit or "--scope" in names
    strategy = poseidon.PoseidonStrategy(policy=policy, verify=1 if "--verify" in names else None, strict=in_fit,
                                         wire_dtype="bfloat16" if "--rounded" in names else None,
                                         global_batch_norm=in_fit)
    names = [name for name in names if not name.startswith("--")]
    for name in names or one_process_programs.PROGRAMS:
        arrays = {}
        with strategy.scope() if in_scope else contextlib.nullcontext():
            step, variables, batches = one_process_programs.PROGRAMS[name]()
            runs = Model(step) if in_fit else poseidon.distribute(tf.function(step, reduce_retracing=True))

        def note(when):
            arrays.update({f"{when}/variable {i}": v.numpy() for i, v in enumerate(variables)})

        note("before")
        for i, batch in enumerate(batches):
            if in_fit:
                results = list(runs.train_on_batch(batch, return_dict=True).values())
            else:
                with strategy.scope() if in_scope else contextlib.nullcontext():
                    results = tf.nest.flatten(runs(*batch))
            note(f"step {i}")
            arrays.update({f"step {i}/result {j}": np.asarray(result) for j, result in enumerate(results)})
        np.savez(pathlib.Path(directory) / f"{name}.{strategy.rank}.npz", **arrays)
        if not in_fit and strategy.rank == 0 and strategy.num_replicas_in_sync > 1:
            report = runs.report
            print(f"{name}: {report if report else 'runs whole'}", flush=True)
    for site, counts in strategy.stats()["sites"].items():
        print(f"site {site}: {counts['count']} times, {counts['sent_bytes']} bytes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
