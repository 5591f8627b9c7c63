"""Training on rewritten graphs: that they are executed, what they send, and what happens if a rank has none."""

from concurrent import futures
import json
import os
import pathlib
import re

import launch
import numpy as np
import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

RANKS = 2  # more where the others end as rank 0 does


def run(*arguments, reports, ranks=RANKS):
    """Runs a program; its ranks write their reports to the directory `reports`."""
    return launch.run(["rewritten_programs.py", *arguments], ranks, timeout_s=90,
                      environment={"REPORTS": str(reports)})


def reports_of(*arguments, reports, ranks=RANKS):
    """Runs a program that must succeed, and returns its reports, by rank."""
    outcome = run(*arguments, ranks=ranks, reports=reports)
    assert outcome.status == 0, outcome.output
    return [json.loads((reports / f"{rank}.json").read_text()) for rank in range(max(ranks, 1))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Reports of training by each policy, by policy; two jobs keep all cores busy."""
    folders = {policy: tmp_path_factory.mktemp(policy) for policy in ("ps", "sfb", "auto")}
    with futures.ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda policy: reports_of("measure", policy, reports=folders[policy]), folders)
        return dict(zip(folders, reports))


@pytest.mark.parametrize("policy, dense_layer", [("ps", "ps"), ("sfb", "sfb"), ("auto", "sfb")])
def test_rewritten_graph_is_executed_in_fit(measured, policy, dense_layer):
    for report in measured[policy]:
        assert {"PoseidonSend", "PoseidonRecv"} <= set(report["ops"])
        assert "PoseidonSync" not in report["ops"]
        assert ("SufficientFactorOuterProduct" in report["ops"]) == (dense_layer == "sfb")
        schemes = {site: scheme for site, (scheme, _) in report["plan"].items()}
        assert schemes.pop("conv2d/kernel") == schemes.pop("conv2d/bias") == "ps"
        assert schemes["dense/kernel"] == schemes["dense/bias"] == dense_layer
        small_layer = "sfb" if policy == "sfb" else "ps"  # 512 x 2
        assert schemes["dense_1/kernel"] == schemes["dense_1/bias"] == small_layer


@pytest.mark.parametrize("policy", ["ps", "sfb", "auto"])
def test_counted_bytes_are_those_of_the_plan(measured, policy):
    ranks = measured[policy]
    steps = ranks[0]["steps"]
    for site, (scheme, planned) in ranks[0]["plan"].items():
        counted = [sum(report["sites"].get(site, {}).get(key, 0)
                       for key in ("sent_bytes", "received_bytes")) for report in ranks]
        assert np.mean(counted) == planned * steps
        if scheme == "sfb":
            assert set(counted) == {planned * steps}
    assert ranks[0]["total"] == sum(planned for _, planned in ranks[0]["plan"].values())


def test_bfloat16_on_the_wire_has_half_the_bytes(measured):
    full, half = (measured[policy][0]["plan"]["dense/kernel"][1] for policy in ("sfb", "auto"))
    assert full == 2 * half
    assert measured["auto"][0]["plan"]["conv2d/kernel"][1] * 2 == (
        measured["ps"][0]["plan"]["conv2d/kernel"][1])


SHORTENED = {policy: ("shorter", "broken", "verified") for policy in ("ps", "sfb")} if (
    "POSEIDON_ALL_CELLS" in os.environ) else {"ps": ("shorter",), "sfb": ("shorter",)}


@pytest.fixture(scope="module")
def shortened(tmp_path_factory):
    """Reports of training with what travels shortened or whole, by (policy, how); sums of two have no order."""
    cases = [(policy, how) for policy in ("ps", "sfb") for how in ("whole", *SHORTENED[policy])]
    folders = {case: tmp_path_factory.mktemp("-".join(case)) for case in cases}
    with futures.ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda case: reports_of("shorten", *case, ranks=3, reports=folders[case]), cases)
        return dict(zip(cases, reports))


@pytest.mark.parametrize("policy, how", [
    (policy, how) for policy, each in SHORTENED.items() for how in each])
def test_what_travels_shorter_gives_the_same_bits(shortened, policy, how):
    """Also where a rank has no pass, and so sends floats among the halves of others.

    There, all gradients travel dense; those of factors are summed by products otherwise, in another order.
    """
    whole = shortened["ps" if how == "broken" else policy, "whole"]
    for report in shortened[policy, how]:
        assert report["weights"] == whole[0]["weights"]


def test_gradients_that_were_cast_have_three_quarters_of_the_bytes(shortened):
    """Half on their way to the servers, all on their way back."""
    sent = {how: sum(report["sites"]["conv2d/kernel"]["sent_bytes"] for report in shortened["ps", how])
            for how in ("whole", "shorter")}
    assert sent["shorter"] == 0.75 * sent["whole"]
    reasons = shortened["ps", "shorter"][0]["reasons"]
    assert reasons["conv2d/kernel"].endswith("sent in bfloat16, from which it is cast")
    assert "sent in" not in reasons["second/kernel"]  # a layer in single precision


def test_factors_travel_without_their_zeros(shortened):
    sent = {how: [report["sites"]["first/kernel"]["sent_bytes"] for report in shortened["sfb", how]]
            for how in ("whole", "shorter")}
    assert max(sent["shorter"]) < 0.6 * min(sent["whole"])
    shares = [report["shares"] for report in shortened["sfb", "shorter"]]
    assert shares == [shares[0]] * 3 and shares[0]["first/kernel"] < 0.6
    assert all(share == 1 for share in shortened["sfb", "whole"][0]["shares"].values())


@pytest.mark.parametrize("policy", ["ps", "sfb"])
def test_headers_are_few(measured, policy):
    for report in measured[policy]:
        payload = sum(s["sent_bytes"] for s in report["sites"].values())
        assert payload > (2 << 20 if policy == "ps" else 0)
        assert report["headers"] < (0.02 * payload if policy == "ps" else 20_000)


def test_waiting_is_counted(measured):
    assert all(report["waiting"] > 0 for report in measured["ps"])


@pytest.mark.parametrize("policy", ["ps", "sfb"])
def test_last_layer_is_sent_before_the_first_layer_has_a_gradient(policy, tmp_path):
    launch.run_ok(["rewritten_programs.py", "order", policy, tmp_path], RANKS, 90)
    for rank in range(RANKS):
        events = traced(next((tmp_path / str(rank)).rglob("*.xplane.pb")))
        sends = [(name, begin) for name, op, begin in events if op == "PoseidonSend"
                 and not name.endswith("dense_send")]
        assert len(sends) >= 2
        # The first layer's gradient, or its factor, depends on the slow function.
        slow, = (begin for _, op, begin in events if op in ("PyFunc", "NumpyFunction"))
        slow_end = slow + 0.1e9
        begins = sorted(begin for _, begin in sends)
        assert begins[0] < slow_end < begins[-1]
        if policy == "ps":
            first_gradient, = (begin for name, op, begin in events
                               if op.endswith("MatMul") and "gradient_tape" in name and "/first" in name)
            assert begins[0] < first_gradient


def traced(path):
    """Returns (node, op, nanoseconds at its beginning) of each kernel that a profile has seen."""
    space = xplane_pb2.XSpace.FromString(pathlib.Path(path).read_bytes())
    events = []
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                node, separator, op = plane.event_metadata[event.metadata_id].name.rpartition(":")
                if separator:
                    events.append((node, op, line.timestamp_ns + event.offset_ps / 1000))
    return events


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Reports of training where nothing is wrong; strict makes no difference there."""
    return reports_of("train", "nothing", "True", reports=tmp_path_factory.mktemp("trained"))


def assert_same_training(ranks, expected):
    for report in ranks:
        assert report["weights"] == ranks[0]["weights"]
    for mine, theirs in zip(ranks[0]["weights"], expected[0]["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", ["ps", "sfb"])
def test_model_on_an_accelerator(policy, trained, tmp_path):
    """Exchanges run, and gradients are rebuilt, on the accelerator; verify finds them correct."""
    ranks = reports_of("train_on_accelerator", policy, reports=tmp_path)
    assert_same_training(ranks, trained)
    on_accelerator = [place for place in ranks[0]["places"] if not place.endswith(" on 0")]
    # PoseidonRows passes on its input, on any device.
    rebuilt = ["SufficientFactorBias on 1", "SufficientFactorOuterProduct on 1"]
    assert on_accelerator == ["PoseidonAllGather on 1", "PoseidonRecv on 1", "PoseidonRows on 1",
                              "PoseidonSend on 1", *(rebuilt if policy == "sfb" else [])]
    assert "PoseidonAgree on 0" in ranks[0]["places"]


def train_with(reports, **options):
    """Returns the reports of training with options of the strategy."""
    return reports_of("train_with", json.dumps(options), reports=reports)


@pytest.mark.parametrize("options, schemes", [
    # Few bytes cost nothing, messages much: dense gradients take two.
    (dict(policy="auto", cluster=dict(workers=RANKS, latency_us=1000)),
     {"first/kernel": "sfb", "second/kernel": "sfb", "table4/embeddings": "ps"}),
    (dict(policy="paper", pins={"second/*": "ps", "*/kernel": "sfb"}, merge=True),
     {"first/kernel": "sfb", "first/bias": "sfb", "second/kernel": "ps", "second/bias": "ps"}),
])
def test_plans_are_followed_and_replayed(options, schemes, trained, tmp_path):
    ranks = train_with(tmp_path, **options)
    assert_same_training(ranks, trained)
    assert ranks[0]["schemes"].items() >= schemes.items()
    again = train_with(tmp_path, plan=str(tmp_path / "plan"), strict=True)
    assert again == ranks  # with the same bits
    if options["policy"] == "paper":
        assert_another_graph_is_refused(tmp_path)


def assert_another_graph_is_refused(folder):
    text = (folder / "plan").read_text()
    lines = [line.replace("second/", "third/") for line in text.splitlines() if "digest" not in line]
    (folder / "plan").write_text("\n".join(lines))
    outcome = run("train_with", json.dumps({"plan": str(folder / "plan")}), reports=folder)
    assert outcome.status != 0 and outcome.seconds < 40
    assert re.search(r"graph of rank \d was not rewritten: PlanError: The plan was made for "
                     "another training graph: the first difference is 'second/",
                     outcome.own_lines[-1]), outcome.output


@pytest.mark.parametrize("options", [dict(pins={"second/*": "ps"}), dict(broken=True)])
def test_bfloat16_on_the_wire(options, trained, tmp_path):
    """Ranks have the same bits; weights are off by roundings of the gradients.

    A product of two roundings is off by 2 u, a sum of such by 2 u of the terms' magnitudes, and once
    more by u where it travels: 3 u = 0.012 with u = 2^-8. Momentum adds gradients up, and weights change
    by at most what is compared with; sums that cancel are off by more: 4 times as much is allowed.
    """
    ranks = train_with(tmp_path, policy="sfb", wire_dtype="bfloat16", **options)
    assert all(report["weights"] == ranks[0]["weights"] for report in ranks)
    for start, mine, theirs in zip(ranks[0]["start"], ranks[0]["weights"], trained[0]["weights"],
                                   strict=True):
        difference = np.abs(np.subtract(theirs, mine)).max()
        assert 0 < difference <= 4 * 0.012 * np.abs(np.subtract(theirs, start)).max()


REASONS = {
    "fails_on_rank_1": "RuntimeError: broken on purpose",
    "disabled": "TensorFlow has not run the graph pass",
    "disabled_on_rank_1": "TensorFlow has not run the graph pass",
}


@pytest.mark.parametrize("how", [*REASONS, "other_shapes", "other_optimizations"])
def test_training_is_right_where_ranks_have_other_graphs(how, trained, tmp_path):
    outcome = run("train", how, reports=tmp_path)
    assert outcome.status == 0, outcome.output
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert_same_training(ranks, trained)
    warnings = "".join(text for rank in ranks for text in rank["warnings"])  # of passes and of kernels
    if how in REASONS:
        assert REASONS[how] in ranks[1]["refusal"]
        assert "was not rewritten" in warnings
    if how != "disabled":
        schemes = ranks[1 if how == "other_shapes" else 0]["schemes"]
        assert {scheme for site, scheme in schemes.items() if site.startswith(("first", "second"))} == {"sfb"}
        assert schemes["table4/embeddings"] == "ps"
        assert "'first/kernel' cannot travel as factors, since the training graphs" in warnings


def test_training_goes_on_where_a_later_function_is_not_rewritten(tmp_path):
    """Steps that were exchanged as factors, until one rank cannot any more."""
    ranks = reports_of("train", "fails_later_on_rank_1", reports=tmp_path)
    assert all(report["weights"] == ranks[0]["weights"] for report in ranks)
    assert "broken on purpose" in ranks[1]["refusal"] and not ranks[0]["refusal"]
    one, = reports_of("train", "fails_later_on_rank_1", ranks=0, reports=tmp_path)
    for mine, theirs in zip(ranks[0]["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


STRICT = {
    "fails_on_rank_1": "graph of rank 1 was not rewritten: RuntimeError: broken on purpose",
    "fails_later_on_rank_1": "graph of rank 1 was not rewritten: RuntimeError: broken on purpose",
    "disabled_on_rank_1": "graph of rank 1 was not rewritten: TensorFlow has not run the graph pass",
    "other_optimizations": "were not rewritten alike",
    # Whichever is noticed first.
    "other_shapes": "have different plans: the first difference is 'first/bias' by |not rewritten alike",
}


@pytest.mark.parametrize("how", STRICT)
def test_strict_ends_all_ranks(how, tmp_path):
    # Of more than two, the others end as rank 0 does: seen once.
    ranks = 3 if how == "fails_on_rank_1" else RANKS
    outcome = run("train", how, "True", ranks=ranks, reports=tmp_path)
    assert outcome.status != 0
    assert outcome.seconds < 40
    assert re.search(f"strict=True, but .*({STRICT[how]})", outcome.own_lines[-1]), outcome.output


def test_factors_come_back_after_functions_without_them(tmp_path):
    """Steps without factors on all ranks cost one more dense step; strict accepts that."""
    for report in reports_of("come_back", reports=tmp_path):
        compiled, eager, again, large, small = report["sent"]
        dense = 64 * 64 / (4 * (64 + 64))  # a dense gradient, over two servers of it
        assert compiled == 8
        assert eager == 0  # all rows on every rank
        assert again == compiled and small == 7 + dense
        assert large == 2 * dense


def test_strict_is_content_where_all_is_well(trained):
    """Its results are compared above with those without strict."""
    for report in trained:
        assert not report["refusal"] and set(report["schemes"].values()) == {"sfb", "ps"}
        assert report["weights"] == trained[0]["weights"]


@pytest.mark.parametrize("arguments, message", [
    (["freeze_on_rank_1"], r"Ranks train different variables, so ranks would do different things: "
     r"'\S*first/bias' float32\[4\] on rank 0, but nothing on rank 1"),
    (["differ_on_rank_1", "policy"], "Ranks differ in policy: sfb on rank 1, and ps on rank 0"),
    (["differ_on_rank_1", "keras"], r"Ranks differ in keras: 9.9 on rank 1, and 3\.\S+ on rank 0"),
])
def test_disagreement_ends_all_ranks(arguments, message, tmp_path):
    outcome = run(*arguments, reports=tmp_path)
    assert outcome.status != 0
    assert outcome.seconds < 40
    assert re.search(message, outcome.own_lines[-1]), outcome.output
