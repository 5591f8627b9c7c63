"""Jobs that take turns on the same accelerators: each has the bits of a job alone, and outlives the other ones."""

from concurrent import futures
import json
import os
import re

import launch
import numpy as np
import pytest

PROGRAMS = "plain-adam", "executions-ema"
BATCHES = 24


def start(pool, folder, job, jobs, programs, name="", ranks=2, run=launch.run_ok):
    name = name and f"{name}-{os.getpid()}"  # other tests of this machine take turns, too
    return pool.submit(run, ["train_crossover.py", str(folder), str(job), str(jobs), name, *programs], ranks,
                       timeout_s=100)


def report(folder, job, rank=0):
    return json.loads((folder / f"{job}.{rank}.json").read_text())


def check_weights(folder, job, alone, programs):
    for name in programs:
        with np.load(alone / f"{name}.0.0.npz") as expected:
            for rank in range(2):
                with np.load(folder / f"{name}.{job}.{rank}.npz") as file:
                    assert len(file.files) > 5
                    for key in expected:
                        np.testing.assert_array_equal(file[key], expected[key])


@pytest.fixture(scope="module")
def solo(tmp_path_factory):
    """The folder of a job that has its accelerators alone."""
    folder = tmp_path_factory.mktemp("solo")
    with futures.ThreadPoolExecutor() as pool:
        start(pool, folder, 0, 1, PROGRAMS).result()
    assert report(folder, 0)[PROGRAMS[0]]["turns"] == {}
    return folder


def test_each_job_has_the_bits_of_a_job_alone(tmp_path, solo):
    with futures.ThreadPoolExecutor() as pool:
        for job in [start(pool, tmp_path, job, 2, PROGRAMS, "bits") for job in range(2)]:
            job.result()
    times = []
    for job in range(2):
        check_weights(tmp_path, job, solo, PROGRAMS)
        for rank in range(2):
            of_rank = report(tmp_path, job, rank)
            times.append((of_rank["begin"], of_rank["end"]))
            for name in PROGRAMS:
                assert of_rank[name]["turns"]["count"] == BATCHES  # one in each step, also of several in a graph
                assert of_rank[name]["turns"]["holding_seconds"] > 0
                assert of_rank[name]["history"] == report(solo, 0)[name]["history"]
    assert max(begin for begin, _ in times) < min(end for _, end in times)


@pytest.mark.parametrize("fault, is_named", [("die", False), ("hang", True)])
def test_a_job_outlives_another_one(fault, is_named, tmp_path, solo):
    with futures.ThreadPoolExecutor() as pool:
        other = start(pool, tmp_path, 0, 2, [fault], fault, run=launch.run)
        job = start(pool, tmp_path, 1, 2, PROGRAMS[:1], fault)
        outcome, of_other = job.result(), other.result()
    assert of_other.status != 0
    check_weights(tmp_path, 1, solo, PROGRAMS[:1])
    assert report(tmp_path, 1)[PROGRAMS[0]]["turns"]["count"] == BATCHES
    process, = re.findall(r"the process is (\d+)", of_other.output)
    assert set(re.findall(r"Process (\d+) \(.*train_crossover.py, rank 1 of another job\) has not given back its turn "
                          "on the accelerator for 2 s", outcome.output)) == ({process} if is_named else set())


def test_no_turn_begins_without_a_batch(tmp_path):
    with futures.ThreadPoolExecutor() as pool:
        start(pool, tmp_path, 0, 1, ["ends"], "ends").result()


def test_ranks_begin_turns_together_or_the_job_ends(tmp_path):
    with futures.ThreadPoolExecutor() as pool:
        outcome = start(pool, tmp_path, 0, 1, ["unlike"], "unlike", run=launch.run).result()
    assert outcome.status != 0
    assert ("The training graph of rank 1 was not rewritten, so it takes no turns with other jobs, but rank 0 does; "
            "enable Grappler") in outcome.output


def test_jobs_on_other_accelerators_are_refused(tmp_path):
    with futures.ThreadPoolExecutor() as pool:
        first = start(pool, tmp_path, 0, 2, ["plain-adam"], "refused")
        while not (tmp_path / "ready0").exists():
            assert not first.done()
        second = start(pool, tmp_path, 1, 2, ["plain-adam"], "refused", ranks=3, run=launch.run).result()
        (tmp_path / "ready1").touch()
        first.result()
    assert second.status != 0
    assert second.output.count("with a job on other accelerators, expected the same hosts and processes on each") >= 1
    assert re.search(r"ConfigurationError: crossover='refused-\d+', but process \d+ \(.*train_crossover.py\) takes",
                     second.output)
