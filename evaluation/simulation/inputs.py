"""The inputs of a simulation: the work of an accelerator, the machines, and the system that exchanges gradients.

simulation.py describes the model.
"""

import dataclasses
import functools
import math

from tf_poseidon import options
from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one accelerator in a step, without others.

    Attributes:
        sites: The `planning.Site`s, in the order of the forward pass, with the rows of one accelerator.
        operations: Additions and multiplications of a step.
        seconds: Time that they take.
        rebuild_seconds_per_operation: Time of one of them in the products that rebuild gradients.
        accelerators: Whether plans assume that exchanges do not slow computing down, see `planning.Cluster`.
        exchanges: The `planning.Exchange`s of ranks other than gradients; for systems that follow plans.
    """

    sites: tuple[planning.Site, ...]
    operations: float
    seconds: float
    rebuild_seconds_per_operation: float
    accelerators: bool = True
    exchanges: tuple[planning.Exchange, ...] = ()

    def __post_init__(self):
        for name in ("operations", "seconds", "rebuild_seconds_per_operation"):
            _check_at_least_0(name, getattr(self, name), is_more=True)

    def seconds_at(self, operations):
        """Returns when so many operations are done, in seconds of computing after the start of the step."""
        return min(operations / self.operations, 1.0) * self.seconds

    @functools.cached_property
    def forward_seconds(self):
        return min([self.seconds / 3, *(self.seconds_at(s.operations) for s in self.sites if not s.is_waited_for)])

    def needed(self, site):
        """Returns how many operations of the next step precede the need of a gradient, None if it does not need it.

        If no site says so, the forward pass is the mirror image of backpropagation.
        """
        if any(other.needed is not None for other in self.sites):
            return site.needed
        backward = self.seconds - self.forward_seconds
        share = (self.seconds - self.seconds_at(site.operations)) / backward
        return self.forward_seconds / self.seconds * self.operations * share


@dataclasses.dataclass(frozen=True)
class Machines:
    """The nodes and their links.

    Attributes:
        nodes: Number of nodes that compute.
        gbps: Rate at which each sends, and receives at the same time, in 10^9 bits per second; or one per node,
            dedicated servers last.
        latency_us: Time from when the last byte leaves one node until another node can use it, in microseconds.
        servers: Number of nodes that hold KV pairs, counted from the first, and dedicated servers; 0 for all.
        efficiency: Share of `gbps` for payload: 0.94 for TCP over Ethernet with frames of 1500 bytes.
        message_us: How long each message occupies a link in addition to its bytes, in microseconds.
        gpus_per_node: Accelerators of a node. Their gradients are summed, or their factors concatenated, on
            one of them; only that one uses the network.
        local_gbytes_per_s: Rate of its link to the others, in each direction, in 10^9 bytes per second.
        copy_gbytes_per_s: Rate of copies between accelerator and host, in each direction; no copies by default.
        sum_gbytes_per_s: Rate at which a server sums; no limit by default.
        late_seconds: How much later than the others each node starts computing; () if none does.
        dedicated_servers: Number of further nodes, which only serve.
    """

    nodes: int
    gbps: float | tuple[float, ...] = 10.0
    latency_us: float = 50.0
    servers: int = 0
    efficiency: float = 1.0
    message_us: float = 0.0
    gpus_per_node: int = 1
    local_gbytes_per_s: float = 10.0
    copy_gbytes_per_s: float = math.inf
    sum_gbytes_per_s: float = math.inf
    late_seconds: tuple[float, ...] = ()
    dedicated_servers: int = 0

    def __post_init__(self):
        if not isinstance(self.gpus_per_node, int) or self.gpus_per_node < 1:
            raise PoseidonError(f"gpus_per_node={self.gpus_per_node!r}, expected a whole number, at least 1.")
        self.cluster(1.0)  # checks nodes, servers and the latency
        for name in ("gbps", "late_seconds"):
            values = getattr(self, name)
            number = self.all_nodes if name == "gbps" else self.nodes
            if isinstance(values, tuple) and len(values) not in (number, *([0] * (name != "gbps"))):
                raise PoseidonError(f"{name} has {len(values)} values, expected one for each of the "
                                    f"{number} nodes: give as many, or one for all.")
        for name in ("efficiency", "local_gbytes_per_s", "copy_gbytes_per_s", "sum_gbytes_per_s"):
            _check_at_least_0(name, getattr(self, name), is_more=True)
        for name, values in (("message_us", (self.message_us,)), ("late_seconds", self.late_seconds)):
            for value in values:
                _check_at_least_0(name, value)
        if self.efficiency > 1:
            raise PoseidonError(f"efficiency={self.efficiency!r}, expected at most 1: give the share of the "
                                "link's rate that payload gets.")

    @property
    def all_nodes(self):
        """Number of nodes, dedicated servers included: these come last."""
        return self.nodes + self.dedicated_servers

    @property
    def serving_nodes(self):
        """Number of nodes that compute and hold KV pairs."""
        return self.servers - self.dedicated_servers if self.servers else self.nodes

    def bytes_per_s(self, node):
        gbps = self.gbps[node] if isinstance(self.gbps, tuple) else self.gbps
        return gbps * self.efficiency * 1e9 / 8

    def late(self, node):
        return self.late_seconds[node] if self.late_seconds else 0.0

    def cluster(self, gflops):
        """Returns the nodes as a `planning.Cluster`, at the rate of the slowest link."""
        slowest = min(self.gbps) if isinstance(self.gbps, tuple) and self.gbps else self.gbps
        return planning.Cluster(
            self.nodes * self.gpus_per_node, self.servers, slowest * self.efficiency, self.latency_us, gflops,
            ranks_per_node=self.gpus_per_node, dedicated_servers=self.dedicated_servers)


def _check_at_least_0(name, value, is_more=False):
    if not value >= 0 or is_more and value == 0:
        raise PoseidonError(f"{name}={value!r}, expected {'more than 0' if is_more else 'at least 0'}.")


@dataclasses.dataclass(frozen=True)
class System:
    """How and when gradients travel.

    Attributes:
        exchange: "plan" (ours, by a plan), "ring" (all-reduce), "whole" (each tensor on one server; values
            are pulled when all values of the step are updated) or "adam" (factors to one server and the
            matrix back; the rest over KV pairs).
        policy, pins: For "plan": the policy that makes the plan, and what is decided before it.
        overlap: Whether gradients travel during backpropagation.
        order: "fifo", or "priority": what the forward pass needs first is sent first.
        steps: How many steps overlap until all gradients must have arrived: between two barriers. 0 for no barrier.
        merge: For "plan": whether small messages wait for each other, see planning/choice/merging.py.
        kv_pair_bytes: For "plan" and "adam": size of KV pairs; None for that of `PoseidonStrategy`.
        balance: For "whole" and "adam": "round_robin" over servers in the order of the variables, as
            TensorFlow's replica_device_setter does, or "greedy", to the server with the fewest bytes.
        buffer_bytes: For "ring": tensors that are ready together share a buffer of this size; 0 for none.
        cycle_seconds: For "ring": the interval at which it looks for ready tensors.
    """

    exchange: str = "plan"
    policy: str = "ps"
    overlap: bool = True
    order: str = "fifo"
    steps: int = 1
    merge: bool = False
    kv_pair_bytes: int | None = None
    balance: str = "round_robin"
    buffer_bytes: float = 0
    cycle_seconds: float = 0.0
    pins: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        for name, allowed in (("exchange", ("plan", "ring", "whole", "adam")),
                              ("order", ("fifo", "priority")), ("balance", ("round_robin", "greedy"))):
            if getattr(self, name) not in allowed:
                raise PoseidonError(f"{name}={getattr(self, name)!r}, expected one of {', '.join(allowed)}.")
        if not self.steps >= 0:
            raise PoseidonError(f"steps={self.steps!r}, expected a whole number, at least 0.")
        options.JobOptions(kv_pair_bytes=self.kv_pair_bytes)  # checks it


SYSTEMS = {
    "poseidon": System(policy="auto"),
    "poseidon-paper": System(policy="paper"),
    "poseidon-ps": System(policy="ps"),
    "poseidon-sfb": System(policy="sfb"),
    "poseidon-hfb": System(policy="ps", pins=(("*", planning.HFB),)),
    "wfbp": System(policy="ps"),  # Caffe+WFBP and TF+WFBP of the paper
    "ps": System(policy="ps", overlap=False),  # Caffe+PS of the paper
    "ring": System("ring"),
    # The defaults since Horovod 0.21 (its release notes).
    "horovod": System("ring", buffer_bytes=128 << 20, cycle_seconds=1e-3),
    # tf.distribute concatenates all gradients, so nothing travels before the last one is ready.
    "mwms": System("ring", overlap=False, buffer_bytes=math.inf),
    # TensorFlow in 2016. Nodes read variables after a step begins, each op when it needs them: no barrier.
    "tensorflow": System("whole", steps=0),
    "tensorflow-greedy": System("whole", steps=0, balance="greedy"),
    "adam": System("adam"),
}
