"""Trains two dense layers by one scheme, with data for which sums are exact; each rank writes its weights and counters.

Of the first layer, V is the wider factor, and its bias travels by itself; of the second it is U, and its bias needs no
message. HOW is "rewritten"; "verified"; "not_on_rank_1": rank 1 sends its dense gradients in the first steps; or
"sharded": ranks update what they rebuild.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS = 32


def main(scheme, how, path):
    strategy = poseidon.PoseidonStrategy("ps", pins={"*/kernel": scheme}, timeout_s=30,
                                         verify=1 if how == "verified" else None, shard_update=how == "sharded",
                                         strict=how in ("rewritten", "sharded"))
    if how == "not_on_rank_1" and strategy.rank == 1:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    rng = np.random.default_rng(4)

    def integers(*shape):
        return rng.integers(-3, 4, shape).astype(np.float32)

    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100, name="wide"),
                                  keras.layers.Dense(6, name="narrow")])
        # In the first step, momentum changes nothing but that there are slots.
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5 if how == "sharded" else 0.0)
        model.compile(optimizer, lambda y, found: tf.reduce_sum(y * found, axis=-1))
        model.set_weights([integers(*weight.shape) for weight in model.get_weights()])
    x, y = integers(ROWS, 8), integers(ROWS, 6)
    model.fit(x, y, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    np.savez(f"{path}.{strategy.rank}.npz", *model.get_weights())
    with open(f"{path}.{strategy.rank}.json", "w") as file:
        json.dump({"plan": {d.site: [d.scheme, d.num_bytes, d.leader] for d in strategy.plan.decisions}
                   if strategy.plan else None,
                   "sites": {name: [counts[key] for key in ("count", "sent_bytes", "received_bytes")]
                             for name, counts in strategy.stats()["sites"].items()}}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
