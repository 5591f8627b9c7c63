"""Executions of several steps, in which steps overlap, have the bits of as many executions of one step."""

import json

import launch
import pytest
import train_overlapping

JOBS = ((2, "auto", 8), (3, "sfb", 4), (4, "ps", 8))  # ranks, policy, steps per execution
# On more than two ranks, without --full.
SOME = ("momentum", "accumulation", "batch_norm", "embedding", "gan", "loop_of_ones_own")
WHOLE = "variables wait for the whole step before, since branches or loops access them"
HELD = {
    "global_norm": "updates wait for several gradients, as with a global norm",
    "loss_scale": WHOLE,
    "accumulation": WHOLE,
    "averages": WHOLE,
    "loop_of_ones_own": "",  # not an execution of Keras
    "random_ops_that_keep_their_state": "Steps do not overlap, since the RandomStandardNormal",
}


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("--full")
    jobs = [(job, tuple(train_overlapping.PROGRAMS) if full or job[0] == 2 else SOME) for job in JOBS]
    metafunc.parametrize(("trained", "name"), [(job, name) for job in jobs for name in job[1]], indirect=["trained"],
                         ids=[f"{policy} on {ranks}, {steps} steps-{name}" for (ranks, policy, steps), names in jobs
                              for name in names], scope="module")


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """Returns (what each rank has written, steps per execution)."""
    (ranks, policy, steps), names = request.param
    directory = tmp_path_factory.mktemp("overlapping")
    launch.run_ok(["train_overlapping.py", directory, policy, str(steps), *names], ranks, timeout_s=900)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)], steps


def test_bits_do_not_depend_on_the_steps_of_an_execution(trained, name):
    digests = {digest for found in trained[0] for steps, digest in found[name].items() if steps.isdecimal()}
    assert len(digests) == 1


def test_plans_say_what_holds_steps_back(trained, name):
    found, steps = trained
    overlap = found[0][name]["overlap"]
    assert HELD[name] in overlap if name in HELD else overlap == "Steps overlap."
    assert found[0][name]["planned"] == (1 if "do not" in overlap else steps)
