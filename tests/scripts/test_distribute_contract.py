"""How results of tf.distribute's strategies and of ours are compared; and a few of the checks."""

import subprocess

import pytest

from evaluation import modules
from evaluation.runner.outcomes import Outcome
from evaluation.suites import distribute_contract


@pytest.mark.parametrize("expected, found, is_same", [
    (["float32", 1.0], ["float32", 1.0 + 1e-7], True), (["float32", 1.0], ["float32", 1.1], False),
    (["int32", 1], ["int64", 1], False), ([1, 2], [1], False), (1, 1.0, False), (True, 1, False),
    ({"error": "a"}, {"error": "b"}, True), ({"error": "a"}, 1, False), ({"a": [1]}, {"a": [1]}, True),
    ({"a": 1}, {"b": 1}, False), ([float("nan")], [float("nan")], True)])
def test_results_are_compared(expected, found, is_same):
    assert distribute_contract.same(expected, found) == is_same


@pytest.mark.parametrize("ranks, result", [
    ([1, 1], 1), ([1, 2], {"ranks differ": [1, 2]}),
    ([{"replicas": [1]}, {"replicas": [2]}], {"replicas": [1, 2]}),
    ([[{"replicas": [1]}, 5], [{"replicas": [2]}, 5]], [{"replicas": [1, 2]}, 5]),
    ([{"error": "a"}, {"error": "b"}], {"error": "a"}),
    ([{"error": "a"}, 1], {"ranks differ": [{"error": "a"}, 1]})])
def test_results_of_ranks_are_merged(ranks, result):
    assert distribute_contract.merged(ranks) == result


@pytest.mark.parametrize("expected, found, outcome", [
    (Outcome("passed", values=[1]), Outcome("passed", values=[1, 1]), Outcome("passed", values=[1, 1])),
    (Outcome("passed", values=[1]), Outcome("passed", values=[2]), Outcome("failed", "expected 1, found 2", "", [2])),
    (Outcome("passed", values=[1]), Outcome("failed", "died"), Outcome("failed", "died")),
    (Outcome("passed", values=[[1]]), Outcome("passed", values=[{"error": "File a\nTypeError: b\n"}]), Outcome(
        "failed", "expected [1], found error: TypeError: b", "", [{"error": "File a\nTypeError: b\n"}]))])
def test_checks_fail_if_their_results_differ(expected, found, outcome):
    assert distribute_contract.judged(found, expected) == outcome


def test_checks_run_under_all_strategies(tmp_path):
    checks = ("all_reduce/all_reduce_by_another_name", "reduce/reduce_scalars[[]*", "variables/mean_of_integers*",
              "variables/synchronization_none", "interfaces/files[[]should_checkpoint]")
    ended = subprocess.run([*modules.command("suites.distribute_contract"), f"--names={','.join(checks)}",
                            f"--markdown={tmp_path / 'page.md'}"], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 end worse than they may, of which 1 are explained" in ended.stdout
    page = (tmp_path / "page.md").read_text()
    assert "rank 0 alone writes files" in page and "| **all** | 9 | 9 | 9 | 9 | 8 |" in page
