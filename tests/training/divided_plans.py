"""Trains a model with a head that ranks divide: divided_plans.py OUT [PLAN | auto].

OUT.npz gets the weights and losses of a step of the program's own, under `distribute`, and of `fit`, and predictions of
weights that were assigned before; OUT.plan gets the plan of `fit`. With PLAN, the job follows this plan, and `fit`
trains alone; with "auto", a head with more classes, of which plans say whether it is divided.
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS, MANY = 24, 1 << 16
CLASSES = MANY if sys.argv[2:] == ["auto"] else 70
X = np.random.default_rng(0).normal(size=(2 * ROWS, 12)).astype("float32")
Y = np.random.default_rng(1).integers(0, CLASSES, 2 * ROWS)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made(name):
    """Returns a compiled model."""
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(24, "tanh", name="body"),
                              keras.layers.Dense(CLASSES, name="head")], name=name)
    accumulates = 2 if name == "fitted" and CLASSES < MANY else None
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=accumulates), LOSS)
    model.optimizer.build(model.trainable_variables)
    return model


def train_by_own_step(model):
    """Returns the losses."""
    @poseidon.distribute
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    return [float(step(X[i:i + ROWS], Y[i:i + ROWS])) for i in (0, ROWS, 0, ROWS)]


def main():
    out, given = pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    cluster = poseidon.Cluster(2, bandwidth_gbps=1)
    strategy = poseidon.PoseidonStrategy(cluster=cluster) if given == "auto" else poseidon.PoseidonStrategy(
        plan=given) if given else poseidon.PoseidonStrategy(pins={"*head/kernel": "columns"}, cluster=cluster)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        own, fitted = made("own"), made("fitted")
    fitted.set_weights([2 * weight for weight in fitted.get_weights()])  # before a step has divided any
    predicted = fitted.predict(X, verbose=0)
    losses = [] if given else train_by_own_step(own)
    history = fitted.fit(X, Y, ROWS, 2, shuffle=False, verbose=0).history
    weights = [weight for model in (own, fitted) for weight in model.get_weights()]
    if strategy.rank == 0:
        np.savez(f"{out}.npz", *weights, own=losses, predicted=predicted, fitted=history["loss"])
        if strategy.plan is not None:
            strategy.plan.save(f"{out}.plan")


if __name__ == "__main__":
    main()
