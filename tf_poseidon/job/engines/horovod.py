"""Horovod as the engine: gradients travel by its ops, over whatever it was built with.

Horovod only has collectives, in which all ranks take part. Everything else that a job needs, such as
agreement, failing with a reason and leaving, takes messages between two ranks. These travel over
connections of our own (`connections.py`); ranks exchange the addresses over Horovod.

Tests: tests/engines/test_horovod.py, tests/unit/test_gpus.py.
"""

from collections.abc import Mapping
import dataclasses
import importlib.metadata
import json
import logging
import os
import secrets
import socket
import threading
import time
import types
from typing import Any

import numpy as np

from tf_poseidon.errors import JobError
from tf_poseidon.graph_passes.write import horovod_ops
from tf_poseidon.job import communicator as communicator_lib
from tf_poseidon.job import log_lines
from tf_poseidon.job.engines import mpi
from tf_poseidon.job.host import connections
from tf_poseidon.job.host import forks
from tf_poseidon.options import JobOptions

writer = horovod_ops.HorovodOps

# Set by horovodrun --gloo. With MPI, mpiexec starts the processes.
_SIZE_VARIABLE = "HOROVOD_SIZE"

# How long the program may take to end after the job has failed.
_GRACE_S = 10.0


def library() -> str:
    """Returns the version of Horovod, and what it was built with."""
    hvd = _horovod()
    over = [name for name, is_built in (("Gloo", hvd.gloo_built()), ("MPI", hvd.mpi_built()),
                                        ("NCCL", hvd.nccl_built())) if is_built]
    return f"Horovod {importlib.metadata.version('horovod')} over {', '.join(over)}"


def launched_size(environment: Mapping[str, str] = os.environ) -> tuple[int, str | None]:
    """Returns (processes, variable): how many horovodrun has started, and the environment variable with it."""
    if _SIZE_VARIABLE in environment:
        return int(environment[_SIZE_VARIABLE]), _SIZE_VARIABLE
    return 1, None


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns this process's number on its machine, according to horovodrun or MPI's launcher; None if unknown."""
    text = environment.get("HOROVOD_LOCAL_RANK")
    return mpi.local_rank(environment) if text is None else int(text)


def join(size: int, options: JobOptions) -> communicator_lib.Communicator:
    """Joins the job that this process was launched in.

    Horovod decides which ranks combine.

    Raises:
        PoseidonError: If Horovod is not installed, sees a different number of processes than the launcher,
            or the ranks cannot connect.
    """
    hvd = _horovod()
    if not hvd.is_initialized():
        # A rank that never joins is an error for Horovod too, after the same time as for us.
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(max(1, int(options.timeout_s / 2))))
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(max(2, int(options.timeout_s))))
        hvd.init()
    if hvd.size() != size:
        raise JobError(
            f"The launcher started {size} processes, but Horovod sees {hvd.size()}. Launch with "
            f"horovodrun, or with the mpiexec of the MPI that Horovod was built with (this one was "
            f"built {'with' if hvd.mpi_built() else 'without'} MPI; scripts/install_horovod.sh builds it "
            "with the MPI whose mpicxx it finds).")
    return connect(options)


def connect(options: JobOptions, may_leave: bool = False) -> communicator_lib.Communicator:
    """Returns a `Communicator` between the ranks of Horovod, which is initialised.

    Args:
        options: The `JobOptions`.
        may_leave: Whether a rank may end its program before the others end theirs.
    """
    hvd = _horovod()
    sockets = _sockets(hvd, options.startup_timeout_s)
    # With a copy in a child, the others would not notice that this rank has ended.
    forks.keep_from_children(connection.fileno() for connection in sockets if connection is not None)
    # Horovod decides which ranks combine.
    joined = communicator_lib.join_sockets(hvd.rank(), sockets,
                                           dataclasses.replace(options, ranks_per_node=None))
    threading.Thread(target=_end_with_job, args=(joined, may_leave), daemon=True).start()
    return joined


def register_ops() -> None:
    """Registers Horovod's ops with TensorFlow."""
    _horovod()


def start_alone() -> None:
    """Makes Horovod's ops run in a process that was launched alone."""
    _horovod().init()


def disconnect() -> None:
    """Does nothing: horovodrun sees a process end by its status alone."""


def end_launcher() -> None:
    """Does nothing: horovodrun ends when the first of its processes has failed, unless another one is frozen."""


def sum_in_place(communicator: communicator_lib.Communicator, site: str, value: np.ndarray) -> None:
    """Sums an array over all ranks, as gradients are summed; all ranks must call it in the same order."""
    del communicator, site
    hvd = _horovod()
    hvd.allreduce(value, op=hvd.Sum)


def _horovod() -> types.ModuleType:
    try:
        import horovod.tensorflow as hvd  # late: it is optional, and imports TensorFlow
    except ImportError as error:
        raise JobError(f"engine='horovod', but Horovod cannot be imported ({error}); run "
                       "scripts/install_horovod.sh from tf_poseidon's source tree.") from error
    return hvd


def _sockets(hvd: types.ModuleType, timeout_s: float) -> list[socket.socket | None]:
    """Returns a connected socket per rank, None for this one."""
    rank = hvd.rank()
    host = connections.this_host()
    hosts = [connections.Host(network, tuple(addresses)) for network, addresses in
             _gather(hvd, "hosts", [host.network, host.addresses])]
    listeners = connections.listen(host, hosts[:rank] + hosts[rank + 1:])
    places = _gather(hvd, "places", [listener.getsockname() for listener in listeners])
    # Not by an object, which would travel as a program that the other ranks run.
    own_key = np.frombuffer(secrets.token_bytes(connections.KEY_BYTES), np.uint8)
    key = np.asarray(hvd.broadcast(own_key, 0, name="poseidon.key")).tobytes()
    return connections.connect(rank, [list(map(tuple, of_rank)) for of_rank in places], listeners, key, timeout_s)


def _gather(hvd: types.ModuleType, name: str, value: Any) -> list[Any]:
    """Returns the values of all ranks, made of lists, texts and numbers."""
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(hvd.allgather(np.array([len(text)]), name=f"poseidon.{name}.lengths"))
    texts = np.asarray(hvd.allgather(text, name=f"poseidon.{name}")).tobytes()
    ends = np.cumsum(lengths)
    return [json.loads(texts[end - length:end]) for end, length in zip(ends, lengths)]


def _end_with_job(communicator: communicator_lib.Communicator, may_leave: bool) -> None:
    """Ends the process some time after the job has failed, unless a rank that may leave was lost.

    Horovod's operations that wait for a rank that never comes cannot be cancelled, and the program
    waits for them.
    """
    while communicator.failure is None:
        time.sleep(0.5)
    if may_leave and communicator.failure.startswith("The network failed: The connection to rank"):
        return
    time.sleep(_GRACE_S)
    log_lines.say(f"[rank {communicator.rank}] The job has ended. {communicator.failure}\n", logging.ERROR)
    os._exit(1)
