"""Jobs whose ranks have unequal shares of batches train what one process does; a plan that has shares replays them."""

import json

import launch
import numpy as np
import pytest

LONG = ("long_epoch", "long_epoch_of_own_rows")
PROGRAMS = ("arrays", "accumulated", "own_rows", *LONG, "full_batches")


def trained(output, rows, ranks, *plan, sleep=0.0, programs=()):
    """Returns what each rank has found, in which rank 0 has what they printed."""
    environment = {"SLEEP": str(sleep), "PROGRAMS": " ".join(programs)}
    outcome = launch.run_ok(["train_with_shares.py", str(output), rows, *map(str, plan)], ranks, timeout_s=120,
                            environment=environment)
    found = [json.loads(output.with_name(f"{output.name}.{rank}.json").read_text()) for rank in range(max(ranks, 1))]
    found[0]["output"] = outcome.output
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("alone") / "alone", "None", 0)[0]


def check(found, alone, programs):
    for program in programs:
        assert len({of_rank[program]["digest"] for of_rank in found}) == 1
        for own, expected in zip(found[0][program]["weights"], alone[program]["weights"], strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5, err_msg=program)
        for name, values in alone[program]["logs"].items():
            np.testing.assert_allclose(found[0][program]["logs"][name], values, rtol=1e-4, err_msg=f"{program} {name}")


@pytest.mark.parametrize("rows", ["(1, 3)", "(7, 1, 2)"])
def test_shares_train_what_one_process_does(alone, tmp_path, rows):
    check(trained(tmp_path / "shares", rows, len(eval(rows))), alone, PROGRAMS)


def test_balanced_shares_follow_speeds_and_a_plan_replays_them(alone, tmp_path):
    plan = tmp_path / "plan"
    found = trained(tmp_path / "balanced", "'balanced'", 2, plan, sleep=0.01)  # rank 1 takes 4 times as long
    check(found, alone, PROGRAMS[:3])
    first, second = found[0]["own_rows"]["shares"]
    assert first >= 1.5 * second, (first, second)
    assert json.loads(plan.read_text())["row_shares"] == [first, second]
    replayed = [trained(tmp_path / f"replay{i}", "None", 2, plan)[0]["own_rows"] for i in range(2)]
    assert replayed[0] == replayed[1] and replayed[0]["shares"] == [first, second]


@pytest.mark.parametrize("program", LONG)
def test_balanced_shares_follow_speeds_within_an_epoch(alone, tmp_path, program):
    found = trained(tmp_path / "balanced", "'balanced'", 2, sleep=0.003, programs=[program, "full_batches"])
    check(found, alone, [program, "full_batches"])
    assert found[0]["output"].count("but ranks keep their shares") == 1  # those of "full_batches", in two epochs
    used = found[0][program]["used"]
    assert used[0] == [1, 1] and used[-1][0] >= 1.5 * used[-1][1], used


@pytest.mark.parametrize("rows, says", [
    ("(1, 2, 3)", "rows=(1, 2, 3) are for 3 ranks, but the job has 2; give as many numbers."),
    ("'fast'", "rows='fast', expected 'balanced', or for each rank a whole number from 1 to 1000, such as (3, 1, 1)."),
    ("(0, 1)", "rows=(0, 1), expected 'balanced'"),
    ("np.array([3, 1])", "rows=array([3, 1]), expected 'balanced'"),
])
def test_other_shares_are_refused(tmp_path, rows, says):
    outcome = launch.run(["train_with_shares.py", str(tmp_path / "refused"), rows], 2, timeout_s=60)
    assert outcome.status != 0 and says in outcome.output
