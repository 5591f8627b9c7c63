"""How long steps wait for their batches is measured, whichever way they get them, and is said."""

import json
import re

import launch
from printed_durations import DURATION
from printed_durations import seconds_of
import pytest
import wait_for_data

LATE_S = wait_for_data.LATE_S


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What two ranks say, of which rank 0 waits for 50 ms or more for each batch."""
    folder = tmp_path_factory.mktemp("waits")
    launch.run_ok(["wait_for_data.py", folder], 2, timeout_s=120)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_ways_to_get_a_batch_are_measured(reports):
    """What rank 1 waits for, when it compares its first batch with that of rank 0, is no data."""
    late = wait_for_data.BATCHES * LATE_S
    assert len(reports[0]["waits"]) == 9
    for way, (waited, seconds) in reports[0]["waits"].items():
        assert late <= waited < seconds, way
    for way, (waited, _) in reports[1]["waits"].items():
        assert 0 < waited < late, way


def test_the_table_names_the_rank_whose_data_come_late(reports):
    for rank, report in enumerate(reports):
        found = re.search(rf"^a step of {DURATION}: {DURATION} waiting for data", report["table"], re.M)
        assert (seconds_of(found[2]) >= 0.999 * LATE_S) == (rank == 0)
        assert re.search(rf"^rank 0 waits longest for data, {DURATION} of a step longer than", report["table"], re.M)


def test_the_summary_says_what_to_do(reports):
    """Each step waits for its batch, and then validation for as many."""
    assert reports[1]["summary"] == ""
    found = re.search(rf"^of a step {DURATION} \(.+ %\) wait for data; read it with", reports[0]["summary"], re.M)
    assert 0.999 * LATE_S <= seconds_of(found[1]) < 2 * LATE_S
