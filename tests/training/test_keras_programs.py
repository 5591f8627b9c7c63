"""`fit` of published models computes the same on several ranks as in one process, without hints.

Steps are plain SGD: a gradient of a wrong length is an update of a wrong length.
"""

import json

import keras_programs
import launch
import numpy as np
import pytest

# For updates and logs: single precision, summed in another order.
BOUNDS = {"float64": 1e-8, "float32": 1e-3}
STEPS = -(-keras_programs.ROWS // keras_programs.BATCH)


class Runs:
    """The results of programs, one job per (ranks, policy)."""

    def __init__(self, directory):
        self._directory = directory
        self._done = {}

    def of(self, ranks, policy):
        if (ranks, policy) not in self._done:
            out = self._directory / f"{ranks}-{policy}"
            out.mkdir()
            outcome = launch.run_ok(["run_keras_programs.py", out, policy], ranks if ranks > 1 else 0, timeout_s=600)
            assert outcome.output.count("done") == ranks
            self._done[ranks, policy] = out
        return self._done[ranks, policy]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("keras"))


def test_fit_computes_what_one_process_does(runs, keras_program, ranks, policy):
    expected = dict(np.load(runs.of(1, "ps") / f"{keras_program}.0.npz"))
    results = [dict(np.load(runs.of(ranks, policy) / f"{keras_program}.{rank}.npz")) for rank in range(ranks)]
    assert list(expected) == list(results[0])
    for key in expected:
        assert all(result[key].tobytes() == results[0][key].tobytes() for result in results), f"bits of {key}"
    trained = 0
    for step in range(STEPS):
        before = f"step {step - 1}" if step else "before"
        for key in [key for key in expected if key.startswith(f"step {step}/")]:
            want, have, what = expected[key], results[0][key], key.partition("/")[2]
            bound = BOUNDS["float32" if keras_program in keras_programs.SINGLE else "float64"]
            if what.startswith("variable"):
                start = f"{before}/{what}"
                want, have = want - expected[start], have - results[0][start]
                trained += bool(np.any(want))
            scale = max(np.abs(want).max(initial=0), 1e-3)
            assert np.isfinite(want).all()
            assert np.abs(have - want).max(initial=0) <= bound * scale, (
                f"{key}: {np.ravel(have)[:4]}, one process has {np.ravel(want)[:4]}")
    assert trained, "nothing was trained"


def test_only_what_has_no_rule_runs_whole(runs, keras_program, ranks, policy):
    whole = json.loads((runs.of(ranks, policy) / "whole.0.json").read_text())
    assert whole[keras_program] == keras_programs.WHOLE.get(keras_program, [])
