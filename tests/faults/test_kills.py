"""A job that is killed in every start ends with the bits of one that was not: evaluation/faults/kills.py."""

import numpy as np
import pytest

from evaluation.faults import killed_program
from evaluation.faults import killing

RANKS = 2  # that train


@pytest.mark.parametrize("killed, updated", [
    ([("tracing", 1), ("while a backup is written", 0), ("validation", 1), ("end of training", 0)], "whole"),
    ([("a step", 1), ("while a backup is written", 0), ("after a backup", 1), ("end of training", 1)], "shards")])
def test_killed_job_has_the_bits_of_an_undisturbed_one(killed, updated, tmp_path):
    assert killing.run_job(tmp_path / "undisturbed", "one host", RANKS, 1, (), updated=updated) == ([], "")
    found, wrong = killing.run_job(tmp_path / "killed", "one host", RANKS, 1, killed, updated=updated)
    assert not wrong and [(kill.moment, kill.rank) for kill in found] == killed
    assert all(kill.seconds < 10 and kill.status for kill in found)
    assert not killing.difference("one host", *(
        killing.weights(tmp_path / name, RANKS) for name in ("killed", "undisturbed")))


def test_a_job_whose_dedicated_servers_are_killed_has_the_bits_of_an_undisturbed_one(tmp_path):
    killed = [("before the strategy", 2), (killed_program.SERVING, 2), ("a step", 1)]
    assert killing.run_job(tmp_path / "undisturbed", "one host", 3, 1, (), dedicated=1) == ([], "")
    found, wrong = killing.run_job(tmp_path / "killed", "one host", 3, 1, killed, dedicated=1)
    assert not wrong and [(kill.moment, kill.rank) for kill in found] == killed
    assert all(kill.seconds < 10 and kill.status for kill in found)
    assert not killing.difference("one host", *(
        killing.weights(tmp_path / name, RANKS) for name in ("killed", "undisturbed")))


@pytest.mark.parametrize("place,found,undisturbed,expected", [
    ("one host", [[1.0], [1.0]], [[1.0], [1.0]], ""),
    ("one host", [[1.0], [1.0]], [[1.0 + 1e-12], [1.0 + 1e-12]], "other bits than an undisturbed job"),
    ("horovodrun", [[1.0], [1.0]], [[1.0 + 1e-12], [1.0 + 1e-12]], "other bits than an undisturbed job"),
    ("horovodrun", [[1.0]] * 3, [[1.0 + 1e-12]] * 3, ""),
    ("horovodrun", [[1.0]] * 3, [[1.001]] * 3, "other weights than an undisturbed job"),
    ("one host", [[1.0], [2.0]], [[1.0], [2.0]], "ranks have no weights, or others than rank 0"),
    ("one host", [[1.0], []], [[1.0], [1.0]], "ranks have no weights, or others than rank 0"),
])
def test_what_differs_after_a_kill_is_named(place, found, undisturbed, expected):
    def arrays(ranks):
        return [[np.array(value) for value in values] for values in ranks]
    assert killing.difference(place, arrays(found), arrays(undisturbed)) == expected


def test_moments_that_are_not_reached_are_wrong(tmp_path):
    found, wrong = killing.run_job(tmp_path / "killed", "one host", RANKS, 1, [("after training", 5)])
    assert found[0].seconds is None and "the rank 5 was not killed at 'after training'" in wrong


def test_the_page_of_kills_counts_them_by_place():
    done = [killing.Kill("tracing", 0, "one host", 2, 0.5, 9), killing.Kill("tracing", 1, "one host", 4, 1.5, 9)]
    page = killing.report(done, ["job 3: other bits"])
    assert "| one host | tracing | 2 | 2, 4 | 1.0 | 1.5 |" in page
    assert "2 kills; 1 jobs are wrong.\n* job 3: other bits" in page
