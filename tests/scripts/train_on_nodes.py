"""Trains on ranks that share nodes, and prints the result; sums are exact in any order."""

import hashlib
import json
import pathlib
import sys

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))  # an emulated host starts it
import forking

forking.import_keras()  # in half the time
import keras

import tf_poseidon as poseidon

STEPS, ROWS, COLUMNS = 4, 16, 512


def main(ranks_per_node):
    """Trains two dense layers, side by side, one by each scheme; prints a line of JSON."""
    strategy = poseidon.PoseidonStrategy("ps", pins={"sfb/*": "sfb"}, ranks_per_node=ranks_per_node,
                                         timeout_s=60)
    with strategy.scope():
        x = keras.Input((COLUMNS,))
        model = keras.Model(x, sum(keras.layers.Dense(COLUMNS, kernel_initializer="zeros", name=name)(x)
                                   for name in ("ps", "sfb")))
        model.compile(keras.optimizers.SGD(2.0**-10),
                      lambda y, predicted: -keras.ops.sum(y * predicted, axis=-1) * ROWS)
    rng = np.random.default_rng(1)
    x, y = (rng.integers(-2, 3, (STEPS * ROWS, COLUMNS)).astype(np.float32) for _ in range(2))
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    plan, counted = strategy.plan, strategy.stats()["sites"]
    decisions = () if plan is None else plan.decisions
    line = json.dumps({
        "rank": strategy.rank, "ranks_per_node": plan and plan.cluster.ranks_per_node,
        "weights": hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest(),
        "sites": {d.site: {"scheme": d.scheme, "planned_bytes": STEPS * d.num_bytes, **counted[d.site]}
                  for d in decisions if d.site in counted}})
    # In one call: print writes the end of a line separately, and another rank's line comes between.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
