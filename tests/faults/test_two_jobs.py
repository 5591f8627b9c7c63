"""Jobs that run at the same time on one host, of the same program in the same folder, do not disturb each other."""

from concurrent import futures
import json
import os
import re
import signal
import time

import launch
import pytest

RANKS = 2


@pytest.fixture
def beside(tmp_path):
    """Starts a job in a thread, which goes on after its first batch when there are some files."""
    (tmp_path / "temporary").mkdir()
    with futures.ThreadPoolExecutor() as pool:
        yield lambda name, *awaited: pool.submit(
            launch.run, ["small_programs.py", "train_beside_others", tmp_path, name, *awaited], ranks=RANKS,
            timeout_s=60, environment={"TMPDIR": str(tmp_path / "temporary")})


def started(folder, name):
    """Returns what each rank of a job has written when it had trained on one batch."""
    files = [folder / f"{name}.{rank}" for rank in range(RANKS)]
    end = time.monotonic() + 50
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, f"{name} does not start"
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in files]


def weights(job):
    outcome = job.result()
    assert outcome.status == 0, outcome.output
    found = re.findall(r"weights ([0-9a-f]{64})", outcome.output)
    assert len(found) == RANKS and len(set(found)) == 1, outcome.output
    return found[0]


def test_two_jobs_and_one_that_is_killed(beside, tmp_path):
    """Three start at once, all have trained on a batch before one is killed, and then the others go on."""
    alone = weights(beside("alone"))
    first, second = beside("a", "b.0", "b.1", "gone"), beside("b", "a.0", "a.1", "gone")
    killed = beside("c", "never")
    ranks = {name: started(tmp_path, name) for name in "abc"}
    for rank in ranks["c"]:
        os.kill(rank["pid"], signal.SIGKILL)
    assert killed.result().status != 0
    (tmp_path / "gone").touch()
    assert [weights(first), weights(second)] == [alone, alone]
    names = [{path for rank in of_job for path in rank["shared"]} for of_job in ranks.values()]
    assert all(names) and len(set.union(*names)) == sum(map(len, names)), "two jobs share memory"
    assert not any(map(os.path.exists, set.union(*names)))
    assert os.listdir(tmp_path / "temporary") == []
