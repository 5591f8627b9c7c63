"""Options of PoseidonStrategy that are equivalent, or contradict each other: without a job."""

import contextlib
import dataclasses
import inspect
import logging
import re
import sys
import types

import pytest

import tf_poseidon as poseidon
from tf_poseidon import options
from tf_poseidon import planning
from tf_poseidon.commands import arguments
from tf_poseidon.job import runtime
from tf_poseidon.saved_graphs import rewriting
from tf_poseidon.staleness import bounds


@pytest.mark.parametrize("ranks_per_node, plan, cluster, message", [
    (None, None, None, None), (2, None, None, None), (None, 2, None, None), (2, 2, 2, None), (2, None, 1, None),
    (None, 1, 1, None), (1, 2, None, "ranks_per_node says that 1 ranks of a node combine, and the plan that 2 do"),
    (None, 1, 2, "the plan says that 1 ranks of a node combine, and the cluster that 2 do"),
    (4, 1, None, None), (0, None, None, "ranks_per_node=0, expected a whole number, at least 1")])
def test_options_may_say_the_same_of_nodes(ranks_per_node, plan, cluster, message):
    """A job of 4 ranks. A cluster with one rank per node leaves it to the job; 4 ranks on one node do not combine."""
    plan, cluster = (value and planning.Cluster(4, ranks_per_node=value) for value in (plan, cluster))
    plan = plan and planning.Plan("ps", plan)
    with contextlib.nullcontext() if message is None else pytest.raises(poseidon.PoseidonError, match=message):
        job = options.JobOptions(engine="mpi", ranks_per_node=ranks_per_node)
        options.TrainingOptions(plan=plan, cluster=cluster).check(job, 4, has_own_ops=False)


@pytest.mark.parametrize("shard_update, kinds, message", [
    (False, (), None), (True, (planning.SCATTER, planning.SHARDS), None), (False, (planning.GATHER,), None),
    (True, (planning.GATHER,), "shard_update=True, but by the plan each rank updates whole variables, expect"),
    (False, (planning.SCATTER,), "shard_update=False, but by the plan each rank updates parts of variables, expect"),
    ("auto", (planning.SCATTER,), None), ("auto", (), None),
    ("never", (), "shard_update='never', expected True, False or 'auto'")])
def test_options_and_plans_say_the_same_of_updates(shard_update, kinds, message):
    plan = planning.Plan("ps", planning.Cluster(4), exchanges=tuple(
        planning.Exchange(kind, kind, "float32", 4, (9,)) for kind in kinds))
    with contextlib.nullcontext() if message is None else pytest.raises(poseidon.PoseidonError, match=message):
        training = options.TrainingOptions(plan=plan, shard_update=shard_update)
        assert training.shard_update == plan.has_shards


def test_whoever_joins_first_is_checked():
    with pytest.raises(poseidon.PoseidonError, match="ranks_per_node=0, expected a whole number, at least 1"):
        runtime.start(options.JobOptions(ranks_per_node=0))
    with pytest.raises(poseidon.PoseidonError, match="ranks_per_node=2 is not possible with engine='horovod'"):
        runtime.start(options.JobOptions(engine="horovod", ranks_per_node=2))


def test_number_of_servers_is_not_their_ranks():
    with pytest.raises(poseidon.PoseidonError, match=r"servers=5, expected the ranks that are servers, .* range\(5\)"):
        options.JobOptions(servers=5)


@pytest.mark.parametrize("servers", [(0, 0), (0, 2), (-1,)])
def test_servers_are_distinct_ranks(servers):
    with pytest.raises(poseidon.PoseidonError, match=r"servers=\[.*\], expected distinct ranks from 0 to 1; omit it"):
        options.JobOptions(servers=servers).check(2, has_own_ops=False)
    options.JobOptions(servers=(1, 0)).check(2, has_own_ops=False)


@pytest.mark.parametrize("ranks, given, message", [
    (3, {"dedicated_servers": 2}, "dedicated_servers=2 in a job of 3 ranks, expected at most 1: two or more have to"),
    (1, {"dedicated_servers": 1}, "dedicated_servers=1 in a job of 1 ranks, expected at most 0"),
    (4, {"dedicated_servers": 2, "servers": (0, 2)}, r"servers=\[0, 2\], but rank 3 is one of the last "
                                                     "dedicated_servers=2 ranks, which only serve; name it, too")])
def test_dedicated_servers_leave_two_ranks_that_train_and_are_servers(ranks, given, message):
    with pytest.raises(poseidon.PoseidonError, match=message):
        options.JobOptions(**given).check(ranks, has_own_ops=False)


def test_dedicated_servers_are_a_whole_number_and_our_own():
    with pytest.raises(poseidon.PoseidonError, match="dedicated_servers=-1, expected a whole number, at least 0"):
        options.JobOptions(dedicated_servers=-1)
    with pytest.raises(poseidon.PoseidonError, match="dedicated_servers=1 is not possible with engine='horovod'"):
        options.JobOptions(engine="horovod", dedicated_servers=1).check(3, has_own_ops=True)


def test_options_of_training_are_about_workers():
    job = options.JobOptions(engine="mpi", dedicated_servers=2)
    cluster = planning.Cluster(4, dedicated_servers=2)
    options.TrainingOptions(cluster=cluster, rows=(1, 2, 3, 4)).check(job, 6, has_own_ops=False)
    options.TrainingOptions(plan=planning.Plan("ps", cluster)).check(job, 6, has_own_ops=False)
    with pytest.raises(poseidon.PoseidonError, match="has 4 workers and 4 servers, but this job has 4 and 6"):
        options.TrainingOptions(cluster=planning.Cluster(4)).check(job, 6, has_own_ops=False)
    job = options.JobOptions(engine="mpi", dedicated_servers=2, servers=(0, 1, 4, 5))
    with pytest.raises(poseidon.PoseidonError, match="cluster has dedicated_servers=0, but this job has 2"):
        options.TrainingOptions(cluster=planning.Cluster(4)).check(job, 6, has_own_ops=False)


@pytest.mark.parametrize("number", [0, -1, 2**63, 1.5])
def test_memory_for_staging_is_a_number_of_bytes(number):
    with pytest.raises(poseidon.PoseidonError, match=f"staging_bytes={number}, expected a positive number of bytes"):
        options.JobOptions(staging_bytes=number)
    assert options.JobOptions(staging_bytes=1).staging_bytes == 1


@pytest.mark.parametrize("name", ["timeout_s", "startup_timeout_s", "heartbeat_timeout_s"])
def test_times_may_be_long(name):
    for seconds in (float("inf"), 1e30, 1e9):
        assert getattr(options.JobOptions(**{name: seconds}), name) == 1e9
    assert getattr(options.JobOptions(**{name: 1e8}), name) == 1e8
    for seconds in (0, -1, float("nan")):
        with pytest.raises(poseidon.PoseidonError, match=f"{name}={seconds}, expected "):
            options.JobOptions(**{name: seconds})


@pytest.mark.parametrize("options_given, has_own_ops, message", [
    ({}, False, None), ({"crossover": "a name"}, False, "crossover='a name', expected a name of at most 64 letters, "),
    ({"crossover": "x" * 65}, False, "expected a name of at most 64"), ({"crossover": ""}, False, "crossover='', exp"),
    ({"crossover": 3}, False, "crossover=3, expected a name"), ({"synchrony": bounds.SSP(1)}, False,
     r"crossover='night-1.a' is not possible with synchrony=SSP\(1\), by which"),
    ({}, True, "crossover='night-1.a' is not possible with engine='horovod'")])
def test_jobs_that_take_turns_have_a_name(options_given, has_own_ops, message):
    job = options.JobOptions(engine="horovod" if has_own_ops else "mpi")
    with contextlib.nullcontext() if message is None else pytest.raises(poseidon.PoseidonError, match=message):
        options.TrainingOptions(**{"crossover": "night-1.a", **options_given}).check(job, 4, has_own_ops)


def test_horovod_has_its_own_way_with_nodes():
    job = options.JobOptions(engine="horovod", ranks_per_node=1)
    options.TrainingOptions().check(job, 4, has_own_ops=True)
    plan = planning.Plan("ps", planning.Cluster(4, ranks_per_node=2))
    with pytest.raises(poseidon.PoseidonError, match="ranks_per_node=2 of the plan is not possible with engine='h"):
        options.TrainingOptions(plan=plan).check(options.JobOptions(engine="horovod"), 4, has_own_ops=True)


def test_links_between_gpus_are_those_of_our_own_sums():
    training = options.TrainingOptions(cluster=planning.Cluster(4, gpus_per_node=4, gpu_link_gbps=2400))
    assert training.described(training.cluster).endswith("for 10 Gbit/s (2400 between GPUs), 50 µs and 1000 GFLOP/s")
    training.check(options.JobOptions(engine="mpi"), 4, has_own_ops=False)
    training.check_links(4)
    with pytest.raises(poseidon.PoseidonError, match="has gpus_per_node=4, but 1 ranks of a node combine in this job"):
        training.check_links(1)
    with pytest.raises(poseidon.PoseidonError, match="gpus_per_node=4 of the cluster is not possible with engine='h"):
        training.check(options.JobOptions(engine="horovod"), 4, has_own_ops=True)


def test_notebooks_run_in_one_process(monkeypatch, caplog):
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=None))
    monkeypatch.setattr(runtime, "_membership", None)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setenv("PMI_SIZE", "3")
    with pytest.raises(poseidon.PoseidonError, match="kernel of this notebook is one of 3 processes that a launcher"):
        runtime.start(options.JobOptions())
    monkeypatch.delenv("PMI_SIZE")
    with caplog.at_level(logging.WARNING, "tf_poseidon"):
        assert [runtime.start(options.JobOptions()) for _ in range(2)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "A notebook trains in this process alone. To train on several, make it a function and call "
        "poseidon.run(function, ranks=4), which starts them"]
    with pytest.raises(poseidon.PoseidonError, match="in a notebook, restart the kernel"):
        runtime.start(options.JobOptions(timeout_s=5))


def test_who_takes_options_takes_all_of_them():
    """Each option is one field, which the public functions take by its name."""
    def names(*kinds):
        return {field.name for kind in kinds for field in dataclasses.fields(kind)}

    def parameters(function):
        return set(inspect.signature(function).parameters)

    assert parameters(poseidon.PoseidonStrategy) == names(options.JobOptions, options.TrainingOptions)
    assert parameters(poseidon.load_ops) == names(options.JobOptions)
    assert parameters(poseidon.explain) == names(options.PlanOptions) | {
        "model", "batch_size", "data", "global_batch_norm", "steps_per_execution", "shard_update",
        "synchrony"}
    documented = set(re.findall("`([a-z_]+)`", rewriting.rewrite_saved_model.__doc__.partition("**options:")[2]))
    assert names(rewriting.SavedGraphOptions) <= documented
    given = arguments.parser().parse_args(["explain", "model.keras", "--batch_size=1", "--workers=2"])
    assert names(options.PlanOptions) - {"pins"} <= set(vars(given))
    assert planning.Cluster(**{name: getattr(options.PlanOptions(workers=2), name) for name in names(
        planning.Cluster) & names(options.PlanOptions)}) == options.PlanOptions(workers=2).cluster
