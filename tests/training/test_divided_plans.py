"""Plans of weights that ranks divide: jobs follow them as they are made, and train as one process does."""

import launch
import numpy as np
import pytest

import tf_poseidon as poseidon


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """{which job: (its results by name, its plan)}; one process has no plan."""
    out = tmp_path_factory.mktemp("divided")
    found = {}
    for name, ranks, given in (("alone", 0, ()), ("pinned", 2, ()), ("followed", 2, (out / "pinned.plan",)),
                               ("alone_auto", 0, ("auto",)), ("auto", 2, ("auto",))):
        launch.run_ok(["divided_plans.py", out / name, *given], ranks, 60)
        with np.load(out / f"{name}.npz") as results:
            found[name] = dict(results), poseidon.Plan.load(out / f"{name}.plan") if ranks else None
    return found


def test_pins_divide_weights_in_fit_and_in_distributed_functions(outcomes):
    (alone, _), (pinned, plan) = outcomes["alone"], outcomes["pinned"]
    assert [(weight.path, weight.dimension) for weight in plan.divided] == [
        ("fitted/head/kernel", 1), ("fitted/head/bias", 0)]
    for name, values in alone.items():
        np.testing.assert_allclose(pinned[name], values, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_plan_divides_the_same_weights_again(outcomes):
    (pinned, plan), (followed, again) = outcomes["pinned"], outcomes["followed"]
    assert again.divided == plan.divided and again.digest == plan.digest
    for name in ("fitted", *(f"arr_{i}" for i in range(4, 8))):
        np.testing.assert_array_equal(followed[name], pinned[name], err_msg=name)


def test_weights_are_divided_by_which_steps_are_shorter(outcomes):
    (alone, _), (auto, plan) = outcomes["alone_auto"], outcomes["auto"]
    assert [(weight.path, weight.dimension) for weight in plan.divided] == [
        ("fitted/head/kernel", 1), ("fitted/head/bias", 0)]
    for name, values in alone.items():
        np.testing.assert_allclose(auto[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
