"""Trains with a Summary; rank 1 of several reads its data slowly."""

import time

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

SLOW_S = 0.05


def main():
    strategy = poseidon.PoseidonStrategy("ps")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")

    def late(x, y):
        waits = tf.numpy_function(lambda v: time.sleep(SLOW_S * strategy.rank) or v, [x], x.dtype)
        return tf.ensure_shape(waits, x.shape), y

    x = np.ones((48, 4), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :3])).batch(8, drop_remainder=True).map(late)
    summary = poseidon.Summary()
    begin = time.perf_counter()
    model.fit(data, epochs=2, verbose=0, callbacks=[summary])
    assert (summary.text != "") == (strategy.rank == 0)
    if strategy.rank == 0:
        print(f"fit took {time.perf_counter() - begin} s", flush=True)


main()
