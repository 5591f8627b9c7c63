"""Training with stale weights: SSP(0) has the bits of synchronous training, and a log gives those of a former run."""

import json
import shutil

import explain_models
import keras
import launch
import measure_clocks
import numpy as np
import pytest

import tf_poseidon as poseidon

PROGRAMS = "plain-sgd", "rnn-momentum", "plain-adam", "executions-ema", "callback-muon"


def train(folder, synchrony, programs, ranks=2):
    folder.mkdir(exist_ok=True)
    launch.run_ok(["train_clocks.py", synchrony, ",".join(programs), str(folder)], ranks, timeout_s=200)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def weights(folder, name, rank=0):
    with np.load(folder / f"{name}.{rank}.npz") as file:
        return [file[key] for key in file]


def check_same(first, second):
    assert len(first) == len(second) > 5
    for one, other in zip(first, second):
        np.testing.assert_array_equal(one, other)


def test_no_staleness_has_the_bits_of_bulk_synchronous_training(tmp_path):
    bsp = train(tmp_path / "bsp", "bsp", PROGRAMS)
    ssp = train(tmp_path / "ssp", "SSP(0)", PROGRAMS)
    for name in PROGRAMS:
        for rank in range(2):
            check_same(weights(tmp_path / "bsp", name), weights(tmp_path / "ssp", name, rank))
        one, other = bsp[0][name], ssp[0][name]
        assert one["norms"] == other["norms"]
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)
        assert one["history"].keys() == other["history"].keys()
        for key, values in one["history"].items():
            assert values == pytest.approx(other["history"][key], rel=1e-6)
    assert ssp[0]["staleness"] == [{"0": 24 * len(PROGRAMS)}] * 2
    assert "Workers may run ahead of the weights that they read, by SSP(0)" in ssp[0]["plain-sgd"]["plan"]


@pytest.mark.parametrize("synchrony, upper", [("SSP(3)", 3), ("DSSP(1, 4)", 4)])
def test_replayed_versions_have_the_same_bits(synchrony, upper, tmp_path):
    """Ranks are late at random, and in the second run never."""
    programs = ["plain-adam", "backup-momentum"]
    reports = train(tmp_path / "first", synchrony, programs, 3)
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    shutil.rmtree(tmp_path / "second" / "backup", ignore_errors=True)
    replayed = train(tmp_path / "second", synchrony, ["replay", *programs], 3)
    stale = [max(map(int, of_rank)) for of_rank in reports[0]["staleness"]]
    assert 0 < max(stale) <= upper
    for name in programs:
        for rank in range(3):  # at the end of an epoch, all have the same weights
            check_same(weights(tmp_path / "first", name), weights(tmp_path / "second", name, rank))
            assert reports[rank][name]["history"] == reports[0][name]["history"]
        assert replayed[0][name]["history"] == reports[0][name]["history"]
    assert replayed[0]["staleness"] == reports[0]["staleness"]


def test_what_has_no_version_is_refused(tmp_path):
    launch.run_ok(["refused_clocks.py"], 2, timeout_s=120)


@pytest.mark.parametrize("synchrony", ["SSP(0)", "SSP(3)"])
def test_later_steps_go_on_after_an_update_that_fails(synchrony):
    launch.run_ok(["failing_updates.py", synchrony], 3, timeout_s=120)


def test_counted_bytes_and_the_explained_plan_are_those_of_the_plan(tmp_path):
    launch.run_ok(["measure_clocks.py", tmp_path, measure_clocks.SYNCHRONY], explain_models.RANKS, timeout_s=120)
    plan, cluster = poseidon.Plan.load(tmp_path / "plan"), explain_models.CLUSTER
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(explain_models.RANKS)]
    assert len(plan.decisions) > 5
    for decision in plan.decisions:
        sites = [of_rank[decision.site] for of_rank in counts[:cluster.servers]]  # which send most
        counted = [site["sent_bytes"] + site["received_bytes"] for site in sites]
        assert np.mean(counted) == decision.num_bytes * measure_clocks.STEPS
    keras.backend.clear_session()  # names do not depend on the tests before
    explained = poseidon.explain(
        explain_models.compiled("sequential"), explain_models.BATCH, cluster.workers, cluster.bandwidth_gbps,
        servers=cluster.servers, latency_us=cluster.latency_us, gflops=cluster.gflops,
        synchrony=eval(f"poseidon.{measure_clocks.SYNCHRONY}"))
    assert explained.diff(plan) == "" and explained.digest == plan.digest
    assert explained.operations == plan.operations > 0


@pytest.mark.parametrize("of_rank_1", ["bsp", "SSP(3)"])
def test_ranks_with_other_bounds_are_refused(of_rank_1, tmp_path):
    outcome = launch.run(["measure_clocks.py", tmp_path, of_rank_1], explain_models.RANKS, timeout_s=60)
    assert outcome.status != 0
    assert f"Ranks differ in synchrony: {of_rank_1} on rank 1, and SSP(2) on rank 0. Start the same" in outcome.output
