"""MPI as the engine: detects whether this process was launched as one of several, and joins them.

Tests: tests/unit/test_room_for_ranks.py, tests/unit/test_package.py, tests/faults/test_failures.py.
"""

from collections.abc import Mapping
import contextlib
import os
import pathlib
import re
import signal
import time

import numpy as np

from tf_poseidon.errors import JobError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.write import send_receive
from tf_poseidon.job import communicator
from tf_poseidon.job.host import forks
from tf_poseidon.job.host import mpi_library
from tf_poseidon.options import JobOptions

# Where launchers give this process's number on its machine.
_LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

_LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Where Slurm gives the number of processes on each of its nodes, such as "4(x2),3", and which of these nodes this is.
_SLURM_SIZES, _SLURM_NODE = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "SLURM_NODEID"
_SHARED_MEMORY = "/dev/shm"

# UCX notes all memory that the process gives back to the system, until it has to register memory with a network card.
# On one host that is never, so it would keep 150 kB for every thousand such events: some 2 MB for each new model.
_UCX_NOTES = "UCX_RCACHE_MAX_UNRELEASED", "16m"

# Where launchers give the number of the connection by which a rank speaks to them.
_CONNECTION = "PMI_FD"

# hydra's process on each host, and what the other ranks there have to print their last words.
_PROXY, _LAST_WORDS_S = "hydra_pmi_proxy", 1.0

writer = send_receive.SendReceive


def library() -> str:
    """Returns which MPI this process uses, such as "MPICH 5.0.2 (ch4:ofi)"."""
    return mpi_library.version()


def launched_size(environment: Mapping[str, str] = os.environ) -> tuple[int, str | None]:
    """Returns (processes, variable): how many a launcher has started, and the environment variable with it."""
    return mpi_library.launched_size(environment)


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns this process's number on its machine, according to a launcher; None if none says so."""
    return next((int(environment[name]) for name in _LOCAL_RANK_VARIABLES if name in environment), None)


def local_size(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes on this machine, according to a launcher; 1 if none says so."""
    for name in _LOCAL_SIZE_VARIABLES:
        if name in environment:
            return int(environment[name])
    sizes = next((environment[name] for name in _SLURM_SIZES if name in environment), "")
    node = int(environment.get(_SLURM_NODE, 0))
    for size, times in re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", sizes):
        node -= int(times or 1)
        if node < 0:
            return int(size)
    return 1


def join(size: int, options: JobOptions) -> "communicator.Communicator":
    """Joins the job that this process was launched in.

    Raises:
        PoseidonError: If there is no usable MPI, the ranks do not meet in time, or MPI sees a different
            number of processes than the launcher.
    """
    mpi_library.check_transport()
    _check_was_launched()
    _check_shared_memory(local_size())
    if not mpi_library.is_own():  # an older UCX would warn of it
        os.environ.setdefault(*_UCX_NOTES)
    # mpiexec ends the others, and all children, when a connection ends, but not once it has noticed the end of the rank
    # itself: a child with the connection that outlives its rank for a moment would let the job hang.
    forks.keep_from_children(int(os.environ[name]) for name in (_CONNECTION,) if name in os.environ)
    mpi_library.load_wheel()
    _check_only_mpi()
    try:
        joined = communicator.join_mpi(mpi_library.TRANSPORT, options)
    except PoseidonError as error:
        if "cannot open shared object file" in str(error):
            raise mpi_library.not_found(error) from error
        raise
    seen = joined.size + options.dedicated_servers
    if seen != size:
        variable = launched_size()[1]
        is_srun = variable == mpi_library.SRUN
        with_what = ("srun --mpi=pmi2 (`srun --mpi=list` shows what this Slurm has)" if is_srun else
                     "the mpiexec of that MPI (for the mpich wheel, the one beside python)")
        raise JobError(
            f"The launcher started {size} processes ({variable}={size}), but MPI sees {seen}: it belongs to a "
            f"different MPI than tf_poseidon was built with, or does not speak to it. Launch with {with_what}.")
    return joined


def register_ops() -> None:
    """Does nothing: this engine only has our ops."""


def start_alone() -> None:
    """Does nothing, for the same reason."""


def disconnect() -> None:
    """Closes the connection to mpiexec, which then ends the other ranks.

    When a process ends, its output closes before this connection. If mpiexec notices that, and the end of the process,
    before the connection's, it leaves the other ranks alone.
    """
    if _CONNECTION in os.environ:
        with contextlib.suppress(OSError, ValueError):
            os.close(int(os.environ[_CONNECTION]))


def end_launcher() -> None:
    """Ends mpiexec where it waits for a host that is gone, by ending its proxy on this host.

    mpiexec hears of its hosts by connections, which stay open when a host vanishes. When it loses the proxy of one, it
    ends, and then the proxies of the others do, with their ranks. On this host nobody would end them.
    """
    parents = _parents()
    ancestor = os.getpid()
    while ancestor in parents and _name_of(ancestor) != _PROXY:
        ancestor = parents[ancestor]
    if ancestor not in parents:
        return  # another launcher's, which watches its hosts
    time.sleep(_LAST_WORDS_S)
    ranks = [ancestor]
    for process in ranks:
        ranks += [child for child, parent in _parents().items() if parent == process and child != os.getpid()]
    for process in ranks[::-1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Returns the parent of each process."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return parents


def _name_of(process: int) -> str:
    try:
        return pathlib.Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def sum_in_place(communicator: "communicator.Communicator", site: str, value: np.ndarray) -> None:
    """Sums an array over all ranks, as gradients are summed."""
    communicator.submit(site, value, out=value)()


def _check_was_launched() -> None:
    """Refuses a process that has a rank's environment, but was started by that rank: MPI would end it with its own."""
    connection = os.environ.get("PMI_FD")
    if connection is None:
        return
    try:
        os.fstat(int(connection))
    except OSError:
        raise JobError(
            f"This process has the environment of a rank (PMI_FD={connection}), but not its connection to mpiexec: a "
            "rank has started it, as a subprocess. To run it alone, start it without the variables that begin with "
            "'PMI_'.") from None


def _check_shared_memory(ranks: int, directory: str = _SHARED_MEMORY) -> None:
    """Refuses to start ranks where MPI would end by a signal, when it touches memory that is not there.

    Other ranks of the job may have their parts already. So there has to be room for all that this job takes beside
    files that are older than this process, which are none of its; and where others without names have taken that, at
    least for this rank.
    """
    try:
        room = os.statvfs(directory)
    except OSError:
        return  # none: MPI does without
    free, size = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    needed = mpi_library.shared_bytes(ranks)
    if not os.access(directory, os.W_OK) and not mpi_library.is_own():  # which may share memory elsewhere
        raise JobError(f"{directory} cannot be written, but MPI needs {needed >> 20} MiB there for the ranks of this "
                       f"host ({ranks}); let this user write it, or mount one (a tmpfs, in Kubernetes an emptyDir).")
    if free < mpi_library.shared_bytes(1) or size - _older_bytes(directory) < needed:
        raise JobError(
            f"{directory} has {free / 2**20:.1f} of {size / 2**20:.1f} MiB left, but MPI needs {needed >> 20} MiB "
            f"there for the ranks of this host ({ranks}); remove what ended programs have left "
            f"('{directory}/mpich_shm_*'), or give the container more (docker run --shm-size=1g).")


def _older_bytes(directory: str) -> int:
    """Returns what files of a folder take that have not changed since this process started."""
    ticks = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the machine started
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    started, taken = time.time() - age, 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # it is gone
                status = os.lstat(os.path.join(folder, name))
                if status.st_mtime < started:
                    taken += status.st_blocks * 512
    return taken


def _check_only_mpi() -> None:
    """Refuses a second MPI: Horovod, for example, loads its own in such a way that ours would call its functions."""
    libraries = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split()[-1]
            if os.path.basename(path).startswith("libmpi.so"):
                libraries.add(path)
    if len(libraries) > 1:
        raise JobError(
            f"Two MPI libraries are loaded into this process, {' and '.join(sorted(libraries))}, and would "
            "call each other's functions; build Horovod with the mpicxx of the MPI that tf_poseidon uses "
            "(scripts/install_horovod.sh), or without MPI.")
