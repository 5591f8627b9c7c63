"""The calling program's end: gives each rank the call, and hears how it has ended.

Tests: tests/training/test_function_jobs.py.
"""

from collections.abc import Sequence
import contextlib
import errno
import multiprocessing
import re
import socket
import threading
import time
from typing import NamedTuple

from tf_poseidon.job.function_jobs import rank_messages
from tf_poseidon.job.function_jobs.rank_messages import RankFailure
from tf_poseidon.job.function_jobs.rank_messages import RankGreeting
from tf_poseidon.job.function_jobs.rank_messages import RankResult
from tf_poseidon.job.host import connections
from tf_poseidon.job.host import launching

_SETTLE_S = 10.0  # what words that ranks have sent may take, after mpiexec has ended
# What `accept` says of one connection, or while the system has no room; those that wait are accepted later.
_PASSING = {errno.ECONNABORTED, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EPROTO}
_AGAIN_S = 0.05
# A rank of which an error speaks, and not the rank of a tensor: "must be at least rank 2 but is rank 1".
_RANK = re.compile(r"(?<!\bbe )(?<!\bis )(?<!\bleast )(?<!\bmost )\b[Rr]ank (\d+)\b")


class FailedRank(NamedTuple):
    """A rank whose function has failed.

    Attributes:
        greeting: Who it is.
        failure: What it has said.
    """

    greeting: RankGreeting
    failure: RankFailure


class LostRank(NamedTuple):
    """A rank that has left without a word.

    Attributes:
        greeting: Who it is.
        has_ended: Whether its connection has: otherwise its host is gone, or cut off.
    """

    greeting: RankGreeting
    has_ended: bool


class RankListener:
    """Listens to the ranks of a job, each in a thread.

    Attributes:
        environment: Environment variables by which ranks find it.
        results: What ranks have returned, by their numbers.
        failures: Of ranks, in the order of their words.
        lost: Ranks whose connection has ended without a word, in this order.
    """

    def __init__(self, call: bytes, hosts: Sequence[str]) -> None:
        """Listens from here on.

        Args:
            call: What each rank gets.
            hosts: Where ranks run; none if here.
        """
        self.results: dict[int, RankResult] = {}
        self.failures: list[FailedRank] = []
        self.lost: list[RankGreeting] = []
        self._call = call
        self._greetings: list[RankGreeting] = []
        self._lost_first: list[RankGreeting] = []  # before any rank has failed
        self._key = rank_messages.new_key()
        self._threads: list[threading.Thread] = []
        self._servers: list[socket.socket] = []
        addresses = []
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            for bound, name in _addresses(hosts):
                self._servers.append(connections.listen_at(bound))
                addresses.append((name, self._servers[-1].getsockname()[1]))
            self.environment = rank_messages.environment(addresses, self._key)
            for server in self._servers:
                self._start(self._accept, server)
            failing.pop_all()

    def close(self) -> None:
        """Listens no longer; ranks that have come are served on."""
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # so that `accept` returns
            server.close()

    def settle(self) -> None:
        """Waits for what ranks have said, once they have ended; what is said later is not heard."""
        self.close()
        last = time.monotonic() + _SETTLE_S
        for thread in list(self._threads):
            thread.join(max(0.0, last - time.monotonic()))

    def first_cause(self) -> FailedRank | LostRank | None:
        """Returns the rank that was the first to fail or to leave, after `settle`; None if all have returned.

        A rank that leaves makes others fail, which may say so before anyone knows that it has left, and those that
        still run are ended for it: neither are the cause.
        """
        heard = {*self.results, *(failed.greeting.rank for failed in self.failures), *(who.rank for who in self.lost)}
        lost = [*(LostRank(who, False) for who in self._greetings if who.rank not in heard),
                *(LostRank(who, True) for who in self._lost_first)]
        gone = {each.greeting.rank for each in lost}
        own = [failed for failed in self.failures if not failed.failure.is_echo
               and not gone.intersection(map(int, _RANK.findall(failed.failure.text)))]
        causes: list[FailedRank | LostRank] = [*own, *lost, *self.failures]
        return causes[0] if causes else None

    def _start(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                other_end = server.accept()[0]
            except OSError as error:
                if error.errno not in _PASSING:  # closed
                    return
                time.sleep(_AGAIN_S)
                continue
            self._start(self._serve, other_end)

    def _serve(self, other_end: socket.socket) -> None:
        try:
            connection = rank_messages.authenticated(other_end, self._key, is_caller=True)
        except (OSError, EOFError, multiprocessing.AuthenticationError):  # a stranger
            return
        greeting = None
        with connection:
            try:
                greeting = connection.recv()
                self._greetings.append(greeting)
                connection.send_bytes(self._call)
                said = connection.recv()
            except (OSError, EOFError):
                if greeting is not None:
                    if not self.failures:
                        self._lost_first.append(greeting)
                    self.lost.append(greeting)
                return
        if isinstance(said, RankFailure):
            self.failures.append(FailedRank(greeting, said))
        else:
            self.results[greeting.rank] = said


def _addresses(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns (address to listen on, name by which ranks reach it): those by which this host reaches the others."""
    found: dict[str, str] = {}
    for host in hosts:
        if launching.is_here(host):
            continue
        try:
            family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                found.setdefault(probe.getsockname()[0], probe.getsockname()[0])
        except OSError:  # a name that only ssh knows: as for mpiexec's own connections
            found.setdefault("", socket.gethostname())
    if "" in found:
        return [("", found[""])]
    if len(found) < len(hosts) or not found:
        found.setdefault("127.0.0.1", "127.0.0.1")
    return list(found.items())
