"""Each process of a machine takes its own GPU, if any. TensorFlow's list of GPUs and the driver are replaced."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.commands import doctor
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import engines
from tf_poseidon.job.host import gpu_driver
from tf_poseidon.job.host import gpus
from tf_poseidon.ops import library


@pytest.fixture
def visible(monkeypatch):
    """Returns the list of GPUs that TensorFlow takes to be visible, whose memory it takes as it needs it."""
    found, growing, experimental = [], {}, tf.config.experimental
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: found if kind == "GPU" else [])

    def set_visible(device, kind):
        assert kind == "GPU"
        found[:] = [device]

    monkeypatch.setattr(tf.config, "set_visible_devices", set_visible)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
    monkeypatch.setattr(experimental, "get_memory_growth", growing.get)
    monkeypatch.setattr(experimental, "set_memory_growth", growing.__setitem__)
    monkeypatch.setattr(library, "gpu_problem", lambda: "")
    return found


class FakeLibrary:
    """libcuda.so of a driver for CUDA 12.4 and two GPUs, of which the first reaches the second.

    Attributes:
        failing: Names of functions that fail.
    """

    def __init__(self, failing=()):
        self.failing, self.memory, self.pinned = failing, 0, 0

    def __getattribute__(self, name):
        failing = object.__getattribute__(self, "failing") if name.startswith("cu") else ()
        return (lambda *arguments: 201) if name in failing else object.__getattribute__(self, name)

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDeviceCanAccessPeer(self, result, device, other):
        result._obj.value = device.value < other.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 1 + device.value
        return 0

    def cuCtxSetCurrent(self, context):
        return 0 if context.value == 1 else 201

    def cuMemHostAlloc(self, data, num_bytes, flags):
        self.pinned += num_bytes.value
        return flags

    def cuMemFreeHost(self, data):
        self.pinned = 0
        return 0

    def cuMemAlloc_v2(self, data, num_bytes):
        data._obj.value = self.memory = 7
        return 0

    def cuMemFree_v2(self, data):
        self.memory -= data.value
        return 0

    def cuIpcGetMemHandle(self, handle, data):
        handle._obj.bytes[0] = data.value
        return 0

    def cuIpcOpenMemHandle_v2(self, data, handle, flags):
        data._obj.value = handle.bytes[0]
        return 0 if (handle.bytes[0], flags) == (7, 1) else 400

    def cuIpcCloseMemHandle(self, data):
        return 0 if data.value == 7 else 400

    def cuDriverGetVersion(self, version):
        version._obj.value = 12040
        return 0

    def cuInit(self, flags):
        return flags

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0 if number < 2 else 101

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid.raw = bytes([device.value]) * 16
        return 0

    def cuDeviceTotalMem_v2(self, total, device):
        total._obj.value = 5 << 30
        return 0


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


def test_the_driver_says_its_version_and_which_gpu_this_is():
    driver = gpu_driver.Driver(FakeLibrary())
    assert driver.version() == (12, 4)
    assert [driver.uuid(number) for number in (0, 1)] == [bytes(16), b"\1" * 16]
    assert driver.memory_bytes(1) == 5 << 30
    with pytest.raises(OSError, match="cuDeviceGet of the GPUs' driver fails with error 101"):
        driver.uuid(2)


def test_what_ranks_do_with_memory_is_tried():
    fake = FakeLibrary()
    driver = gpu_driver.Driver(fake)
    driver.pin()
    assert driver.share(lambda handle: driver.open(handle) or "") == ""
    assert (fake.memory, fake.pinned) == (0, 0)
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2 of the GPUs' driver fails with error 400"):
        driver.open(bytes(64))
    assert [driver.reaches(*pair) for pair in ((0, 1), (1, 0))] == [True, False]
    failing = FakeLibrary(["cuIpcGetMemHandle"])
    assert gpu_driver.Driver(failing).share(lambda handle: "") == (
        "cuIpcGetMemHandle of the GPUs' driver fails with error 201")
    assert failing.memory == 0


def test_another_process_says_why_it_cannot_open_memory():
    says = gpu_driver._opened_elsewhere(bytes(64))
    assert says == "there is no driver" or "GPUs' driver fails with error" in says  # here, and where there are GPUs


@pytest.mark.parametrize("failing, refused, kinds", [
    ([], "", ["ok", "ok", "ok", "ok"]), ([], "no", ["ok", "ok", "note", "ok"]),
    (["cuMemHostAlloc"], "", ["ok", "ok", "ok", "note"])])
def test_doctor_tells_what_gpus_of_a_machine_may_do(failing, refused, kinds, monkeypatch):
    driver = gpu_driver.Driver(FakeLibrary(failing))
    monkeypatch.setattr(gpu_driver, "_opened_elsewhere", lambda handle: refused)
    found = list(doctor._gpu_driver(driver))
    assert [finding.kind.value for finding in found] == kinds
    assert [finding.subject for finding in found] == ["GPUs' driver", "between GPUs", "GPU memory", "pinned memory"]
    assert found[0].value == "supports CUDA 12.4"


@pytest.mark.parametrize("chosen, parts, grows", [(None, None, True), (False, None, False), (None, ["a part"], None)])
def test_memory_is_taken_as_it_is_needed_unless_the_program_says_otherwise(visible, chosen, parts, grows, monkeypatch):
    visible[:] = map(gpu, range(2))
    if chosen is not None:
        tf.config.experimental.set_memory_growth(gpu(1), chosen)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: parts)
    gpus.take_own(1)
    assert tf.config.experimental.get_memory_growth(gpu(1)) is grows


@pytest.mark.parametrize("local_rank, is_told", [(None, True), (0, True), (1, False)])
def test_without_gpu_kernels_a_machine_is_told_once(visible, local_rank, is_told, monkeypatch, caplog):
    visible[:] = [gpu(0)]
    monkeypatch.setattr(library, "gpu_problem", lambda: "the driver is old; update it")
    gpus.take_own(local_rank)
    assert ("since the driver is old. That takes longer; to change it, update it." in caplog.text) is is_told


@pytest.mark.parametrize("versions, says", [
    (None, "tf_poseidon was built without GPU kernels; build a wheel, or from source with TF_POSEIDON_CUDA=1, "),
    ((12040, 13000), "the GPUs' driver supports CUDA 12.4, and tf_poseidon's GPU kernels were built by CUDA 13.0; "
     "update the driver, or build from source with CUDA_HOME naming a toolkit of CUDA 12"),
    ((13000, 13000), "")])
def test_why_there_are_no_gpu_kernels(versions, says, monkeypatch):
    functions = types.SimpleNamespace()
    if versions is not None:
        def is_too_old(driver, compiler):
            driver._obj.value, compiler._obj.value = versions
            return versions[0] < versions[1]

        functions.poseidon_is_driver_too_old = is_too_old
    monkeypatch.setattr(library, "load", lambda: (None, functions))
    problem = library.gpu_problem()
    assert problem.startswith(says) and bool(problem) == bool(says)


LIMITED = types.SimpleNamespace(memory_limit=1024)


@pytest.mark.parametrize("ranks, rank, says", [
    ([(0, None), (1, None)], 0, ""),
    ([(0, None), (0, None)], 0, "Ranks 0 and 1 share a GPU, and 0 and 1 may take all"),
    ([(0, None), (0, None)], 1, ""),  # rank 0 says it
    ([(1, None), (0, LIMITED), (0, LIMITED), (0, None)], 1, "Ranks 1, 2 and 3 share a GPU, and 3 may take all"),
    ([(0, LIMITED), (0, LIMITED)], 0, ""),
    ([(None, None), (None, None)], 0, ""),  # none has a GPU
])
def test_ranks_that_share_a_gpu(visible, ranks, rank, says, monkeypatch, caplog):
    monkeypatch.setattr(gpu_driver, "find", lambda: gpu_driver.Driver(FakeLibrary()))
    rows = []

    def together(number, limit, communicator):
        visible[:] = [] if number is None else [gpu(number)]
        monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: limit and [limit])
        gpus.warn_of_shared(communicator)

    def note(site, mine):
        rows.extend(mine)
        return np.zeros((len(ranks), 2), np.int64)

    for other, (number, limit) in enumerate(ranks):
        together(number, limit, types.SimpleNamespace(rank=other, gather=note))
    assert not caplog.text
    together(*ranks[rank], types.SimpleNamespace(rank=rank, gather=lambda site, mine: np.array(rows)))
    assert says in caplog.text and bool(says) == bool(caplog.text)
