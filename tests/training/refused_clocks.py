"""Programs in which a version of the weights has no meaning: each is refused in a sentence, on all ranks."""

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import GraphError

X, Y = np.ones((16, 4), np.float32), np.ones((16, 1), np.float32)


def dense(strategy, optimizer="sgd", layers=(), **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *(make() for make in layers), keras.layers.Dense(1)])
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **options)
    model.fit(X, Y, batch_size=8, verbose=0)


def embedding(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Embedding(9, 2), keras.layers.Flatten(),
                                  keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, verbose=0)


def distributed(strategy):
    with strategy.scope():
        w = tf.Variable(tf.ones([4, 1]))
    poseidon.distribute(lambda x: w.assign_sub(tf.reduce_mean(x) * w), strategy=strategy)(tf.constant(X))


PROGRAMS = {
    "batch_normalization": lambda strategy: dense(
        strategy, layers=[lambda: keras.layers.BatchNormalization(synchronized=True)]),
    "is a PoseidonAllGather, no sum of a tensor": embedding,
    "scales losses by the newest factor": lambda strategy: dense(
        strategy, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
    "is in a branch or loop": lambda strategy: dense(
        strategy, lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)),
    "run eagerly": lambda strategy: dense(strategy, run_eagerly=True),
    "of poseidon.distribute has no versions": distributed,
    "strategy.run has no versions": lambda strategy: strategy.run(lambda x: x, args=(tf.constant(X),)),
}


def main():
    strategy = poseidon.PoseidonStrategy(synchrony=poseidon.SSP(2), timeout_s=60)
    for words, program in PROGRAMS.items():
        try:
            program(strategy)
        except GraphError as error:
            assert words in str(error) and "synchrony=" in str(error), (words, str(error))
            print(words, "|", error)
        else:
            raise AssertionError(f"'{words}' was not said")
    dense(strategy)  # and what has one is not
    try:
        strategy.timeline("trace.json")
    except ConfigurationError as error:
        assert "strategy.timeline('trace.json') shows what each step waits for, but with synchrony=SSP(2)" in str(error)
    else:
        raise AssertionError("a timeline of stale weights was not refused")
    for options in ({"policy": "sfb"}, {"pins": {"*": "ps"}}, {"wire_dtype": "bfloat16"}, {"verify": 2},
                    {"rows": "balanced"}, {"shard_update": True}, {"merge": True}):
        try:
            poseidon.PoseidonStrategy(synchrony=poseidon.SSP(2), **options)
        except ConfigurationError as error:
            assert f"{next(iter(options))}=" in str(error) and "SSP(2)" in str(error), error
        else:
            raise AssertionError(f"{options} was not refused")


main()
