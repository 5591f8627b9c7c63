"""Measuring the speeds of a job."""

import re
import threading
import time
import types

import launch
import pytest

import tf_poseidon as poseidon
from tf_poseidon import planning
from tf_poseidon.job import calibration


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


# In a node of r ranks with s servers, a GPU gives and takes (r + s - 2) / s times the bytes of a sum.
@pytest.mark.parametrize("nodes, servers, num_bytes, seconds, expected", [
    ((0, 0, 0, 0), 0, 10_000_000, 1e-3, (4, 120.0)),
    ((0, 0, 0, 0), 1, 10_000_000, 1e-3, (4, 240.0)),
    ((0, 0, 1, 1), 0, 10_000_000, 1e-3, (2, 80.0)),
    ((0, 0, 0, 1), 0, 10_000_000, 1e-3, (3, 107.0)),  # 106.7 in three digits
    ((0, 0, 0, 0), 0, 4, 1e-3, (4, 3.15)),  # 64 KiB for each of 4 servers
    ((0, 0, 0, 0), 0, 10_000_000, 0.0, (1, 0.0)),
    ((0, 1, 2, 3), 0, 10_000_000, 1e-3, (1, 0.0))])
def test_links_are_those_that_rank_0_finds(nodes, servers, num_bytes, seconds, expected):
    """Another rank measures too, and takes part in a sum of the same bytes."""
    ranks = max(map(nodes.count, nodes))
    cluster, asked = planning.Cluster(4, servers, ranks_per_node=ranks if len(set(nodes)) > 1 else 1), []
    communicator = types.SimpleNamespace(most_on_a_node=ranks, broadcast=lambda site, own: [seconds])

    def time_across(*arguments):
        asked.append(arguments)
        return 7.0

    found = calibration.with_links(cluster, communicator, num_bytes, time_across)
    assert (found.gpus_per_node, found.gpu_link_gbps) == expected
    assert asked == ([(communicator, max(num_bytes, 4 * 65536))] if ranks > 1 else [])
    if found.are_all_linked:
        traffic = planning.SCHEMES["ps"].traffic(planning.Site("x", "float32", 4, (asked[0][1] // 4,)))
        assert traffic.cost(found).transfer == pytest.approx(seconds, rel=5e-3)


def test_only_what_happens_between_gpus_counts(monkeypatch):
    exchanged = []
    rows = [["down", "calibration/across", 0, 5, 4, False, 0], ["across", "calibration/across", 10, 40, 4, False, 0],
            ["across", "calibration/across", 50, 60, 4, False, 0], ["ps", "calibration/across", 0, 90, 4, False, 0]]
    communicator = types.SimpleNamespace(sum=lambda site, value: None,
                                         events_of=lambda site, exchange, capacity: exchange() or rows)
    monkeypatch.setattr(calibration.ops, "all_reduce",
                        lambda value, site: exchanged.append((site, len(value))) or value)
    assert calibration.seconds_across(communicator, 400) == pytest.approx(40e-9)
    assert exchanged == [("calibration/open", 1), *[("calibration/across", 100)] * 2]
    assert {site for site, _ in exchanged} < calibration.SITES


@pytest.mark.parametrize("times, spread", [([2.0, 2.0, 2.0], 0), ([1.0, 2.0, 4.0], 0.375), ([4.0, 1.0, 2.0], 0.375)])
def test_spread_is_that_of_the_middle_half(times, spread):
    assert calibration._spread(times) == spread
