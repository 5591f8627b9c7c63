"""What ranks and the program that has called `poseidon.run` say to each other, and by which words they know each other.

A connection begins with proofs, both ways, that the ends know the key of the job (by HMAC); only then is anything
unpickled. A rank greets, gets the call, and answers with a `RankResult` or a `RankFailure`. It is the environment that
tells ranks where to connect, and the key.

Tests: tests/training/test_function_jobs.py.
"""

from collections.abc import Mapping
import json
from multiprocessing import connection as connection_lib
import secrets
import socket
import struct
from typing import NamedTuple

CALLER = "TF_POSEIDON_CALLER"  # where it listens; set in all ranks of such a job, and in processes that they start
_KEY = "TF_POSEIDON_CALLER_KEY"
KEY_BYTES = 32
_PROOF_S = 5  # what an end has to prove itself
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")


class RankGreeting(NamedTuple):
    """Who a rank is.

    Attributes:
        rank: Its number.
        host: Its host's name.
    """

    rank: int
    host: str


class RankResult(NamedTuple):
    """That the function has returned.

    Attributes:
        pickled: What it has returned, or None if that is not wanted.
    """

    pickled: bytes | None


class RankFailure(NamedTuple):
    """That the function has raised an exception.

    Attributes:
        pickled: The exception, or None if it cannot be pickled, or is none for the caller.
        text: Its last lines in a traceback.
        trace: All of it.
        is_echo: Whether the job had ended before, by a failure of another rank or of this one.
        has_joined: Whether this rank has joined the job, so that the others end by themselves.
    """

    pickled: bytes | None
    text: str
    trace: str
    is_echo: bool
    has_joined: bool


def new_key() -> bytes:
    """Returns a key that nobody knows."""
    return secrets.token_bytes(KEY_BYTES)


def environment(addresses: list[tuple[str, int]], key: bytes) -> dict[str, str]:
    """Returns the environment variables by which a rank finds the caller."""
    return {CALLER: json.dumps(addresses), _KEY: key.hex()}


def take_environment(variables: dict[str, str]) -> tuple[list[tuple[str, int]], bytes]:
    """Returns the addresses and the key, which other processes do not get any more."""
    return [(host, port) for host, port in json.loads(variables[CALLER])], bytes.fromhex(variables.pop(_KEY))


def own_rank(variables: Mapping[str, str]) -> int:
    """Returns this process's number, according to its launcher."""
    return next((int(variables[name]) for name in _RANK_VARIABLES if name in variables), 0)


def authenticated(own_end: socket.socket, key: bytes, is_caller: bool) -> connection_lib.Connection:
    """Returns the connection of a socket, whose other end has proved that it knows the key.

    Raises:
        OSError: If it does not prove so in time, or leaves.
        EOFError: If it leaves.
        multiprocessing.AuthenticationError: If it does not know the key.
    """
    own_end.settimeout(None)
    own_end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PROOF_S, 0))
    connection = connection_lib.Connection(own_end.detach())
    try:
        steps = [connection_lib.deliver_challenge, connection_lib.answer_challenge]
        for step in steps if is_caller else steps[::-1]:
            step(connection, key)
        with socket.socket(fileno=connection.fileno()) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
            same.detach()
    except BaseException:
        connection.close()
        raise
    return connection
