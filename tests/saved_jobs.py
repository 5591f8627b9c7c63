"""Verifies rewritten graphs, and trains with them: saved_jobs.py CASES OUT, on some ranks.

CASES is a pickled list of (`saved_zoo.Saved`, path of the rewritten graph); OUT gets a pickled dictionary.
"""

import pickle
import sys

import numpy as np
import saved_zoo
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon import runtime
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import running
from tf_poseidon.saved_graphs import verifying

STEPS = 2

# Those whose step can be given the rows of all ranks at once, and makes the same of them.
JOINED = {name for name in saved_zoo.CASES if name not in (
    "as_many_rows_as_columns", "several_steps", "keras_batch_norm", "keras_dropout", "v1_batch_norm")}


def what_of(saved):
    """Returns what makes a step of a saved graph."""
    if saved.kind == "saved_model":
        return dict(signature=saved.fetches[0])
    return dict(train_op=saved.fetches[:1], initializer=[saved.initializer] if saved.initializer else ())


def shards(saved, size, seed):
    """Returns what each rank computes: batches of their own."""
    return [saved_zoo.batch(saved, saved.rows, 100 * seed + rank) for rank in range(size)]


def joined(parts):
    """Returns the inputs of all ranks under each other."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def train(path, saved, batches):
    """Returns the variables by name after some steps, as TensorFlow optimizes graphs by default."""
    runner = running.runner(formats.read(path), **what_of(saved))
    for batch in batches:
        runner.run(batch)
    return dict(zip(runner.variables, runner.state()))


def main(cases, out):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rank, size = poseidon.load_ops()
    results = {}
    with open(cases, "rb") as file:
        cases = pickle.load(file)
    for name, (saved, path) in cases.items():
        steps = [shards(saved, size, seed) for seed in range(STEPS)]
        result = {"verified": verifying.verify(saved.path, path, **what_of(saved), steps=STEPS,
                                               inputs=joined(steps[0]))}
        before = sites()
        result["trained"] = train(path, saved, [parts[rank] for parts in steps])
        result["bytes"] = {site: (count - before.get(site, 0)) / STEPS for site, count in sites().items()
                           if count != before.get(site, 0)}
        if rank == 0 and name in JOINED:
            result["one process"] = train(saved.path, saved, map(joined, steps))
        results[name] = result
    if rank == 0:
        with open(out, "wb") as file:
            pickle.dump(results, file)


def sites():
    """Returns the bytes that this rank has sent and received, by site."""
    communicator = runtime.communicator()
    found = communicator.statistics()["sites"] if communicator else {}
    return {site: counts["sent_bytes"] + counts["received_bytes"] for site, counts in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
