"""Training in verify mode, with and without a fault: train_verified.py FAULT POLICY [WAY], on several ranks.

With the WAY "fit" or "distribute" it trains on a matrix of rows against rows; with "shards", ranks update shards.
"""

import dataclasses
import logging
import sys

import keras
import numpy as np
import planted
from rewritten_programs import BATCH
from rewritten_programs import small_model
from rewritten_programs import write_report
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.match import factors
from tf_poseidon.graph_passes.match import matches
from tf_poseidon.graph_passes.write import horovod_ops
from tf_poseidon.graph_passes.write import send_receive
from tf_poseidon.graph_passes.write import writers

EVERY = 2


def scale_factors():
    """Makes the passes rebuild gradients a thousandth too large, on all ranks alike."""
    original = factors.match

    def wrong(*args):
        match = original(*args)
        if not isinstance(match, matches.Match):
            return match
        scale = (matches.Scalar(value=1.001),)
        return dataclasses.replace(match, products=tuple(
            dataclasses.replace(p, scale=p.scale + scale) for p in match.products))

    factors.match = wrong


def double_sums():
    """Makes the passes double dense sums."""
    def wrong_collective(site):
        total = site._all_reduced("total", site.marker.gradient)
        site.writer.add("", "AddV2", [total, total], T=site.marker.dtype)
        site._verify_by_magnitudes()

    def wrong(site):
        total = site._exchange_dense("", site.marker.gradient, "total")
        site.writer.add("", "AddV2", [total, total], T=site.marker.dtype)

    writers.WRITERS[send_receive.SendReceive, "ps"] = wrong
    writers.WRITERS[horovod_ops.HorovodOps, "ps"] = wrong_collective


def double_shards():
    """Makes the passes double the sums of which ranks get shards."""
    original = session.RewriteSession.rewrite

    def wrong(self, graph_def, *args, **options):
        for node in [node for node in graph_def.node if node.op == poseidon_markers.SCATTER]:
            total = f"{node.name}/total"
            graph_def.node.add(name=node.name, op="AddV2", input=[total, total], device=node.device,
                               attr={"T": node.attr["T"]})
            node.name = total
        return original(self, graph_def, *args, **options)

    session.RewriteSession.rewrite = wrong


class ChangeWeights(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:  # a step is verified before the epoch ends, where ranks compare their state anyway
            kernel = self.model.layers[-1].kernel
            kernel.assign(kernel + 0.25)


class Similarities(keras.layers.Dense):
    """Its loss is that of similarities to its inputs, which are centred over the batch."""

    def call(self, inputs):
        outputs = super().call(inputs)
        similarities = tf.matmul(tf.sin(outputs), inputs, transpose_b=True)
        self.add_loss(tf.reduce_mean((similarities - tf.reduce_mean(similarities, 0, keepdims=True)) ** 2))
        return outputs


def train_on_similarities(strategy, way):
    """Trains in four steps by `fit`, or a function of `distribute`."""
    x = np.random.default_rng(0).normal(size=(12, 3))
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Similarities(3)])
        model.compile(keras.optimizers.Adam(0.1))
    if way == "fit":
        model.fit(x, batch_size=len(x), epochs=4, verbose=0, callbacks=[poseidon.Summary()])
        return

    @poseidon.distribute
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            model(x, training=True)
            loss = model.losses[0]
        variables = [variable.value for variable in model.trainable_variables]
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.1 * gradient)
        return loss

    for _ in range(4):
        step(x)


def main(fault, policy, way=""):
    if way == "shards":
        logging.basicConfig(level=logging.INFO, force=True)  # one that is there shows warnings alone
    keras.config.set_floatx("float64")
    strategy = poseidon.PoseidonStrategy(policy, verify=EVERY, timeout_s=30, shard_update=way == "shards")
    callbacks = []
    if fault == "factors":
        scale_factors()
    elif strategy.rank == 1 and fault == "sums":
        double_sums()
        double_shards()
    elif strategy.rank == 1 and fault == "weights":
        callbacks = [ChangeWeights()]
    elif fault == "shapes":
        session.RewriteSession.find = planted.usual_shapes()
    if way in ("fit", "distribute"):
        train_on_similarities(strategy, way)
        return
    model, x, y = small_model(strategy)
    model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0, callbacks=callbacks)
    counts = {name: site["count"] for name, site in strategy.stats()["sites"].items()}
    write_report(strategy, counts=counts, schemes={d.site: d.scheme for d in strategy.plan.decisions})


if __name__ == "__main__":
    main(*sys.argv[1:])
