"""Random programs with matrices of rows against rows, through the whole pipeline, against one process.

Similarity matrices, kernels, distances and masks against the batch, reduced, normalised and sorted along each
dimension, with gradients. Programs are those of `test_partition_fuzz.py`, with other tensors and operations, and share
graphs as there. POSEIDON_PIPELINE_GRAPHS sets the number of graphs (2, or 20 with --full), POSEIDON_FUZZ_SEED the seed.
"""

import os
from unittest import mock

import hypothesis
from hypothesis import strategies as st
import numpy as np
import partition_table
import pipeline
import planted
import pytest
import tensorflow as tf
import test_partition_fuzz as fuzz
from test_partition_fuzz import Value

from tf_poseidon.graph_passes import session

GRAPHS = int(os.environ.get("POSEIDON_PIPELINE_GRAPHS", 2))
PROGRAMS = 20  # of a graph
BATCHES = (13, 7, 2, 1)
_ROWS = (1, 1)


def _squares(x, y):
    return tf.reduce_sum((x[:, None] - y[None]) ** 2, -1)


class Program(fuzz.Program):
    """Builds the graph of one program, which begins with matrices of rows against rows."""

    def __init__(self, inputs):
        super().__init__(inputs)
        hidden = tf.sin(self.x @ self.w)
        other = tf.cos(self.x * self.v)
        diagonal = tf.eye(tf.shape(self.x)[0], dtype=tf.float64)
        later = tf.cast(self.x[:, :1] < self.x[:, 0][None], tf.float64)
        similar = tf.cast(tf.equal(self.ids[:, None], self.ids[None]), tf.float64)
        self.values += [Value(matrix, (_ROWS, _ROWS)) for matrix in (
            similar, diagonal + 0 * hidden[:, :1], tf.matmul(self.x, self.x, transpose_b=True) / 4,
            tf.exp(-_squares(self.x, self.x)) * hidden[:, :1], _squares(hidden, hidden), _squares(hidden, self.x),
            tf.matmul(hidden, hidden, transpose_b=True) - 9 * later, tf.matmul(hidden, other, transpose_b=True),
            tf.matmul(self.x, hidden, transpose_b=True), tf.matmul(hidden, self.x, transpose_b=True))]


def _with_diagonal(p, x, b, c):
    if x.sizes != (_ROWS, _ROWS):
        return None
    eye = tf.eye(tf.shape(p.x)[0], dtype=tf.float64)
    return Value([x.tensor * (1 - eye), x.tensor - 9 * eye, tf.linalg.set_diag(x.tensor, p.mask)][b % 3], x.sizes)


def _diagonal(p, x, b, c):
    return Value(tf.linalg.diag_part(x.tensor), (_ROWS,)) if x.sizes == (_ROWS, _ROWS) else None


def _masked(p, x, b, c):
    if x.sizes != (_ROWS, _ROWS):
        return None
    mask = p.mask > 0
    mask = [mask[:, None], mask[None], mask[:, None] & mask[None], tf.abs(x.tensor) < 1][b % 4]
    return Value(tf.where(mask, x.tensor, -2.0 * tf.ones_like(x.tensor)), x.sizes)


def _std(x, axes, keeps):
    return tf.sqrt(0.1 + tf.math.reduce_variance(x, axes, keeps))


def _sorted(p, x, b, c):
    if not x.rank:
        return None
    return Value(tf.sort(x.tensor, fuzz._axis(x, b), "DESCENDING" if c % 2 else "ASCENDING"), x.sizes)


def _ranked(p, x, b, c):
    """The place of each element among those along a dimension, as numbers; it does not depend on rounding."""
    if not x.rank:
        return None
    axis, rounded = fuzz._axis(x, b), tf.round(x.tensor * 2**20)
    places = tf.argsort(tf.argsort(rounded, axis, stable=True), axis, stable=True)
    return Value(tf.cast(places, tf.float64) * x.tensor, x.sizes)


OPERATIONS = [
    *fuzz.OPERATIONS,
    *map(fuzz._reduction, (tf.reduce_logsumexp, tf.reduce_mean, tf.reduce_max, _std, tf.math.reduce_variance)),
    *map(fuzz._along, (tf.nn.softmax, tf.nn.log_softmax, lambda x, d: x - tf.reduce_mean(x, d, keepdims=True),
                       lambda x, d: tf.math.l2_normalize(x, d, epsilon=0.1),
                       lambda x, d: x / tf.reduce_sum(1 + tf.abs(x), d, keepdims=True))),
    _with_diagonal, _diagonal, _masked, fuzz._normalised, fuzz._normalised, _sorted, _ranked, fuzz._matmul,
    fuzz._transpose]


def case_of(steps, kind):
    """Returns the `Case` of a program."""

    def build(*inputs):
        program = Program(inputs)
        program.run(steps, OPERATIONS)
        return program.results(kind)

    return partition_table.Case(f"{steps}, {kind}", build, fuzz.INPUTS, "", tolerance=1e-8, has_gradient=False)


_steps = st.lists(st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 11), st.integers(0, 11),
                            st.integers(0, 5)), min_size=1, max_size=4)
_programs = st.lists(st.tuples(_steps, st.integers(0, 9)), min_size=PROGRAMS, max_size=PROGRAMS)


@hypothesis.settings(max_examples=GRAPHS, derandomize=True, deadline=None, database=None,
                     suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate])
@hypothesis.given(_programs, st.sampled_from((2, 3)), st.sampled_from(("sfb", "ps")))
def test_random_programs(programs, ranks, policy):
    lines = pipeline.check([case_of(*program) for program in programs], [ranks], BATCHES, policy=policy)
    assert not lines, "\n".join(lines)


if fuzz.SEED:  # for further searches for errors
    def test_other_random_programs():
        rng, found = np.random.default_rng(int(fuzz.SEED)), []
        for number in range(GRAPHS):
            programs = [([tuple(map(int, rng.integers(0, (len(OPERATIONS), 12, 12, 6))))
                          for _ in range(rng.integers(1, 7))], int(rng.integers(10))) for _ in range(PROGRAMS)]
            lines = pipeline.check([case_of(*program) for program in programs], [int(rng.choice((2, 3)))], BATCHES,
                                   policy=str(rng.choice(("sfb", "ps"))))
            print(f"{(number + 1) * PROGRAMS} programs", *lines, sep="\n", flush=True)
            found += lines
        assert not found


# Of each column of a matrix, whose sums are exchanged.
_LOSSES = [
    ("logsumexp", lambda m: tf.reduce_mean(tf.reduce_logsumexp(m, 0))),
    ("normalised", lambda m: tf.reduce_mean(tf.math.l2_normalize(m, 0)[:, 0])),
]


def test_functions_that_grow_before_maxima():
    """Where TensorFlow takes a maximum before such a function, it takes the first output of the node before that."""
    def build(x, y, z):
        return [tf.reduce_max(tf.exp(y)), tf.reduce_min(tf.sigmoid(z), 1), tf.reduce_max(tf.tanh(x), 1),
                tf.reduce_sum(x)]
    inputs = [fuzz.of(fuzz.K, 4, make=fuzz._reals), fuzz.of(fuzz.K, make=fuzz._reals),
              fuzz.of(3, fuzz.K, make=fuzz._reals)]
    assert not pipeline.check([partition_table.Case("", build, inputs, "", has_gradient=False)], [2, 3], BATCHES)


def _columns(loss):
    def build(x, w):
        value = loss(tf.matmul(tf.sin(x @ w), x, transpose_b=True))
        return [value, *tf.gradients(value, w)]
    return partition_table.Case("", build, [fuzz.of(fuzz.K, 4, make=fuzz._reals), fuzz.of(4, 4, make=fuzz._reals)], "",
                                tolerance=1e-12, has_gradient=False)


@pytest.mark.parametrize("loss", [loss for _, loss in _LOSSES], ids=[name for name, _ in _LOSSES])
def test_usual_shapes_in_a_graph_that_runs_are_found(loss):
    """If sums are received with the shapes of one rank's usual rows, what TensorFlow's optimizer makes is wrong."""
    assert not pipeline.check([_columns(loss)], [2], BATCHES, usual_rows=12)
    with mock.patch.object(session.RewriteSession, "find", planted.usual_shapes()):
        assert pipeline.check([_columns(loss)], [2], BATCHES, usual_rows=12)
