"""How Horovod's tests are run plainly and after `enable()`, with small tests in place of Horovod's."""

import importlib.util
import os

import pytest

from evaluation.suites import horovod_examples
from evaluation.suites import horovod_suites

needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None and not os.environ.get("CI"),
                                   reason="Horovod is not installed (scripts/install_horovod.sh)")

SUMS = """
import sys
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

def test_sum():
    hvd.init()
    x, weights = tf.ones([4, 16]) * (1 + hvd.rank()), tf.Variable(tf.ones([16, 8]))
    @tf.function
    def step():
        with tf.GradientTape() as tape: loss = tf.reduce_sum(x @ weights)
        gradient, = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [weights])
        weights.assign_sub(gradient)
        return gradient
    assert np.all(step().numpy() == 12)

def test_fails_after_enable(): assert "tf_poseidon" not in sys.modules

def test_left_out(): pass
"""


@needs_horovod
def test_enabled_tests(tmp_path):
    path = tmp_path / "test" / "parallel" / "test_sums.py"
    path.parent.mkdir(parents=True)
    path.write_text(SUMS)
    results = horovod_suites.run_suite(horovod_suites.Suite(path.name, 3), str(tmp_path), "sfb", ["*left_out"],
                                       timeout_s=60, wait_s=5)
    assert {name: result.outcome for name, result in results.items()} == {
        "test_sums.py, Keras 3::test_sum": "passed", "test_sums.py, Keras 3::test_fails_after_enable": "failed"}
    assert {"sfb": 1} in results["test_sums.py, Keras 3::test_sum"].values[0]
    count = horovod_suites.COMMAND.columns
    assert count["as factors"](results.values()) == 1 <= count["sums"](results.values())


def test_examples_are_made_smaller():
    example = horovod_examples.Example("one.py", (("10000", "2"),), (("read(", "\n", "made"),))
    assert example.small("for i in range(10000): x = read(file)\nprint(x)") == "for i in range(2): x = made\nprint(x)"
    for text in ("x = read(file)\n", "range(10000)"):
        with pytest.raises(ValueError, match=r"one.py has no text"):
            example.small(text)
