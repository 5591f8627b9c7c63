"""How Horovod's tests are run and compared before and after `enable()`, with small tests in place of Horovod's."""

import importlib.util
import os

import numpy as np
import pytest

from evaluation.suites import horovod_differences
from evaluation.suites import horovod_examples
from evaluation.suites import horovod_outcomes
from evaluation.suites import horovod_runs
from evaluation.suites.horovod_outcomes import Result

needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None and not os.environ.get("CI"),
                                   reason="Horovod is not installed (scripts/install_horovod.sh)")

# Needs neither Horovod nor TensorFlow, so that its jobs start in a second.
ENDS = """
import os, time, unittest, pytest
rank = os.environ["PMI_RANK"]

def test_passes(): pass

def test_skipped(): pytest.skip("no such device")

def test_skipped_on_rank_0():
    if rank == "0": pytest.skip("no such device")

def test_fails_on_rank_1(): assert rank == "0", "boom"

class TestSubtests(unittest.TestCase):
    def test_part_fails(self):
        for number in range(3):
            with self.subTest(number): self.assertNotEqual(number, 1)

def test_dies():
    if rank == "1": os._exit(7)
    time.sleep(60)

def test_fails_while_others_wait():
    if rank == "1": raise ValueError("left early")
    time.sleep(60)

def test_last(): pass
"""
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
"""


def of(results):
    return {name: result.outcome for name, result in results.items()}


def test_jobs_go_on_after_tests_that_die_or_hang(tmp_path):
    path = tmp_path / "test_ends.py"
    path.write_text(ENDS)
    results = horovod_runs.run_suite(str(path), "plain", keras=3, timeout_s=60, grace_s=2)
    assert of(results) == {
        "test_passes": "passed", "test_skipped": "skipped", "test_skipped_on_rank_0": "passed",
        "test_fails_on_rank_1": "failed", "TestSubtests::test_part_fails": "failed", "test_dies": "failed",
        "test_fails_while_others_wait": "failed", "test_last": "passed"}
    assert "no such device" in results["test_skipped"].text and "boom" in results["test_fails_on_rank_1"].text
    assert "1 == 1" in results["TestSubtests::test_part_fails"].text
    assert results["test_dies"].text == "rank 1 died"
    assert "left early" in results["test_fails_while_others_wait"].text
    assert "did not end on others within 2 s" in results["test_fails_while_others_wait"].text


def test_file_that_cannot_be_imported(tmp_path):
    path = tmp_path / "test_broken.py"
    path.write_text("import no_such_module\n")
    results = horovod_runs.run_suite(str(path), "plain", keras=3, timeout_s=60, grace_s=2)
    assert of(results) == {"(collection)": "failed"} and "no_such_module" in results["(collection)"].text


def test_test_that_takes_too_long(tmp_path):
    path = tmp_path / "test_long.py"
    path.write_text("import time\ndef test_long(): time.sleep(60)\ndef test_last(): pass\n")
    results = horovod_runs.run_suite(str(path), "plain", keras=3, timeout_s=6, grace_s=6)
    assert of(results) == {"test_long": "failed", "test_last": "passed"}
    assert results["test_long"].text == "did not end within 6 s"


@needs_horovod
def test_enabled_tests(tmp_path):
    path = tmp_path / "test_sums.py"
    path.write_text(SUMS)
    results = horovod_runs.run_suite(str(path), "sfb", keras=3, timeout_s=60, grace_s=5)
    assert of(results) == {"test_sum": "passed", "test_fails_after_enable": "failed"}
    assert {"sfb": 1} in results["test_sum"].plans


@pytest.fixture
def one_difference(monkeypatch):
    monkeypatch.setattr(horovod_differences, "DIFFERENCES", (("suite::test_known*", "it is so"),))
    monkeypatch.setattr(horovod_differences, "CAUSES", (("no attribute 'lr'", "Keras 3"),))


PASSED, FAILED, SKIPPED = Result("passed"), Result("failed", "no attribute 'lr'"), Result("skipped", "Not a test.")


@pytest.mark.parametrize("plain, enabled, problem", [
    ({"test_a": PASSED, "test_known": PASSED}, {"test_a": PASSED, "test_known": FAILED}, None),
    ({"test_a": FAILED, "test_known": PASSED}, {"test_a": FAILED, "test_known": FAILED}, None),
    ({"test_a": FAILED, "test_known": PASSED}, {"test_a": PASSED, "test_known": FAILED}, None),
    ({"test_a": SKIPPED}, {"test_a": FAILED}, "suite::test_a: only after enable(): no attribute 'lr'"),
    ({}, {"(end of the job)": FAILED}, "suite::(end of the job): only after enable(): no attribute 'lr'"),
    ({"test_known": FAILED}, {"test_known": FAILED}, "no test fails because it is so: delete the line")])
def test_failures_need_reasons_and_reasons_failures(one_difference, plain, enabled, problem):
    problems = horovod_outcomes.problems({"suite": plain}, {"suite": enabled}, is_complete=True)
    assert problem in problems if problem else not problems


def test_report_has_every_failure(one_difference):
    plain = {"suite": {"test_known": PASSED, "test_a": FAILED, "test_b": SKIPPED}, "examples": {"one": PASSED}}
    enabled = {"suite": {"test_known": Result("failed", "a | b"), "test_a": FAILED, "test_b": SKIPPED},
               "examples": {"one": Result("passed", plans=[{"ps": 2, "sfb": 3}, "refused"])}}
    page = horovod_outcomes.report(plain, enabled, {"one": 1e-7}, "versions")
    assert "| suite | 3 | 1 | 0 | 1 | 1 | 1 | 0 | 0 |" in page
    assert "| examples | 1 | 1 | 1 | 0 | 0 | 0 | 5 | 3 |" in page
    assert "### It is so\n\n- `suite::test_known`: a / b" in page and "| one | 1e-07 |" in page
    assert "| Keras 3 | 1 |" in page and "| Not a test. | 1 |" in page


@pytest.mark.parametrize("plain, enabled, expected", [
    ([{"w": np.float32([1, 2])}], [{"w": np.float32([1, 2])}], 0), ([{"w": np.int64(1)}], [{"w": np.int64(2)}], np.inf),
    ([{"w": np.float32([1, 4])}], [{"w": np.float32([1, 5])}], 0.25), ([{"w": np.ones(1)}], [{}], np.inf),
    ([{"w": np.ones(1)}, {"w": np.ones(2)}], [{"w": np.ones(1)}, {"w": np.zeros(2)}], 1),
    ([{"w": np.ones(1)}], [{"w": np.full(1, np.nan)}], np.inf)])
def test_what_examples_compute_is_compared(plain, enabled, expected):
    assert horovod_outcomes.difference(plain, enabled) == expected


def test_examples_are_made_smaller():
    example = horovod_examples.Example("one.py", (("10000", "2"),), (("read(", "\n", "made"),))
    assert example.small("for i in range(10000): x = read(file)\nprint(x)") == "for i in range(2): x = made\nprint(x)"
    for text in ("x = read(file)\n", "range(10000)"):
        with pytest.raises(ValueError, match=r"one.py has no text"):
            example.small(text)
