"""Programs for one process, on several ranks: every update is that of one process."""

import collections
import re

from jobs import assert_same_as_one_process
from jobs import Case
import launch
import one_process_programs
import pytest

FILE = "run_one_process_programs.py"
POLICIES = ("ps", "sfb", "auto")


def cases(is_full):
    """Returns programs in a loop of their own, and as the training step of a model of Keras."""
    jobs = [(ranks, policy, options) for ranks in (2, 3) for policy in POLICIES for options in ((), ("--fit",))]
    names = list(one_process_programs.PROGRAMS)
    if is_full:
        return [Case(FILE, name, *job) for job in jobs for name in names]
    return [Case(FILE, name, 2, "sfb") for name in names] + [
        Case(FILE, name, 3, "auto", ("--fit",)) for name in names[::10]]


SCOPED = [Case(FILE, name, 2, "sfb", ("--scope",)) for name in one_process_programs.PROGRAMS
          if name.startswith("keras")]
VERIFIED = Case(FILE, "mean_of_squares", 2, "sfb", ("--verify",))
WIRES = [Case(FILE, "mean_of_squares", 2, "ps", options) for options in ((), ("--rounded",))]


def check(jobs, case):
    one = jobs.one_process(case)
    assert_same_as_one_process(one, jobs.arrays(case))
    assert "whole batch" not in jobs.output(case), "a program was not partitioned"


@pytest.mark.table(cases=cases)
def test_program_computes_what_one_process_does(jobs, case):
    check(jobs, case)


@pytest.mark.parametrize("case", SCOPED, ids=str)
def test_models_of_the_strategys_scope_are_those_of_one_process(jobs, case):
    """There, Keras' losses and optimizers ask the strategy how many replicas there are: one."""
    check(jobs, case)


@pytest.mark.needs(VERIFIED)
def test_verify_mode_compares_each_exchange_and_the_weights(jobs):
    check(jobs, VERIFIED)
    steps = len(one_process_programs.SIZES)
    for site in ("verify/w", "verify/b", "verify/v", "verify/digests"):
        assert re.search(rf"site {site}(#\d)?: {steps} times", jobs.output(VERIFIED)), site


@pytest.mark.needs(*WIRES)
def test_wire_dtype_rounds_what_trains(jobs):
    """Sums that are only outputs are not rounded."""
    trained, sent = ("w", "b", "v"), []
    for case in WIRES:
        counts = collections.Counter()  # of all ranks
        for site, number in re.findall(r"site (\w+): \d+ times, (\d+) bytes", jobs.output(case)):
            counts[site] += int(number)
        sent.append(counts)
    assert all(sent[0][site] == 4 * sent[1][site] for site in trained)  # of double precision
    outputs = sent[0].keys() - set(trained)
    assert outputs and all(sent[0][site] == sent[1][site] for site in outputs)


RIGHT = ("methods", "structures", "traces", "within_a_function", "split_datasets", "nothing_to_sum", "starts_equal",
         "eagerly", "one_rank_without_the_pass")
REFUSED = {
    "different_rows": r"'x' has 4 rows.*'y' has 3|'y' has 3 rows.*'x' has 4",
    "ragged_rows": r"'x', a RaggedTensor, has rows; only dense tensors are partitioned",
    "unknown_input": r"inputs= names 'y', which is not an argument of '<lambda>'; its arguments are x",
    "scalar_with_rows": r"'y' has 0 dimensions, and inputs= says that its rows are in dimension 0",
    "other_structure": r"inputs= has a different structure for 'x' than the argument itself",
    "no_rows": r"No input of '<lambda>' has rows",
}


@pytest.fixture(scope="module")
def output():
    return launch.run_ok(["distribute_programs.py", *RIGHT, *REFUSED], ranks=3, timeout_s=180).output


@pytest.mark.parametrize("name", RIGHT)
def test_what_it_takes(output, name):
    assert output.count(f"{name}: all right") == 3


def test_a_pass_that_fails_on_one_rank_costs_speed_only(output):
    assert output.count("was not partitioned: ") == 1
    assert "RuntimeError: no pass today" in output and "correct, but no faster than one process" in output


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_cannot_be_distributed_are_refused_by_name(output, name):
    said = [line for line in output.split("\n") if line.startswith(f"{name}: ")]
    assert len(said) == 3, said
    assert all(re.search(REFUSED[name], line) for line in said), said


@pytest.mark.parametrize("name, text", [
    ("without_grappler", "all right"),
    ("other_batches", "Rank 1 has different data than rank 0: call 1 of '<lambda>'"),
    ("strict", "strict=True, but: The function '<lambda>' was not partitioned")])
def test_other_options(name, text):
    outcome = launch.run(["distribute_programs.py", name], ranks=2, timeout_s=120)
    assert f"{name}: {text}" in outcome.output, outcome.output[-3000:]
