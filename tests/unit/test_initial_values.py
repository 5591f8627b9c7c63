"""Parts of what initializers return."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.one_process.sharding import initial_values

INITIALIZERS = {
    "uniform": keras.initializers.RandomUniform(-0.1, 0.3, seed=3),
    "normal": keras.initializers.RandomNormal(0.5, 2.0, seed=4),
    "truncated": keras.initializers.TruncatedNormal(0.5, 2.0, seed=4),
    "glorot": keras.initializers.GlorotUniform(seed=5),
    "he": keras.initializers.HeNormal(seed=6)}


@pytest.mark.parametrize("shape", [(7, 50), (50, 7), (1000,), (300, 401)], ids=str)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_parts_have_the_bits_of_the_whole(name, shape):
    whole = INITIALIZERS[name](shape, dtype="float32").numpy()
    value = initial_values.traced(lambda: INITIALIZERS[name](shape, dtype="float32"))
    for first, count in ((0, 1), (3, 9), (whole.size // 2 + 1, 40), (whole.size - 2, 2), (5, 0)):
        np.testing.assert_array_equal(value.elements(first, count), whole.reshape(-1)[first:first + count])
    for dimension in range(len(shape)):
        begin, count = shape[dimension] // 3, shape[dimension] // 2
        np.testing.assert_array_equal(
            value.columns(shape, dimension, begin, count),
            np.take(whole, range(begin, begin + count), dimension).reshape(-1))


def test_few_numbers_are_drawn_at_a_time(monkeypatch):
    """So that TensorFlow needs, and keeps, little memory besides that of the result."""
    monkeypatch.setattr(initial_values, "_TOGETHER", 30)
    shape = (5, 100)
    whole = INITIALIZERS["truncated"](shape, dtype="float32").numpy()
    value = initial_values.traced(lambda: INITIALIZERS["truncated"](shape, dtype="float32"))
    elements, counts = value.elements, []

    def noted(first, count):
        counts.append(count)
        return elements(first, count)

    monkeypatch.setattr(value, "elements", noted)
    for dimension, sizes in ((0, [30] * 6 + [20]), (1, [30, 20] * 5)):
        counts.clear()
        begin, count = (1, 2) if dimension == 0 else (13, 50)
        np.testing.assert_array_equal(value.columns(shape, dimension, begin, count),
                                      np.take(whole, range(begin, begin + count), dimension).reshape(-1))
        assert counts == sizes


def test_another_rank_draws_the_same_with_the_same_source():
    first, other = (initial_values.traced(lambda seed=seed: keras.initializers.GlorotUniform(seed=seed)((40, 3)))
                    for seed in (1, 2))
    assert not np.array_equal(first.elements(0, 120), other.elements(0, 120))
    other.source = first.source
    np.testing.assert_array_equal(first.elements(7, 100), other.elements(7, 100))


_seeds = keras.random.SeedGenerator(1)


@pytest.mark.parametrize("value", [
    lambda: keras.initializers.Orthogonal(seed=1)((4, 4)),
    lambda: tf.random.stateless_uniform((4, 4), (1, 2)) * tf.range(4.0),
    lambda: tf.cumsum(tf.random.stateless_uniform((4, 4), (1, 2))),
    lambda: tf.reshape(tf.random.stateless_uniform((16,), (1, 2)), (4, 4)),
    lambda: tf.random.stateless_uniform((4, 4), (1, 2), dtype=tf.float64),
    lambda: tf.random.uniform((4, 4)),
    lambda: tf.random.stateless_uniform((4, 4), (1, 2)) + tf.random.stateless_uniform((4, 4), (3, 2)),
    lambda: tf.zeros((4, 4)), lambda: keras.initializers.RandomUniform(seed=_seeds)((4, 4))])
def test_what_cannot_be_drawn_in_parts(value):
    assert initial_values.traced(value) is None
