"""Files are written once, resumed on other numbers of ranks, and opened without tf_poseidon."""

import os

from jobs import assert_same_as_one_process
from jobs import Case
import launch
import numpy as np
import pytest
import train_resumed

RANKS = 2
BOUND = 1e-9  # as in test_training.py


@pytest.fixture(scope="module", params=["whole", "shards", "columns", "owners", "divided"])
def updates(request):
    """What ranks update of an optimizer's variables."""
    return request.param


@pytest.fixture(scope="module")
def reference(updates, tmp_path_factory):
    """The result of one process without interruption."""
    directory = tmp_path_factory.mktemp("one")
    launch.run_ok(["train_saving.py", directory, updates], 0, timeout_s=90)
    return dict(np.load(directory / "state.0.npz"))


@pytest.fixture(scope="module")
def interrupted(updates, tmp_path_factory):
    """The directory of a job whose ranks all fail in the third epoch."""
    directory = tmp_path_factory.mktemp("interrupted")
    outcome = launch.run(["train_saving.py", directory, "interrupt", updates], RANKS, timeout_s=90)
    assert outcome.status != 0 and "interrupted on purpose" in outcome.own_lines[-1]
    return directory


@pytest.fixture(scope="module")
def resumed(updates, interrupted):
    """The same directory after the job was resumed on one more rank."""
    launch.run_ok(["train_saving.py", interrupted, updates], RANKS + 1, timeout_s=90)
    return interrupted


def test_only_rank_0_writes(updates, resumed):
    # 1 and 2 are directories of ranks that write nothing in `fit`.
    assert not {"1", "2"} & set(os.listdir(resumed)) or updates != "whole"
    assert not (resumed / "1" / "backup").exists() and not list((resumed / "2").glob("*.csv"))
    files = {path.suffix for path in (resumed / "0").iterdir()}
    assert {".keras", ".h5", ".csv"} <= files
    assert len(list((resumed / "0").glob("*.keras"))) == 4
    assert list((resumed / "0" / "tensorboard").rglob("events*"))
    assert len((resumed / "0" / "log.csv").read_text().splitlines()) == 1 + 2  # of the last two


def test_other_numbers_of_ranks_resume_where_the_job_was_interrupted(resumed, reference):
    states = [dict(np.load(resumed / f"state.{rank}.npz")) for rank in range(RANKS + 1)]
    assert list(states[0]["epochs"]) == [2, 3]
    for name, value in reference.items():
        for state in states:
            assert state[name].tobytes() == states[0][name].tobytes(), name
        if name != "epochs":
            np.testing.assert_allclose(states[0][name], value, rtol=BOUND, atol=BOUND, err_msg=name)


def test_files_open_without_us(resumed):
    launch.run_ok(["open_saved.py", resumed], 0, timeout_s=90)


def cases(is_full):
    return [Case("train_resumed.py", name, RANKS, "auto") for name in (
        train_resumed.CASES if is_full else ("callbacks",))]


@pytest.mark.table(cases=cases)
def test_resumed_job_has_the_bits_of_an_undisturbed_one(jobs, case):
    one = jobs.one_process(case)
    assert_same_as_one_process(one, jobs.arrays(case), {"float64": BOUND, "float32": BOUND}, least=1.0)
    printed = jobs.output(case.alone()) + jobs.output(case)
    assert sorted(line for line in printed.splitlines() if f", {case.name}:" in line) == [
        f"rank {rank}, {case.name}: same bits" for rank in (0, 0, 1)]
