"""Jobs of which some ranks only serve train, evaluate and predict what one process does."""

import json
import re

import launch
import numpy as np
import pytest

WAYS = ("fit", "distribute", "run")


def trained(output, ranks, **options):
    """Returns what each rank that trains has found, and the job's outcome."""
    outcome = launch.run_ok(["train_with_servers.py", str(output), str(options)], ranks, timeout_s=120)
    return [json.loads(path.read_text()) for path in sorted(output.parent.glob(f"{output.name}.*.json"))], outcome


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    (found,), _ = trained(tmp_path_factory.mktemp("alone") / "alone", 0)
    return found


@pytest.mark.parametrize("ranks, options, servers", [
    (3, {"dedicated_servers": 1, "policy": "ps", "ranks_per_node": 1}, "3 servers (1 dedicated)"),
    # All keys are theirs, and ranks combine before; parameters travel in many KV pairs.
    (4, {"dedicated_servers": 2, "servers": (2, 3), "kv_pair_bytes": 4096, "policy": "ps"}, "2 servers (2 dedicated)"),
    (4, {"dedicated_servers": 1, "policy": "sfb", "verify": 2}, "4 servers (1 dedicated)"),
    (4, {"dedicated_servers": 1, "policy": "ps", "pins": {"*/kernel": "hfb"}}, "4 servers (1 dedicated)")])
def test_ranks_that_train_compute_what_one_process_does(alone, tmp_path, ranks, options, servers):
    found, outcome = trained(tmp_path / "served", ranks, **options)
    workers = ranks - options["dedicated_servers"]
    assert [each["ranks"] for each in found] == [workers] * workers
    assert f"for {workers} workers, {servers}" in found[0]["plan"]
    for way in WAYS:
        for each in found:
            assert each[way]["change"] == found[0][way]["change"]  # the same bits on all ranks
        change, expected = (np.array(each[way]["change"]) for each in (found[0], alone))
        assert change @ expected / (expected @ expected) == pytest.approx(1, abs=1e-4)
        np.testing.assert_allclose(change, expected, atol=1e-5)
        for name, values in found[0][way].items():
            np.testing.assert_allclose(values, alone[way][name], rtol=1e-3, atol=1e-5, err_msg=f"{way} {name}")
    said = re.findall(r"tf_poseidon: rank (\d+) serves the (\d+) ranks that train", outcome.output)
    assert sorted(said) == [(str(rank), str(workers)) for rank in range(workers, ranks)]
    assert f"{workers} ranks on one host, served by {ranks - workers} more, over" in outcome.output
