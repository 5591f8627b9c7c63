"""How results of tf.distribute's strategies and of ours are compared; and a few of the checks."""

import subprocess

import pytest

from evaluation import modules
from evaluation.suites import contract_differences
from evaluation.suites import contract_outcomes


@pytest.mark.parametrize("expected, found, is_same", [
    (["float32", 1.0], ["float32", 1.0 + 1e-7], True), (["float32", 1.0], ["float32", 1.1], False),
    (["int32", 1], ["int64", 1], False), ([1, 2], [1], False), (1, 1.0, False), (True, 1, False),
    ({"error": "a"}, {"error": "b"}, True), ({"error": "a"}, 1, False), ({"a": [1]}, {"a": [1]}, True),
    ({"a": 1}, {"b": 1}, False), ([float("nan")], [float("nan")], True)])
def test_results_are_compared(expected, found, is_same):
    assert contract_outcomes.same(expected, found) == is_same


@pytest.mark.parametrize("ranks, result", [
    ([1, 1], 1), ([1, 2], {"ranks differ": [1, 2]}),
    ([{"replicas": [1]}, {"replicas": [2]}], {"replicas": [1, 2]}),
    ([[{"replicas": [1]}, 5], [{"replicas": [2]}, 5]], [{"replicas": [1, 2]}, 5]),
    ([{"error": "a"}, {"error": "b"}], {"error": "a"}),
    ([{"error": "a"}, 1], {"ranks differ": [{"error": "a"}, 1]})])
def test_results_of_ranks_are_merged(ranks, result):
    assert contract_outcomes.merged(ranks) == result


@pytest.fixture
def one_difference(monkeypatch):
    monkeypatch.setattr(contract_differences, "DIFFERENCES", (("group/known*", (2,), "it is so"),))


@pytest.mark.parametrize("expected, found, replicas, problem", [
    ({"group/a": 1, "group/known": 1}, {"group/a": 1, "group/known": 2}, 2, None),
    ({"group/a": 1, "group/known": 1}, {"group/a": 3, "group/known": 2}, 2, "group/a, 2 replicas: expected 1, found 3"),
    ({"group/known": 1}, {"group/known": 2}, 1, "group/known, 1 replicas: expected 1, found 2"),
    ({"group/a": 1}, {}, 2, 'group/a, 2 replicas: expected 1, found {"missing": true}'),
    ({"group/known": 1}, {"group/known": 1}, 2, "no check differs because it is so: delete the line")])
def test_differences_need_reasons_and_reasons_differences(one_difference, expected, found, replicas, problem):
    rows = contract_outcomes.compared(expected, found, replicas)
    problems = contract_outcomes.problems(rows, is_complete=True)
    assert problem in problems if problem else not problems


def test_report_has_every_difference(one_difference):
    rows = contract_outcomes.compared({"group/a": 1, "group/known|": 1}, {"group/a": 1, "group/known|": 2}, 2)
    page = contract_outcomes.report(rows, "versions")
    assert "| group | 0 | 0 | 2 | 1 |" in page and "### It is so" in page and "| 1 | 2 |" in page


def test_checks_run_under_all_strategies(tmp_path):
    checks = ("all_reduce/all_reduce_by_another_name", "reduce/reduce_scalars[[]*", "variables/mean_of_integers*",
              "variables/synchronization_none", "interfaces/files[[]should_checkpoint]")
    ended = subprocess.run([*modules.command("suites.distribute_contract"), f"--checks={','.join(checks)}",
                            f"--markdown={tmp_path / 'page.md'}"], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("18 comparisons: 17 equal, 1 different")
    assert "rank 0 alone writes files" in (tmp_path / "page.md").read_text()
