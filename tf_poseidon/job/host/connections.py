"""Connects the ranks of a job with each other by sockets; strangers on the network are neither served nor waited for.

A rank listens only where the others reach it. Whoever connects has a few seconds to prove that it knows the key of the
job, and gets such a proof in return; meanwhile others are served. Both proofs are about numbers drawn for this
connection, so what somebody has heard of another one is of no use. What follows is neither encrypted nor signed:
docs/security.md.

Tests: tests/engines/test_connections.py.
"""

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence
import concurrent.futures
import contextlib
import dataclasses
import errno
import hmac
import itertools
import os
import pathlib
import re
import secrets
import socket
import time

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import JobError
from tf_poseidon.errors import shown

INTERFACE_VARIABLE = "TF_POSEIDON_INTERFACE"
PORTS_VARIABLE = "TF_POSEIDON_PORT_RANGE"
KEY_BYTES = 32

_NONCE_BYTES, _PROOF_BYTES = 16, 32
_HANDSHAKE_S = 5.0
_RETRY_S = 0.2
_ACCEPTED = b"\1"
# Connections whose proof is awaited at a time, beside those of ranks.
_STRANGERS = 64


@dataclasses.dataclass(frozen=True)
class Host:
    """Where a rank runs.

    Attributes:
        network: Names the network that the rank sees: ranks with the same one reach each other by loopback.
        addresses: Its IPv4 addresses, without that of loopback.
    """

    network: str
    addresses: tuple[str, ...]


def this_host(environment: Mapping[str, str] = os.environ) -> Host:
    """Returns this rank's host; with the addresses of one interface alone if TF_POSEIDON_INTERFACE names it.

    Raises:
        ConfigurationError: If there is no such interface.
    """
    import psutil  # installed with Horovod
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    interfaces = {name: tuple(entry.address for entry in entries if entry.family == socket.AF_INET)
                  for name, entries in psutil.net_if_addrs().items()}
    wanted = environment.get(INTERFACE_VARIABLE)
    if wanted is not None and not interfaces.get(wanted):
        names = ", ".join(sorted(name for name, addresses in interfaces.items() if addresses))
        raise ConfigurationError(f"{INTERFACE_VARIABLE}={wanted}, but {socket.gethostname()} has no such interface "
                                 f"with an IPv4 address; expected one of {names}.")
    addresses = interfaces[wanted] if wanted else tuple(itertools.chain.from_iterable(interfaces.values()))
    return Host(f"{boot}/{os.stat('/proc/self/ns/net').st_ino}",
                tuple(address for address in addresses if not address.startswith("127.")))


def listen(this: Host, others: Sequence[Host]) -> list[socket.socket]:
    """Returns sockets that listen at those addresses of this host by which the others reach it.

    Raises:
        JobError: If there is none.
    """
    addresses = {"127.0.0.1"} if any(host.network == this.network for host in others) else set()
    for host in others:
        if host.network != this.network:
            addresses.update(source for address in host.addresses if address not in this.addresses
                             and (source := _source(address)) in this.addresses)
    if not addresses:
        raise JobError(f"{socket.gethostname()} has the addresses {', '.join(this.addresses) or 'none'}, by none of "
                       f"which it reaches another host of the job; set {INTERFACE_VARIABLE} on all hosts to the "
                       "interface that connects them.")
    return [listen_at(address) for address in sorted(addresses)]


def listen_at(address: str, environment: Mapping[str, str] = os.environ) -> socket.socket:
    """Returns a socket that listens at an address of this host, on a port of TF_POSEIDON_PORT_RANGE if that is set.

    Raises:
        ConfigurationError: If that is no range of ports, or of some that the user may not have.
        JobError: If other programs have all of them.
    """
    text = environment.get(PORTS_VARIABLE) or "0-0"
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text, re.ASCII)
    low, high = map(int, match.groups()) if match else (1, 0)
    if not low <= high < 2**16 or low == 0 < high:
        raise ConfigurationError(f"The environment variable {PORTS_VARIABLE} is {shown(text)}, expected the first and "
                                 "the last of some ports, such as 30000-30099; change it, or unset it.")
    for port in range(low, high + 1):
        try:
            return socket.create_server((address, port), backlog=1024,
                                        family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        except OSError as error:
            if error.errno == errno.EACCES:
                raise ConfigurationError(f"The environment variable {PORTS_VARIABLE} is {shown(text)}, but this user "
                                         f"may not listen on port {port}; allow ports above 1023.") from error
            if error.errno != errno.EADDRINUSE:
                raise
    raise JobError(f"{socket.gethostname()} has no free port among {text}, which {PORTS_VARIABLE} allows, expected one "
                   "for each call of poseidon.run, and each rank of the engine horovod; allow more, or end the "
                   "programs that have them.")


def _source(address: str) -> str | None:
    """Returns the address from which this host sends to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def connect(rank: int, places: Sequence[Sequence[tuple[str, int]]], listeners: Sequence[socket.socket], key: bytes,
            timeout_s: float) -> list[socket.socket | None]:
    """Returns a connected socket per rank, None for this one. Every rank connects to those below it.

    Args:
        rank: This rank.
        places: For each rank, the (address, port) pairs at which it listens.
        listeners: This rank's listening sockets, which are closed in the end.
        key: The job's key.
        timeout_s: After how long to give up.

    Raises:
        JobError: If not all ranks are connected then.
    """
    meeting = _Meeting(rank, places, key, time.monotonic() + timeout_s, timeout_s)
    # A thread of its own: in a notebook, this one runs an event loop already.
    with concurrent.futures.ThreadPoolExecutor(1) as executor, contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener).setblocking(False)
        sockets = executor.submit(asyncio.run, meeting.meet(listeners)).result()
    for connection in sockets:
        if connection is not None:
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets


class _Meeting:
    """One rank, on its way to a connection with each other one."""

    def __init__(self, rank: int, places: Sequence[Sequence[tuple[str, int]]], key: bytes, deadline: float,
                 timeout_s: float) -> None:
        self._rank, self._places, self._key = rank, places, key
        self._deadline, self._timeout_s = deadline, timeout_s
        self._sockets: list[socket.socket | None] = [None] * len(places)
        self._failures: dict[int, list[str]] = {}
        self._changed = asyncio.Event()

    async def meet(self, listeners: Sequence[socket.socket]) -> list[socket.socket | None]:
        higher = len(self._places) - self._rank - 1
        room = asyncio.Semaphore(_STRANGERS + higher)
        tasks = [asyncio.create_task(self._serve(listener, room)) for listener in listeners if higher]
        tasks += [asyncio.create_task(self._reach(peer)) for peer in range(self._rank)]
        try:
            await asyncio.wait_for(self._all_found(), max(0.0, self._deadline - time.monotonic()))
        except asyncio.TimeoutError:
            for connection in self._sockets:
                if connection is not None:
                    connection.close()
            raise JobError(self._problem()) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._sockets

    async def _all_found(self) -> None:
        while self._missing():
            self._changed.clear()
            await self._changed.wait()

    def _missing(self) -> list[int]:
        return [peer for peer, connection in enumerate(self._sockets) if connection is None and peer != self._rank]

    def _problem(self) -> str:
        missing = self._missing()
        reached = "; ".join(f"rank {peer}: {', '.join(self._failures[peer])}" for peer in missing
                            if peer in self._failures)
        return (f"Rank {self._rank} on {socket.gethostname()} waited {self._timeout_s:g} s for connections with the "
                f"ranks {missing}{f' ({reached})' if reached else ''}; let the hosts reach each other on all TCP "
                f"ports, or set {INTERFACE_VARIABLE} on all of them to the interface that connects them.")

    def _take(self, peer: int, connection: socket.socket) -> None:
        former, self._sockets[peer] = self._sockets[peer], connection
        if former is not None:
            former.close()  # whose peer has given it up
        self._changed.set()

    # ---- ranks above this one ------------------------------------------------------------------------------------

    async def _serve(self, listener: socket.socket, room: asyncio.Semaphore) -> None:
        """Accepts connections until it is cancelled; each is answered by a task of its own."""
        answers: set[asyncio.Task[None]] = set()
        try:
            while True:
                await room.acquire()
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listener)
                except OSError:  # that connection is gone already, or this process has too many files open
                    room.release()
                    await asyncio.sleep(_RETRY_S)
                    continue
                connection.setblocking(False)
                answer = asyncio.create_task(self._answer(connection))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
                answer.add_done_callback(lambda _: room.release())
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def _answer(self, connection: socket.socket) -> None:
        with contextlib.ExitStack() as unless_proved:
            unless_proved.enter_context(connection)
            try:
                peer = await asyncio.wait_for(self._ask(connection), _HANDSHAKE_S)
            except (OSError, asyncio.TimeoutError):
                return  # a stranger, or a rank that tries again
            unless_proved.pop_all()
        self._take(peer, connection)

    async def _ask(self, connection: socket.socket) -> int:
        """Returns the rank that proves to have connected; raises ConnectionError if none does."""
        loop = asyncio.get_running_loop()
        hello = await _read(connection, 4 + _NONCE_BYTES)
        peer, theirs = int.from_bytes(hello[:4], "big"), hello[4:]
        if not self._rank < peer < len(self._places):
            raise ConnectionError(f"rank {peer}")
        mine = secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(connection, mine + self._proof(b"accept", peer, self._rank, theirs, mine))
        proof = await _read(connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"connect", peer, self._rank, mine, theirs)):
            raise ConnectionError("another program")
        await loop.sock_sendall(connection, _ACCEPTED)
        return peer

    # ---- ranks below this one ------------------------------------------------------------------------------------

    async def _reach(self, peer: int) -> None:
        """Connects to a rank, at any of its places that answers."""
        while True:
            failures = []
            for place in self._places[peer]:
                try:
                    connection = await asyncio.wait_for(self._try(peer, place), _HANDSHAKE_S)
                    return self._take(peer, connection)
                except (OSError, asyncio.TimeoutError) as error:
                    failures.append(f"{place[0]}: {error or 'no answer'}")
            self._failures[peer] = failures
            await asyncio.sleep(_RETRY_S)

    async def _try(self, peer: int, place: tuple[str, int]) -> socket.socket:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as unless_proved:
            connection = unless_proved.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            connection.setblocking(False)
            await loop.sock_connect(connection, place)
            mine = secrets.token_bytes(_NONCE_BYTES)
            await loop.sock_sendall(connection, self._rank.to_bytes(4, "big") + mine)
            answer = await _read(connection, _NONCE_BYTES + _PROOF_BYTES)
            theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, self._proof(b"accept", self._rank, peer, mine, theirs)):
                raise ConnectionError("another program")  # many hosts have the same private addresses
            await loop.sock_sendall(connection, self._proof(b"connect", self._rank, peer, theirs, mine))
            await _read(connection, len(_ACCEPTED))
            unless_proved.pop_all()
            return connection

    def _proof(self, role: bytes, connecting: int, accepting: int, first: bytes, second: bytes) -> bytes:
        """Returns what only a rank of this job can say about a connection and the numbers drawn for it."""
        text = b"|".join((role, connecting.to_bytes(4, "big"), accepting.to_bytes(4, "big"), first, second))
        return hmac.digest(self._key, text, "sha256")


async def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(connection, num_bytes - len(data))
        if not part:
            raise ConnectionError("it has closed the connection")
        data += part
    return data
