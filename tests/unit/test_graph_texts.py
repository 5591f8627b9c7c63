"""Graphs as texts: a digest that tells functions apart, but not by names; and lines that name what differs."""

import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.job import agreement
from tf_poseidon.one_process.graphs import flat_graphs
from tf_poseidon.one_process.graphs import graph_texts

VARIABLE = tf.Variable([1., 2.])
SPEC = tf.TensorSpec([None, 2])
TABLE = tf.constant(np.arange(300, dtype="float32"))


def concrete(function):
    return tf.function(function).get_concrete_function(SPEC)


def branches(of_branch=2.):
    return lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * of_branch, lambda: x)


def loop(rounds=3):
    def function(x):
        return tf.while_loop(lambda i, _: i < rounds, lambda i, y: (i + 1, tf.sin(y) * VARIABLE), [0, x])[1]
    return function


def custom(factor=2.):
    @tf.custom_gradient
    def scaled(x):
        return x, lambda gradient: factor * gradient

    def function(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(scaled(x @ tf.linalg.diag(VARIABLE)))
        return tape.gradient(loss, VARIABLE)
    return function


def python(x):
    return tf.py_function(lambda y: y, [x], tf.float32) * VARIABLE


def named(name):
    def function(x):
        with tf.name_scope(name):
            return tf.sin(x) + VARIABLE
    return function


def assigned(first, second):
    def function(x):
        VARIABLE.assign_add(first * x[0])
        VARIABLE.assign_add(second * x[0])
    return function


SAME = [(branches(), branches()), (loop(), loop()), (custom(), custom()), (python, python),
        (named("dense_1"), named("dense_2"))]
OTHER = [
    (lambda x: tf.sin(x), lambda x: tf.cos(x), "the node 'Sin' is a Sin (", "the node 'Cos' is a Cos ("),
    (lambda x: x - tf.exp(x), lambda x: tf.exp(x) - x, "", ""),
    (lambda x: (x, tf.exp(x)), lambda x: (tf.exp(x), x), "", ""),
    (lambda x: x * [1., 2.], lambda x: x * [1., 3.], "is a Const of [1.0, 2.0] (", "is a Const of [1.0, 3.0] ("),
    (lambda x: tf.reduce_sum(x, keepdims=True), lambda x: tf.reduce_sum(x), "is a Sum (", "is a Sum ("),
    (branches(), branches(3.), "of the function 'cond_true' is a Const of 2.0", "'cond_true' is a Const of 3.0"),
    (loop(), loop(4), "is a Const of 3 (", "is a Const of 4 ("),
    (custom(), custom(3.), "is a Const of 2.0 (", "is a Const of 3.0 ("),
    (assigned(1., 2.), assigned(2., 1.), "", ""),
]


@pytest.mark.parametrize("one, other", SAME)
def test_names_and_numbers_make_no_difference(one, other):
    concrete(python), concrete(branches())  # which count
    assert graph_texts.structure(concrete(one)) == graph_texts.structure(concrete(other))


@pytest.mark.parametrize("one, other, here, there", OTHER)
def test_what_differs_is_named(one, other, here, there):
    one, other = concrete(one), concrete(other)
    assert graph_texts.structure(one) != graph_texts.structure(other)
    if here:
        said = agreement.first_difference(*("\n".join(flat_graphs.lines_of(each)) for each in (one, other)), 0, 1)
        mine, _, theirs = said.partition(" on rank 0, but ")
        assert here in mine and there in theirs


def test_captured_values():
    def lines(table):
        return graph_texts.captured_values(concrete(lambda x: x + tf.reduce_sum(table) * VARIABLE))

    line, = lines(TABLE)
    assert line.startswith("the captured tensor 0 is float32[300] (")
    assert lines(TABLE + 0) == [line] != lines(TABLE + 1)
