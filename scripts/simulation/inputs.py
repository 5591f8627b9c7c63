"""What is simulated: the work of an accelerator, the machines, and the system that decides how gradients travel.

simulation.py says what stands for what.
"""

import dataclasses
import functools
import math

from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError


@dataclasses.dataclass(frozen=True)
class Work:
    """What one accelerator does in a step without others.

    Attributes:
        sites: The `planning.Site`s, in the order of the forward pass, with the rows of one accelerator.
        operations: Additions and multiplications of a step.
        seconds: How long they take.
        rebuild_seconds_per_operation: How long one of them takes in the products that rebuild gradients.
        accelerators: Whether plans count on exchanges that disturb no computing, see `planning.Cluster`.
        exchanges: What ranks exchange beside gradients, `planning.Exchange`s; of systems that follow plans.
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

    def ready_seconds(self, operations):
        """Returns when as many operations are done, after the step's begin."""
        return min(operations / self.operations, 1.0) * self.seconds

    @functools.cached_property
    def forward_seconds(self):
        return min([self.seconds / 3,
                    *(self.ready_seconds(s.operations) for s in self.sites if not s.is_waited_for)])

    def needed_seconds(self, operations):
        """Returns when the forward pass needs the variable of a site."""
        backward = self.seconds - self.forward_seconds
        return self.forward_seconds * (self.seconds - self.ready_seconds(operations)) / backward


@dataclasses.dataclass(frozen=True)
class Machines:
    """The nodes and what connects them.

    Attributes:
        nodes: How many there are. Each computes.
        gbps: What each sends, and receives at the same time, in 10^9 bits per second; or one for each node.
        latency_us: From the last byte's leaving one node to its being used on another, in microseconds.
        servers: How many nodes, the first ones, hold KV pairs; 0 for all.
        efficiency: Share of `gbps` that payload gets. Of Ethernet with frames of 1500 bytes TCP's is 0.94.
        message_us: How long each message occupies a link apart from its bytes, in microseconds.
        gpus_per_node: Accelerators of a node. Their gradients are added up, or their factors laid end to
            end, on one of them, which alone uses the network.
        local_gbytes_per_s: The link of that one to the others, in each direction, in 10^9 bytes per second.
        copy_gbytes_per_s: Copies between accelerator and host, in each direction; none by default.
        sum_gbytes_per_s: What a server adds up; no limit by default.
        late_seconds: How much later than the others each node begins to compute; () for no node.
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

    def __post_init__(self):
        if not isinstance(self.gpus_per_node, int) or self.gpus_per_node < 1:
            raise PoseidonError(f"gpus_per_node={self.gpus_per_node!r}, expected a whole number, at least 1.")
        self.cluster(1.0)  # checks nodes, servers and the latency
        for name in ("gbps", "late_seconds"):
            values = getattr(self, name)
            if isinstance(values, tuple) and len(values) not in (self.nodes, *([0] * (name != "gbps"))):
                raise PoseidonError(f"{name} has {len(values)} values, expected one for each of the "
                                    f"{self.nodes} nodes: give as many, or one for all.")
        for name in ("efficiency", "local_gbytes_per_s", "copy_gbytes_per_s", "sum_gbytes_per_s"):
            _check_at_least_0(name, getattr(self, name), is_more=True)
        for name, values in (("message_us", (self.message_us,)), ("late_seconds", self.late_seconds)):
            for value in values:
                _check_at_least_0(name, value)
        if self.efficiency > 1:
            raise PoseidonError(f"efficiency={self.efficiency!r}, expected at most 1: give the share of the "
                                "link's rate that payload gets.")

    def bytes_per_s(self, node):
        gbps = self.gbps[node] if isinstance(self.gbps, tuple) else self.gbps
        return gbps * self.efficiency * 1e9 / 8

    def late(self, node):
        return self.late_seconds[node] if self.late_seconds else 0.0

    def cluster(self, gflops):
        """Returns the nodes as planning knows them, at the rate of the slowest link."""
        slowest = min(self.gbps) if isinstance(self.gbps, tuple) and self.gbps else self.gbps
        return planning.Cluster(
            self.nodes * self.gpus_per_node, self.servers, slowest * self.efficiency, self.latency_us, gflops,
            ranks_per_node=self.gpus_per_node)


def _check_at_least_0(name, value, is_more=False):
    if not value >= 0 or is_more and value == 0:
        raise PoseidonError(f"{name}={value!r}, expected {'more than 0' if is_more else 'at least 0'}.")


@dataclasses.dataclass(frozen=True)
class System:
    """What decides how gradients travel, and when.

    Attributes:
        exchange: "plan" (ours, by a plan), "ring" (all-reduce), "whole" (each tensor on one server; values
            are pulled when all of the step are updated) or "adam" (factors to one server and the matrix
            back; the rest over KV pairs).
        policy: Of "plan": what makes the plan.
        overlap: Whether gradients travel during backpropagation.
        order: "fifo" or "priority", what the forward pass needs first.
        barrier: Whether a step ends only when all gradients are there.
        merge: Of "plan": whether small messages wait for each other, see planning/merging.py.
        kv_pair_bytes: Of "plan" and "adam": size of KV pairs.
        balance: Of "whole" and "adam": "round_robin" over servers in the order of the variables, as
            TensorFlow's replica_device_setter does, or "greedy", to the server with the fewest bytes.
        buffer_bytes: Of "ring": tensors that are ready together share a buffer of this size; 0 for none.
        cycle_seconds: Of "ring": time between looking for them.
    """

    exchange: str = "plan"
    policy: str = "ps"
    overlap: bool = True
    order: str = "fifo"
    barrier: bool = True
    merge: bool = False
    kv_pair_bytes: int = 2 << 20
    balance: str = "round_robin"
    buffer_bytes: float = 0
    cycle_seconds: float = 0.0

    def __post_init__(self):
        for name, allowed in (("exchange", ("plan", "ring", "whole", "adam")),
                              ("order", ("fifo", "priority")), ("balance", ("round_robin", "greedy"))):
            if getattr(self, name) not in allowed:
                raise PoseidonError(f"{name}={getattr(self, name)!r}, expected one of {', '.join(allowed)}.")
        if not self.kv_pair_bytes >= 4096:
            raise PoseidonError(f"kv_pair_bytes={self.kv_pair_bytes!r}, expected 4096 or more, as of PoseidonStrategy.")


SYSTEMS = {
    "poseidon": System(policy="auto"),
    "poseidon-paper": System(policy="paper"),
    "poseidon-ps": System(policy="ps"),
    "poseidon-sfb": System(policy="sfb"),
    "wfbp": System(policy="ps"),  # Caffe+WFBP and TF+WFBP of the paper
    "ps": System(policy="ps", overlap=False),  # Caffe+PS of the paper
    "ring": System("ring"),
    # The defaults since Horovod 0.21 (its release notes).
    "horovod": System("ring", buffer_bytes=128 << 20, cycle_seconds=1e-3),
    # tf.distribute lays all gradients end to end, so nothing travels before the last one is there.
    "mwms": System("ring", overlap=False, buffer_bytes=math.inf),
    # TensorFlow of 2016. Nodes read variables when a step begins, each op as it needs them: no barrier.
    "tensorflow": System("whole", barrier=False),
    "tensorflow-greedy": System("whole", barrier=False, balance="greedy"),
    "adam": System("adam"),
}
