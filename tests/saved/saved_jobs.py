"""Trains with saved graphs, rewritten and original: saved_jobs.py CASES OUT, on some ranks.

CASES is a pickled dictionary of `Job`s by name; OUT gets a pickled dictionary of their results.
"""

import dataclasses
import hashlib
import pickle
import sys
import typing

import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.job import runtime
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import running


@dataclasses.dataclass(frozen=True)
class Job:
    """A saved step to train.

    Attributes:
        original: Path of the saved graph.
        rewritten: Path of the rewritten graph.
        what: What selects a step: arguments of `running.runner`.
        batches: The global batch of each step: arrays by name.
    """

    original: str
    rewritten: str
    what: dict[str, typing.Any]
    batches: list[dict[str, np.ndarray]]


def train(path, job):
    """Returns the variables by name after all steps, as TensorFlow optimizes graphs by default."""
    runner = running.runner(formats.read(path), **job.what)
    for batch in job.batches:
        runner.run(batch)
    return dict(zip(runner.variables, runner.state()))


def main(cases, out):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rank, _ = poseidon.load_ops()
    results = {}
    with open(cases, "rb") as file:
        cases = pickle.load(file)
    for name, job in cases.items():
        before = sites()
        trained = train(job.rewritten, job)
        result = {"trained": trained, "bits": _bits_of_ranks(name, trained)}
        result["bytes"] = {site: (count - before.get(site, 0)) / len(job.batches) for site, count in sites().items()
                           if count != before.get(site, 0)}
        if rank == 0:
            result["one process"] = train(job.original, job)
        results[name] = result
    if rank == 0:
        with open(out, "wb") as file:
            pickle.dump(results, file)


def _bits_of_ranks(name, values):
    """Returns how many different versions of some arrays, by their bits, the ranks have."""
    communicator = runtime.communicator()
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(value).tobytes() for value in values.values())).digest()
    if communicator is None:
        return 1
    rows, = communicator.submit_factors(f"test/{name}", [np.frombuffer(digest, np.uint8).reshape(1, -1)])()
    return len({row.tobytes() for row in rows})


def sites():
    """Returns the bytes that this rank has sent and received, by site."""
    communicator = runtime.communicator()
    found = communicator.statistics()["sites"] if communicator else {}
    return {site: counts["sent_bytes"] + counts["received_bytes"] for site, counts in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
