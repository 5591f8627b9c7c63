"""Runs scenarios and writes what each rank got: run_scenarios.py OUT POLICY [--engine=NAME] NAME…"""

import pathlib
import sys

import keras
import numpy as np
import scenarios

import tf_poseidon as poseidon


def main(out, policy, *names):
    engine = names[0].partition("=")[2] if names[0].startswith("--engine=") else None
    keras.config.set_floatx("float64")
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=60, engine=engine)
    for name in names[1:] if engine else names:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        arrays = scenarios.SCENARIOS[name](strategy)
        np.savez(pathlib.Path(out) / f"{name}.{strategy.rank}.npz", **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])
