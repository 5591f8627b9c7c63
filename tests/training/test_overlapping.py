"""Executions of several steps, in which steps overlap, have the bits of as many executions of one step."""

import functools
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


def programs_of(job, full):
    return tuple(train_overlapping.PROGRAMS) if full or job[0] == 2 else SOME


def pytest_generate_tests(metafunc):
    full = metafunc.config.getoption("--full")
    metafunc.parametrize("job, name", [(job, name) for job in JOBS for name in programs_of(job, full)], ids=[
        f"{policy} on {ranks}, {steps} steps-{name}" for ranks, policy, steps in JOBS
        for name in programs_of((ranks, policy, steps), full)])


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Returns what each rank of a job has written, by a function that runs each job once."""
    @functools.cache
    def results(job):
        ranks, policy, steps = job
        directory = tmp_path_factory.mktemp("overlapping")
        names = programs_of(job, request.config.getoption("--full"))
        launch.run_ok(["train_overlapping.py", directory, policy, str(steps), *names], ranks, timeout_s=900)
        return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)]

    return results


def test_bits_do_not_depend_on_the_steps_of_an_execution(results, job, name):
    digests = {digest for found in results(job) for steps, digest in found[name].items() if steps.isdecimal()}
    assert len(digests) == 1


def test_plans_say_what_holds_steps_back(results, job, name):
    found = results(job)[0][name]
    overlap = found["overlap"]
    assert HELD[name] in overlap if name in HELD else overlap == "Steps overlap."
    assert found["planned"] == (1 if "do not" in overlap else job[2])
