"""Updates that fail on all ranks, which the program catches: it goes on from the last version, alike on all ranks.

Gradients do not depend on weights, and are sums of small numbers: so weights are exact, whichever versions were read.
"""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS, STEPS, BAD = 16, 12, 5


class Checked(keras.optimizers.SGD):
    """Fails where a gradient is no number; not at once, so that other variables have been updated."""

    def update_step(self, gradient, variable, learning_rate):
        if variable.shape.rank == 2:  # the kernel
            later = tf.ensure_shape(tf.numpy_function(self._slow, [gradient], gradient.dtype), gradient.shape)
            gradient = tf.debugging.check_numerics(later, "a gradient is no number")
        super().update_step(gradient, variable, learning_rate)

    def _slow(self, gradient):
        time.sleep(0.05)
        return gradient


def weights_after(x, y, steps, initial):
    """Returns kernel and bias."""
    return [initial[0] - sum(x[i].T @ y[i] for i in range(steps)) / ROWS,
            initial[1] - sum(y[i].sum(0) for i in range(steps)) / ROWS]


def check(model, expected, strategy, what):
    for mine, theirs in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs, f"rank {strategy.rank}, {what}")


def main(synchrony):
    strategy = poseidon.PoseidonStrategy(synchrony=eval(f"poseidon.{synchrony}"), timeout_s=60)
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (STEPS, ROWS, 4)).astype(np.float32)
    y = rng.integers(-2, 3, (STEPS, ROWS, 1)).astype(np.float32)
    spoiled = x.copy()
    spoiled[BAD, 0, 0] = np.nan

    def data(inputs):
        def batches():
            for pair in zip(inputs, y):
                time.sleep(0.1 * (strategy.rank == 1))  # the other ranks run ahead
                yield pair
        return tf.data.Dataset.from_generator(batches, output_signature=(
            tf.TensorSpec((ROWS, 4)), tf.TensorSpec((ROWS, 1)))).apply(tf.data.experimental.assert_cardinality(STEPS))

    def made():
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            model.compile(Checked(1.0), lambda target, output: tf.reduce_sum(target * output, -1), metrics=["mae"])
        return model

    first = made()
    initial = first.get_weights()
    for trial in ("the first", "the second"):
        try:
            first.fit(data(spoiled), epochs=1, verbose=0)
        except tf.errors.InvalidArgumentError as error:
            assert "a gradient is no number" in str(error)
        else:
            raise AssertionError(f"{trial} did not fail")
        check(first, expected := weights_after(x, y, BAD, initial), strategy, trial)
        first.evaluate(x[0], y[0], verbose=0)
        if trial == "the first":
            second = made()  # other models are not harmed
            others = second.get_weights()
            second.fit(data(x), epochs=1, verbose=0)
            check(second, weights_after(x, y, STEPS, others), strategy, "another model")
        first.fit(data(x), epochs=1, verbose=0)
        check(first, initial := weights_after(x, y, STEPS, expected), strategy, f"after {trial}")
    log = strategy.version_log()
    assert [len(versions) for versions in log.versions] == [2 * BAD + 3 * STEPS] * strategy.num_replicas_in_sync
    assert max(map(max, log.staleness())) == strategy.extended.job.clocks.synchrony.upper, log


if __name__ == "__main__":
    main(*sys.argv[1:])
