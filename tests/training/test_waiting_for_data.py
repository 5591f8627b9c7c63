"""How long steps wait for their batches is measured, whichever way they get them."""

import json

import launch
import wait_for_data


def test_steps_that_wait_for_data_say_so(tmp_path):
    """Each batch of rank 1 takes 50 ms at least; those of rank 0, of which all together take less, have that long."""
    launch.run_ok(["wait_for_data.py", tmp_path], 2, timeout_s=120)
    late = wait_for_data.BATCHES * wait_for_data.LATE_S
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len(of_ranks[0]) == 9
    for way, (waited, _) in of_ranks[0].items():
        assert 0 < waited < late, way
    for way, (waited, seconds) in of_ranks[1].items():
        assert late <= waited < seconds, way
