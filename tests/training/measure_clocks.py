"""Trains with stale weights and reports what was planned and counted: measure_clocks.py DIRECTORY BOUNDS_OF_RANK_1."""

import json
import os
import pathlib
import sys
import time

import explain_models
import keras
import numpy as np

import tf_poseidon as poseidon

SYNCHRONY = "SSP(2)"
STEPS, LATE_S = 6, 0.05  # of the last rank


def main(folder, of_rank_1):
    bounds = of_rank_1 if os.environ["PMI_RANK"] == "1" else SYNCHRONY
    cluster = explain_models.CLUSTER
    strategy = poseidon.PoseidonStrategy(
        cluster=cluster, servers=range(cluster.servers), timeout_s=30,
        synchrony=bounds if bounds == "bsp" else eval(f"poseidon.{bounds}"))
    with strategy.scope():
        model = explain_models.compiled("sequential")
    rows = explain_models.BATCH * explain_models.RANKS

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return STEPS

        def __getitem__(self, i):
            time.sleep(LATE_S * (strategy.rank == explain_models.RANKS - 1))
            return np.ones((rows, *model.input_shape[1:])), np.zeros(rows, np.int32)

    model.fit(Batches(), verbose=0)
    folder = pathlib.Path(folder)
    (folder / f"{strategy.rank}.json").write_text(json.dumps(strategy.stats()["sites"]))
    if strategy.rank == 0:
        strategy.plan.save(folder / "plan")


if __name__ == "__main__":
    main(*sys.argv[1:])
