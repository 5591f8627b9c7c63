"""The cluster that a plan is made for: the number of ranks, and their speeds.

Tests: tests/unit/test_planning.py.
"""

import dataclasses
import math
import numbers
from typing import Any
from typing import TypeGuard

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import shown

# (workers, servers, ranks that combine, dedicated servers).
Shape = tuple[int, int, int, int]

# Speeds by name, fields of a `Cluster`. Latencies are those of TCP, which are the hosts' more than the network's.
NETWORKS = {f"{gbps}GbE": {"bandwidth_gbps": float(gbps), "latency_us": 50.0} for gbps in (1, 10, 25, 40, 100, 200)}

# Rates that training in single precision reaches, not peaks: images a second times operations for one, as planning
# counts them. docs/planning.md#accelerators has the sources.
ACCELERATORS = {
    "cpu": {"gflops": 1000.0, "accelerators": False},
    "titan-x": {"gflops": 4500.0, "accelerators": True},  # peak 6,100: VGG19 with 38.5 images/s
    "v100": {"gflops": 8500.0, "accelerators": True},  # peak 15,700: ResNet-50 with 367 images/s
    "a100": {"gflops": 21_500.0, "accelerators": True},  # peak of TF32 156,000: ResNet-50 with 938 images/s
    "h100": {"gflops": 43_000.0, "accelerators": True},  # twice an A100, as of other models for images
}

# Ranks are numbers of 32 bits on the wire.
_MOST_RANKS = (1 << 31) - 1

# Files of plans have these only where GPUs are linked, or ranks only serve: so earlier versions read the others.
_IF_NEEDED = ("gpus_per_node", "gpu_link_gbps", "dedicated_servers")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The ranks that train together.

    `poseidon.calibrate()` measures one. The defaults describe servers with 10 Gbit/s Ethernet.

    Attributes:
        workers: Number of ranks that compute, P1 in the paper.
        servers: Number of ranks that hold KV pairs, P2; 0 for all, dedicated servers included.
        bandwidth_gbps: Bandwidth at which a node can send, and receive at the same time, in 10^9 bits per
            second.
        latency_us: Time from one rank's sending a small message to another's receiving it, in microseconds.
        gflops: How fast a rank multiplies matrices, in 10^9 additions and multiplications per second.
        accelerators: Whether ranks compute on accelerators, which continue undisturbed while processors
            exchange; then the part of an exchange that backpropagation hides costs nothing.
        ranks_per_node: How many ranks share a node and its link; the last node may have fewer. They combine
            their contributions before these leave the node: they sum dense gradients, and concatenate
            factors. Exchanges inside the node cost nothing, unless its GPUs are linked at a known rate.
        uncertainty: By which share the ratio of these speeds may be wrong, 0 if they are exact. `calibrate` takes it
            from how much its measurements differ.
        gpus_per_node: How many ranks of a node have GPUs that reach each other's memory, so that gradients take the
            links between them; 1 for none. All ranks that combine do, or none: that is `ranks_per_node` or, on one
            machine, `workers`.
        gpu_link_gbps: Rate at which a GPU gives to the others of its node, and takes from them at the same time, in
            10^9 bits per second; 0 if what they exchange goes through the host.
        dedicated_servers: How many of the servers are no workers, but nodes that only serve.

    Raises:
        PoseidonError: If a value is out of range.
    """

    workers: int
    servers: int = 0
    bandwidth_gbps: float = 10.0
    latency_us: float = 50.0
    gflops: float = 1000.0
    accelerators: bool = False
    ranks_per_node: int = 1
    uncertainty: float = 0.0
    gpus_per_node: int = 1
    gpu_link_gbps: float = 0.0
    dedicated_servers: int = 0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("servers", 0), ("ranks_per_node", 1), ("gpus_per_node", 1),
                            ("dedicated_servers", 0)):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name}={shown(value)}, expected a whole number, at least {least}.")
            if int(value) > _MOST_RANKS:
                raise ConfigurationError(f"{name}={shown(value)}, expected at most {_MOST_RANKS}.")
        if not self.servers:
            object.__setattr__(self, "servers", self.workers + self.dedicated_servers)
        if not self.dedicated_servers <= self.servers <= self.workers + self.dedicated_servers:
            raise ConfigurationError(
                f"servers={self.servers} with workers={self.workers} and dedicated_servers={self.dedicated_servers}, "
                f"expected {max(1, self.dedicated_servers)} to {self.workers + self.dedicated_servers}: every server "
                "is also a worker, but for the dedicated ones.")
        for name in ("bandwidth_gbps", "gflops"):
            if not (_is_number(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigurationError(f"{name}={shown(getattr(self, name))}, expected a positive number.")
        if not isinstance(self.accelerators, bool):
            raise ConfigurationError(f"accelerators={shown(self.accelerators)}, expected True or False.")
        for name in ("latency_us", "uncertainty", "gpu_link_gbps"):
            if not (_is_number(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigurationError(f"{name}={shown(getattr(self, name))}, expected 0 or more.")
        possible = sorted({1, self.workers if self.shape[2] == 1 else self.ranks_per_node})
        if self.gpus_per_node not in possible:
            raise ConfigurationError(
                f"gpus_per_node={self.gpus_per_node} with workers={self.workers} and ranks_per_node="
                f"{self.ranks_per_node}, expected {' or '.join(map(str, possible))}: the GPUs of all ranks of a node "
                "that combine are linked, or none.")
        if self.gpu_link_gbps and self.gpus_per_node == 1:
            raise ConfigurationError(f"gpu_link_gbps={self.gpu_link_gbps:g} with gpus_per_node=1, expected 0 where no "
                                     "GPUs are linked; omit it, or give gpus_per_node too.")

    @property
    def nodes(self) -> int:
        return math.ceil(self.workers / self.ranks_per_node)

    @property
    def of_workers(self) -> "Cluster":
        """The same without dedicated servers, which own neither shards nor columns of factors."""
        return dataclasses.replace(self, servers=self.servers - self.dedicated_servers, dedicated_servers=0)

    @property
    def server_nodes(self) -> int:
        """Number of nodes of workers with servers, if servers are spread evenly."""
        return min(self.servers - self.dedicated_servers, self.nodes)

    @property
    def dedicated_share(self) -> float:
        """The share of all KV pairs that dedicated servers own, by which steps are short: see docs/planning.md.

        `PlacesOf` in kernels/communicator/kv_pairs.cc divides KV pairs by it. A job whose workers share one node, for
        which ranks_per_node is 1, divides by it only if its own ranks_per_node is 1, too (docs/clusters.md).
        """
        if not self.dedicated_servers or (self.server_nodes and self.nodes == 1):
            return 0.0
        if not self.server_nodes or self.dedicated_servers >= self.nodes:
            return 1.0
        others = (self.nodes + self.server_nodes - 2) / self.server_nodes  # what workers' nodes send if these own all
        ratio = 7 / 8 * min(2.0, others * self.server_nodes / (self.nodes - self.dedicated_servers))
        share = ratio * self.dedicated_servers / (self.server_nodes + ratio * self.dedicated_servers)
        return share if share + (1 - share) * others < self.nodes / self.dedicated_servers else 1.0

    @property
    def are_all_linked(self) -> bool:
        """Whether links join the GPUs of all workers: those of one machine."""
        return self.gpu_link_gbps > 0 and self.gpus_per_node == self.workers

    @property
    def linked_servers(self) -> int:
        """Number of servers among the linked GPUs of a node, if servers are spread evenly."""
        return max(1, math.ceil((self.servers - self.dedicated_servers) * self.gpus_per_node / self.workers))

    @property
    def shape(self) -> Shape:
        """The values on which the cutting and routing of tensors depend."""
        return self.workers, self.servers, self.ranks_per_node if self.nodes > 1 else 1, self.dedicated_servers

    def send_seconds(self, num_bytes: float) -> float:
        """Returns how long a node takes to send `num_bytes` while it receives as many."""
        return num_bytes * 8 / (self.bandwidth_gbps * 1e9)

    def gpu_link_seconds(self, num_bytes: float) -> float:
        """Returns how long a GPU takes to give `num_bytes` to others of its node while it takes as many; 0 unlinked."""
        return num_bytes * 8 / (self.gpu_link_gbps * 1e9) if self.gpu_link_gbps else 0.0

    def compute_seconds(self, operations: float) -> float:
        """Returns how long a rank takes for a number of additions and multiplications."""
        return operations / (self.gflops * 1e9)

    @property
    def latency_seconds(self) -> float:
        return self.latency_us / 1e6

    @property
    def routes(self) -> str:
        """What takes the links between GPUs, and what does not, as sentences; "" if no GPUs are linked."""
        if not self.gpu_link_gbps:
            return ""
        if self.are_all_linked:
            return "Gradients take the links between the GPUs; what else is exchanged goes through the host."
        return (f"Inside a node, gradients take the links between its {self.gpus_per_node} GPUs. The network carries "
                "one sum of each node, the factors and slices of all its ranks, and what else is exchanged.")

    def fields(self) -> dict[str, Any]:
        """Returns the attributes by name, some only where they are not the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if name not in _IF_NEEDED or value != default}

    def __str__(self) -> str:
        return (f"{describe(self.shape)}, {self.bandwidth_gbps:g} Gbit/s, {self.latency_us:g} µs, "
                f"{self.gflops:g} GFLOP/s" + (" on accelerators" if self.accelerators else "")
                + (f", {self.gpus_per_node} GPUs to a node linked at {self.gpu_link_gbps:g} Gbit/s"
                   if self.gpu_link_gbps else "")
                + (f", \N{PLUS-MINUS SIGN}{100 * self.uncertainty:.2g} %" if self.uncertainty else ""))


def describe(shape: Shape) -> str:
    """Returns a `Cluster.shape` as text."""
    workers, servers, ranks_per_node, dedicated_servers = shape
    text = f"{workers} workers, {servers} servers"
    if dedicated_servers:
        text += f" ({dedicated_servers} dedicated)"
    return text if ranks_per_node == 1 else f"{text}, {ranks_per_node} to a node"


def _is_number(value: object) -> TypeGuard[float]:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False
