"""Jobs that take turns on accelerators: of all schedules, none stops, and none lets two jobs have an accelerator."""

import pytest
from turn_model import Breach
from turn_model import explore
from turn_model import TurnModel
from turn_model import walk


@pytest.mark.parametrize("options, least", [
    ({}, 12_000), ({"overlaps": True}, 19_000), ({"fault": "death"}, 190_000),
    ({"fault": "death", "overlaps": True, "steps": 2}, 36_000), ({"fault": "hang", "steps": 3}, 46_000),
    ({"fault": "restart", "hosts": 2, "steps": 3}, 40_000), ({"jobs": 3, "hosts": 2, "steps": 2}, 20_000)])
def test_no_schedule_stops_or_lets_two_jobs_have_an_accelerator(options, least):
    assert explore(TurnModel(**options)) >= least


@pytest.mark.parametrize("options, error, match", [
    ({"is_numbered": False}, AssertionError, "nobody can go on"),  # each has some hosts, and waits for others
    ({"sees_passed": False}, Breach, None),
    ({"sees_ends": False, "fault": "death"}, AssertionError, "nobody can go on"),
    # It waits for a job which waits for the number that it was to pass before it died.
    ({"is_same_again": True, "fault": "restart", "hosts": 2}, AssertionError, "nobody can go on"),
])
def test_schedules_that_are_wrong_are_found(options, error, match):
    with pytest.raises(error, match=match):
        explore(TurnModel(**options))


@pytest.mark.parametrize("fault", [None, "death", "restart"])
def test_random_schedules_of_more_jobs_and_hosts(fault):
    model = TurnModel(jobs=3, hosts=5, steps=20, overlaps=fault is None, fault=fault)
    actions = [walk(model, seed) for seed in range(20)]
    assert min(actions) >= (3 if fault is None else 2) * 5 * 20 * 3  # of the jobs without a fault


def test_random_schedules_find_what_is_wrong():
    model = TurnModel(jobs=3, hosts=5, steps=20, is_numbered=False)
    with pytest.raises(AssertionError, match="nobody can go on"):
        for seed in range(8):
            walk(model, seed)
