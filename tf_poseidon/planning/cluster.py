"""What a plan is made for: how many ranks there are, and how fast they are."""

import dataclasses
import math
import numbers

from tf_poseidon.errors import PoseidonError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The ranks that train together.

    `poseidon.calibrate()` measures one. The defaults are those of servers with a 10 Gbit/s Ethernet.

    Attributes:
        workers: Number of ranks, P1 in the paper. Every rank computes.
        servers: Number of ranks that hold KV pairs as well, P2; 0 for all. There are no ranks that
            only serve.
        bandwidth_gbps: What a rank can send, and receive at the same time, in 10^9 bits per second.
        latency_us: From one rank's sending a small message to another's having it, in microseconds.
        gflops: How fast a rank multiplies matrices, in 10^9 additions and multiplications per second.
        accelerators: Whether ranks compute on accelerators, which go on undisturbed while processors
            exchange; then what backpropagation hides of an exchange costs nothing.

    Raises:
        PoseidonError: If a value is out of range.
    """

    workers: int
    servers: int = 0
    bandwidth_gbps: float = 10.0
    latency_us: float = 50.0
    gflops: float = 1000.0
    accelerators: bool = False

    def __post_init__(self):
        for name, least in (("workers", 1), ("servers", 0)):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise PoseidonError(f"{name}={value!r}, expected a whole number, at least {least}.")
        if not self.servers:
            object.__setattr__(self, "servers", self.workers)
        if self.servers > self.workers:
            raise PoseidonError(
                f"servers={self.servers} with workers={self.workers}, but every server is also a "
                "worker: expected at most as many servers as workers. To use more machines, let "
                "them work too.")
        for name in ("bandwidth_gbps", "gflops"):
            if not (_is_number(getattr(self, name)) and getattr(self, name) > 0):
                raise PoseidonError(f"{name}={getattr(self, name)!r}, expected a positive number.")
        if not isinstance(self.accelerators, bool):
            raise PoseidonError(f"accelerators={self.accelerators!r}, expected True or False.")
        if not (_is_number(self.latency_us) and self.latency_us >= 0):
            raise PoseidonError(f"latency_us={self.latency_us!r}, expected 0 or more.")

    def send_seconds(self, num_bytes):
        """Returns how long a rank takes to send as many bytes while it receives as many."""
        return num_bytes * 8 / (self.bandwidth_gbps * 1e9)

    def compute_seconds(self, operations):
        """Returns how long a rank takes for as many additions and multiplications."""
        return operations / (self.gflops * 1e9)

    @property
    def latency_seconds(self):
        return self.latency_us / 1e6

    def __str__(self):
        return (f"{self.workers} workers, {self.servers} servers, {self.bandwidth_gbps:g} Gbit/s, "
                f"{self.latency_us:g} µs, {self.gflops:g} GFLOP/s"
                + (" on accelerators" if self.accelerators else ""))


def _is_number(value):
    return isinstance(value, numbers.Real) and math.isfinite(value)
