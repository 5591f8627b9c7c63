"""Planning: the paper's formulas and numbers, the policies, and their printed plans."""

import dataclasses
import gc
import itertools
import random
import subprocess
import sys
import time

import pytest
from small_plans import dense_site
from small_plans import plan_for
from small_plans import TABLE

import tf_poseidon as poseidon
from tf_poseidon import planning
from tf_poseidon.explanations import plan_page
from tf_poseidon.planning import cost
from tf_poseidon.planning import schemes
from tf_poseidon.planning import step_time
from tf_poseidon.reports import texts

# Dense layers of networks in the paper: (M, N), and the most workers for which Algorithm 1 sends
# factors at K = 32 and 128, which is K P <= 2MN / (M + N).
LAYERS = {
    "vgg_fc6": (25088, 4096, 220, 55),
    "vgg_fc7": (4096, 4096, 128, 32),
    "vgg_fc8": (4096, 1000, 50, 12),
    "vgg_22k_fc8": (4096, 21841, 215, 53),
    "googlenet": (1024, 1000, 31, 7),
    "resnet": (2048, 1000, 41, 10),
}


def scheme(policy, site, workers, servers=0):
    decision, = plan_for([site], policy, workers, servers).decisions
    return decision.scheme


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("k, column", [(32, 2), (128, 3)])
def test_algorithm_1_breaks_even_where_the_paper_does(layer, k, column):
    m, n = LAYERS[layer][:2]
    workers = LAYERS[layer][column]
    assert scheme("paper", dense_site(m, n, k), workers) == "sfb"
    assert scheme("paper", dense_site(m, n, k), workers + 1) == "ps"


def test_example_of_the_paper():
    """M = N = 4096, K = 32, 8 workers that are servers: 58.7 against 3.67 million numbers."""
    assert cost.parameter_server(4096 * 4096, 8, 8) == pytest.approx(58.7e6, rel=1e-3)
    assert cost.factor_broadcasting(32 * (4096 + 4096), 8) == pytest.approx(3.67e6, rel=1e-3)


def test_googlenet_of_the_paper_falls_back():
    assert scheme("paper", dense_site(1024, 1000, 128), 16) == "ps"


@pytest.mark.parametrize("servers, expected", [(1, "sfb"), (4, "ps")])
def test_fewer_servers_make_the_parameter_server_dearer(servers, expected):
    # 2K (P1 - 1)(M + N) = 96; 2MN (P1 + P2 - 2) / P2 = 96 with one server, 48 with four.
    assert scheme("paper", dense_site(4, 4, 2), 4, servers) == expected


def test_equal_costs_send_factors():
    # 2 K (P - 1)(M + N) = 2 * 2 * 1 * 8 = 32 = 2MN (2P - 2) / P
    assert scheme("paper", dense_site(4, 4, 2), 2) == "sfb"


@pytest.mark.parametrize("policy", planning.POLICIES)
def test_sites_without_factors_go_over_the_parameter_server(policy):
    site = planning.Site("conv", "float32", 4, (3, 3, 8, 8), refusal="a convolution")
    decision, = plan_for([site], policy, 4, 4).decisions
    assert decision.scheme == "ps" and decision.reason == "a convolution"
    assert decision.num_bytes == 4 * 3 * 3 * 8 * 8 * 4 * 3 / 4


@pytest.mark.parametrize("policy", ["sfb", "paper"])
def test_unknown_rows_go_over_the_parameter_server(policy):
    decision, = plan_for([dense_site(512, 512, None)], policy, 4, 4).decisions
    assert decision.scheme == "ps" and "number of rows is not known" in decision.reason


@pytest.mark.parametrize("k, expected", [(1, "sfb"), (400, "ps")])
def test_biases_follow_their_layer(k, expected):
    bias = planning.Site("bias", "float32", 4, (512,), refusal="alone", bias_of="kernel")
    # A bias may come before its layer.
    plan = plan_for([bias, dense_site(512, 512, k)], "paper", 4, 4)
    first, second = plan.decisions
    assert first.scheme == second.scheme == expected
    assert (first.num_bytes == 0) == (expected == "sfb")
    assert first.leader == ("kernel" if expected == "sfb" else None)


def test_bytes_of_factors():
    site = dense_site(100, 50, 8)
    site = dataclasses.replace(site, factors=dataclasses.replace(site.factors, extra_bytes=4))
    decision, = plan_for([site], "sfb", 3, 3).decisions
    assert decision.num_bytes == 2 * 2 * (8 * 150 * 4 + 4)


def test_plan_prints_as_a_table():
    bias = planning.Site("bias", "float32", 4, (50,), bias_of="kernel")
    odd = planning.Site("odd", "float32", 4, None, refusal="its shape is unknown")
    plan = plan_for([dense_site(100, 50, 8), bias, odd], "sfb", 3, operations=1e9)
    assert str(plan) == """\
plan by policy 'sfb' for 3 workers, 3 servers, 10 Gbit/s, 50 µs, 1000 GFLOP/s
variable  shape   scheme    bytes     time  runner-up   reason
kernel    100x50  sfb      19,200  57.8 µs  hfb 115 µs  the policy is 'sfb', and the gradient is a product of factors
bias      50      sfb           0        0              the sum of the rows of a factor of 'kernel'
odd       ?       ps      unknown  unknown              its shape is unknown
total                     unknown  57.8 µs              sent plus received by each rank in a step, half of it in each direction
expected: 1 ms for a step, 1 ms without other ranks: 3 times as fast as one process
at least: 1 ms by any choice of schemes, for bytes and arithmetic alone; this plan takes 1 times as long"""
    assert plan.agreement_text() == """\
3 workers, 3 servers
'bias' by sfb with 'kernel'
'kernel' by sfb
'odd' by ps"""


def test_values_are_frozen():
    plan = plan_for([dense_site(4, 4, 1)], "ps", 2, 2)
    for value in (plan, plan.decisions[0], dense_site(4, 4, 1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.scheme = "sfb"


def test_planning_needs_no_tensorflow():
    program = "import sys, tf_poseidon.planning; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


# ---- seconds ----------------------------------------------------------------------------------

# 1 Gbit/s is 125 bytes in a microsecond, and 1 GFLOP/s 1000 operations.
CLUSTER = planning.Cluster(4, 4, bandwidth_gbps=1, latency_us=10, gflops=1)


PAPERS = ("ps", "sfb")  # the schemes of the paper, which differ in when rebuilding pays


def cost_of(name, site, cluster):
    """Returns the `Cost` of a site by a scheme."""
    return planning.SCHEMES[name].traffic(site).cost(cluster)


def test_seconds_of_the_parameter_server():
    """Two messages, and 2 MN (P1 + P2 - 2) / P2 numbers of which half are sent: 1.5 x 4 x 20000."""
    found = cost_of(schemes.PS, dense_site(100, 200, 1), CLUSTER)
    assert found.num_bytes == 4 * 80_000 * 3 / 4
    assert (found.latency, found.transfer, found.rebuild) == pytest.approx(
        (20e-6, 1.5 * 80_000 / 125e6, 0))


def test_seconds_of_factors():
    """One message, K (P1 - 1)(M + N) numbers sent, and 2 K (P1 - 1) M N operations."""
    found = cost_of(schemes.SFB, dense_site(100, 200, 8), CLUSTER)
    assert found.num_bytes == 2 * 8 * 3 * 300 * 4
    assert (found.latency, found.transfer, found.rebuild) == pytest.approx(
        (10e-6, 8 * 3 * 300 * 4 / 125e6, 2 * 8 * 3 * 20_000 / 1e9))


def test_seconds_of_half_factors():
    """Two messages; K (P1 - 1) M numbers sent and, of K N and M N, (P1 + P2 - 2) / 2 P2 of each; rebuilt once."""
    found = cost_of(schemes.HFB, dense_site(100, 200, 8), CLUSTER)
    assert found.num_bytes == 2 * 4 * (8 * 3 * 100 + (8 * 200 + 100 * 200) * 3 / 4)
    assert (found.latency, found.transfer, found.rebuild) == pytest.approx((20e-6, found.num_bytes / 2 / 125e6, 0))
    assert found == cost_of(schemes.HFB, dense_site(200, 100, 8), CLUSTER)
    two = dataclasses.replace(CLUSTER, servers=2)
    found = cost_of(schemes.HFB, dense_site(100, 200, 8), two)
    assert found.num_bytes == 2 * 4 * (8 * 3 * 100 + (8 * 200 + 100 * 200) * 4 / 2 / 2)
    assert found.rebuild == pytest.approx(2 * 8 * 20_000 / 1e9)


HEAD = dense_site(768, 30_522, 160, "head")


@pytest.mark.parametrize("name, megabytes, gigaoperations", [("ps", 164.1, 0), ("sfb", 140.2, 52.5), ("hfb", 102.6, 0)])
def test_half_factors_of_a_wide_head(name, megabytes, gigaoperations):
    """Bytes in each direction. A server multiplies 7.5 GFLOP, as many as the products of its own rows would be."""
    cluster = planning.Cluster(8, gflops=1)
    found = cost_of(name, HEAD, cluster)
    assert (found.num_bytes / 2e6, found.rebuild) == pytest.approx((megabytes, gigaoperations), rel=1e-3)
    assert planning.SCHEMES["hfb"].traffic(HEAD).operations == pytest.approx(7.5e9, rel=1e-2)
    assert scheme("auto", HEAD, 8) == "hfb"
    assert [scheme(policy, HEAD, 8) for policy in ("ps", "sfb", "paper")] == ["ps", "sfb", "sfb"]


def test_columns_that_servers_update_come_down_as_weights():
    """One message less, and 61.6 MB in each direction with weights of two bytes."""
    cluster, kept = planning.Cluster(8, latency_us=10), dataclasses.replace(HEAD, is_divided=True)
    whole, up = (cost_of("hfb", site, cluster) for site in (HEAD, kept))
    down = planning.Exchange("shards/head", planning.SHARDS, "bfloat16", 2, HEAD.shape).cost(cluster)
    assert (up.num_bytes + down.num_bytes) / 2e6 == pytest.approx(61.6, rel=1e-3)
    assert up.num_bytes + 2 * down.num_bytes == whole.num_bytes
    assert (whole.latency, up.latency, down.latency) == (2e-5, 1e-5, 1e-5)
    assert planning.SCHEMES["hfb"].note(kept) and not planning.SCHEMES["hfb"].note(HEAD)


@pytest.mark.parametrize("m, n, columns, follows", [
    (768, 3000, 768, True), (768, 3000, 3000, False), (3000, 768, 768, True), (768, 768, 768, False)])
def test_a_bias_follows_half_factors_if_it_needs_the_narrow_one(m, n, columns, follows):
    bias = planning.Site("bias", "float32", 4, (columns,), bias_of="kernel")
    plan = plan_for([dense_site(m, n, 160), bias], "ps", 8, pins=(("kernel", "hfb"),))
    assert [(d.scheme, d.leader) for d in plan.decisions] == [
        ("hfb", None), ("hfb", "kernel") if follows else ("ps", None)]
    again = planning.Planner(plan.cluster, given=poseidon.Plan.from_text(plan.to_text()))
    assert again.plan(plan.sites).agreement_text() == plan.agreement_text()


def test_half_factors_cross_the_network_as_they_travel():
    """Narrow factors and the gradient once for a node; columns of each rank to each server."""
    cluster = dataclasses.replace(CLUSTER, workers=8, servers=8, ranks_per_node=2)
    found = cost_of(schemes.HFB, dense_site(100, 200, 8), cluster)
    assert found.num_bytes == 2 * 4 * (2 * 8 * 3 * 100 + (2 * 8 * 200 + 100 * 200) * 3 / 4)
    assert found.rebuild == 0


def test_half_factors_are_no_choice_where_hosts_carry_for_nothing():
    """On one machine nothing crosses a network; and between linked GPUs, half factors would go through the host."""
    site = dense_site(768, 3000, 160)
    alone = planning.Cluster(4, ranks_per_node=4)
    decision, = planning.make_plan([site], "auto", alone).decisions
    assert (decision.scheme, decision.runner_up) == ("ps", "hfb")
    linked = dataclasses.replace(alone, gpus_per_node=4, gpu_link_gbps=100)
    decision, = planning.make_plan([site], "auto", linked, pins=(("*", "hfb"),)).decisions
    assert (decision.scheme, decision.reason) == (
        "ps", "pinned to 'hfb', which is not possible: the engine cannot carry it out")


@pytest.mark.parametrize("ranks_per_node, share", [(1, 0.75), (2, 1.0), (4, 1.0)])
def test_gradients_that_were_cast_go_to_the_servers_in_half_of_their_bytes(ranks_per_node, share):
    """And come back whole; what the ranks of a node add up leaves it whole, too."""
    cluster = dataclasses.replace(CLUSTER, ranks_per_node=ranks_per_node)
    wide = dense_site(100, 200, 1)
    narrow = dataclasses.replace(wide, cast_from="bfloat16")
    found, expected = (cost_of(schemes.PS, site, cluster) for site in (narrow, wide))
    assert found.num_bytes == share * expected.num_bytes
    assert found.transfer == pytest.approx(share * expected.transfer)
    assert cost_of(schemes.SFB, narrow, cluster) == cost_of(schemes.SFB, wide, cluster)
    plan = plan_for([narrow], "ps", 4)
    assert plan.predictions()["variables"][0]["reason"] == "the policy is 'ps'; sent in bfloat16, from which it is cast"
    given = planning.Planner(plan.cluster, given=plan)
    assert given.plan([narrow]) == plan and given.plan([wide]) == plan_for([wide], "ps", 4)


@pytest.mark.parametrize("workers, ranks_per_node, gbps, expected", [
    (2, 1, 1, 1 / 16), (2, 1, 10, 10 / 16), (2, 1, 16, 1), (2, 1, 100, 1), (4, 1, 1, 1 / 24), (4, 1, 10, 10 / 24),
    (4, 2, 1, 1 / 16), (4, 4, 0.1, 1), (1, 1, 0.1, 1)])
def test_zeros_are_left_out_where_that_takes_less_time_than_sending_them(workers, ranks_per_node, gbps, expected):
    """A rank leaves out its own and puts back those of all others, at 4 GB/s; as many bytes cross its node's link."""
    cluster = planning.Cluster(workers, bandwidth_gbps=gbps, ranks_per_node=ranks_per_node)
    assert planning.least_saving(cluster) == pytest.approx(expected)


def test_a_plan_has_the_bytes_that_were_measured_without_zeros():
    bias = planning.Site("bias", "float32", 4, (50,), bias_of="kernel")
    plan = plan_for([dense_site(100, 50, 8), bias, dense_site(10, 10, 1, "other")], "sfb", 3, operations=1e9,
                    pins=[("other", "ps")])
    measured = plan.measured({"sites": {
        name: {"factor_bytes": whole, "short_factor_bytes": short} for name, whole, short in (
            ("kernel", 400, 100), ("bias", 0, 0), ("other", 0, 0), ("unknown", 10, 1))}})
    kernel, *others = measured.decisions
    assert kernel.num_bytes == 0.25 * plan.decisions[0].num_bytes
    assert kernel.cost.rebuild == plan.decisions[0].cost.rebuild
    reason = measured.predictions()["variables"][0]["reason"]
    assert reason.endswith("factors; without their zeros, factors had 0.25 of their bytes") and reason in str(measured)
    assert others == list(plan.decisions[1:])
    assert measured.agreement_text() == plan.agreement_text() and measured.digest == plan.digest
    assert planning.Plan.from_text(measured.to_text()) == measured
    assert plan.measured({"sites": {}}) == plan


# A link of 8 Gbit/s is 1e9 bytes per second, eight times the network. A rank gives 80,000 bytes of a gradient, 9600 of
# factors, and 880 of slices.
@pytest.mark.parametrize("ranks, options, expected", [
    (1, {"gpu_link_gbps": 8}, (1.5 * 80_000 / 1e9, 3 * 9600 / 1e9, 3 * 880 / 1e9)),
    (4, {"gpu_link_gbps": 8}, (1.5 * 80_000 / 1e9, 3 * 9600 / 1e9, 3 * 880 / 1e9)),
    (1, {"gpu_link_gbps": 8, "servers": 1}, (3 * 80_000 / 1e9, 3 * 9600 / 1e9, 3 * 880 / 1e9)),
    (1, {}, (1.5 * 80_000 / 125e6, 3 * 9600 / 125e6, 3 * 880 / 125e6)),
    # Two nodes of two: the network is slower, or the links, for sums alone or for all.
    (2, {"gpu_link_gbps": 8}, (80_000 / 125e6, 2 * 9600 / 125e6, 2 * 880 / 125e6)),
    (2, {"gpu_link_gbps": 0.8}, (80_000 / 1e8, 2 * 9600 / 125e6, 2 * 880 / 125e6)),
    (2, {"gpu_link_gbps": 0.08}, (80_000 / 1e7, 9600 / 1e7, 880 / 1e7)),
    (2, {}, (80_000 / 125e6, 2 * 9600 / 125e6, 2 * 880 / 125e6))])
def test_gradients_take_the_links_between_gpus(ranks, options, expected):
    """Their bytes, latency and arithmetic are the same; other exchanges go as they did."""
    host = dataclasses.replace(CLUSTER, ranks_per_node=ranks, servers=options.get("servers", 4))
    linked = dataclasses.replace(host, gpus_per_node=2 if ranks == 2 else 4, **options)
    layer, table = dense_site(100, 200, 8), planning.Site(
        "table", "float32", 4, (1000, 10), slices=planning.Slices(20, 44))
    traffics = [planning.SCHEMES[name].traffic(site) for name, site in (
        (schemes.PS, layer), (schemes.SFB, layer), (schemes.SPARSE, table))]
    assert [traffic.cost(linked).transfer for traffic in traffics] == pytest.approx(expected)
    for traffic in traffics:
        found = traffic.cost(host)
        assert traffic.cost(linked) == dataclasses.replace(found, transfer=traffic.cost(linked).transfer)
    for kind in planning.exchange.KINDS:
        other = planning.Exchange("x", kind, "float32", 4, (3, 5))
        assert other.cost(linked) == other.cost(host)


@pytest.mark.parametrize("cast_from, sent_bytes", [(None, 80_000), ("bfloat16", 40_000)])
@pytest.mark.parametrize("options", [{}, {"servers": 1}, {"ranks_per_node": 2, "servers": 2}])
def test_the_ways_of_shards_cost_what_those_of_a_sum_do(options, cast_from, sent_bytes):
    cluster = dataclasses.replace(CLUSTER, **options)
    both = planning.cost.Traffic(planning.SUM, 80_000, sent_bytes=sent_bytes).cost(cluster)
    up = planning.Exchange("x", planning.SCATTER, "float32", 4, (100, 200), cast_from=cast_from).cost(cluster)
    down = planning.Exchange("x", planning.SHARDS, "float32", 4, (100, 200)).cost(cluster)
    is_shorter = cast_from is not None and cluster.ranks_per_node == 1  # what a node adds up leaves it whole
    assert up.num_bytes == pytest.approx((0.5 if is_shorter else 1) * down.num_bytes)
    for field in dataclasses.fields(both):
        assert getattr(up, field.name) + getattr(down, field.name) == pytest.approx(getattr(both, field.name))


@pytest.mark.parametrize("options", [{}, {"servers": 1}, {"servers": 6, "dedicated_servers": 2}])
def test_rows_of_a_sum_cost_its_way_up_whoever_serves(options):
    found = planning.Exchange("x", planning.RETURN, "float32", 4, (100, 200)).cost(
        dataclasses.replace(CLUSTER, **options))
    assert found == planning.Exchange("x", planning.SCATTER, "float32", 4, (100, 200)).cost(CLUSTER)
    assert found.num_bytes == 1.5 * 80_000


def test_gradients_that_were_cast_take_links_in_half_of_their_bytes():
    """Also where several nodes make them whole again before they leave."""
    for ranks, gpus in ((1, 4), (2, 2)):
        cluster = dataclasses.replace(CLUSTER, ranks_per_node=ranks, gpus_per_node=gpus, gpu_link_gbps=0.01)
        wide = dense_site(100, 200, 1)
        narrow = dataclasses.replace(wide, cast_from="bfloat16")
        found, expected = (cost_of(schemes.PS, site, cluster) for site in (narrow, wide))
        assert found.transfer == pytest.approx(0.75 * expected.transfer)


@pytest.mark.parametrize("accelerators", [False, True])
def test_links_between_gpus_favour_sums_which_need_no_rebuilding(accelerators):
    """1.5 MN against 96 (M + N) numbers: 4.8 and 0.61 ms by the host, 0.02 and 0.003 by links; rebuilding takes 0.04."""
    host = planning.Cluster(4, 4, 10, 10, 5000, accelerators)
    linked = dataclasses.replace(host, gpus_per_node=4, gpu_link_gbps=2400)
    plans = [planning.make_plan([dense_site(1000, 1000, 32)], "auto", cluster, operations=1e6)
             for cluster in (host, linked)]
    assert [plan.decisions[0].scheme for plan in plans] == ["sfb", "ps"]
    for plan in plans:
        assert plan.least_seconds <= plan.step_seconds
    assert planning.least_saving(host) < 1 == planning.least_saving(linked)


@pytest.mark.parametrize("ranks_per_node, cluster, routes", [
    (1, "4 workers, 4 servers, 10 Gbit/s, 50 µs, 1000 GFLOP/s, 4 GPUs to a node linked at 2400 Gbit/s",
     "Gradients take the links between the GPUs; what else is exchanged goes through the host."),
    (2, "4 workers, 4 servers, 2 to a node, 10 Gbit/s, 50 µs, 1000 GFLOP/s, 2 GPUs to a node linked at 2400 Gbit/s",
     "Inside a node, gradients take the links between its 2 GPUs. The network carries one sum of each node, the "
     "factors and slices of all its ranks, and what else is exchanged.")])
def test_plans_say_what_takes_the_links_between_gpus(ranks_per_node, cluster, routes):
    given = planning.Cluster(4, ranks_per_node=ranks_per_node, gpus_per_node=4 // ranks_per_node, gpu_link_gbps=2400)
    plan = planning.make_plan([dense_site(100, 50, 8)], "ps", given)
    first, *_, last = str(plan).splitlines()
    assert (first, last) == (f"plan by policy 'ps' for {cluster}", routes)
    assert f"for {cluster}. {routes}<" in plan_page.html_report({"": plan})


def test_an_urgent_message_waits_for_what_is_under_way_between_gpus():
    """Copies of 8 MiB, or of 256 KiB to each of 3 others."""
    host = dataclasses.replace(CLUSTER, bandwidth_gbps=8)
    for cluster, num_bytes in ((host, 3 << 18), (dataclasses.replace(host, gpus_per_node=4, gpu_link_gbps=8), 8 << 20)):
        plan = planning.make_plan([dense_site(100, 50, 8)], "ps", cluster)
        message, = step_time.messages(plan.decisions, plan.sites, (), cluster)
        assert message.piece == pytest.approx(num_bytes / 1e9)


@pytest.mark.parametrize("ranks_per_node, nodes", [(2, 2), (3, 2), (4, 1)])
def test_ranks_of_a_node_share_its_link(ranks_per_node, nodes):
    """P1 and P2 count nodes, and K a node's rows; but all ranks' rows are rebuilt."""
    cluster = dataclasses.replace(CLUSTER, ranks_per_node=ranks_per_node)
    site = dense_site(100, 200, 8)
    ps, sfb = cost_of(schemes.PS, site, cluster), cost_of(schemes.SFB, site, cluster)
    assert ps.num_bytes == 4 * 80_000 * (nodes - 1) / nodes
    assert sfb.num_bytes == 2 * (8 * ranks_per_node) * (nodes - 1) * 300 * 4
    assert [c.transfer for c in (ps, sfb)] == pytest.approx([c.num_bytes / 2 / 125e6 for c in (ps, sfb)])
    assert sfb.rebuild == cost_of(schemes.SFB, site, CLUSTER).rebuild
    assert (ps.latency > 0) == (sfb.latency > 0) == (nodes > 1)


def test_more_ranks_on_a_node_favour_the_parameter_server():
    """2 K 2 (P - 1)(M + N) is 64 of 2 nodes with 2 ranks each, 2MN (2P - 2) / P is 32."""
    site = dense_site(4, 4, 2)
    assert scheme("paper", site, 2) == "sfb"
    cluster = planning.Cluster(4, ranks_per_node=2)
    decision, = planning.make_plan([site], "paper", cluster).decisions
    assert decision.scheme == "ps" and "= 64 is more than" in decision.reason and "for K=4" in decision.reason


@pytest.mark.parametrize("workers, dedicated, servers, share, speedup", [
    (4, 0, 0, 0, 1), (4, 1, 0, 7 / 23, 69 / 62), (4, 2, 0, 7 / 15, 45 / 38), (4, 3, 0, 21 / 37, 111 / 90),
    (4, 4, 0, 1, 1.5), (4, 6, 0, 1, 1.5), (8, 7, 0, 1, 49 / 32), (8, 8, 0, 1, 1.75), (2, 1, 0, 7 / 15, 1),
    (4, 2, 2, 1, 0.75), (4, 1, 2, 7 / 15, 45 / 62)])
def test_dedicated_servers_own_a_share_by_which_the_busiest_link_is_less_busy(workers, dedicated, servers, share,
                                                                             speedup):
    site, without = dense_site(1000, 500, 1), planning.Cluster(workers)
    cluster = planning.Cluster(workers, servers, dedicated_servers=dedicated)
    assert cluster.dedicated_share == pytest.approx(share)
    seconds, before = (cost_of(schemes.PS, site, each).transfer for each in (cluster, without))
    assert before / seconds == pytest.approx(speedup)
    if dedicated and cluster.server_nodes == workers:  # to own all would be no better

        def busiest(share):
            return max(share + 2 * (1 - share) * (workers - 1) / workers, share * workers / dedicated)

        assert busiest(share) <= busiest(1)
        assert seconds == pytest.approx(busiest(share) * cluster.send_seconds(site.num_bytes))


def test_dedicated_servers_take_one_way_at_a_time():
    """Half of the bytes on the way up help where servers are workers, and not where links carry one way's bytes."""
    wide = dense_site(100, 200, 1)
    narrow = dataclasses.replace(wide, cast_from="bfloat16")
    for dedicated, ratio in ((0, 0.75), (4, 1)):
        cluster = planning.Cluster(4, dedicated_servers=dedicated)
        assert cost_of(schemes.PS, narrow, cluster).transfer == pytest.approx(
            ratio * cost_of(schemes.PS, wide, cluster).transfer)


def test_plans_say_how_many_servers_are_dedicated(tmp_path):
    plan = planning.make_plan([dense_site(100, 50, 8)], "ps", planning.Cluster(4, dedicated_servers=2))
    assert str(plan).startswith("plan by policy 'ps' for 4 workers, 6 servers (2 dedicated), 10 Gbit/s")
    plan.save(tmp_path / "plan")
    loaded = planning.Plan.load(tmp_path / "plan")
    assert loaded == plan and loaded.digest != dataclasses.replace(plan, cluster=planning.Cluster(4)).digest
    with pytest.raises(poseidon.PoseidonError, match=r"for 4 workers, 6 servers \(2 dedicated\), but this job has 4 w"):
        plan.check(plan.sites, planning.Cluster(4))


def test_seconds_with_few_servers_are_those_of_a_server():
    """With 1 server it receives and sends MN for each of the 3 others: 3 MN each way."""
    one = dataclasses.replace(CLUSTER, servers=1)
    assert cost_of(schemes.PS, dense_site(100, 200, 1), one).transfer == pytest.approx(3 * 80_000 / 125e6)


def test_seconds_of_slices():
    site = planning.Site("table", "float32", 4, (1000, 10), slices=planning.Slices(20, 44))
    found = cost_of(schemes.SPARSE, site, CLUSTER)
    assert found.num_bytes == 2 * 3 * 20 * 44
    assert found.seconds == pytest.approx(10e-6 + 3 * 20 * 44 / 125e6)


def test_one_worker_costs_nothing():
    alone = planning.Cluster(1)
    assert cost_of(schemes.PS, dense_site(10, 10, 4), alone).seconds == 0
    assert cost_of(schemes.SFB, dense_site(10, 10, 4), alone).seconds == 0


@pytest.mark.parametrize("bandwidth, gflops, expected", [
    (1, 1000, "sfb"),    # a slow network
    (1000, 1, "ps"),     # slow arithmetic
    (1000, 1e6, "sfb"),  # neither: fewer bytes and one message
])
def test_auto_compares_seconds(bandwidth, gflops, expected):
    cluster = planning.Cluster(4, 4, bandwidth, 10, gflops)
    site = dense_site(1000, 1000, 32)
    decision, = planning.make_plan([site], "auto", cluster, schemes=PAPERS).decisions
    other = {"ps": "sfb", "sfb": "ps"}[expected]
    assert (decision.scheme, decision.runner_up) == (expected, other)
    assert decision.seconds <= decision.runner_up_cost.seconds
    assert f"{texts.duration(cost_of(schemes.PS, site, cluster).seconds)} dense" in decision.reason


SIZES = (1, 7, 64, 1000, 4096)


@pytest.mark.parametrize("policy", planning.POLICIES)
def test_costs_grow_with_the_shape_and_fall_with_the_bandwidth(policy):
    def seconds(m, n, gbps):
        plan = planning.make_plan([dense_site(m, n, 32)], policy,
                                  planning.Cluster(8, 8, gbps, 10, 500))
        return plan.decisions[0].seconds

    for n in SIZES:
        by_m = [[seconds(m, n, gbps) for m in SIZES] for gbps in (0.1, 1, 10, 100)]
        for slower, faster in zip(by_m, by_m[1:]):
            assert all(a > b for a, b in zip(slower, faster))
        if policy != "paper":  # it may take the slower of two schemes
            assert all(row == sorted(row) for row in by_m)


def test_auto_is_never_slower_than_another_policy():
    for gbps in (0.1, 1, 10, 100):
        for k in (1, 32, 1000):
            cluster = planning.Cluster(8, 8, gbps, 10, 500)
            by_policy = {policy: planning.make_plan([dense_site(m, n, k, f"{m}x{n}") for m in SIZES
                                                     for n in SIZES], policy, cluster)
                         for policy in planning.POLICIES}
            seconds = {policy: sum(d.seconds for d in plan.decisions)
                       for policy, plan in by_policy.items()}
            assert seconds["auto"] == min(seconds.values())


@pytest.mark.parametrize("gbps, expected", [
    (1, "sfb"),     # bytes are what the step waits for
    (40, "ps"),     # backpropagation hides them, and rebuilding would come on top
    (0.001, "sfb"),
])
def test_auto_on_accelerators_counts_what_is_hidden(gbps, expected):
    """For a gradient that takes less time as factors when considered alone."""
    sites = [dense_site(8192, 8192, 32, "top"), dense_site(256, 256, 32, "bottom")]
    sites = [dataclasses.replace(site, operations=operations)
             for site, operations in zip(sites, (3e11, 9e11))]
    cluster = planning.Cluster(32, 32, gbps, 0, 4500, True)
    assert planning.make_plan(sites, "auto", cluster, schemes=PAPERS).decisions[0].scheme == "sfb"
    plan = planning.make_plan(sites, "auto", cluster, operations=1e12, schemes=PAPERS)
    top = plan.decisions[0]
    assert top.scheme == expected
    assert ("; by 'ps' the whole step is shorter" in top.reason) == (expected == "ps")
    assert top.runner_up == {"ps": "sfb", "sfb": "ps"}[expected]
    for policy in ("ps", "sfb"):
        other = planning.make_plan(sites, policy, cluster, operations=1e12)
        assert plan.step_seconds <= other.step_seconds / 0.95


def test_auto_on_accelerators_follows_pins_and_keeps_biases_with_their_layer():
    sites = [dataclasses.replace(dense_site(8192, 8192, 32, "top"), operations=3e11),
             planning.Site("bias", "float32", 4, (8192,), bias_of="top", operations=3e11)]
    cluster = planning.Cluster(32, 32, 40, 0, 4500, True)
    free, pinned = (planning.make_plan(sites, "auto", cluster, pins, 1e12)
                    for pins in ((), (("top", "sfb"),)))
    assert [d.scheme for d in free.decisions] == ["ps", "ps"] and not free.decisions[1].leader
    assert [d.scheme for d in pinned.decisions] == ["sfb", "sfb"]


# Numbers of the table "per-node traffic" that follow from table 1 of the paper: VGG19 at K = 32, Gbit
# sent plus received by a node. Convolutions have 20,024,384 numbers.
VGG19 = [planning.Site("convolutions", "float32", 4, (20_024_384,), refusal="not a product"),
         dense_site(25088, 4096, 32, "fc6"), dense_site(4096, 4096, 32, "fc7"),
         dense_site(4096, 1000, 32, "fc8")]


@pytest.mark.parametrize("workers, ps, hybrid", [(8, 16.1, 2.85), (16, 17.2, 3.71), (32, 17.8, 5.18)])
def test_traffic_of_vgg19(workers, ps, hybrid):
    for policy, gigabits in (("ps", ps), ("paper", hybrid), ("auto", hybrid)):
        plan = plan_for(VGG19, policy, workers)
        assert plan.total_bytes * 8 / 1e9 == pytest.approx(gigabits, rel=5e-3)


# ---- a step -----------------------------------------------------------------------------------


def test_step_hides_what_backpropagation_leaves_time_for():
    """Compute takes 10 s. The last layer is ready after 4 s and sends for 3 s; the first for 2 s."""
    last = planning.Site("last", "float32", 4, (int(3 * 125e6 / 1.5 / 4),), operations=4e9)
    first = planning.Site("first", "float32", 4, (int(2 * 125e6 / 1.5 / 4),), operations=10e9)
    cluster = dataclasses.replace(CLUSTER, latency_us=0)
    plan = planning.make_plan([first, last], "ps", cluster, operations=10e9)
    assert plan.compute_seconds == 10
    assert plan.step_seconds == pytest.approx(12)
    assert not plan.is_slower_than_one_process
    # Were the last layer to send for 30 s, the first would wait until second 34.
    slow = dataclasses.replace(last, shape=(10 * last.shape[0],))
    plan = planning.make_plan([first, slow], "ps", cluster, operations=10e9)
    assert plan.step_seconds == pytest.approx(36)
    slower = dataclasses.replace(last, shape=(20 * last.shape[0],))
    plan = planning.make_plan([first, slower], "ps", cluster, operations=10e9)
    assert plan.is_slower_than_one_process
    assert "SLOWER than one process, which would take 40 s" in str(plan)


def test_step_of_unknown_arithmetic():
    plan = plan_for([dense_site(10, 10, 1)], "ps", 2)
    assert plan.step_seconds is None and plan.is_slower_than_one_process is None


def test_step_ends_with_the_rebuild_of_what_arrives_last():
    """The first arrives after 7.4 s, and is rebuilt in 0.2 s; the other one arrives meanwhile."""
    early = dataclasses.replace(dense_site(1000, 1000, 100, "early"), operations=1e9)
    late = dataclasses.replace(dense_site(10, 10, 100, "late"), operations=2e9)
    cluster = planning.Cluster(2, bandwidth_gbps=0.001, latency_us=0, gflops=1)
    plan = planning.make_plan([late, early], "sfb", cluster, operations=2e9)
    costs = {d.site: d.cost for d in plan.decisions}
    assert costs["early"].rebuild == pytest.approx(0.2) and costs["late"].transfer < 0.1
    assert plan.step_seconds == pytest.approx(1 + costs["early"].transfer + sum(c.rebuild for c in costs.values()))


def test_rebuilding_delays_the_layers_that_follow_it():
    """Computing takes 2 s; factors that arrive after 1.2 s are rebuilt in 0.2 s before the last layer is computed."""
    first = dataclasses.replace(dense_site(1000, 1000, 100, "top"), operations=1e9)
    middle, last = (planning.Site(name, "float32", 4, (250_000,), operations=operations)
                    for name, operations in (("middle", 1.5e9), ("last", 2e9)))
    cluster = planning.Cluster(2, bandwidth_gbps=0.032, latency_us=0, gflops=1)
    plan = planning.make_plan([last, middle, first], "sfb", cluster, operations=2e9)
    assert [d.cost.transfer for d in plan.decisions] == pytest.approx([0.25, 0.25, 0.2])
    assert plan.step_seconds == pytest.approx(2 + 0.2 + 0.25)


def gigabyte_layers(**needed):
    """1 s forward, 2 s backward; the sums of two layers take 2 s each. The upper one's is ready first, at 2 s."""
    lower, upper = (planning.Site(name, "float32", 4, (250_000_000,), operations=operations, needed=needed.get(name))
                    for name, operations in (("lower", 3e9), ("upper", 2e9)))
    return [lower, upper]


@pytest.mark.parametrize("needed, steps, seconds", [
    ({}, 1, 6), ({"lower": 0.0, "upper": 0.5e9}, 1, 6),
    # The lower gradient interrupts the upper one, and is there after 5 s; half a second of the next step later, the
    # upper one comes after 6 s. From then on each step takes 5.5 s.
    ({"lower": 0.0, "upper": 0.5e9}, 2, (6 + 5.5) / 2), ({"lower": 0.0, "upper": 0.5e9}, 3, (6 + 2 * 5.5) / 3),
    # As with a global norm: the next step begins when all are there.
    ({"lower": 0.0, "upper": 0.0}, 3, 6),
    # The next step needs neither: the links are always busy, from 2 s on.
    ({}, 3, (2 + 3 * 4) / 3)])
def test_the_next_step_hides_what_it_does_not_need_yet(needed, steps, seconds):
    cluster = planning.Cluster(2, bandwidth_gbps=4, latency_us=0, gflops=1)
    plan = planning.make_plan(gigabyte_layers(**needed), "ps", cluster, operations=3e9, steps=steps)
    assert plan.step_seconds == pytest.approx(seconds) and plan.compute_seconds == 3
    assert (f" s for a step of {steps} that overlap" in str(plan)) == (steps > 1)


def test_factors_that_the_next_step_needs_are_rebuilt_before_it_goes_on():
    """Computing takes 1 s; the factors are ready then, travel for 1.024 s, and are rebuilt in 0.256 s."""
    site = dataclasses.replace(dense_site(1000, 1000, 128), operations=1e9)
    cluster = planning.Cluster(2, bandwidth_gbps=0.008, latency_us=0, gflops=1)
    for needed, steps, seconds in ((0.0, 1, 2.28), (0.0, 3, 2.28), (0.5e9, 2, (1 + 1.024 + 0.256 + 0.5 + 1.28) / 2)):
        plan = planning.make_plan([dataclasses.replace(site, needed=needed)], "sfb", cluster, operations=1e9,
                                  steps=steps)
        assert plan.step_seconds == pytest.approx(seconds)


def test_auto_plans_with_what_the_next_step_hides():
    """Where the next forward pass hides bytes, rebuilding costs more than they do."""
    sites = [dataclasses.replace(dense_site(8192, 8192, 256, "top"), operations=4e11, needed=3e11),
             dataclasses.replace(dense_site(256, 256, 256, "bottom"), operations=1e12, needed=0.0)]
    cluster = planning.Cluster(8, 8, 20, 0, 4500, True)
    single, overlapping = (planning.make_plan(sites, "auto", cluster, operations=1e12, steps=steps, schemes=PAPERS)
                           for steps in (1, 8))
    assert [plan.decisions[0].scheme for plan in (single, overlapping)] == ["sfb", "ps"]
    assert overlapping.step_seconds < single.step_seconds


def test_a_piece_that_travels_is_not_overtaken():
    """Three peers get 256 KiB each at a time, in 6.3 ms: what is needed first leaves after those that have begun."""
    first = planning.Site("first", "float32", 4, (1000,), operations=1e9, needed=0.0)
    large = planning.Site("large", "float32", 4, (3 << 20,), operations=9.9e8)
    cluster = planning.Cluster(4, bandwidth_gbps=1, latency_us=0, gflops=1)
    alone, both = (planning.make_plan(sites, "ps", cluster, operations=1e9, steps=2).step_seconds
                   for sites in ([first], [first, large]))
    piece, way = 3 * (256 << 10) * 8 / 1e9, 1.5 * (6 << 20) * 8 / 1e9  # to the servers, and as long back
    assert way == pytest.approx(12 * piece)
    # The large gradient has begun 10 ms before, so that a second piece is under way.
    assert alone < 1.001 and both == pytest.approx((1 + 2 * piece - 0.01 + 1 - 0.01 + 2 * way) / 2, rel=1e-4)


def test_what_rows_wait_for_does_not_wait_for_gradients_of_the_step_before():
    """Half a second of computing, an exchange of 0.1 s in the forward pass, and a gradient of 10 s that nothing needs."""
    moments = planning.Site("moments", "float32", 4, (12_500_000,), operations=5e8, is_waited_for=True)
    gradient = planning.Site("gradient", "float32", 4, (1_250_000_000,), operations=1e9)
    cluster = planning.Cluster(2, bandwidth_gbps=4, latency_us=0, gflops=1)
    plan = planning.make_plan([moments, gradient], "ps", cluster, operations=1e9, steps=3)
    assert plan.step_seconds == pytest.approx((1.1 + 3 * 10 + 2 * 0.1) / 3)


def random_case(seed):
    """Returns (sites, cluster, operations): some layers with factors on some accelerators."""
    rng = random.Random(seed)
    number, operations = rng.randint(2, 6), 10 ** rng.uniform(9, 12)
    sites = []
    for i in range(number):
        m, n, k = (2 ** rng.randint(5, 13) for _ in range(3))
        ready = operations * (1 / 3 + 2 / 3 * (number - i) / number)
        sites.append(dataclasses.replace(dense_site(m, n, min(k, 512), f"layer{i}"), operations=ready,
                                         needed=operations / 3 * i / number))
    return sites, planning.Cluster(rng.choice((2, 8, 32)), bandwidth_gbps=10 ** rng.uniform(-1, 2), latency_us=20,
                                   gflops=10 ** rng.uniform(2, 4), accelerators=True), operations


# Cases in which choosing gradient by gradient takes more than 5 % longer.
@pytest.mark.parametrize("steps, seeds", [
    (1, (176, 241, 285, 361, 402, 525, 642, 770, 836, 966, 976, 1003, 1224, 1225, 1230, 1341, 1377, 1483)),
    (8, (176, 241, 396, 514, 525, 642, 658, 771, 836, 924, 976, 1003, 1062, 1224, 1225, 1321, 1341, 1377))])
def test_auto_on_accelerators_is_as_fast_as_any_choice(steps, seeds):
    """Of all combinations of schemes, which are all tried here."""
    for seed in seeds:
        sites, cluster, operations = random_case(seed)

        def plan(pins=(), operations=operations, sites=sites, cluster=cluster):
            return planning.make_plan(sites, "auto", cluster, pins, operations, steps=steps, schemes=PAPERS)

        best = min(plan(tuple((site.name, scheme) for site, scheme in zip(sites, schemes))).step_seconds
                   for schemes in itertools.product(("ps", "sfb"), repeat=len(sites)))
        assert plan().step_seconds <= best * (1 + 1e-9), f"seed {seed}"
        each_alone = dataclasses.replace(plan(operations=None), operations=operations)
        assert each_alone.step_seconds > best / 0.95, f"seed {seed}"


def vgg16(batch_size):
    """Returns (sites, operations) of VGG16: its convolutions as one gradient that is no product, and its dense layers."""
    forward = [2 * 15.35e9 * batch_size, *(2 * batch_size * m * n for m, n in VGG16_LAYERS.values())]
    done, sites = sum(forward), []
    for (name, (m, n)), own in reversed(list(zip(VGG16_LAYERS.items(), forward[1:]))):
        sites.append(dataclasses.replace(dense_site(m, n, batch_size, name), operations=done + own))
        done += 2 * own
    sites.append(planning.Site("convolutions", "float32", 4, (14_710_464,), operations=done + forward[0]))
    return sites[::-1], 3 * sum(forward)


VGG16_LAYERS = {"fc1": (25088, 4096), "fc2": (4096, 4096), "predictions": (4096, 1000)}


@pytest.mark.parametrize("accelerators", [False, True])
@pytest.mark.parametrize("steps", [1, 8])
def test_auto_is_never_behind_another_policy_by_its_own_estimate(accelerators, steps):
    sites, operations = vgg16(32)
    cases = [(sites, planning.Cluster(workers, bandwidth_gbps=gbps, gflops=gflops), operations)
             for workers, gbps, gflops in itertools.product((2, 4, 8, 32), (1, 10, 100), (100, 1000, 50_000))]
    cases += [random_case(seed) for seed in range(40)]
    for sites, cluster, operations in cases:
        cluster = dataclasses.replace(cluster, accelerators=accelerators)
        seconds = {policy: planning.make_plan(sites, policy, cluster, operations=operations, steps=steps).step_seconds
                   for policy in planning.POLICIES}
        assert seconds["auto"] <= min(seconds.values()) * (1 + 1e-9), cluster


def test_auto_takes_what_another_policy_chooses_if_that_is_shorter():
    """Computing takes 29 s, and hides the 1.2 s that a layer's bytes take; its factors are rebuilt on top."""
    sites, operations = vgg16(32)
    slow, fast = (planning.make_plan(sites, "auto", planning.Cluster(4, bandwidth_gbps=1, gflops=gflops),
                                     operations=operations) for gflops in (100, 10_000))
    assert [decision.scheme for decision in slow.decisions] == ["ps"] * 4
    assert slow.decisions[1].reason.endswith("by 'ps' the whole step is shorter")
    assert fast.decisions[1].scheme == "sfb"
    measured = planning.Cluster(4, bandwidth_gbps=1, gflops=100, uncertainty=0.01)  # on processors, which may hide less
    assert planning.make_plan(sites, "auto", measured, operations=operations).decisions[1].scheme == "sfb"


@pytest.mark.parametrize("uncertainty, expected", [(0.0, "ps"), (0.1, "ps"), (0.5, "sfb")])
def test_auto_changes_nothing_for_a_gain_that_is_not_certain(uncertainty, expected):
    """By servers the large gradient takes 1.6 s, hidden with 0.1 s to spare; as factors 0.64 s, and 0.075 s to rebuild it."""
    sites = [dataclasses.replace(dense_site(5000, 5000, 500, "top"), operations=1.3e12),
             dataclasses.replace(dense_site(64, 64, 64, "bottom"), operations=3e12)]
    cluster = planning.Cluster(4, 4, 0.75, 0, 1000, True, uncertainty=uncertainty)
    plan = planning.make_plan(sites, "auto", cluster, operations=3e12)
    assert plan.decisions[0].scheme == expected


# ---- the least time -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 8])
def test_no_plan_is_faster_than_bytes_and_arithmetic(steps):
    for seed in range(200):
        sites, cluster, operations = random_case(seed)
        rows = planning.Exchange("rows", "gather", "float32", 4, (2 ** (seed % 24),), operations=operations / 2,
                                 is_waited_for=True)
        sites[0] = dataclasses.replace(sites[0], is_waited_for=seed % 3 == 0)
        for policy, others in itertools.product(("auto", "ps", "sfb"), ((), (rows,))):
            plan = planning.make_plan(sites, policy, cluster, operations=operations, exchanges=others, steps=steps)
            assert plan.least_seconds <= plan.step_seconds * (1 + 1e-9), f"seed {seed}"


@pytest.mark.parametrize("gbps, gflops, least", [
    # Over 1 Gbit/s, 0.8 s by servers, and 0.32 s as factors; with 10 GFLOP/s it is ready after 1 s, the step computes
    # for 2 s, and rebuilding takes 5 s.
    (1, 10, 2.0), (1, 1000, 0.01 + 0.32), (100, 10, 2.0),
    # As half factors at least 7.4 s, as factors 7 s: no mean of the processor's and the link's time is larger than this.
    (0.1, 10, 5.2927)])
def test_the_least_time_is_that_of_the_better_scheme(gbps, gflops, least):
    site = dataclasses.replace(dense_site(5000, 5000, 1000), operations=1e10)
    plan = planning.make_plan([site], "ps", planning.Cluster(2, 2, gbps, 0, gflops, True), operations=2e10)
    assert plan.least_seconds == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize("share", [1, 10])
def test_a_thousand_gradients_are_planned_in_a_fifth_of_a_second(share):
    """On accelerators, where gradients compete for a link; every one, or each tenth, has factors."""
    sites = [dataclasses.replace(dense_site(512, 512, 32, f"layer{i}"), operations=(2000 - i) * 1e7)
             for i in range(1000)]
    sites = [site if i % share == 0 else dataclasses.replace(site, factors=None) for i, site in enumerate(sites)]
    seconds = []
    gc.freeze()  # what other tests have left is not looked through
    for _ in range(3):
        begin = time.process_time()
        planning.make_plan(sites, "auto", planning.Cluster(64, gflops=5000, accelerators=True), operations=2e10)
        seconds.append(time.process_time() - begin)
    gc.unfreeze()
    assert min(seconds) < 0.2


# ---- merging ----------------------------------------------------------------------------------


def small_site(name, kib, ready_us):
    return planning.Site(name, "float32", 4, (256 * kib,), refusal="small", operations=ready_us * 1e3)


def groups(sites, latency_us):
    cluster = planning.Cluster(2, latency_us=latency_us, gflops=1)  # 1000 operations in a microsecond
    plan = planning.Planner(cluster, "ps", merge=True).plan(sites)
    return {d.site: d.group for d in plan.decisions}


def test_messages_wait_for_those_that_come_sooner_than_a_latency():
    sites = [small_site("a", 1, 100), small_site("b", 1, 70), small_site("c", 1, 55),
             small_site("large", 64, 52), small_site("d", 1, 10)]
    assert groups(sites, 20) == {"a": None, "b": "c", "c": "c", "large": None, "d": None}
    assert groups(sites, 31) == {"a": "c", "b": "c", "c": "c", "large": None, "d": None}
    assert groups(sites, 0) == dict.fromkeys("abcd", None) | {"large": None}


def test_groups_fit_into_a_packet():
    sites = [small_site(f"s{i}", 30, 0) for i in range(6)]
    found = groups(sites, 20)
    assert [sum(1 for g in found.values() if g == name) for name in set(found.values())] in (
        [4, 2], [2, 4])


def test_no_message_waits_for_one_that_is_computed_from_it():
    """All are ready at once, but "variance" after "mean"; exchanges in a loop happen an unknown number of times."""
    sites = [small_site("mean", 1, 0), small_site("count", 1, 0),
             dataclasses.replace(small_site("variance", 1, 0), depth=1),
             dataclasses.replace(small_site("looped", 1, 0), depth=None)]
    assert groups(sites, 20) == {"mean": "count", "count": "count", "variance": None, "looped": None}


def test_what_is_no_gradient_waits_for_others_too():
    rows = planning.Exchange("rows", "gather", "float32", 4, (64,))
    value, large = (dataclasses.replace(rows, site=site, kind="broadcast", shape=(n,))
                    for site, n in (("value", 2), ("large", 10_000)))
    plan = planning.Planner(planning.Cluster(2), "ps", merge=True).plan([small_site("a", 1, 0)],
                                                                        exchanges=[rows, value, large])
    assert [d.group for d in plan.decisions] == ["a"]
    assert {e.site: e.group for e in plan.exchanges} == {"rows": "a", "value": "a", "large": None}


def test_slices_do_not_wait_for_other_messages():
    sites = [small_site("a", 1, 0), small_site("b", 1, 0), dataclasses.replace(TABLE, operations=0.0)]
    plan = planning.Planner(planning.Cluster(2, latency_us=20, gflops=1), "auto", merge=True).plan(sites)
    assert [(d.scheme, d.group) for d in plan.decisions] == [("ps", "b"), ("ps", "b"), ("sparse", None)]


def test_merging_is_off_by_default():
    plan = planning.Planner(planning.Cluster(2)).plan([small_site("a", 1, 0), small_site("b", 1, 0)])
    assert {d.group for d in plan.decisions} == {None}


# ---- pins -------------------------------------------------------------------------------------


def test_pins_decide_before_the_policy():
    sites = [dense_site(512, 512, 400, name) for name in ("a/kernel", "b/kernel", "c/kernel")]
    plan = plan_for(sites, "ps", 4, pins=(("b/*", "ps"), ("?/kernel", "sfb")))
    assert [d.scheme for d in plan.decisions] == ["sfb", "ps", "sfb"]
    assert plan.decisions[0].reason == "pinned to 'sfb'"


def test_pins_that_are_impossible_say_so():
    site = planning.Site("conv", "float32", 4, (3, 3, 8, 8), refusal="a convolution")
    decision, = plan_for([site], "auto", 4, pins=(("*", "sfb"),)).decisions
    assert decision.scheme == "ps"
    assert decision.reason == "pinned to 'sfb', which is not possible: a convolution"


@pytest.mark.parametrize("pins, sentence", [
    ((), ""), ((("b/*", "ps"), ("*", "sfb")), ""),
    ((("b/*", "ps"), ("c/kernl", "ps")), "The pin of 'c/kernl' matches no variable of this step; the nearest is "
                                         "'c/kernel'. Patterns are those of file names, for whole paths: '*/kernel'.")])
def test_pins_that_match_nothing_are_named(pins, sentence):
    plan = plan_for([dense_site(512, 512, 400, name) for name in ("b/kernel", "c/kernel")], "ps", 4, pins=pins)
    assert planning.unmatched_pins(pins, plan) == sentence


def test_pins_fit_every_site_of_a_variable():
    sites = [dense_site(512, 512, 400, name) for name in ("a[1]/kernel#1", "a[1]/kernel")]
    plan = plan_for(sites, "ps", 4, pins=(("a[1]/kernel", "sfb"),))
    assert [d.scheme for d in plan.decisions] == ["sfb", "sfb"]


@pytest.mark.parametrize("site, pin, reason", [
    (dense_site(8, 8, 2), "sparse", "pinned to 'sparse', which is not possible: it is not slices"),
    (TABLE, "sfb", "pinned to 'sfb', which is not possible: its gradient is slices")])
def test_pins_of_another_kind_say_so(site, pin, reason):
    decision, = plan_for([site], "auto", 4, pins=(("*", pin),)).decisions
    assert (decision.scheme, decision.reason) == ("ps", reason)


def test_a_bias_can_be_pinned_by_itself():
    bias = planning.Site("bias", "float32", 4, (512,), refusal="alone", bias_of="kernel")
    plan = plan_for([dense_site(512, 512, 1), bias], "sfb", 4, pins=(("bias", "ps"),))
    assert [d.scheme for d in plan.decisions] == ["sfb", "ps"]


# ---- plans as values --------------------------------------------------------------------------

@pytest.mark.parametrize("make, message", [
    (lambda: planning.Cluster(0), "workers=0, expected a whole number, at least 1"),
    (lambda: planning.Cluster(2.5), "workers=2.5, expected a whole number"),
    (lambda: planning.Cluster(2, -1), "servers=-1, expected a whole number, at least 0"),
    (lambda: planning.Cluster(2, ranks_per_node=0), "ranks_per_node=0, expected a whole number, at least 1"),
    (lambda: planning.Cluster(2, latency_us=float("nan")), "latency_us=nan, expected 0 or more"),
    (lambda: planning.Cluster(2, gpus_per_node=0), "gpus_per_node=0, expected a whole number, at least 1"),
    (lambda: planning.Cluster(1, gpus_per_node=2), "gpus_per_node=2 with workers=1 and ranks_per_node=1, expected 1:"),
    (lambda: planning.Cluster(4, gpus_per_node=2), "gpus_per_node=2 with workers=4 and ranks_per_node=1, expected 1 or "
     "4: the GPUs of all ranks of a node that combine are linked, or none"),
    (lambda: planning.Cluster(8, ranks_per_node=4, gpus_per_node=8), "ranks_per_node=4, expected 1 or 4"),
    (lambda: planning.Cluster(3, ranks_per_node=4, gpus_per_node=4), "ranks_per_node=4, expected 1 or 3"),
    (lambda: planning.Cluster(2, gpu_link_gbps=5), "gpu_link_gbps=5 with gpus_per_node=1, expected 0 where no GPUs are"),
    (lambda: planning.Cluster(2, gpus_per_node=2, gpu_link_gbps=-1), "gpu_link_gbps=-1, expected 0 or more"),
    (lambda: planning.Plan.load(5), "The plan '5' cannot be read"),
    (lambda: planning.Cluster(4, 5), "servers=5 with workers=4 and dedicated_servers=0, expected 1 to 4: every server"),
    (lambda: planning.Cluster(4, 1, dedicated_servers=2), "servers=1 with workers=4 and .* expected 2 to 6: every"),
    (lambda: planning.Cluster(4, dedicated_servers=(4,)), "dedicated_servers=.*, expected a whole number, at least 0"),
    (lambda: planning.Cluster(4, bandwidth_gbps=0), "bandwidth_gbps=0, expected a positive number"),
    (lambda: planning.Cluster(4, accelerators=1), "accelerators=1, expected True or False"),
    (lambda: planning.Cluster(4, latency_us=-1), "latency_us=-1, expected 0 or more"),
    (lambda: plan_for([], "best", 4), f"policy='best', expected one of {', '.join(planning.POLICIES)}"),
    (lambda: plan_for([], "auto", 4, pins=(("*", "fast"),)), "The pin of '.*' is 'fast', expected"),
    (lambda: planning.Plan.load("/nowhere/plan"), "The plan '/nowhere/plan' cannot be read"),
    (lambda: planning.Plan("ps", CLUSTER, refusal="why").save("plan"), "no plan to save"),
])
def test_policies_clusters_and_pins_that_are_impossible_are_refused(make, message):
    with pytest.raises(poseidon.PoseidonError, match=message):
        make()


def test_what_is_no_gradient_is_counted_too():
    """On 4 ranks of 2 nodes: rows of 2 ranks to and from the other node; rank 0's value to the other node."""
    cluster = planning.Cluster(4, bandwidth_gbps=8.0, latency_us=100.0, ranks_per_node=2)
    gathered = planning.Exchange("rows/x", "gather", "float32", 4, (3, 5), is_waited_for=True)
    taken = planning.Exchange("value/x", "broadcast", "int64", 8, (10,), depth=1, is_waited_for=True)
    unknown = planning.Exchange("rows/y", "gather", "float32", 4, None)
    last = dataclasses.replace(dense_site(6, 7, None), operations=1e6)
    plan = planning.Planner(cluster).plan([last], 1e6, [gathered, taken])
    assert gathered.cost(cluster).num_bytes == 2 * 2 * 3 * 5 * 4
    assert gathered.cost(cluster).seconds == pytest.approx(100e-6 + 2 * 3 * 5 * 4 / 1e9)
    assert taken.cost(cluster).num_bytes == 80 and taken.cost(cluster).seconds == pytest.approx(100e-6 + 80 / 1e9)
    alone = planning.Planner(cluster).plan([last], 1e6)
    assert plan.total_bytes == alone.total_bytes + 240 + 80 and plan.digest == alone.digest
    assert plan.step_seconds == pytest.approx(alone.step_seconds + 200e-6 + 200 / 1e9)
    assert [e["name"] for e in plan.predictions()["exchanges"]] == ["rows/x", "value/x"]
    assert "rows/x" in str(plan) and "broadcast" in str(plan)
    assert planning.Planner(cluster).plan((), None, [unknown]).total_bytes is None
    assert planning.Planner(planning.Cluster(1)).plan((), 1e6, [taken]).total_bytes == 0
