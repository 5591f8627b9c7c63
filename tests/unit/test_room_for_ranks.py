"""What launchers say of the ranks of a host, and the room that these have for what they share."""

import contextlib
import os
import time
import types

import pytest

from tf_poseidon.errors import JobError
from tf_poseidon.job.engines import mpi


@pytest.mark.parametrize("free, older, ranks, is_refused", [
    (64, 0, 2, False), (24, 40, 2, False), (23, 41, 2, True),  # another job has left files
    (18, 40, 2, False), (17, 40, 2, True),  # the other rank has its part already, or somebody without a file
    (18, 0, 9, True), (64, 0, 8, False), (64, 0, 9, True), (0, 64, 1, True)])
def test_room_for_shared_memory(free, older, ranks, is_refused, tmp_path, monkeypatch):
    """Of 64 MiB."""
    room = types.SimpleNamespace(f_bavail=free, f_blocks=64, f_frsize=2**20)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    for name, when in (("mpich_shm_1", 0), ("mpich_shm_2", time.time())):  # what has begun since then is this job's
        with open(tmp_path / name, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, older * 2**20))
        os.utime(tmp_path / name, (when, when))
    with pytest.raises(JobError, match=rf"has {free}.0 of 64.0 MiB left, but .* of this host \({ranks}\); remove") if (
            is_refused) else contextlib.nullcontext():
        mpi._check_shared_memory(ranks, str(tmp_path))


def test_shared_memory_here(monkeypatch):
    mpi._check_shared_memory(2, "/no/such/directory")
    mpi._check_shared_memory(2)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(JobError, match=r"^/dev/shm cannot be written, but MPI needs 24 MiB there .* \(2\); let this"):
        mpi._check_shared_memory(2)


@pytest.mark.parametrize("node, size", [(0, 4), (1, 4), (2, 3), (3, 1), (4, 1)])
def test_ranks_of_a_host_by_slurm(node, size):
    environment = {"SLURM_TASKS_PER_NODE": "9", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3,1", "SLURM_NODEID": str(node)}
    assert mpi.local_size(environment) == size
    assert mpi.local_size({**environment, "MPI_LOCALNRANKS": "2"}) == 2
    assert mpi.local_size({"SLURM_TASKS_PER_NODE": "5(x3)", "SLURM_NODEID": str(min(node, 2))}) == 5
    assert mpi.local_size({}) == 1
