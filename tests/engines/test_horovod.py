"""Horovod as the engine, and programs written for it.

Installed by scripts/install_horovod.sh; without it these tests are skipped, but not in CI.
"""

import importlib.util
import json
import os
import pathlib
import pickle
import re

from jobs import assert_same_as_one_process
from jobs import Case
import launch
import numpy as np
import pytest
import saved_jobs
import saved_zoo
from test_drop_in import check_loops
from test_saved_graphs import step_of
from test_saved_graphs import what_of
from test_training import BOUND

from evaluation.faults import fault_table
from tf_poseidon.saved_graphs import rewriting

if importlib.util.find_spec("horovod") is None and not os.environ.get("CI"):
    pytest.skip("Horovod is not installed (scripts/install_horovod.sh)", allow_module_level=True)

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"

# Factors, a regularizer, sequences; a dense gradient and moving averages; slices.
CELLS = ("wide-momentum-mean", "convolution-adam-mean", "embedding-rmsprop-mean")
WAYS = (("horovodrun", "sfb"), ("mpiexec", "ps"), ("horovodrun", "ps"), ("mpiexec", "sfb"))


def cells(is_full):
    return [Case("run_scenarios.py", cell, 2, policy, ("--engine=horovod",), launcher=launcher)
            for launcher, policy in WAYS[:4 if is_full else 2] for cell in CELLS]


# Programs of evaluation/faults/fault_table.py that are run by default.
FAULTS = {("raise_on_rank_1",), ("receive_signal_on_rank_1", "SIGKILL"), ("stall_on_rank_1", "sfb")}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """(output of a job of programs, the directory with their reports); shared, since a job takes seconds to start."""
    folder = tmp_path_factory.mktemp("programs")
    names = ["refuse", "keras_optimizers", "executed"]
    outcome = launch.run_ok(["horovod_programs.py", *names], ranks=2, timeout_s=120, launcher="horovodrun",
                            environment={"REPORTS": str(folder)}.items())
    return outcome.output, folder


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("--full")
    if "program_fault" in metafunc.fixturenames:
        metafunc.parametrize("program_fault", [
            fault for fault in fault_table.FAULTS if fault.horovod and (full or fault.program in FAULTS)],
                             ids=lambda fault: fault.name)


@pytest.mark.table(cases=cells)
def test_two_ranks_compute_what_one_process_does(jobs, case):
    one = jobs.one_process(case)
    assert_same_as_one_process(one, jobs.arrays(case), {"float64": BOUND}, least=1.0)


def test_gradients_travel_by_horovods_ops(programs):
    """All gradients, merged ones too, travel by Horovod; our exchanges carry everything else."""
    report = pickle.loads((programs[1] / "executed.0").read_bytes())
    for policy, (ops, schemes, sites) in report.items():
        assert schemes == {"sfb": {"sfb", "ps"}, "ps": {"ps"}}[policy]
        assert ops["PoseidonSync"] == ops["PoseidonSyncSlices"] == ops["PoseidonSend"] == 0
        assert (ops["HorovodAllgather"] > 0) == (policy == "sfb")
        # With merge=True those that are small, and ready one after the other.
        assert policy == "sfb" or ops["HorovodGroupedAllreduce"] > 0, ops
        assert not [site for site in sites if "kernel" in site or "embeddings" in site and not site.startswith("rows/")]


def test_selftest():
    command = pathlib.Path(rewriting.__file__).parents[1] / "__main__.py"
    output = launch.run_ok([command, "selftest"], ranks=2, timeout_s=120, launcher="horovodrun").output
    assert output.count("the same bits") == 9
    assert len(re.findall(r" hfb +not supported by this engine$", output, re.MULTILINE)) == 2


def test_saved_graphs_are_rewritten_for_horovod(tmp_path):
    names = ["sgd", "embedding_by_scatter", "several_steps", "nested_functions", "keras_mixed_precision",
             "v1_control_flow", "graph_def"]
    jobs = {}
    for name in names:
        saved = saved_zoo.CASES[name](str(tmp_path))
        rewritten = tmp_path / "rewritten" / pathlib.Path(saved.path).name
        rewritten.parent.mkdir(exist_ok=True)
        rewriting.rewrite(saved.path, str(rewritten), *step_of(saved), workers=2, batch_size=-(-saved.rows // 2),
                          policy="sfb", inputs=saved.inputs_with_rows, engine="horovod")
        batches = [saved_zoo.batch(saved, saved.rows, seed) for seed in range(2)]
        jobs[name] = saved_jobs.Job(saved.path, str(rewritten), what_of(saved), batches)
    (tmp_path / "cases").write_bytes(pickle.dumps(jobs))
    launch.run_ok(["saved_jobs.py", tmp_path / "cases", tmp_path / "out"], ranks=2, timeout_s=120,
                  launcher="horovodrun")
    results = pickle.loads((tmp_path / "out").read_bytes())
    assert list(results) == names
    for name, result in results.items():
        assert result["bits"] == 1
        for variable, value in result["trained"].items():
            scale = max(1e-3, np.max(np.abs(result["one process"][variable]), initial=0))
            np.testing.assert_allclose(value, result["one process"][variable], rtol=0, err_msg=f"{name}: {variable}",
                                       atol=(2e-2 if "mixed" in name else 2e-5) * scale)


# ---- programs that are written for Horovod ---------------------------------------------------------

def named(*names):
    return dict.fromkeys(names, "sfb")


# By their names in Horovod.
TAPE = named("HorovodAllreduce_AddN_0", "HorovodAllreduce_gradient_tape_add_Reshape_0",
             "HorovodAllreduce_gradient_tape_matmul_1_MatMul_1_0",
             "HorovodAllreduce_gradient_tape_add_1_Reshape_0")
GROUPS = named(*(f"HorovodGroupedAllreduce_{group}/{part}" for part in (0, 1) for group in (
    "AddN_0_gradient_tape_add_Reshape_0", "gradient_tape_matmul_1_MatMul_1_0_gradient_tape_add_1_Reshape_0")))
# For each loop of tests/engines/enabled_loops.py: the schemes of its gradients, or why it is left unchanged.
EXPECTED = {
    "tape": TAPE, "predivided": TAPE, "in_groups": GROUPS,
    "sums_that_are_scaled": named("scaled0", "scaled1", "scaled2", "scaled3"),
    "halves": "a narrowing Cast rounds it",
    "largest": "its reduction is neither a sum nor an average",
    "process_sets": "only the ranks of a process set add it up",
    "fewer_rows_on_rank_1": TAPE,
    "other_mask_on_rank_1": "ranks would do different things: 'masked' any rows, masks ",
    "own_state_of_each_rank": {
        "weighted": "it is multiplied with a tensor that may differ between ranks, or one of the two is broadcast "
                    "(node 'mul_1')",
        "unweighted0": "only a matrix has factors (node 'gradient_tape/add/Reshape')",
        **named("unweighted1", "unweighted2")},
    "carried_by_a_loop": named("carried"),
    "another_step_on_rank_0": named("same"),
    "in_a_loop": named("looped0", "looped1", "looped2", "looped3"),
}


def test_loops_for_horovod(tmp_path):
    launch.run_ok(["enabled_loops.py", "horovod", tmp_path / "out"], ranks=3, timeout_s=90)
    ranks = [pickle.loads((tmp_path / f"out.{rank}").read_bytes()) for rank in range(3)]
    check_loops(ranks, EXPECTED, "HorovodAllgather")


def run_example(path, folder, launcher):
    """Runs a program; returns (its output, its trained weights)."""
    saved = folder / f"{path.stem}.{launcher}.npz"
    outcome = launch.run_ok([path, "--width", 64, "--save", saved], ranks=2, timeout_s=90, launcher=launcher)
    return outcome.output, np.load(saved)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The weights of the unchanged examples/horovod_loop.py."""
    return run_example(EXAMPLES / "horovod_loop.py", tmp_path_factory.mktemp("example"), "horovodrun")[1]


@pytest.mark.parametrize("launcher", ["horovodrun", "mpiexec"])
def test_two_lines_in_a_program(tmp_path, launcher, example):
    """Weights of examples/horovod_loop.py, unchanged and with poseidon.enable()."""
    program = (EXAMPLES / "horovod_loop.py").read_text()
    two_lines = "hvd.init()\nimport tf_poseidon as poseidon\nenabled = poseidon.enable(policy='sfb')\n"
    enabled = tmp_path / "enabled.py"
    enabled.write_text(program.replace("hvd.init()\n", two_lines, 1) + "print(enabled.plan, flush=True)\n")
    output, weights = run_example(enabled, tmp_path, launcher)
    assert len(re.findall(r"64x64 +sfb ", output)) >= 1, output
    for key in example:  # 20 steps in single precision
        np.testing.assert_allclose(example[key], weights[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("program, ranks, message", [
    ("mismatched_types", "01", "Mismatched data types: One rank had type float"),
    ("mismatched_with_integers", "01", "Mismatched data types: One rank had type (int32|float)"),
    ("mismatched_types_later", "1", "Rank 1 waited 10 s for rank 0 to exchange"),
])
def test_types_that_differ_between_ranks(program, ranks, message):
    """Horovod's own error, when all ranks trace; ours, after `timeout_s`, when only one does."""
    output = launch.run(["horovod_programs.py", program], ranks=2, timeout_s=60).output
    for rank in ranks:
        assert re.search(f"rank {rank}: .*{message}", output), output


@pytest.mark.parametrize("program, messages", [
    ("joins_after_sums", {0: "joined, 6.0", 1: "joined, 12.0"}),
    ("joins_after_factors", dict.fromkeys((0, 1), "hvd.join() was called where poseidon.enable() has made ranks")),
])
def test_rank_that_joins(program, messages):
    """Other ranks go on with sums; gathers of factors are refused, in which Horovod would end without a reason."""
    output = launch.run_ok(["horovod_programs.py", program], ranks=2, timeout_s=60).output
    for rank, message in messages.items():
        assert f"rank {rank}: {message}" in output, output


# ---- Keras -------------------------------------------------------------------------------------------


def test_stock_horovod_does_not_synchronise_keras_3_and_we_do(programs):
    """Weights of ranks that trained on different rows, compared as verify mode compares them."""
    report = pickle.loads((programs[1] / "keras_optimizers.0").read_bytes())
    assert report["stock, as Horovod documents it"] == ["kernel", "bias"]
    assert report["PoseidonStrategy"] == []


@pytest.mark.parametrize("fault, policy, message", [
    ("none", "ps", ""),
    ("none", "sfb", ""),
    ("sums", "ps", r"gradient of '(first|second)/(kernel|bias)' on rank 1 differs .* where rounding explains"),
    ("factors", "sfb", r"gradient of '(first|second)/(kernel|bias)' on rank \d differs .* where rounding"),
])
def test_verify_mode(tmp_path, fault, policy, message):
    outcome = launch.run(["train_verified.py", fault, policy], ranks=3, timeout_s=60, launcher="horovodrun",
                         environment={"REPORTS": str(tmp_path)}.items())
    assert (outcome.status == 0) == (not message), outcome.output
    assert re.search(message, outcome.output), outcome.output


# ---- how jobs end ------------------------------------------------------------------------------------


def test_fault_ends_the_job_with_its_cause(program_fault, tmp_path):
    """A rank that waits in one of Horovod's operations cannot be interrupted, but ends."""
    launch.run_fault(program_fault, tmp_path, launcher="horovodrun")


@pytest.mark.parametrize("how", ["fails_on_rank_1", "disabled"])
def test_pass_that_does_not_run(tmp_path, how):
    """Then no rank rewrites the graph, and gradients are still summed."""
    outcome = launch.run(["rewritten_programs.py", "train", how], ranks=2, timeout_s=60, launcher="horovodrun",
                         environment={"REPORTS": str(tmp_path)}.items())
    assert outcome.status == 0, outcome.output
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert {"fails_on_rank_1": "RuntimeError: broken on purpose", "disabled": "enable Grappler"}[how] in (
        ranks[0]["refusal"])


REFUSALS = {
    "wire_dtype": "wire_dtype='bfloat16' is not possible with engine='horovod'",
    "servers": "servers=(0,) is not possible with engine='horovod'",
    "ranks_per_node": "ranks_per_node=2 is not possible with engine='horovod'",
    "engine": "engine='nccl', expected one of horovod, mpi",
    "mpi": "engine='mpi', but this is one of 2 processes that another launcher has started (HOROVOD_SIZE=2)",
}


def test_options_that_horovod_cannot_have_are_refused(programs):
    for case, message in REFUSALS.items():
        assert f"{case}: {message}" in programs[0], programs[0]
