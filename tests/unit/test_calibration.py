"""Measuring the speeds of a job."""

import re

import launch

import tf_poseidon as poseidon


def test_all_ranks_agree_on_what_was_measured():
    ranks = 3
    outcome = launch.run_ok(["small_programs.py", "calibrate"], ranks, timeout_s=60)
    found = re.findall(r"Cluster\(([^)]*)\) in ([\d.]+) s", outcome.output)
    assert len(found) == ranks
    assert len({cluster for cluster, _ in found}) == 1
    values = {name: float(value) for name, value in (
        pair.split("=") for pair in found[0][0].split(", "))
        if name != "accelerators"}  # the only one that is no number
    assert (values["workers"], values["servers"]) == (ranks, 1)
    # Of any machine that runs these tests.
    assert 0.1 < values["bandwidth_gbps"] < 1000
    assert 1 < values["latency_us"] < 1e5
    assert 0.1 < values["gflops"] < 1e5
    assert all(float(seconds) < 3 + START_S for _, seconds in found)


START_S = 5  # of joining the job, which is measured too


def test_alone_there_is_only_arithmetic():
    cluster = poseidon.calibrate()
    assert cluster.workers == cluster.servers == 1
    assert 0.1 < cluster.gflops < 1e5
    assert poseidon.calibrate() is cluster
