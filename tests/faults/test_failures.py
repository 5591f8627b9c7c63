"""How jobs end: successfully, or quickly and with the cause shown last."""

import re

import launch
import pytest

from evaluation.faults import fault_table
from tf_poseidon import planning


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


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        full = metafunc.config.getoption("--full")
        metafunc.parametrize("fault", [fault for fault in fault_table.FAULTS if full or not fault.is_slow],
                             ids=lambda fault: fault.name)


def test_fault_ends_the_job_with_its_cause(fault, tmp_path):
    launch.run_fault(fault, tmp_path)


@pytest.mark.parametrize("ended, wrong", [
    ((0, "boom", 1.0), "the status is 0"), ((1, "boom\nother", 1.0), "'boom' is not said"),
    ((1, "boom", None), "the fault did not happen"), ((1, "boom", 11.0), "it took 11.0 s, expected 10 at most"),
    ((1, "boom", 9.0), "")])
def test_ends_that_are_wrong(ended, wrong):
    fault = fault_table.Fault("a name", "somehow", ("program",), "boom")
    assert fault_table.wrong(fault, fault_table.Ended(*ended)).startswith(wrong)
    assert bool(fault_table.wrong(fault, fault_table.Ended(*ended))) == bool(wrong)


def test_jobs_leave_no_shared_memory():
    outcome = launch.run_ok(["small_programs.py", "tell_shared_memory"], ranks=2, timeout_s=60)
    assert re.findall(r"(\d+) shared, left: (.*)", outcome.output) == [("1", "[]")] * 2


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
    "columns_in_step": "'columns/kernel' is to be divided by 'columns', but strategy.run reads all of it on every rank",
    "read_without_aggregation": "has synchronization=ON_READ and no aggregation, and was read outside strategy.run",
    "distribute_own_value": "has another value on each rank since strategy.run has used it",
    "distribute_other_rows": "are batches that ranks divide in different ways, but its inputs have the same rows",
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
    "no_policy": f"policy='fastest', expected one of {', '.join(planning.POLICIES)}",
    "other_policy": "This process rewrites training graphs with Planner(",
    "plan_and_policy": "A plan was given together with a policy or pins",
    "plan_of_others": "The plan is for 3 workers, 3 servers, but this job has 2 workers, 2 servers",
    "other_cluster": "The cluster has 3 workers and 3 servers, but this job has 2 and 2",
    "no_pin": f"The pin of '*' is 'fast', expected one of {', '.join(planning.SCHEMES)}",
    "no_wire_dtype": "wire_dtype='float16', expected 'bfloat16' or None",
    "verify_what_is_rounded": "verify=5 compares gradients with their exact sums, but wire_dtype=",
    "load_optimizer_on_rank_0": "was assigned on some ranks only, expected all of them; load weights and optimizers on",
    "assign_other_weights": "was assigned another value on some ranks than on rank 0, expected the same; load it from",
    "distribute_other_weights": "/columns/kernel', of which each rank holds a shard, was assigned another value on",
    "other_options": "give every PoseidonStrategy of a process, and poseidon.calibrate before them, the",
}


def test_what_cannot_be_trained_is_refused():
    outcome = launch.run_ok(["small_programs.py", "refuse"], ranks=2, timeout_s=90)
    for case, message in REFUSALS.items():
        said = re.search(rf"^{case}: (.*?)(?=^\w+: |\Z)", outcome.output, re.DOTALL | re.MULTILINE)
        assert said and message in said[1], f"{case}: {said and said[1]}"


def test_weights_that_cannot_be_divided_are_named():
    lines = launch.run_ok(["small_programs.py", "pin_to_columns"], ranks=2, timeout_s=60).own_lines
    said = [line for line in lines if line.startswith(("'net/", "The pin of", "divided "))]
    assert sorted(set(said)) == [
        "'net/conv/kernel' is to be divided by 'columns', but it has the shape [3, 3, 1, 4], expected a matrix with "
        "several columns: every rank holds the whole.",
        "'net/half/kernel' is to be divided by 'columns', but it is of bfloat16, expected float32 or float64: every "
        "rank holds the whole.",
        "'net/one/kernel' is to be divided by 'columns', but it has the shape [24, 1], expected a matrix with several "
        "columns: every rank holds the whole.",
        "The pin of 'other/*' matches no variable of this step; the nearest is 'net/head/bias'. Patterns are those of "
        "file names, for whole paths: '*/kernel'.",
        *(f"divided net/{name}" for name in ("body/bias", "body/kernel", "head/bias", "head/kernel"))]


def test_waiting_and_idle_ranks_leave_the_processor_alone():
    outcome = launch.run_ok(["small_programs.py", "wait_and_idle"], ranks=2, timeout_s=60)
    used = dict(re.findall(r"(wait|idle): ([\d.]+) of a core", outcome.output))
    assert float(used["wait"]) < 0.10
    assert float(used["idle"]) < 0.02
