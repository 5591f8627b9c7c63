"""Measures the links between the hosts of a job, in both directions, and within each host.

Pairs that have no host in common measure at the same time, as in a tournament, so the time grows with the number of
hosts, not with that of pairs. The bytes travel as gradients do.

Tests: tests/unit/test_selftest.py.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import socket
import statistics

import numpy as np

from tf_poseidon.job.communicator import Communicator

_ROUND_TRIPS, _COLD = 20, 6
# Transfers grow until one takes this long, or has this size.
_LONG_ENOUGH_S = 0.03
_FIRST_BYTES, _LAST_BYTES = 1 << 18, 64 << 20
_TRANSFERS = 3


@dataclasses.dataclass(frozen=True)
class Link:
    """The way from one host to another one, or within a host.

    Attributes:
        sender, receiver: The hosts, as names.
        latency_us: Time of a short message.
        gbps: Rate of a long one, in Gbit/s.
    """

    sender: str
    receiver: str
    latency_us: float
    gbps: float

    @property
    def is_local(self) -> bool:
        """Whether it connects two ranks of one host."""
        return self.sender == self.receiver


def measure(communicator: Communicator) -> list[Link]:
    """Returns the links of a job; all ranks must call it, and get the same ones.

    Empty where hosts are unknown: there gradients travel by another library, over links of its own choice.
    """
    hosts = communicator.hosts
    if hosts is None:
        return []
    members = [[rank for rank in range(communicator.size) if hosts[rank] == host] for host in sorted(set(hosts))]
    firsts = [ranks[0] for ranks in members]
    names = _names(communicator, firsts)
    speeds = np.zeros((communicator.size, communicator.size, 2))
    for pairs in [*rounds(firsts), [(ranks[0], ranks[1]) for ranks in members if len(ranks) > 1]]:
        for turn in (pairs, [pair[::-1] for pair in pairs]):
            for sender, receiver in turn:
                if communicator.rank == sender:
                    speeds[sender, receiver] = _measure(communicator, receiver)
            communicator.sum("selftest/turn", np.zeros(1, np.float32))  # where all others wait
    speeds = communicator.sum("selftest/links", speeds)
    name = {rank: names[host] for host, ranks in enumerate(members) for rank in ranks}
    return [Link(name[sender], name[receiver], *speeds[sender, receiver])
            for sender, receiver in zip(*np.nonzero(speeds[:, :, 1]))]


def rounds(ranks: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Returns rounds of pairs: each pair of ranks is in one round, and no rank is in a round twice."""
    ring = [*ranks, *([-1] if len(ranks) % 2 else [])]
    for _ in range(len(ring) - 1):
        pairs = [(ring[i], ring[-1 - i]) for i in range(len(ring) // 2)]
        yield [pair for pair in pairs if -1 not in pair]
        ring.insert(1, ring.pop())


def slowest(links: Sequence[Link]) -> Link | None:
    """Returns the slowest link between hosts, or within one if there are no others; None if there is none."""
    between = [link for link in links if not link.is_local] or links
    return min(between, key=lambda link: link.gbps, default=None)


def _measure(communicator: Communicator, receiver: int) -> tuple[float, float]:
    """Returns (latency in µs, rate in Gbit/s) from this rank to another one."""
    trips = [communicator.ping(receiver) for _ in range(_ROUND_TRIPS)]
    round_trip = statistics.median(trips[_COLD:])
    num_bytes = _FIRST_BYTES
    while communicator.ping(receiver, num_bytes) < _LONG_ENOUGH_S and num_bytes < _LAST_BYTES:
        num_bytes *= 4
    seconds = statistics.median(communicator.ping(receiver, num_bytes) for _ in range(_TRANSFERS))
    return 1e6 * round_trip / 2, 8e-9 * num_bytes / max(seconds - round_trip, 1e-9)


def _names(communicator: Communicator, firsts: Sequence[int]) -> list[str]:
    """Returns the names of the hosts of some ranks, with a number where two have the same."""
    names = [communicator.broadcast_text(f"selftest/host/{rank}", socket.gethostname(), rank) for rank in firsts]
    return [name if names.count(name) == 1 else f"{name} ({rank})" for name, rank in zip(names, firsts)]
