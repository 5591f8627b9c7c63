"""Measuring the speeds of a job."""

import re
import threading
import time

import launch
import pytest

import tf_poseidon as poseidon
from tf_poseidon import calibration


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
    assert 0 <= values["uncertainty"] < 10
    assert all(float(seconds) < 3 + START_S for _, seconds in found)


START_S = 5  # of joining the job, which is measured too


def test_alone_there_is_only_arithmetic():
    cluster = poseidon.calibrate()
    assert cluster.workers == cluster.servers == 1
    assert 0.1 < cluster.gflops < 1e5
    assert poseidon.calibrate() is cluster


@pytest.mark.parametrize("meanwhile, number, is_undisturbed", [
    (1.0, 5, True), (1.05, 5, True), (1.2, 5, False), (1.0, 2, False)])  # two are too few to say
def test_computing_is_undisturbed_if_products_take_no_longer_meanwhile(meanwhile, number, is_undisturbed):
    is_over, products = threading.Event(), []

    def time_product():
        products.append(meanwhile)
        if len(products) > number:
            is_over.set()
            time.sleep(0.2)  # the exchange ends before this product
            return 100.0
        return meanwhile

    assert calibration.is_undisturbed([1.0] * 3, is_over.wait, time_product) == is_undisturbed
    with pytest.raises(ZeroDivisionError):
        calibration.is_undisturbed([1.0] * 3, lambda: 1 / 0, time_product)


@pytest.mark.parametrize("times, spread", [([2.0, 2.0, 2.0], 0), ([1.0, 2.0, 4.0], 0.375), ([4.0, 1.0, 2.0], 0.375)])
def test_spread_is_that_of_the_middle_half(times, spread):
    assert calibration._spread(times) == spread
