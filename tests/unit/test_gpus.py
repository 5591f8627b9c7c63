"""Each process of a machine takes its own GPU, if there is one: TensorFlow's list of GPUs is replaced."""

import pytest
import tensorflow as tf

from tf_poseidon import engines
from tf_poseidon import gpus
from tf_poseidon.errors import PoseidonError


@pytest.fixture
def visible(monkeypatch):
    """Returns the list of GPUs that TensorFlow takes to be visible."""
    found = []
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: found if kind == "GPU" else [])

    def set_visible(device, kind):
        assert kind == "GPU"
        found[:] = [device]

    monkeypatch.setattr(tf.config, "set_visible_devices", set_visible)
    return found


def gpu(i):
    return tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU")


@pytest.mark.parametrize("number, local_rank, own", [
    (0, 0, None), (0, 3, None), (1, 0, 0), (1, 3, 0), (4, 0, 0), (4, 3, 3), (2, 3, 1)])
def test_each_process_takes_one(visible, number, local_rank, own):
    visible[:] = map(gpu, range(number))
    gpus.take_own(local_rank)
    assert visible == ([] if own is None else [gpu(own)])
    gpus.take_own(local_rank)  # as another strategy of the process does
    assert visible == ([] if own is None else [gpu(own)])


def test_processes_that_share_a_gpu_are_told(visible, caplog):
    visible[:] = map(gpu, range(2))
    gpus.take_own(None)
    assert visible == [gpu(0)] and "each takes /physical_device:GPU:0: let each see a GPU" in caplog.text


def test_gpus_in_use_are_refused(visible, monkeypatch):
    def refuse(device, kind):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    visible[:] = map(gpu, range(2))
    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with pytest.raises(PoseidonError, match="already uses 2 GPUs.*all but /physical_device:GPU:1 .*CUDA_VISIBLE"):
        gpus.take_own(1)


@pytest.mark.parametrize("engine, environment, local_rank", [
    ("mpi", {}, None), ("mpi", {"MPI_LOCALRANKID": "2"}, 2), ("mpi", {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
    ("mpi", {"SLURM_LOCALID": "3"}, 3), ("mpi", {"HOROVOD_LOCAL_RANK": "1"}, None), ("horovod", {}, None),
    ("horovod", {"HOROVOD_LOCAL_RANK": "1", "SLURM_LOCALID": "3"}, 1), ("horovod", {"MPI_LOCALRANKID": "2"}, 2)])
def test_launchers_say_which_process_of_a_machine_this_is(engine, environment, local_rank):
    assert engines.load(engine).local_rank(environment) == local_rank
