"""Variables with an aggregation do in loops over `strategy.run` what they do with MirroredStrategy."""

import json

import launch
import numpy as np
import pytest
import replica_variables


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """What MirroredStrategy gives, and what each rank has."""
    path = tmp_path_factory.mktemp("variables")
    launch.run_ok(["replica_variables.py", "mirrored", path / "mirrored"], 0, timeout_s=120, fresh=True)
    launch.run_ok(["replica_variables.py", "poseidon", path / "rank"], 2, timeout_s=120)
    return [json.loads((path / name).read_text()) for name in ("mirrored.0", "rank.0", "rank.1")]


@pytest.mark.parametrize("name", replica_variables.CASES)
def test_variable_has_the_values_of_mirrored_strategy(values, name):
    mirrored, *ranks = (each[name] for each in values)
    assert ranks[0] == ranks[1]
    if name == "texts":
        assert ranks[0] == mirrored
    else:
        np.testing.assert_allclose(ranks[0], mirrored, rtol=1e-6)


def test_metrics_of_a_loop_can_be_evaluated(values):
    of_evaluate, *of_loop = (list(column) for column in zip(*values[1]["used in fit too"]))
    assert values[1] == values[2]
    assert of_evaluate == pytest.approx(of_loop[-1], rel=1e-6)
    assert of_evaluate == pytest.approx([row[0] for row in values[0]["used in fit too"]], rel=1e-6)


def test_ranks_have_results_of_their_own():
    outcome = launch.run_ok(["small_programs.py", "tell_local_results"], 2, timeout_s=60)
    assert "rank 0: [7], True" in outcome.output and "rank 1: [], False" in outcome.output
