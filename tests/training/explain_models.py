"""Plans of many models, explained in one process or executed by a job: explain_models.py OUT
execute|explain NAME….
"""

import pathlib
import sys

import keras
from keras import layers
import numpy as np
from small_models import make_data
from small_models import MODELS
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.job import runtime

BATCH, RANKS = 8, 3  # rows on each rank
CLUSTER = poseidon.Cluster(RANKS, 2, bandwidth_gbps=0.1, latency_us=20, gflops=5)
PINS = {"*first*/kernel": "ps", "*divided/kernel": "columns"}


class Subclassed(keras.Model):
    """Built by its first call, with a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = layers.Dense(8, "tanh"), layers.Dense(8, "tanh")
        self.last = layers.Dense(3)

    def call(self, x):
        return self.last(self.twice(self.twice(self.first(x))))


@tf.function
def squared(x):
    return x * x


class Squared(layers.Layer):
    """A layer that calls a tf.function."""

    def call(self, x):
        return squared(x)


class OwnStep(keras.Model):
    """Trains by a train_step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def of_table(make):
    return lambda: keras.Model(*make())


def embedding():
    """A model of the table; one process uses another one, which is the reference for several."""
    x = keras.Input((5,), dtype="int32")
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(layers.Embedding(400, 4)(x))))


class Gan(keras.Model):
    """Two models, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="generator")])
        self.critic = keras.Sequential([keras.Input((8,)), layers.Dense(300, name="critic")])
        self.optimizers = [keras.optimizers.Adam(), keras.optimizers.SGD()]

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            judged = self.critic(self.generator(x))
            losses = [tf.reduce_mean(judged), tf.reduce_mean(self.critic(x) - judged)]
        for model, optimizer, loss in zip((self.generator, self.critic), self.optimizers, losses):
            variables = model.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": losses[0]}


def unrolled():
    x = keras.Input((6, 16))
    return keras.Model(x, layers.Dense(2)(layers.LSTM(32, unroll=True)(x)))


def recurrent():
    x = keras.Input((6, 16))
    h = layers.LSTM(32, return_sequences=True)(x)
    return keras.Model(x, layers.Dense(2)(layers.GRU(32)(h)))


class Ranked(layers.Layer):
    """Compares each row with the others, which needs all rows."""

    def call(self, x):
        return x - tf.sort(x, axis=0)


def ranked():
    x = keras.Input((8,))
    return keras.Model(x, layers.Dense(3)(Ranked()(layers.Dense(16, "tanh")(x))))


class SortedStep(keras.Model):
    """Sorts the rows of all ranks; products are of each rank's rows again."""

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(tf.sort(batch[0], axis=0))))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def sorted_step():
    x = keras.Input((8,))
    return SortedStep(x, layers.Dense(3)(x))


def whole_step():
    """Without products all of it is whole: nothing is left to synchronise."""
    x = keras.Input((8,))
    return SortedStep(x, layers.LayerNormalization()(x))


def own_step():
    x = keras.Input((8,))
    return OwnStep(x, layers.Dense(3)(layers.Dense(64, "tanh", kernel_regularizer="l2")(x)))


def sequential():
    """Pooling and flattening before wide layers; pinned, and a sparse loss."""
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Flatten(), layers.Dense(256, "relu", name="first"), layers.Dense(256), Squared(),
        layers.Dense(200), layers.Dense(4)])


def columns():
    """A head that ranks divide."""
    return keras.Sequential([keras.Input((8,)), layers.Dense(24, "tanh"), layers.Dense(100, name="divided")])


CASES = {**{make.__name__: of_table(make) for make in MODELS}, "embedding": embedding,
         "subclassed": Subclassed, "own_step": own_step, "gan": Gan, "unrolled": unrolled,
         "recurrent": recurrent, "sequential": sequential, "ranked": ranked, "sorted_step": sorted_step,
         "whole_step": whole_step, "columns": columns, "accumulated_columns": columns}
# Those that have not said what their inputs are.
DATA = {"subclassed": (np.ones((4, 8)), np.ones((4, 3))), "gan": (np.ones((4, 8)), np.ones((4, 8)))}
CLASSES = ("sequential", "columns", "accumulated_columns")


def compiled(name):
    """Returns a compiled model."""
    model = CASES[name]()
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if name == "gan":
        model.compile()
    else:
        adam = keras.optimizers.Adam(gradient_accumulation_steps=2 if name == "accumulated_columns" else None)
        model.compile(adam, sparse if name in CLASSES else "mse", metrics=["accuracy"] if name == "columns" else None)
    return model


def execute(strategy, name):
    """Trains a model, and returns the plan that it followed."""
    keras.backend.clear_session()
    with strategy.scope():
        model = compiled(name)
    if name in DATA:
        x, y = (np.resize(a, (2 * BATCH * RANKS, a.shape[1])) for a in DATA[name])
    elif name in CLASSES:
        x, y = np.ones((2 * BATCH * RANKS, *model.input_shape[1:])), np.zeros((2 * BATCH * RANKS,), np.int32)
    else:
        x, y = make_data(model)
    model.fit(x, y, batch_size=BATCH * RANKS, verbose=0)
    return strategy.plan


def explain(name):
    """Returns the plan of a model, in one process."""
    keras.backend.clear_session()
    return poseidon.explain(
        compiled(name), BATCH, RANKS, CLUSTER.bandwidth_gbps, data=DATA.get(name), servers=2,
        latency_us=CLUSTER.latency_us, gflops=CLUSTER.gflops, pins=PINS)


def main():
    out, how, names = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if how == "execute":
        strategy = poseidon.PoseidonStrategy(cluster=CLUSTER, pins=PINS, servers=[0, 1], strict=True,
                                             timeout_s=30)
        for name in names:
            plan = execute(strategy, name)
            if strategy.rank == 0:
                plan.save(out / f"{name}.executed")
        assert poseidon.calibrate().workers == RANKS
    else:
        assert runtime.communicator() is None
        for name in names:
            explain(name).save(out / f"{name}.explained")
        # Hooks and passes are unchanged: models train as without tf_poseidon.
        model = compiled("dense")
        model.fit(*make_data(model), verbose=0)
        gan = compiled("gan")
        poseidon.explain(gan, BATCH, RANKS, data=DATA["gan"])
        gan.fit(*DATA["gan"], verbose=0)


if __name__ == "__main__":
    main()
