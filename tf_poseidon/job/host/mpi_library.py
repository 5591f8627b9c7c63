"""Which MPI the transport uses, how it is loaded, and what its launcher says: the mpich wheel's, or a cluster's own.

Imports no TensorFlow.

Tests: tests/unit/test_doctor.py, tests/scripts/test_own_mpi.py.
"""

from collections.abc import Mapping
import ctypes
import importlib.metadata
import os
import pathlib

from tf_poseidon.errors import JobError

TRANSPORT = pathlib.Path(__file__).parents[1] / "engines" / "libposeidon_mpi.so"

SHARED_BYTES = 6 << 20  # what MPICH and the UCX in it take of /dev/shm for each rank: 5.2 MiB, with 2 and with 4 ranks

# Where launchers say how many processes they started: hydra (MPICH, Intel MPI), Open MPI, PMIx,
# Slurm's srun.
SRUN = "SLURM_STEP_NUM_TASKS"
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", SRUN)

# In the file of a transport that was built with MPICXX (kernels/communicator/mpi_transport.cc).
_OWN = b"poseidon has an MPI of its own"

_VERSION_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING


def launched_size(environment: Mapping[str, str] = os.environ) -> tuple[int, str | None]:
    """Returns (processes, variable): how many a launcher has started, and the environment variable with it."""
    for variable in _SIZE_VARIABLES:
        if variable in environment:
            return int(environment[variable]), variable
    return 1, None


def check_transport() -> None:
    """Raises JobError if there is no transport."""
    if not TRANSPORT.exists():
        raise JobError(f"tf_poseidon's MPI transport is missing ({TRANSPORT}); run `pip install .` in its source tree, "
                       "or `make setup`.")


def is_own() -> bool:
    """Whether it is not the MPI of the mpich wheel, but the one whose MPICXX has built the transport."""
    return TRANSPORT.exists() and _OWN in TRANSPORT.read_bytes()


def load_wheel() -> None:
    """Loads libmpi from the mpich wheel, where the dynamic linker does not look, unless the transport has another."""
    if is_own():
        return  # a cluster's own, which the transport finds by its run path
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "libmpi.so.12":
            ctypes.CDLL(str(pathlib.Path(file.locate()).resolve()), mode=ctypes.RTLD_LOCAL)
            return


def version() -> str:
    """Returns which MPI it is, such as "MPICH 5.0.2 (ch4:ofi)".

    Raises:
        JobError: If it cannot be loaded.
    """
    check_transport()
    load_wheel()
    text, length = ctypes.create_string_buffer(_VERSION_BYTES), ctypes.c_int()
    try:
        ctypes.CDLL(str(TRANSPORT)).MPI_Get_library_version(text, ctypes.byref(length))
    except OSError as error:
        raise not_found(error) from error
    said = text.value.decode(errors="replace").splitlines() or [""]
    lines = dict(line.partition(":")[::2] for line in said)
    if "MPICH Version" in lines:
        return f"MPICH {lines['MPICH Version'].strip()} ({lines.get('MPICH Device', '').strip()})"
    return said[0].partition(",")[0]


def shared_bytes(ranks: int) -> int:
    """Returns how much of /dev/shm has to be free before `ranks` of a host start.

    UCX takes its part of `SHARED_BYTES` where some 14 MiB are left, or does without; ranks that look at the same time
    take more than there is, and end by a signal.
    """
    return ranks * SHARED_BYTES + (12 << 20)


def not_found(error: Exception) -> JobError:
    """Returns the error that says how to get an MPI; `error` is why there is none."""
    return JobError(f"MPI was not found: {error}. Install it with `pip install mpich`, or build tf_poseidon with "
                    "MPICXX set to your cluster's mpicxx and keep its library in LD_LIBRARY_PATH.")
