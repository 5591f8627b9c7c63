"""Runs scenarios and writes what each rank got: run_scenarios.py OUT POLICY NAME…"""

import os
import pathlib
import sys

import keras
import numpy as np
import scenarios

import tf_poseidon as poseidon


def main():
    out, policy, names = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    keras.config.set_floatx("float64")
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=60,
                                         engine=os.environ.get("POSEIDON_TEST_ENGINE"))
    for name in names:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        arrays = scenarios.SCENARIOS[name](strategy)
        np.savez(out / f"{name}.rank{strategy.rank}.npz", **arrays)


if __name__ == "__main__":
    main()
