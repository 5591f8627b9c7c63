"""Horovod as the engine: gradients travel by its ops, over whatever it was built with.

Horovod only has collectives, in which all ranks take part. Everything else that a job needs, such as
agreement, failing with a reason and leaving, takes messages between two ranks. These travel over
connections of our own; ranks exchange the addresses over Horovod.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import hmac
import os
import secrets
import socket
import threading
import time
import types

import numpy as np

from tf_poseidon import communicator as communicator_lib
from tf_poseidon.engines import mpi
from tf_poseidon.errors import JobError
from tf_poseidon.graph_passes.write import horovod_ops
from tf_poseidon.options import JobOptions

writer = horovod_ops.HorovodOps

# Set by horovodrun --gloo. With MPI, mpiexec starts the processes.
_SIZE_VARIABLE = "HOROVOD_SIZE"

# Where a rank can be reached: the addresses of its host, the port, and the token that identifies it.
_Address = tuple[list[str], int, bytes]

_TOKEN_BYTES = 16
_CONNECT_S = 5.0
# How long the program may take to end after the job has failed.
_GRACE_S = 10.0


def launched_size(environment: Mapping[str, str] = os.environ) -> tuple[int, str | None]:
    """Returns (processes, variable): how many horovodrun has started, and the environment variable with it."""
    if _SIZE_VARIABLE in environment:
        return int(environment[_SIZE_VARIABLE]), _SIZE_VARIABLE
    return 1, None


def local_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns this process's number on its machine, according to horovodrun or MPI's launcher; None if unknown."""
    found = environment.get("HOROVOD_LOCAL_RANK")
    return mpi.local_rank(environment) if found is None else int(found)


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
    # Horovod decides which ranks combine.
    joined = communicator_lib.join_sockets(hvd.rank(), _sockets(hvd, options.startup_timeout_s),
                                           dataclasses.replace(options, ranks_per_node=None))
    threading.Thread(target=_end_with_job, args=(joined, may_leave), daemon=True).start()
    return joined


def register_ops() -> None:
    """Registers Horovod's ops with TensorFlow."""
    _horovod()


def start_alone() -> None:
    """Makes Horovod's ops run in a process that was launched alone."""
    _horovod().init()


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
    rank, deadline = hvd.rank(), time.monotonic() + timeout_s
    with socket.create_server(("", 0), backlog=hvd.size()) as listener:
        token = secrets.token_bytes(_TOKEN_BYTES)
        mine = (_addresses(), listener.getsockname()[1], token)
        everyone = hvd.allgather_object(mine, name="poseidon.addresses")
        sockets = [None] * hvd.size()
        for peer in range(rank):
            sockets[peer] = _connect_to(peer, rank, everyone, deadline)
        while None in sockets[rank + 1:]:
            accepted = _accept(listener, rank, everyone, deadline)
            if accepted is None:
                missing = [r for r in range(rank + 1, len(sockets)) if sockets[r] is None]
                raise JobError(
                    f"Rank {rank} on {socket.gethostname()} waited {timeout_s:g} s for connections from "
                    f"the ranks {missing}; let the hosts reach each other on all TCP ports.")
            peer, connection = accepted
            sockets[peer] = connection
    for connection in sockets:
        if connection is not None:
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


def _addresses() -> list[str]:
    """Returns the IPv4 addresses of this host, loopback addresses first."""
    import psutil  # installed with Horovod
    found = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries
             if entry.family == socket.AF_INET}
    return sorted(found, key=lambda address: (not address.startswith("127."), address))


def _connect_to(peer: int, rank: int, everyone: Sequence[_Address], deadline: float) -> socket.socket:
    """Returns a connection to a lower rank, at any of its addresses that answers."""
    addresses, port, token = everyone[peer]
    own = everyone[rank][2]
    failures = []
    while time.monotonic() < deadline:
        failures.clear()
        for address in addresses:
            try:
                with contextlib.ExitStack() as unless_proved:
                    connection = unless_proved.enter_context(
                        socket.create_connection((address, port), _CONNECT_S))
                    # Many hosts have the same private addresses, so the peer must prove that it knows the tokens.
                    connection.sendall(rank.to_bytes(4, "big") + _proof(own, token))
                    if hmac.compare_digest(_read(connection, 32), _proof(token, own)):
                        unless_proved.pop_all()
                        return connection
                failures.append(f"{address}: another program")
            except OSError as error:
                failures.append(f"{address}: {error}")
        time.sleep(0.2)
    raise JobError(
        f"Rank {rank} on {socket.gethostname()} cannot connect to rank {peer} ({'; '.join(failures)}); "
        "let the hosts reach each other on all TCP ports.")


def _accept(listener: socket.socket, rank: int, everyone: Sequence[_Address],
            deadline: float) -> tuple[int, socket.socket] | None:
    """Returns (peer, connection) of a higher rank, or None after the deadline."""
    while (left := deadline - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            with contextlib.ExitStack() as unless_proved:
                connection = unless_proved.enter_context(listener.accept()[0])
                connection.settimeout(_CONNECT_S)
                peer, proof = int.from_bytes(_read(connection, 4), "big"), _read(connection, 32)
                if rank < peer < len(everyone):
                    token, own = everyone[peer][2], everyone[rank][2]
                    if hmac.compare_digest(proof, _proof(token, own)):
                        connection.sendall(_proof(own, token))
                        unless_proved.pop_all()
                        return peer, connection
        except OSError:  # a foreign connection, or a peer that has given up
            continue
    return None


def _proof(mine: bytes, yours: bytes) -> bytes:
    """Returns the proof by which a rank shows another that it belongs to this job."""
    return hmac.digest(mine, yours, "sha256")


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("it has closed the connection")
        data += part
    return data


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
    text = f"[rank {communicator.rank}] The job has ended. {communicator.failure}\n"
    os.write(2, text.encode())
    os._exit(1)
