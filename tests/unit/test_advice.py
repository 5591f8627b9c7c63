"""What a plan would gain by other policies, and by changes; and how that is printed."""

import dataclasses

import pytest
from small_plans import BIAS
from small_plans import dense_site
from small_plans import TABLE

from tf_poseidon import planning
from tf_poseidon.explanations import advice as advice_lib
from tf_poseidon.explanations import prospects

ROWS = planning.Exchange("rows/x", "gather", "float32", 4, (32, 64), operations=4e8, is_waited_for=True)
MOMENTS = planning.Exchange("moments", "gather", "float32", 4, (64,), operations=4e8, is_waited_for=True)


def advice(policy="auto", exchanges=(), operations=1e9, may_overlap=True, sites=None, **cluster):
    sites = sites or [dataclasses.replace(site, operations=ready) for site, ready in (
        (dense_site(512, 2048, 32), 6e8), (BIAS, 6e8), (planning.Site("filter", "float32", 4, (3, 3, 64, 64)), 8e8),
        (TABLE, 1e9))]
    planner = planning.Planner(planning.Cluster(**{"workers": 4, "bandwidth_gbps": 1, **cluster}), policy)
    plan = planner.plan(sites, operations, exchanges)
    return advice_lib.of(plan, plan, planner, 32, may_overlap)


def test_a_ring_has_the_bytes_of_servers_and_more_latency():
    """Of 3 ranks, each sends 2/3 of a gradient twice, in 4 rounds; slices are gathered."""
    cluster = planning.Cluster(3, bandwidth_gbps=1, latency_us=100)
    plan = planning.make_plan([dense_site(250, 1000, 8), TABLE], "ps", cluster)
    ring, slices = prospects.all_reduced(plan).decisions
    assert ring.cost.num_bytes == plan.decisions[0].num_bytes == 2 * 2 * 2 / 3 * 1e6
    assert ring.cost.transfer == pytest.approx(4 / 3 * 8e-3) and ring.cost.latency == pytest.approx(4e-4)
    assert slices.scheme == "sparse" and slices.num_bytes == 2 * 2 * TABLE.slices.num_bytes


@pytest.mark.parametrize("cluster", [
    {}, {"workers": 1}, {"workers": 3}, {"workers": 8, "ranks_per_node": 8},
    {"gpus_per_node": 4, "gpu_link_gbps": 100.0},
    {"workers": 8, "ranks_per_node": 4, "gpus_per_node": 4, "gpu_link_gbps": 100.0}, {"workers": 2, "servers": 1},
    {"dedicated_servers": 2}, {"workers": 2, "gpus_per_node": 2, "gpu_link_gbps": 100.0}, {"accelerators": True}])
@pytest.mark.parametrize("policy", planning.POLICIES)
def test_any_plan_has_advice_that_fits(policy, cluster):
    found = advice(policy, (ROWS, MOMENTS), **cluster)
    steps = {each.name: each.step_seconds for each in found.policies}
    first, *others = planning.POLICIES
    assert list(steps) == [first, "all-reduce", *others]
    assert steps[policy] == found.plan.step_seconds
    assert all(change.gain == 1 for change in found.changes if change.step_seconds == found.plan.step_seconds
               and "rows" not in change.name)
    assert all(len(line) <= 100 for line in str(found).splitlines())
    assert ("--policy auto may divide" in str(found)) == (policy != "auto")
    halved = [change.name for change in found.changes if "workers with" in change.name]
    workers = found.plan.cluster.workers
    assert halved == ([] if workers % 2 else [f"{workers // 2} workers with 64 rows each"])
    assert found.predictions()["changes"] == [dataclasses.asdict(change) for change in found.changes]


def test_more_rows_have_more_factors_and_rows_and_the_same_gradients():
    found = advice("ps", (ROWS, MOMENTS))
    now, twice = found.plan, next(change for change in found.changes if "64 rows on each" in change.name)
    rows = ROWS.cost(now.cluster).num_bytes
    assert twice.num_bytes == now.total_bytes + rows
    assert twice.gain == 2 * now.step_seconds / twice.step_seconds > 1


def test_what_helps_is_named_if_it_gains_enough():
    """A gradient whose 24 MB take 192 ms each way, and 16 MB between two workers 128 ms; computing hides none of it."""
    found = advice("ps", sites=[dense_site(1000, 4000, 32)], latency_us=0)
    gains = {change.name: round(change.gain, 2) for change in found.helpful}
    assert list(gains.items()) == [
        ("policy 'auto'", 11.9), ("links of 10 Gbit/s", 10), ("batches of 128 rows on each worker", 4),
        ("batches of 64 rows on each worker", 2), ('wire_dtype="bfloat16"', 2), ("2 workers with 64 rows each", 1.5),
        ("mixed_bfloat16 (bytes alone)", 1.33)]
    hidden = advice("ps", operations=1e13)
    assert not hidden.helpful and "None of these would gain more than 3 %" in str(hidden)


def test_only_what_takes_long_is_named():
    sites = [dataclasses.replace(dense_site(2000, 2000, 32, f"large{i}/{'x' * 60}/kernel")) for i in range(2)]
    sites += [planning.Site(f"small{i}", "float32", 4, (10,)) for i in range(40)]
    lines = str(advice("ps", sites=sites, latency_us=0)).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("exchange"))
    assert [line.split()[0][:6] for line in lines[begin + 1:begin + 4]] == ["large0", "large1", "40"]
    assert lines[begin + 1].split()[0].endswith("x/kernel") and "…" in lines[begin + 1]
    assert lines[begin + 4] == ""


def test_a_step_of_unknown_arithmetic_has_bytes():
    found = advice(operations=None)
    assert not found.changes and "the arithmetic of this step is unknown" in str(found)
    assert {policy.step_seconds for policy in found.policies} == {None}


def test_stale_weights_leave_no_choice():
    plan = advice("ps").plan
    found = advice_lib.of(plan, plan, planning.Planner(plan.cluster, "ps"), 32, has_choice=False)
    assert [policy.name for policy in found.policies] == ["ps"] and not found.changes


def test_what_hangs_on_a_guess_is_said_for_accelerators_too():
    plan = advice("auto").plan
    planner = planning.Planner(plan.cluster)
    text = str(advice_lib.of(plan, plan, planner, 32, is_assumed=True)).replace("\n", " ")
    clusters = [dataclasses.replace(plan.cluster, gflops=gflops, accelerators=True) for gflops in (8500, 21_500)]
    plans = [planning.make_plan(plan.sites, "auto", each, operations=plan.operations) for each in clusters]
    v100, a100 = (f"{4 * each.compute_seconds / each.step_seconds:.3g}" for each in plans)
    assert text.endswith("for which 1000 GFLOP/s are assumed: it is "
                         f"{v100} times with --accelerator v100, {a100} times with --accelerator a100.")
    assert "assumed" not in str(advice("auto"))


def test_a_slow_plan_says_so():
    assert "That is SLOWER than one process, which would take" in str(advice("ps", bandwidth_gbps=0.01))
