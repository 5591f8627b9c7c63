"""Interrupts programs and resumes them, started on several ranks: train_resumed.py OUT POLICY
NAME….

Prints a line per case and rank: whether the bits are those of an undisturbed job.
"""

import pathlib
import sys

import numpy as np
import resumed_programs as programs

import tf_poseidon as poseidon

# Data, steps before the interruption, options.
CASES = {
    "arrays": ("arrays", 14, {"save_freq": 3}),
    "dataset": ("reshuffled dataset", 20, {"save_freq": 1, "validates": True}),
    "end of an epoch": ("reshuffled dataset", 12, {"save_freq": 6}),
    "augmented": ("augmented dataset", 9, {"save_freq": 4}),
    "callbacks": ("generator", 11, {"save_freq": 5, "plateau": True}),
}


def main(directory, policy, *names):
    directory = pathlib.Path(directory)
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=60)
    for name in names:
        data, after, options = CASES[name]
        undisturbed, logs = programs.train(directory / f"undisturbed {name}", data, strategy.scope, **options)
        backup = directory / f"backup {name}"
        assert programs.train(backup, data, strategy.scope, after, **options) is None
        found, found_logs = programs.train(backup, data, strategy.scope, **options)
        same = (all(a.tobytes() == b.tobytes() for a, b in zip(undisturbed, found))
                and all(logs[epoch] == found_logs[epoch] for epoch in found_logs))
        print(f"rank {strategy.rank}, {name}: {'same bits' if same and found_logs else 'other bits'}", flush=True)
        np.savez(directory / f"{name}.{strategy.rank}.npz", *found[:programs.WEIGHTS])


if __name__ == "__main__":
    main(*sys.argv[1:])
