"""How Keras' tests are run and counted: on tests of our own, in a checkout of our own."""

import importlib.metadata
import json
import pathlib
import subprocess
import sys

import keras_differences
import keras_outcomes
from keras_outcomes import Outcome
import pytest

SCRIPT = pathlib.Path(keras_outcomes.__file__).with_name("keras_suites.py")

# On two ranks, each of d, e and f ends its job; the next one continues.
TESTS = """
import os
import time

from keras.src import testing
import numpy as np
import tensorflow as tf


class OwnTest(testing.TestCase):

    def setUp(self):
        super().setUp()
        self.strategy = tf.distribute.get_strategy()
        self.ranks = self.strategy.num_replicas_in_sync

    def test_a_fails_plainly(self):
        assert hasattr(self.strategy, "rank")

    def test_b_fails_in_the_scope(self):
        assert not hasattr(self.strategy, "rank")

    def test_c_is_skipped(self):
        self.skipTest("no reason")

    def test_d_fails_on_one_of_two_ranks(self):
        assert self.ranks == 1 or self.strategy.rank == 0, "as it is known to"

    def test_e_ends_its_process(self):
        if self.ranks == 2:
            os._exit(7)

    def test_f_hangs(self):
        if self.ranks == 2:
            time.sleep(60)

    def test_g_draws_the_same_numbers_on_all_ranks(self):
        assert np.random.random() == np.random.RandomState(1).random()


def test_h_has_no_class():
    assert not hasattr(tf.distribute.get_strategy(), "rank") or tf.distribute.has_strategy()
"""


def checkout(directory, version):
    for name, text in (("pyproject.toml", "[tool.pytest.ini_options]"),
                       ("keras/src/version.py", f'__version__ = "{version}"'),
                       ("keras/src/losses/own_test.py", TESTS),
                       ("keras/src/losses/not_installed_test.py", "import no_such_package")):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def run(directory, *options):
    return subprocess.run([sys.executable, SCRIPT, f"--keras={directory}", *options], capture_output=True, text=True,
                          timeout=240)


def test_tests_run_plainly_and_in_the_scope(tmp_path):
    page, stored = tmp_path / "page.md", tmp_path / "outcomes.json"
    ended = run(checkout(tmp_path / "keras", importlib.metadata.version("keras")), "--suites=losses", "--timeout_s=20",
                f"--markdown={page}", f"--json={stored}")
    assert ended.returncode == 1, ended.stderr
    assert "5 failures in the scope, 0 explained" in ended.stdout
    runs = {name: {test.partition("test_")[2][:1] if "::" in test else "file": outcome
                   for test, outcome in outcomes.items()} for name, outcomes in json.loads(stored.read_text())["losses"].items()}
    assert {name: {test: outcome["outcome"] for test, outcome in outcomes.items()}
            for name, outcomes in runs.items()} == {}, ended.stdout
