"""Executions of several steps, in which steps overlap, have the bits of as many executions of one step."""

import json

from jobs import Case
import pytest
import train_overlapping

STEPS = {2: 8, 3: 4, 4: 8}  # of an execution, by number of ranks
# Without --full, on two ranks; test_sharded_update.py and test_divided_weights.py have such executions on three.
SOME = ("embedding", "accumulation", "gan", "random_ops_that_keep_their_state")
WHOLE = "variables wait for the whole step before, since branches or loops access them"
HELD = {
    "global_norm": "updates wait for several gradients, as with a global norm",
    "loss_scale": WHOLE,
    "accumulation": WHOLE,
    "averages": WHOLE,
    "loop_of_ones_own": "",  # not an execution of Keras
    "random_ops_that_keep_their_state": "Steps do not overlap, since the RandomStandardNormal",
}


def cases(is_full):
    """Returns programs, each with as many steps per execution as STEPS says, and with one."""
    names = tuple(train_overlapping.PROGRAMS)
    jobs = ((2, "auto", names), (3, "sfb", names), (4, "ps", names)) if is_full else (
        (2, "auto", SOME),)
    return [Case("train_overlapping.py", name, ranks, policy, (f"--steps={STEPS[ranks]}",))
            for ranks, policy, some in jobs for name in some]


def found(jobs, case):
    """Returns what each rank has written about a program."""
    return [json.loads((jobs.folder(case) / f"{rank}.json").read_text())[case.name] for rank in range(case.ranks)]


@pytest.mark.table(cases=cases)
def test_bits_do_not_depend_on_the_steps_of_an_execution(jobs, case):
    digests = {digest for of_rank in found(jobs, case) for steps, digest in of_rank.items() if steps.isdecimal()}
    assert len(digests) == 1


@pytest.mark.table(cases=cases)
def test_plans_say_what_holds_steps_back(jobs, case):
    seen = found(jobs, case)[0]
    overlap, name = seen["overlap"], case.name
    assert HELD[name] in overlap if name in HELD else overlap == "Steps overlap."
    assert seen["planned"] == (1 if "do not" in overlap else STEPS[case.ranks])
