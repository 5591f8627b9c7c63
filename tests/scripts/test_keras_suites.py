"""How Keras' tests are run and counted: on tests of our own, in a checkout of our own."""

import importlib.metadata
import json
import subprocess

import pytest

from evaluation import modules

# On two ranks, each of d, e and f ends its job; the next one continues.
TESTS = """
import os
import time

from keras.src import testing
import numpy as np
import tensorflow as tf
from evaluation import modules


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
    return subprocess.run([*modules.command("suites.keras_suites"), f"--keras={directory}", *options],
                          capture_output=True, text=True, timeout=600)


def test_tests_run_plainly_and_in_the_scope(tmp_path):
    page, stored = tmp_path / "page.md", tmp_path / "outcomes.json"
    ended = run(checkout(tmp_path / "keras", importlib.metadata.version("keras")), "--names=losses", "--timeout_s=12",
                "--wait_s=9", f"--markdown={page}", f"--json={stored}")
    assert ended.returncode == 1, ended.stderr
    assert "5 end worse than they may, of which 0 are explained" in ended.stdout
    runs = json.loads(stored.read_text())["losses"]
    found = {name: {test.partition("test_")[2][:1]: outcome["outcome"] for test, outcome in outcomes.items()
                    if "::" in test} for name, outcomes in runs.items()}
    assert found == {
        "plain": dict(a="failed", b="passed", c="skipped", **dict.fromkeys("defgh", "passed")),
        "1 rank": dict(b="failed", **dict.fromkeys("defgh", "passed")),
        "2 ranks": dict(**dict.fromkeys("bdef", "failed"), **dict.fromkeys("gh", "passed"))}
    assert "no_such_package" in runs["plain"]["losses/not_installed_test.py"]["error"]
    for error in ("| the job ended with status 7 |", "| it took more than 12 s |", "AssertionError: as it is known to"):
        assert error in page.read_text()
    assert "| losses | 9 | 6 | 1 | 5 | 2 |" in page.read_text()


@pytest.mark.parametrize("version, found", [("3.0.0", "has Keras 3.0.0, expected"), (None, "no keras/src/version.py")])
def test_other_versions_are_refused(tmp_path, version, found):
    ended = run(checkout(tmp_path, version) if version else tmp_path)
    assert ended.returncode == 1 and found in ended.stderr and "git clone" in ended.stderr
