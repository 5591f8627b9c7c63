"""Runs the self-test in a job that computes something wrong: selftest_with_fault.py FAULT"""

import sys

import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.commands import cli
from tf_poseidon.commands.selftest import scheme_checks


def scale():
    """Gradients of loops are twice as large."""
    synchronize = poseidon.PoseidonStrategy.synchronize
    poseidon.PoseidonStrategy.synchronize = lambda self, gradients, variables: [
        2 * tf.convert_to_tensor(each) for each in synchronize(self, gradients, variables)]


def lost():
    """A partitioned step does not see the first row."""
    step = scheme_checks._step
    scheme_checks._step = lambda variables, x, y: step(variables, x[1:], y[1:]) if tf.inside_function() else step(
        variables, x, y)


def unplanned():
    """Nothing travels as factors."""
    scheme_checks.PINS["*/factors/*"] = "ps"


def whole():
    """All ranks update the whole of what they should update in shards."""
    scheme_checks.PINS["*/shards/*"] = "sfb"


{"scale": scale, "lost": lost, "unplanned": unplanned, "whole": whole}[sys.argv[1]]()
sys.exit(cli.main(["selftest"]))
