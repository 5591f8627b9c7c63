"""How items are run in jobs, compared and reported: on tests of our own, which pytest runs on two ranks."""

import numpy as np
import pytest

from evaluation.runner import arrays
from evaluation.runner import outcomes
from evaluation.runner.command import Command
from evaluation.runner.outcomes import Difference
from evaluation.runner.outcomes import Outcome
from evaluation.suites import horovod_suites

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
LONG = "import time\ndef test_long(): time.sleep(60)\ndef test_last(): pass\n"


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs the tests of a text on two ranks, and returns outcomes and errors."""
    def run(text, **limits):
        path = tmp_path / "test" / "parallel" / "test_own.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        results = horovod_suites.run_suite(horovod_suites.Suite(path.name, 3), str(tmp_path), "plain", **limits)
        results = {name.removeprefix("test_own.py, Keras 3").removeprefix("::"): result
                   for name, result in results.items()}
        return ({name: result.outcome for name, result in results.items()},
                {name: result.error for name, result in results.items()})

    return run


def test_jobs_go_on_after_tests_that_die_or_hang(run):
    found, errors = run(ENDS, timeout_s=60, wait_s=2)
    assert found == {
        "test_passes": "passed", "test_skipped": "skipped", "test_skipped_on_rank_0": "skipped",
        "test_fails_on_rank_1": "failed", "TestSubtests::test_part_fails": "failed", "test_dies": "failed",
        "test_fails_while_others_wait": "failed", "test_last": "passed"}
    assert errors["test_skipped"] == "no such device" and "boom" in errors["test_fails_on_rank_1"]
    assert "1 == 1" in errors["TestSubtests::test_part_fails"]
    assert errors["test_dies"] == "rank 1 died"
    assert "left early" in errors["test_fails_while_others_wait"]
    assert "did not end on others within 2 s" in errors["test_fails_while_others_wait"]


def test_file_that_cannot_be_imported(run):
    found, errors = run("import no_such_module\n")
    assert found == {"": "failed"} and "no_such_module" in errors[""]


def test_test_that_takes_too_long(run):
    found, errors = run(LONG, timeout_s=6, wait_s=6)
    assert found == {"test_long": "failed", "test_last": "passed"}
    assert errors["test_long"] == "it took more than 6 s"


def ends(outcome="passed", error="", at=0, value=None):
    return {"ends": "t", "outcome": outcome, "error": error, "trace": error and f"at {error}", "value": value, "at": at}


DIED = "the job has died"


@pytest.mark.parametrize("notes, outcome", [
    ([[ends()]], Outcome("passed", values=[None])),
    ([[]], Outcome("failed", DIED, "output", [])),
    ([[ends()], []], Outcome("failed", DIED, "output", [None])),
    ([[ends("failed", "cause")], []], Outcome("failed", f"cause ({DIED})", "at cause\n\noutput", [None])),
    ([[ends(value=1)], [ends("skipped", "why", value=2)]], Outcome("skipped", "why", "at why", [1, 2])),
    ([[ends("failed", "late", 2)], [ends("failed", "early", 1)]],
     Outcome("failed", "early", "at late\n\nat early", [None, None])),
    ([[ends("failed", "JobEndedError: rank 1", 1)], [ends("failed", "cause", 2)]],
     Outcome("failed", "cause", "at JobEndedError: rank 1\n\nat cause", [None, None]))])
def test_outcomes_are_the_worst_of_all_ranks(notes, outcome):
    assert outcomes.merged([[{"begins": "t"}, *rank] for rank in notes], DIED, "output") == {"t": outcome}


PASSED, FAILED, SKIPPED = Outcome("passed"), Outcome("failed", "as it does"), Outcome("skipped", "no device")
RUNS = {"plain": "plain", "1 rank": "plain", "2 ranks": "plain"}
KNOWN = Difference("known*", "it is so", ("2 ranks",), "as .* does")
COMMAND = Command("Own tests", "command", "About.", RUNS, [KNOWN], [Difference("*", "no wonder", error="as it")],
                        columns={"values": lambda found: sum(sum(outcome.values) for outcome in found)})


@pytest.mark.parametrize("plain, run, found, problem", [
    ({"known": PASSED}, "2 ranks", {"known": FAILED}, None),
    ({"known": PASSED}, "1 rank", {"known": FAILED}, "known, 1 rank: as it does"),
    ({"known": PASSED}, "2 ranks", {"known": Outcome("failed", "otherwise")}, "known, 2 ranks: otherwise"),
    ({"other": PASSED}, "2 ranks", {"other": FAILED}, "other, 2 ranks: as it does"),
    ({"other": PASSED}, "2 ranks", {"other": SKIPPED}, "other, 2 ranks: no device"),
    ({"other": SKIPPED}, "2 ranks", {"other": FAILED}, "other, 2 ranks: as it does"),
    ({"known": PASSED, "other": FAILED}, "2 ranks", {"known": FAILED, "other": FAILED}, None),
    ({"known": PASSED, "other": FAILED}, "2 ranks", {"known": FAILED, "other": PASSED}, None),
    ({}, "2 ranks", {"(end of the job)": FAILED}, "(end of the job), 2 ranks: as it does"),
    ({"known": FAILED}, "2 ranks", {"known": FAILED}, "no item fails because it is so: delete the line")])
def test_failures_need_reasons_and_reasons_failures(plain, run, found, problem):
    results = {"suite": dict.fromkeys(RUNS, {}) | {"plain": plain, run: found}}
    lines = outcomes.problems(outcomes.failures(results, RUNS, [KNOWN]), [KNOWN], is_complete=True)
    assert problem in lines if problem else not lines


@pytest.mark.parametrize("reference, failed", [("", ["a"]), ("plain", [])])
def test_items_must_pass_in_a_run_that_has_no_reference(reference, failed):
    found = outcomes.failures({"suite": {"plain": {"a": FAILED, "b": PASSED}}}, {"plain": reference}, [])
    assert [failure.item for failure in found] == failed


def test_report_has_every_failure():
    results = {"suite": {
        "plain": {"known|": PASSED, "a": FAILED, "b": SKIPPED, "c": PASSED},
        "1 rank": {"known|": PASSED, "c": Outcome("passed", difference=1e-7)},
        "2 ranks": {"known|": Outcome("failed", "as | does"), "c": Outcome("passed", values=[3], difference=0.0)}}}
    page = COMMAND.page(results, outcomes.failures(results, RUNS, [KNOWN]))
    assert "| suite | items | plain: passed | plain: skipped | 1 rank: passed | 2 ranks: passed | values |" in page
    assert "| suite | 4 | 2 | 1 | 2 | 1 | 3 |" in page and "| **all** | 4 | 2 | 1 | 2 | 1 | 3 |" in page
    assert "### It is so\n\n| item | runs | error |\n|---|---|---|\n| `known/` | 2 ranks | as / does |" in page
    assert "| c | 1e-07 | equal bits |" in page
    assert "| failed | no wonder | 1 | `a` |\n| skipped | no device | 1 | `b` |" in page


@pytest.mark.parametrize("plain, enabled, expected", [
    ([{"w": np.float32([1, 2])}], [{"w": np.float32([1, 2])}], 0), ([{"w": np.int64(1)}], [{"w": np.int64(2)}], np.inf),
    ([{"w": np.float32([1, 4])}], [{"w": np.float32([1, 5])}], 0.25), ([{"w": np.ones(1)}], [{}], np.inf),
    ([{"w": np.ones(1)}, {"w": np.ones(2)}], [{"w": np.ones(1)}, {"w": np.zeros(2)}], 1),
    ([{"w": np.ones(1)}], [{"w": np.full(1, np.nan)}], np.inf),
    ([{"w": np.float32([1, np.inf])}], [{"w": np.float32([1.5, np.inf])}], 0.5),
    ([{"w": np.ones(1)}], [{"w": np.ones(1)}, {"w": np.nextafter([1.0], 2)}], np.inf)])
def test_what_ranks_compute_is_compared(plain, enabled, expected):
    assert arrays.difference(plain, enabled) == expected


@pytest.mark.parametrize("bound, outcome", [(0.3, "passed"), (0.2, "failed")])
def test_items_that_compute_something_else_fail(tmp_path, bound, outcome):
    directories = str(tmp_path / "plain"), str(tmp_path / "run")
    for directory, last in zip(directories, (4, 5)):
        arrays.save(directory, "folder/t", 0, {"w": np.float32([1, last])})
    found = arrays.judged({"folder/t": PASSED}, {"folder/t": PASSED}, directories, lambda name: bound)["folder/t"]
    assert found.outcome == outcome and found.difference == 0.25
    assert found.error == ("" if outcome == "passed" else "differs by 0.25, expected at most 0.2")
