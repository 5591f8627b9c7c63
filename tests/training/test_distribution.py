"""Programs for one process, on several ranks: every update is that of one process."""

import collections
import re

import launch
import numpy as np
import one_process_programs
import pytest

# Updates may differ by rounding, relative to the largest one. Updates are compared, not weights: a gradient of
# half the length has an error of 5e-1 here.
BOUNDS = {"float64": 1e-8, "float32": 1e-3}


class Runs:
    """The results of programs, one job per (ranks, policy, options)."""

    def __init__(self, directory):
        self._directory = directory
        self._done = {}

    def of(self, ranks, policy, *options):
        if (ranks, policy, *options) not in self._done:
            out = self._directory / "-".join([str(ranks), policy, *options])
            out.mkdir()
            outcome = launch.run_ok(["run_one_process_programs.py", out, policy, *options], ranks if ranks > 1 else 0,
                                    timeout_s=600)
            assert outcome.output.count("done") == ranks
            assert "whole batch" not in outcome.output, "a program was not partitioned"
            self._done[(ranks, policy, *options)] = out
        return self._done[(ranks, policy, *options)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("programs"))


def test_program_computes_what_one_process_does(runs, program, ranks, policy, options):
    """In a loop of its own, and as the training step of a model of Keras: there, too, against such a loop."""
    expected = dict(np.load(runs.of(1, "ps") / f"{program}.0.npz"))
    results = [dict(np.load(runs.of(ranks, policy, *options) / f"{program}.{rank}.npz")) for rank in range(ranks)]
    for key in expected:
        assert all(result[key].tobytes() == results[0][key].tobytes() for result in results), f"bits of {key}"
    check(expected, results[0])


def test_models_of_the_strategys_scope_are_those_of_one_process(runs, tmp_path):
    """There, Keras' losses and optimizers ask the strategy how many replicas there are: one."""
    names = [name for name in one_process_programs.PROGRAMS if name.startswith("keras")]
    launch.run_ok(["run_one_process_programs.py", tmp_path, "sfb", "--scope", *names], 2, timeout_s=120)
    for name in names:
        check(dict(np.load(runs.of(1, "ps") / f"{name}.0.npz")), dict(np.load(tmp_path / f"{name}.0.npz")))


def test_verify_mode_compares_each_exchange_and_the_weights(runs, tmp_path):
    outcome = launch.run_ok(["run_one_process_programs.py", tmp_path, "sfb", "--verify", "mean_of_squares"], 2, 120)
    check(dict(np.load(runs.of(1, "ps") / "mean_of_squares.0.npz")), dict(np.load(tmp_path / "mean_of_squares.0.npz")))
    steps = len(one_process_programs.SIZES)
    for site in ("verify/w", "verify/b", "verify/v", "verify/checksums"):
        assert re.search(rf"site {site}(#\d)?: {steps} times", outcome.output), f"{site}: {outcome.output}"


def test_wire_dtype_rounds_what_trains(tmp_path):
    """Sums that are only outputs are not rounded."""
    sent = []
    for options in ([], ["--rounded"]):
        outcome = launch.run_ok(["run_one_process_programs.py", tmp_path, "ps", *options, "mean_of_squares"], 2, 120)
        counts = collections.Counter()  # of all ranks
        for site, number in re.findall(r"site (\w+): \d+ times, (\d+) bytes", outcome.output):
            counts[site] += int(number)
        sent.append(counts)
    assert all(sent[0][site] == 4 * sent[1][site] for site in ("w", "b", "v"))  # of double precision
    assert sent[0]["Identity"] == sent[1]["Identity"] > 0


def check(expected, got):
    """Compares each step's updates, and its results."""
    steps = sorted({key.partition("/")[0] for key in expected if key.startswith("step")})
    before, trained = "before", 0
    for step in steps:
        for key in [key for key in expected if key.startswith(f"{step}/")]:
            what = key.partition("/")[2]
            want, have = expected[key], got[key]
            if what.startswith("variable"):
                trained += bool(want.dtype.kind == "f" and np.abs(want - expected[f"{before}/{what}"]).max())
                if want.dtype.kind == "f":
                    want, have = want - expected[f"{before}/{what}"], have - got[f"{before}/{what}"]
            if want.dtype.kind != "f":
                np.testing.assert_array_equal(have, want, err_msg=key)
                continue
            np.testing.assert_array_equal(np.isfinite(have), np.isfinite(want), err_msg=key)
            finite = np.isfinite(want)
            scale = np.abs(want[finite]).max(initial=1e-3)
            bound = BOUNDS[want.dtype.name] * scale
            assert np.abs(have - want)[finite].max(initial=0) <= bound, (
                f"{key}: {have.ravel()[:4]}, one process has {want.ravel()[:4]}")
        before = step
    assert trained, "nothing was trained"


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
def test_refusals(output, name):
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
