"""Planning: the paper's formulas and numbers, the policies, and what they print."""

import dataclasses
import subprocess
import sys

import pytest

from tf_poseidon import planning
from tf_poseidon.planning import cost

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


def dense_site(m, n, k, name="kernel", itemsize=4):
    return planning.Site(name, "float32", itemsize, (m, n), planning.Factors(m, n, k, itemsize))


def scheme(policy, site, workers, servers=None):
    decision, = planning.make_plan([site], policy, workers, servers or workers).decisions
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
    decision, = planning.make_plan([site], policy, 4, 4).decisions
    assert decision.scheme == "ps" and decision.reason == "a convolution"
    assert decision.num_bytes == 4 * 3 * 3 * 8 * 8 * 4 * 3 / 4


@pytest.mark.parametrize("policy", ["sfb", "paper"])
def test_unknown_rows_go_over_the_parameter_server(policy):
    decision, = planning.make_plan([dense_site(512, 512, None)], policy, 4, 4).decisions
    assert decision.scheme == "ps" and "number of rows is not known" in decision.reason


@pytest.mark.parametrize("k, expected", [(1, "sfb"), (400, "ps")])
def test_biases_follow_their_layer(k, expected):
    bias = planning.Site("bias", "float32", 4, (512,), refusal="alone", bias_of="kernel")
    # A bias may come before its layer.
    plan = planning.make_plan([bias, dense_site(512, 512, k)], "paper", 4, 4)
    first, second = plan.decisions
    assert first.scheme == second.scheme == expected
    assert (first.num_bytes == 0) == (expected == "sfb")
    assert first.rides_on == ("kernel" if expected == "sfb" else None)


def test_bytes_of_factors():
    site = dense_site(100, 50, 8)
    site = dataclasses.replace(site, factors=dataclasses.replace(site.factors, extra_bytes=4))
    decision, = planning.make_plan([site], "sfb", 3, 3).decisions
    assert decision.num_bytes == 2 * 2 * (8 * 150 * 4 + 4)


def test_plan_prints_as_a_table():
    bias = planning.Site("bias", "float32", 4, (50,), bias_of="kernel")
    odd = planning.Site("odd", "float32", 4, None, refusal="its shape is unknown")
    plan = planning.make_plan([dense_site(100, 50, 8), bias, odd], "sfb", 3, 3)
    assert str(plan) == """\
plan by policy 'sfb' for 3 workers, 3 servers
site    scheme    bytes  reason
kernel  sfb      19,200  the policy is 'sfb', and the gradient is a product of factors
bias    sfb           0  the sum of the rows of a factor of 'kernel'
odd     ps      unknown  its shape is unknown
total           unknown  sent and received by each of 3 ranks in a step"""
    assert plan.form() == """\
policy sfb, 3 workers, 3 servers
'bias' by sfb with 'kernel'
'kernel' by sfb
'odd' by ps"""


def test_values_are_frozen():
    plan = planning.make_plan([dense_site(4, 4, 1)], "ps", 2, 2)
    for value in (plan, plan.decisions[0], dense_site(4, 4, 1)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.scheme = "sfb"


def test_planning_needs_no_tensorflow():
    program = "import sys, tf_poseidon.planning; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
