"""Programs that were written for one process, on several ranks: every update is that of one process."""

import launch
import numpy as np
import one_process_programs
import pytest

JOBS = [(2, "ps"), (2, "sfb"), (3, "ps"), (3, "auto")]
# Updates may differ by rounding, in parts of the largest one. Its length is compared, not the weights: a gradient
# that is half as long is 5e-1 off here.
BOUND = 1e-8


class Runs:
    """What programs have written, one job for each (ranks, policy)."""

    def __init__(self, directory):
        self._directory = directory
        self._done = {}

    def of(self, ranks, policy):
        if (ranks, policy) not in self._done:
            out = self._directory / f"{ranks}-{policy}"
            out.mkdir()
            outcome = launch.run_ok(["run_one_process_programs.py", out, policy], ranks if ranks > 1 else 0,
                                    timeout_s=600)
            assert outcome.output.count("done") == ranks
            assert "whole batch" not in outcome.output, "a program was not partitioned"
            self._done[ranks, policy] = out
        return self._done[ranks, policy]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("ranks, policy", JOBS)
@pytest.mark.parametrize("name", one_process_programs.PROGRAMS)
def test_program_computes_what_one_process_does(runs, name, ranks, policy):
    expected = dict(np.load(runs.of(1, "ps") / f"{name}.0.npz"))
    results = [dict(np.load(runs.of(ranks, policy) / f"{name}.{rank}.npz")) for rank in range(ranks)]
    for key in expected:
        assert all(result[key].tobytes() == results[0][key].tobytes() for result in results), f"bits of {key}"
    check(expected, results[0])


def check(expected, got):
    """Compares each step's updates, and its results."""
    steps = sorted({key.partition("/")[0] for key in expected if key.startswith("step")})
    before = "before"
    for step in steps:
        for key in [key for key in expected if key.startswith(f"{step}/")]:
            what = key.partition("/")[2]
            want, have = expected[key], got[key]
            if what.startswith("variable"):
                want, have = want - expected[f"{before}/{what}"], have - got[f"{before}/{what}"]
                is_trained = step != "step 0" or want.dtype.kind != "f" or np.abs(want).max() > 0
                assert is_trained, f"{what} is not trained"
            np.testing.assert_array_equal(np.isfinite(have), np.isfinite(want), err_msg=key)
            finite = np.isfinite(want)
            scale = np.abs(want[finite]).max(initial=1e-3)
            assert np.abs(have - want)[finite].max(initial=0) <= BOUND * scale, (
                f"{key}: {have.ravel()[:4]}, one process has {want.ravel()[:4]}")
        before = step
