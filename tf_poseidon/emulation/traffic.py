"""What a job on emulated hosts has sent and received, and how busy its links were.

Tests: tests/unit/test_emulation_ability.py, tests/scripts/test_emulated_cluster.py.
"""

from collections.abc import Sequence
import dataclasses

from tf_poseidon.base import tables


@dataclasses.dataclass(frozen=True)
class HostTraffic:
    """What has passed the link of a host.

    Attributes:
        name: The host's.
        address: The host's.
        gbps: The rate of its link in each direction, Gbit/s.
        sent: Bytes that it has sent, with their headers.
        received: Bytes that it has received, with their headers.
    """

    name: str
    address: str
    gbps: float
    sent: int
    received: int


def table(hosts: Sequence[HostTraffic], seconds: float, cores: int) -> str:
    """Returns a text for who has started a job: a line per host, and how to read it.

    Args:
        hosts: Of the job.
        seconds: What it took, from its start to its end.
        cores: Number of the machine's.
    """
    header = ("host", "Gbit/s", "sent MB", "received MB", "link busy")
    rows = [(host.name, f"{host.gbps:g}", f"{host.sent / 1e6:.1f}", f"{host.received / 1e6:.1f}",
             f"{max(host.sent, host.received) * 8e-9 / (host.gbps * seconds):.0%}") for host in hosts]
    return "\n".join([*tables.aligned([header, *rows], left=(0,)),
                      f"busy: of {seconds:.1f} s, in which programs have started, too, in the busier direction",
                      f"{len(hosts)} host{'s' * (len(hosts) > 1)} shared the {cores} core{'s' * (cores > 1)} of this "
                      "machine: the bytes are those of a cluster, but of times compare the ratios"])
