"""A custom scheme: every rank gets the whole gradients of all ranks, and sums them in rank order.

As a program it trains a small model by one scheme, and each rank writes its weights.
"""

import sys

import keras
import numpy as np

import tf_poseidon as poseidon
from tf_poseidon import planning
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.write import writers
from tf_poseidon.graph_passes.write.send_receive import SendReceive
from tf_poseidon.planning import schemes
from tf_poseidon.planning.cost import Traffic


class Gathering(schemes.Scheme):
    """One message instead of two: pays where gradients are small."""

    name = "gathered"
    manner = "gathered"
    row = planning.GATHER

    def mismatch(self, site):
        return "its gradient is slices" if site.slices is not None else ""

    def refusal(self, site):
        return "its shape is unknown" if site.num_bytes is None else ""

    def traffic(self, site):
        return Traffic(planning.GATHER, site.num_bytes, can_wait=False)


def write(site):
    """gradient -> one row -> PoseidonAllGather -> sum of the rows, under the marker's name."""
    writer, marker = site.writer, site.marker
    shown = {graph_lib.MEANWHILE: marker.meanwhile} if marker.meanwhile else {}
    shape = writer.constant("row_shape", np.array([1, -1], np.int32), marker.gradient)
    row = writer.add("row", "Reshape", [marker.gradient, shape], T=marker.dtype, Tshape=3)
    rows = writer.add("rows", "PoseidonAllGather", [row, marker.contributes], T=marker.dtype, site=marker.site, **shown)
    total = writer.add("total", "SufficientFactorBias", [rows], T=marker.dtype, Tout=marker.dtype)
    shape = writer.constant("shape", np.array(marker.shape, np.int32), total)
    writer.add("", "Reshape", [total, shape], T=marker.dtype, Tshape=3)


def register():
    """Adds the scheme, as a line in each of the two tables would."""
    planning.SCHEMES[Gathering.name] = Gathering()
    writers.WRITERS[SendReceive, Gathering.name] = write


def train(scheme, path):
    register()
    strategy = poseidon.PoseidonStrategy(pins={"*": scheme}, cluster=planning.Cluster(2), strict=True)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    rng = np.random.default_rng(4)
    model.fit(rng.normal(size=(33, 6)), rng.normal(size=(33, 3)), batch_size=16, epochs=2, verbose=0)
    assert {decision.scheme for decision in strategy.plan.decisions} == {scheme}, strategy.plan
    plan = poseidon.Plan.from_text(strategy.plan.to_text())
    assert plan.digest == strategy.plan.digest
    np.savez(f"{path}.{scheme}.{strategy.rank}.npz", *model.get_weights())


if __name__ == "__main__":
    train(*sys.argv[1:])
