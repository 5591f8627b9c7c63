"""Graphs whose inputs are fed separately, each with its PoseidonRows and number of rows."""

import dataclasses

import numpy as np
import partitioning
import pytest
import tensorflow as tf

v1 = tf.compat.v1


def _two_inputs():
    """Returns (x, z, k): two inputs with numbers of rows of their own, and weights."""
    x, = partitioning.rows(v1.placeholder(tf.float64, (None, 3), "x"))
    z, = partitioning.rows(v1.placeholder(tf.float64, (None, 3), "z"))
    return x, z, tf.constant(np.random.default_rng(0).normal(size=(3, 2)))


def sum_of_two_losses():
    x, z, k = _two_inputs()
    loss = tf.reduce_mean((x @ k)**2) + tf.reduce_mean(tf.sin(z @ k))
    return [loss, *tf.gradients(loss, k)]


def summand_times_what_the_other_gives():
    x, z, k = _two_inputs()
    scale = tf.reduce_max(tf.abs(x))
    return [tf.reduce_sum(z @ k) * scale, tf.reduce_sum(z @ k, 0) + tf.ones(2, tf.float64)]


def added_up_in_a_loop():
    x, z, k = _two_inputs()
    total = v1.while_loop(lambda i, _: i < 3, lambda i, total: (
        i + 1, total + tf.reduce_sum(x[:, i]) + 2 * tf.reduce_sum(z[:, i])), (0, tf.zeros((), tf.float64)))[1]
    return [total]


def gathered_and_reduced():
    x, z, k = _two_inputs()
    return [tf.sort(x, 0), tf.sort(z, 0), tf.reduce_max(x, 0) * tf.reduce_min(z, 0), tf.concat([x, z], 0)]


def alike():
    """Here both must have the same number of rows."""
    x, z, k = _two_inputs()
    return [tf.reduce_sum((x - z) @ k), (x - z) @ k]


def _feed(of_x, of_z):
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(of_x, 3)), "z": rng.normal(size=(of_z, 3))}


@pytest.mark.parametrize("build", [sum_of_two_losses, summand_times_what_the_other_gives, added_up_in_a_loop,
                                   gathered_and_reduced], ids=lambda build: build.__name__)
def test_inputs_have_rows_of_their_own(build):
    was_v2 = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        partitioning.check(build, [_feed(*rows) for rows in ((7, 1), (1, 7), (2, 2), (1, 1), (5, 4))])
    finally:
        if was_v2:
            v1.enable_control_flow_v2()


def test_what_meets_has_as_many_rows():
    partitioning.check(alike, [_feed(5, 5), _feed(1, 1)])
    made = partitioning.Partitioned(alike)
    with pytest.raises(tf.errors.InvalidArgumentError, match="have different numbers of rows"):
        made.on_ranks([_feed(8, 7)], 2)


def test_inputs_can_be_fed_alone():
    made = partitioning.Partitioned(gathered_and_reduced)
    feed = _feed(5, 1)
    expected = np.sort(feed["x"], 0)
    made.partitioned = dataclasses.replace(made.partitioned, fetches=made.partitioned.fetches[:1])
    del feed["z"]
    for (value,) in made.on_ranks([feed], 3)[0]:
        np.testing.assert_array_equal(value, expected)
