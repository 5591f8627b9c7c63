"""Trains the steps of training_steps.FOUND on two ranks, and in one process: train_found.py FOLDER."""

import pathlib
import pickle
import sys

import training_steps

import tf_poseidon as poseidon
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import running

STEPS, ROWS = 4, 8


def train(path, batches):
    runner = running.runner(formats.read(path))
    for batch in batches:
        runner.run(batch)
    return runner.state()


def main(folder):
    rank, size = poseidon.load_ops()
    joined = [training_steps.batch(ROWS, seed) for seed in range(STEPS)]
    rows = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    result = {}
    for i, name in enumerate(training_steps.FOUND):
        mine = train(folder / f"out{i}", [{key: value[rows] for key, value in batch.items()} for batch in joined])
        result[name] = mine, rank == 0 and train(folder / f"step{i}", joined)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
