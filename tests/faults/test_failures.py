"""How jobs end: successfully, or quickly and with the cause shown last."""

import os
import re
import time

import launch
import pytest


def test_job_ends_well_when_all_ranks_reach_the_end():
    outcome = launch.run_ok(["small_programs.py", "reach_the_end"], ranks=3, timeout_s=90)
    for rank in range(3):
        assert f"rank {rank} of 3 is done" in outcome.output


def test_program_runs_alone():
    outcome = launch.run_ok(["small_programs.py", "reach_the_end"], ranks=0, timeout_s=90)
    assert "rank 0 of 1 is done" in outcome.output


def test_shuffling_agrees_without_a_seed():
    outcome = launch.run_ok(["small_programs.py", "train_without_seed"], ranks=3, timeout_s=90)
    # Lines of ranks can run into each other.
    weights = re.findall(r"weights ([0-9a-f]{64})", outcome.output)
    assert len(weights) == 3 and len(set(weights)) == 1


def test_exception_on_one_rank_ends_all_and_is_shown_last(tmp_path):
    stamp = tmp_path / "raised"
    outcome = launch.run(["small_programs.py", "raise_on_rank_1", stamp], ranks=3, timeout_s=90)
    assert time.time() - float(stamp.read_text()) < 10
    assert outcome.status != 0
    assert "ValueError: boom on purpose" in outcome.own_lines[-1], outcome.output


def test_error_of_an_op_on_one_rank_ends_all():
    outcome = launch.run(["small_programs.py", "fail_in_graph_on_rank_1"], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert any("boom in the graph" in line for line in outcome.own_lines[-2:]), outcome.output


@pytest.mark.parametrize("status, policy", [(0, "ps"), (0, "sfb"), (3, "ps")])
def test_exit_of_one_rank_ends_all(status, policy):
    outcome = launch.run(["small_programs.py", "exit_on_rank_1", status, policy], ranks=2, timeout_s=90)
    assert outcome.status != 0
    assert "Rank 1 has ended its program, but rank 0 still" in outcome.own_lines[-1]


def test_killed_rank_ends_all():
    outcome = launch.run(["small_programs.py", "kill_on_rank_1"], ranks=2, timeout_s=60)
    assert outcome.status != 0


@pytest.mark.parametrize("policy", ["ps", "sfb"])
def test_rank_that_stalls_is_named_with_the_variable(policy):
    outcome = launch.run(["small_programs.py", "stall_on_rank_1", policy], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert re.search("waited 2 s for rank 1 to exchange 'sequential/first/(kernel|bias)' "
                     rf"\({policy}\)", outcome.own_lines[-1]), outcome.output


def test_rank_that_is_frozen_is_named_in_seconds():
    outcome = launch.run(["small_programs.py", "stop_on_rank_1"], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert "Rank 0 has heard nothing of rank 1 for 3 s: the host is down, frozen or" in outcome.own_lines[-1]


@pytest.mark.parametrize("status", [0, 3])
def test_rank_that_leaves_without_a_word_ends_all(status):
    outcome = launch.run(["small_programs.py", "leave_without_a_word_on_rank_1", status], ranks=2, timeout_s=60)
    assert outcome.status != 0
    if status == 0:
        assert re.search(r"Rank 1 on \S+ called os\._exit\(0\) before the job had ended", outcome.output)


def test_jobs_leave_no_shared_memory():
    outcome = launch.run_ok(["small_programs.py", "tell_shared_memory"], ranks=2, timeout_s=60)
    assert re.findall(r"(\d+) shared, left: (.*)", outcome.output) == [("1", "[]")] * 2


def test_no_room_for_shared_memory(monkeypatch):
    from tf_poseidon.engines import mpi
    from tf_poseidon.errors import JobError
    mpi._check_shared_memory("/no/such/directory")
    mpi._check_shared_memory()
    monkeypatch.setattr(mpi.os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 16384, 700, 700, *[0] * 5)))
    with pytest.raises(JobError, match=r"/dev/shm has 2\.7 MiB left, but MPI shares 6 MiB there for each rank; remove"):
        mpi._check_shared_memory()


def test_children_of_a_rank_do_not_leave_the_job():
    outcome = launch.run_ok(["small_programs.py", "fork_on_rank_1"], ranks=2, timeout_s=60)
    assert "children ended with [7, 7, 0, 1]" in outcome.output
    assert "child: 'x' was submitted in a process that a rank has forked" in outcome.output
    assert "boom in the child" in outcome.output
    assert outcome.seconds < 30


def test_rank_that_never_comes():
    outcome = launch.run(["small_programs.py", "never_come"], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert "did not meet within 3 s: start all of them" in outcome.own_lines[-1]


def test_other_variables_on_one_rank():
    outcome = launch.run(["small_programs.py", "build_other_variables"], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert re.search(r"Rank 1 has created different variables than rank 0: number 0 is "
                     r"'\S*kernel' float32\[5, 3\] on rank 1, and '\S*kernel' float32\[4, 3\] on "
                     r"rank 0", outcome.own_lines[-1]), outcome.output


def test_other_variables_end_the_job_where_the_error_is_caught():
    outcome = launch.run(["small_programs.py", "build_other_variables_and_go_on"], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert re.search(r"\[rank 0\] The job has ended. Rank 1 failed: GraphError: Rank 1 has created different variables",
                     outcome.own_lines[-1]), outcome.output


@pytest.mark.parametrize("how, message, remedy", [
    ("fit", "the first batch of dataset 0 has other values", "set_random_seed"),
    ("fit with another batch size", "the first batch of dataset 0 has 32 rows, rank 0's has 16", "same batch size"),
    ("train_on_batch", "call 1 of 'sequential.train_on_batch' has other values", "set_random_seed"),
    ("third call", "call 4 of 'sequential.train_on_batch' has other values", "set_random_seed"),
    ("rows", "call 1 of 'sequential.test_on_batch' has 63 rows, rank 0's has 64", "same batch size"),
    ("shape", "call 1 of 'sequential.predict_on_batch' has parts of other shapes", "prepared alike"),
    ("parts", "call 1 of 'sequential.test_on_batch' has other parts", "the same arguments")])
def test_other_data_on_one_rank(how, message, remedy):
    outcome = launch.run(["small_programs.py", "read_other_data", how], ranks=2, timeout_s=60)
    assert outcome.status != 0
    last = outcome.own_lines[-1]
    assert f"Rank 1 has different data than rank 0: {message}" in last and remedy in last
    assert ("set_random_seed" in last) == (remedy == "set_random_seed")


@pytest.mark.parametrize("what, here, there", [
    ("activation", "layers[1].config.activation of the model is 'relu'", "is 'tanh'"),
    ("trainable", "layers[1].config.trainable of the model is True", "is False"),
    ("rate", "layers[2].config.rate of the model is 0.1", "is 0.2"), ("batch", "batch_size=16", "batch_size=32"),
    ("clipnorm", "optimizer.config.clipnorm of compile is None", "is 1.0"),
    ("accumulation", "optimizer.config.gradient_accumulation_steps of compile is None", "is 2"),
    ("loss", "loss of compile is 'mse'", "is 'mae'"), ("metrics", "metrics[0] of compile is 'mae'", "is 'mse'"),
    ("epochs", "epochs=2", "epochs=3"), ("steps", "steps_per_epoch=4", "steps_per_epoch=2"),
    ("validation", "validation_data=None", "validation_data=..."), ("call", "fit is called", "evaluate is called"),
    ("one batch", "train_on_batch is called", "test_on_batch is called")])
def test_what_ranks_do_differently_is_named_at_once(what, here, there):
    outcome = launch.run(["small_programs.py", "differ_on_rank_1", what], ranks=2, timeout_s=60)
    assert outcome.status != 0 and outcome.seconds < 40
    last = outcome.own_lines[-1]
    assert f"ranks would do different things: {here}" in last and f"{there} on rank 1. Build the same" in last, last


def test_two_threads_are_refused():
    outcome = launch.run(["small_programs.py", "fit_in_two_threads"], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert re.search(r"Rank \d failed: GraphError: '(one|two)\.fit' was called in a thread while another thread is in "
                     r"'(one|two)\.fit'", outcome.own_lines[-1]), outcome.output


def test_launcher_of_another_mpi():
    outcome = launch.run(["small_programs.py", "meet_other_mpi"], ranks=0, timeout_s=60,
                         environment={"OMPI_COMM_WORLD_SIZE": "2"})
    assert outcome.status != 0
    assert "started 2 processes (OMPI_COMM_WORLD_SIZE=2), but MPI sees 1" in outcome.own_lines[-1]


def test_subprocess_of_a_rank_is_refused_or_runs_alone():
    outcome = launch.run_ok(["small_programs.py", "start_a_subprocess"], ranks=2, timeout_s=90, fresh=True)
    refused, alone = (line for line in outcome.own_lines if line.startswith("status "))
    assert re.match(r"status 1: .*JobError: This process has the environment of a rank \(PMI_FD=\d+\), but not its "
                    r"connection to mpiexec: .*'PMI_'\.$", refused), refused
    assert alone == "status 0: 1 process"


def test_mpi_not_found(tmp_path):
    from tf_poseidon.engines import mpi
    transport = tmp_path / "transport.so"
    transport.write_bytes(mpi._TRANSPORT.read_bytes().replace(b"libmpi.so.12", b"libmpX.so.12"))
    outcome = launch.run(["small_programs.py", "miss_mpi", transport], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert "MPI was not found" in outcome.output
    assert "pip install mpich" in outcome.own_lines[-1]


def test_rank_that_stalls_in_a_callback_is_named():
    outcome = launch.run(["small_programs.py", "stall_in_callback_on_rank_1"], ranks=2, timeout_s=60)
    assert outcome.status != 0
    assert "waited 2 s for rank 1 to exchange 'model.stop_training'" in outcome.own_lines[-1]


@pytest.mark.parametrize("every, when, before", [
    (1000, "the end of epoch 2", "the end of epoch 1"), (3, "the end of call 3 of its steps", "the end of epoch 1")])
def test_what_one_rank_has_changed_is_named(every, when, before):
    outcome = launch.run(["small_programs.py", "change_learning_rate_on_rank_1", every], ranks=3, timeout_s=60)
    assert outcome.status != 0
    assert (f"'sgd/learning_rate' differs between rank 1 and rank 0 at {when}, and 2 other variables differ; "
            in outcome.own_lines[-1])
    assert f"they were the same at {before}" in outcome.own_lines[-1]


REFUSALS = {
    "outside": "model 'outside' was built outside strategy.scope()",
    "layer_outside": "variable 'early/kernel' of model",
    "optimizer_outside": "optimizer 'early_sgd' of model",
    "jit": "model 'jitted' is compiled with jit_compile=True",
    "own_train_function": "model 'own' overrides make_train_function with its own function",
    "eager_after_graph": "'train_step' runs eagerly, but it ran before as a graph, in which each rank",
    "apply_outside_run": "optimizer 'free' was asked to apply gradients outside strategy.run",
    "scalars": "Add .batch(GLOBAL_BATCH_SIZE)",
    "files": "auto_shard_policy is FILE",
    "gather": "A scalar cannot be gathered from all ranks",
    "reduce_bytes": "'reduce' has dtype int8, which cannot be summed over ranks; cast it to one of",
    "gather_slices": "A RaggedTensor cannot be gathered from all ranks along axis 1",
    "gather_axis": "A tensor with 2 dimensions cannot be gathered along axis 2",
    "scatter_in_step": "was changed by scatter_add inside strategy.run, where ranks may change different rows",
    "read_without_aggregation": "has synchronization=ON_READ and no aggregation, and was read outside strategy.run",
    "distribute_own_value": "has another value on each rank since strategy.run has used it",
    "from_function": "distribute_datasets_from_function has elements with the part",
    "synchronize_outside_run": "strategy.synchronize was called outside strategy.run",
    "float8": "is overwritten with its gradient, as in layers that compute in float8",
    "on_batch_outside": "model 'on_batch' was built outside strategy.scope()",
    "function_in_eager_run": "A tf.function was called inside a strategy.run that runs eagerly",
    "apply_in_condition": "optimizer 'sometimes' was asked to apply gradients inside a tf.cond",
    "unequal_parts": "parts of a batch have [6, 7] rows",
    "server_out_of_range": "servers=[5], expected distinct ranks from 0 to 1",
    "no_rank_on_a_node": "ranks_per_node=0, expected a whole number, at least 1",
    "no_kv_pair": "kv_pair_bytes=0, expected 4096 to 2**30",
    "no_time": "timeout_s=0, expected a positive number of seconds",
    "no_steps": "verify=0, expected the number of steps",
    "no_policy": "policy='fastest', expected one of auto, ps, sfb, paper",
    "other_policy": "This process rewrites training graphs with Planner(",
    "plan_and_policy": "A plan was given together with a policy or pins",
    "plan_of_others": "The plan is for 3 workers, 3 servers, but this job has 2 workers, 2 servers",
    "other_cluster": "The cluster has 3 workers and 3 servers, but this job has 2 and 2",
    "no_pin": "The pin of '*' is 'fast', expected one of ps, sfb, sparse",
    "no_wire_dtype": "wire_dtype='float16', expected 'bfloat16' or None",
    "verify_what_is_rounded": "verify=5 compares gradients with their exact sums, but wire_dtype=",
    "other_options": "give every PoseidonStrategy of a process, and poseidon.calibrate before them, the",
}


def test_what_cannot_be_trained_is_refused():
    outcome = launch.run_ok(["small_programs.py", "refuse"], ranks=2, timeout_s=90)
    for case, message in REFUSALS.items():
        said = re.search(rf"^{case}: (.*?)(?=^\w+: |\Z)", outcome.output, re.DOTALL | re.MULTILINE)
        assert said and message in said[1], f"{case}: {said and said[1]}"


def test_waiting_and_idle_ranks_leave_the_processor_alone():
    outcome = launch.run_ok(["small_programs.py", "wait_and_idle"], ranks=2, timeout_s=60)
    used = dict(re.findall(r"(wait|idle): ([\d.]+) of a core", outcome.output))
    assert float(used["wait"]) < 0.10
    assert float(used["idle"]) < 0.02
