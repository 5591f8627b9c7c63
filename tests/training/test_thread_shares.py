"""Ranks of this host share its processors, unless somebody has said how."""

import json
import os
import re

import launch
import pytest

SHARED = {"TF_NUM_INTRAOP_THREADS": ""}
CORES = len(os.sched_getaffinity(0))  # if none has two threads
COUNT = f"{max(1, CORES // 2)} thread{'s' * (CORES > 3)}"


@pytest.mark.parametrize("how, environment, through, threads, bound, says", [
    ("", {}, (), max(1, CORES // 2), True,
     rf"2 ranks on one host, with {COUNT} each, on {CORES // 2} of {CORES} cores, over"),
    ("", {"TF_NUM_INTRAOP_THREADS": "3"}, (), 3, False, r"2 ranks on one host over"),
    ("computes first", {}, (), 0, False, r"TensorFlow has made its threads on rank 0 before .*\n(.*\n)*.*"
                                         r"2 ranks on one host over"),
    ("", {}, ("sh", "-c", 'exec taskset -c $MPI_LOCALRANKID "$@"', "sh"), 0, True, r"2 ranks on one host over"),
    ("plan", {}, (), 7, True, r"2 ranks on one host, with 7 threads each, on"),
    ("plan", {"TF_NUM_INTRAOP_THREADS": "3"}, (), 3, False, r"another number of threads of an op, 7, than .*, 3:")],
    ids=["shared", "chosen", "late", "bound", "as_planned", "not_as_planned"])
@pytest.mark.skipif(CORES < 2, reason="Ranks have nothing to share on one processor.")
def test_threads_and_processors(how, environment, through, threads, bound, says, tmp_path):
    output = launch.run_ok(["thread_shares_rank.py", str(tmp_path), how], 2, 60, environment=SHARED | environment,
                           through=through, fresh=bool(through)).output
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [rank["threads"] for rank in ranks] == [threads] * 2
    allowed = [set(rank["allowed"]) for rank in ranks]
    assert all(allowed) and (not allowed[0] & allowed[1] if bound else allowed[0] == allowed[1])
    assert re.search(says, output), output
