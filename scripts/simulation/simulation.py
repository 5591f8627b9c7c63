"""Simulates a training step of many nodes: computing, links and rebuilding, as events in time.

Bytes and schemes are those of `tf_poseidon.planning`; what is added is when things happen. The model:

Computing. A node does one thing after the other: the forward pass (a third of the step's arithmetic, or
less if a gradient is there sooner), then backpropagation, in which a gradient is there when its site's
`operations` are done. Rebuilding gradients from factors, of the other nodes' rows, waits for its turn on the
same device, between two layers. With a barrier (a `tf.function`; Algorithm 2 of the paper) the next step
begins when all gradients are there. Without, each layer of the next forward pass waits for its own, and is
reached at the time that mirrors its gradient's; then some steps are simulated, and the last one counts.

Links. Between any two nodes there is one connection in each direction, as there is between two MPI ranks
over TCP. A connection carries one message after the other, in the order in which they were handed over or
by priority; a message that has begun is not interrupted. Connections that are busy at the same time share
the links, each node's to the switch and from it, evenly as TCP's flows do: max-min fair, without packets. So
a node that sends a site to all others sends to all of them at once, and sites follow each other. A message
is there its latency after its last byte has left. The switch has no limit. `message_us` is what a message
occupies a link apart from its bytes (the start-up time of MG-WFBP), nothing by default.

Waiting. What rows are computed from (a step partitioned by rows: moments of batch norm, gathered rows) stops
computing on a node until it is there. Where exchanges follow each other, but no rows wait for them, each is taken
to leave when its own arithmetic is done.

Parameter servers. KV pairs are cut as in kernels/communicator/kv_pairs.cc. All pairs of a site leave at once,
and a server adds a pair up and sends it back when all parts of it are there. The pairs of a site begin at
the server after the last site's end, where the runtime takes a hash of its name.

Symmetry. Nodes that do the same at the same time are of one *kind* and are simulated as one: the work of a
step grows with the square of the kinds, not of the nodes. Where only some servers of a kind have a pair
of a site, others are taken to have pairs of other sites: these share the connections of the kind.

Left out: packets and their headers, loss and congestion, what the network costs processors, reading data.

H. Zhang et al., "Poseidon", USENIX ATC 2017 ("the paper"); S. Shi et al., "MG-WFBP", INFOCOM 2019;
T. Chilimbi et al., "Project Adam", OSDI 2014; A. Sergeev and M. Del Balso, "Horovod", arXiv 1802.05799.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math

import links

from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError

_MIN_KV_PAIR_BYTES = 32 << 10  # kMinKvPairBytes in kv_pairs.cc
_BLOCK_BYTES = 64  # kBlock
_ROOT = 0  # the kind of the node whose value others take: the first one's
_STEPS = 6  # without a barrier, until one is like the one before


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


@dataclasses.dataclass(frozen=True)
class Round:
    """KV pairs of one tensor that travel at the same time, at most one to a server.

    Attributes:
        owners: Servers that have one.
        up: Bytes that each node sends to each of them.
        down: Bytes that each of them sends to each node.
    """

    owners: tuple[int, ...]
    up: float
    down: float


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What is done to one tensor. One of `rounds`, `peer_bytes`, `root_bytes` and `ring_bytes` is set.

    Attributes:
        site: Name of the site.
        ready: When it may leave, in seconds of computing.
        needed: When the next forward pass needs it, in seconds of computing.
        rounds: Over servers: its KV pairs.
        peer_bytes: To all others: bytes to each of them.
        root_bytes: The same, of the first node alone.
        ring_bytes: Over a ring: bytes of the tensor.
        rebuild: Seconds of each node's device, when all is there.
        owner_rebuild: Seconds of the server's device, before it answers.
        up_seconds: Copying from a node's accelerators to the network, `down_seconds` back.
        message_us: As in `Machines`; 0 for what travels with another site.
        depth, is_waited_for: As of `planning.Site`.
    """

    site: str
    ready: float
    needed: float
    rounds: tuple[Round, ...] = ()
    peer_bytes: float | None = None
    root_bytes: float | None = None
    ring_bytes: float | None = None
    rebuild: float = 0.0
    owner_rebuild: float = 0.0
    up_seconds: float = 0.0
    down_seconds: float = 0.0
    message_us: float = 0.0
    depth: int = 0
    is_waited_for: bool = False


@dataclasses.dataclass(frozen=True)
class Event:
    """What a node, the first of its kind, does: its row is "compute", "send", "receive" or "rebuild"."""

    node: int
    row: str
    site: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Result:
    """A simulated step.

    Attributes:
        step_seconds: Until it is done on all nodes.
        compute_seconds: Of one accelerator without others.
        rebuild_seconds: Of the device of the node that rebuilds most.
        sent: Bytes that each node sends.
        received: Bytes that each node receives.
        events: `Event`s in the order of their begin.
    """

    step_seconds: float
    compute_seconds: float
    rebuild_seconds: float
    sent: tuple[float, ...]
    received: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def exposed_seconds(self):
        """How much longer a step takes than computing."""
        return self.step_seconds - self.compute_seconds

    @property
    def node_bytes(self):
        """Bytes that each node sends plus receives, as table 1 of the paper counts."""
        return tuple(map(sum, zip(self.sent, self.received, strict=True)))


def cut(num_bytes, kv_pair_bytes, servers):
    """Returns how many KV pairs a tensor is cut into, as kernels/communicator/kv_pairs.cc does."""
    parts = math.ceil(math.ceil(num_bytes / _BLOCK_BYTES) / (kv_pair_bytes // _BLOCK_BYTES))
    parts = max(parts, min(servers, math.ceil(num_bytes / _MIN_KV_PAIR_BYTES)))
    return math.ceil(parts / servers) * servers if parts > servers else parts


def make_plan(work, machines, system):
    """Returns the `planning.Plan` that a system follows; of all but "plan" only the sites matter."""
    cluster = dataclasses.replace(machines.cluster(1e-9 / work.rebuild_seconds_per_operation),
                                  accelerators=work.accelerators)
    # A cluster has one speed of arithmetic: computing is told as the rebuilding that takes as long.
    scale = work.seconds / work.operations / work.rebuild_seconds_per_operation
    scaled = [dataclasses.replace(s, operations=scale * s.operations) for s in work.sites]
    exchanges = [dataclasses.replace(e, operations=scale * e.operations) for e in work.exchanges]
    plan = planning.make_plan(scaled, system.policy, cluster, operations=scale * work.operations,
                              merge=system.merge, exchanges=exchanges)
    groups = {exchange.site: exchange.group for exchange in plan.exchanges}
    return dataclasses.replace(plan, sites=work.sites, operations=work.operations, exchanges=tuple(
        dataclasses.replace(exchange, group=groups[exchange.site]) for exchange in work.exchanges))


def transfers(work, machines, system, plan):
    """Returns what is done in a step as `Transfer`s, in the order in which they are ready.

    Args:
        work: The `Work`.
        machines: The `Machines`.
        system: The `System`.
        plan: Its plan.

    Raises:
        PoseidonError: If a plan is for other nodes, or bytes are not known.
    """
    if plan.cluster.shape != (shape := machines.cluster(1.0).shape):
        raise PoseidonError(f"The plan is for {planning.describe(plan.cluster.shape)}, expected "
                            f"{planning.describe(shape)}: make a plan for these.")
    if machines.nodes * machines.gpus_per_node == 1:
        return ()
    exchanges = plan.exchanges if system.exchange == "plan" else ()
    ready_of, leaders, place, found = {}, {}, _Placement(machines, system), []
    pairs = [(site.name, site, decision.group) for site, decision in zip(plan.sites, plan.decisions, strict=True)]
    pairs += [(exchange.site, exchange, exchange.group) for exchange in exchanges]
    for name, what, group in pairs:
        ready_of[group or name] = max(ready_of.get(group or name, 0.0), work.ready_seconds(what.operations))
        leaders.setdefault(group or name, name)

    def add(name, what, group, made):
        # Where values are pulled when all of the step are updated, nothing comes before its end.
        is_waited_for = what.is_waited_for and system.exchange != "whole"
        found.append(Transfer(
            name, ready_of[group or name] if system.overlap or is_waited_for else work.seconds,
            0.0 if is_waited_for else work.needed_seconds(what.operations),
            message_us=machines.message_us if leaders[group or name] == name else 0.0,
            depth=what.depth or 0, is_waited_for=is_waited_for, **made))

    for name, what, _ in pairs:
        if what.num_bytes is None:
            raise PoseidonError(f"The shape of '{name}' is {what.shape}, expected one that is known: "
                                "make a plan with fixed shapes.")
    for site, decision in zip(plan.sites, plan.decisions, strict=True):
        made = _transfer(site, decision, work, machines, system, place)
        if made is not None:
            add(site.name, site, decision.group, made)
    found.reverse()  # ties in the order of backpropagation, from the last variable to the first
    for exchange in exchanges:
        add(exchange.site, exchange, exchange.group, _other_transfer(exchange, machines))
    return tuple(sorted(found, key=lambda transfer: (transfer.ready, transfer.depth)))


def _transfer(site, decision, work, machines, system, place):
    """Returns the attributes of a site's `Transfer` that are its exchange's, None if nothing travels."""
    gpus, dense = machines.gpus_per_node, site.num_bytes
    local, copy = machines.local_gbytes_per_s * 1e9, machines.copy_gbytes_per_s * 1e9
    factors = site.factors if site.factors is not None and site.factors.k is not None else None
    made = {"up_seconds": (gpus - 1) * dense / local + dense / copy,
            "down_seconds": (gpus - 1) * dense / local + dense / copy}
    if system.exchange == "ring":
        return made | {"ring_bytes": dense}
    if system.exchange == "whole":
        return made | {"rounds": (Round((place.one(dense),), dense, dense),)}
    if system.exchange == "adam" and factors:
        given, traffic = gpus * factors.num_bytes, planning.SCHEMES[planning.SFB].traffic(site)
        return made | {"rounds": (Round((place.one(dense),), given, dense),),
                       "up_seconds": (1 - 1 / gpus) * given / local + given / copy,
                       "owner_rebuild": _rebuild(traffic, work, machines)}
    if decision.leader and system.exchange != "adam":
        return None
    traffic = planning.SCHEMES[planning.PS if system.exchange == "adam" else decision.scheme].traffic(site)
    if traffic.kind == planning.SUM:
        return made | {"rounds": place.pairs(dense)}
    return _to_all(traffic.num_bytes, machines) | {"rebuild": _rebuild(traffic, work, machines)}


def _rebuild(traffic, work, machines):
    """Returns the seconds of what an accelerator makes of what each other one gave."""
    return traffic.operations * (machines.nodes * machines.gpus_per_node - 1) * work.rebuild_seconds_per_operation


def _other_transfer(exchange, machines):
    """Returns the attributes of the `Transfer` of what is no gradient that are its exchange's."""
    if exchange.scheme == "gather":
        return _to_all(exchange.num_bytes, machines)
    num_bytes, gpus = exchange.num_bytes, machines.gpus_per_node
    copy = num_bytes / (machines.copy_gbytes_per_s * 1e9)
    return {"root_bytes": num_bytes, "up_seconds": copy,
            "down_seconds": (gpus - 1) * num_bytes / (machines.local_gbytes_per_s * 1e9) + copy}


def _to_all(num_bytes, machines):
    """Returns the attributes of a `Transfer` of so many bytes of each accelerator to all others."""
    gpus, nodes, parts = machines.gpus_per_node, machines.nodes, machines.gpus_per_node * num_bytes
    local, copy = machines.local_gbytes_per_s * 1e9, machines.copy_gbytes_per_s * 1e9
    # To each other accelerator of the node go the parts of all but itself.
    return {"peer_bytes": parts, "up_seconds": (1 - 1 / gpus) * parts / local + parts / copy,
            "down_seconds": (gpus - 1) * parts * (nodes - 1 / gpus) / local + parts * (nodes - 1) / copy}


class _Placement:
    """Which servers own what, one tensor after the other."""

    def __init__(self, machines, system):
        self._servers = machines.servers or machines.nodes
        self._kv_pair_bytes, self._is_greedy = system.kv_pair_bytes, system.balance == "greedy"
        self._next, self._loads = 0, [0.0] * self._servers

    def one(self, num_bytes):
        """Returns the server of a whole tensor."""
        owner = (self._loads.index(min(self._loads)) if self._is_greedy else self._take(1)[0])
        self._loads[owner] += num_bytes
        return owner

    def pairs(self, num_bytes):
        """Returns the `Round`s of a tensor that is cut."""
        count = cut(num_bytes, self._kv_pair_bytes, self._servers)
        return tuple(Round(self._take(min(self._servers, count - i)), num_bytes / count, num_bytes / count)
                     for i in range(0, count, self._servers))

    def _take(self, count):
        first, self._next = self._next, (self._next + count) % self._servers
        return tuple((first + i) % self._servers for i in range(count))


def node_bytes(moves, nodes):
    """Returns (bytes that each node sends, bytes that each receives), two lists, of `Transfer`s."""
    sent, received, everybody_sent, everybody_received = [0.0] * nodes, [0.0] * nodes, 0.0, 0.0
    for move in moves:
        same = (move.peer_bytes or 0.0) * (nodes - 1) + (move.ring_bytes or 0.0) * 2 * (nodes - 1) / nodes
        for part in move.rounds:
            for owner in part.owners:  # gets from and gives to the others, but not itself
                sent[owner] += (nodes - 1) * part.down - part.up
                received[owner] += (nodes - 1) * part.up - part.down
        if move.root_bytes is not None:
            sent[0] += (nodes - 1) * move.root_bytes
            received = [r + move.root_bytes * (node > 0) for node, r in enumerate(received)]
        everybody_sent += same + sum(len(part.owners) * part.up for part in move.rounds)
        everybody_received += same + sum(len(part.owners) * part.down for part in move.rounds)
    return [everybody_sent + s for s in sent], [everybody_received + r for r in received]


class _Run:
    """The steps of one simulation.

    A gradient is (step, index of its transfer); a pair is (round, kind of its servers, how many of these).
    """

    def __init__(self, work, machines, system, moves, is_each_by_itself):
        self._work, self._machines, self._system, self._moves = work, machines, system, moves
        self._kinds = _kinds(machines, system, moves, is_each_by_itself)
        kind_of = {node: kind for kind, nodes in enumerate(self._kinds) for node in nodes}
        self._all = range(len(self._kinds))
        # Kinds that a kind has connections to, and from.
        self._others = [[k for k in self._all if k != kind or len(nodes) > 1]
                        for kind, nodes in enumerate(self._kinds)]
        self._pairs = [[(number, owner, count) for number, part in enumerate(move.rounds) for owner, count
                        in collections.Counter(kind_of[o] for o in part.owners).items()] for move in moves]
        self._parts = [[self._parts_of(i, kind) for kind in self._all] for i in range(len(moves))]
        self._rates = [machines.bytes_per_s(nodes[0]) for nodes in self._kinds]
        self._clock = links.Clock()
        self._network = links.Network(self._clock, list(map(len, self._kinds)), self._rates,
                                 machines.latency_us / 1e6)
        self._device, self._up, self._down, self._adder = (
            [links.Line(self._clock) for _ in self._all] for _ in range(4))
        self._steps = 1 if system.barrier else _STEPS
        self._program = self._make_program()
        self._missing = {}  # what is counted -> how many are missing
        self._done = [set() for _ in self._all]
        self._blocked = [None for _ in self._all]  # (step, index of the program) that waits for gradients
        self._answers = collections.defaultdict(list)  # by step, that wait for all of it
        self._ring, self._ring_last, self._ring_is_busy = [], -math.inf, False
        self._joined = itertools.count()
        self._ends, self._spans = [0.0] * self._steps, {}

    def _parts_of(self, i, kind):
        """Returns how many things a kind waits for until it has a gradient: its own part, and what comes."""
        move = self._moves[i]
        return (1 + (move.ring_bytes is not None) + (move.peer_bytes is not None) * len(self._others[kind])
                + (move.root_bytes is not None and kind != _ROOT)
                + sum((kind in self._others[owner]) + (kind == owner) for _, owner, _ in self._pairs[i]))

    def _make_program(self):
        """Returns what a node computes in a step: (name, seconds, transfers to wait for, that are ready).

        Transfers to wait for are (of how many steps before, index).
        """
        forward = self._work.forward_seconds
        actions = [(forward, "forward", (), ())]  # when, and as above
        if not self._system.barrier:
            actions += [(move.needed, "forward", ((1, i),), ()) for i, move in enumerate(self._moves)]
        for (ready, _), group in itertools.groupby(
                range(len(self._moves)), key=lambda i: (self._moves[i].ready, self._moves[i].depth)):
            group = tuple(group)
            name = "forward" if ready < forward else self._moves[group[-1]].site
            actions.append((ready, name, (), group))
            actions.append((ready, name, tuple((0, i) for i in group if self._moves[i].is_waited_for), ()))
        actions.append((self._work.seconds, "backward", (), ()))
        parts, then = [], 0.0
        for time, name, waits, emits in sorted(actions, key=lambda action: action[0]):
            parts += [(name, time - then, (), emits), *([("", 0.0, waits, ())] if waits else [])]
            then = time
        return parts

    def run(self):
        for kind in self._all:
            self._begin(kind, 0)
        self._clock.run(self._network)
        sent, received = node_bytes(self._moves, self._machines.nodes)
        owned = collections.Counter()
        for move in self._moves:
            owned.update({owner: move.owner_rebuild for part in move.rounds for owner in part.owners})
        events = [Event(self._kinds[kind][0], row, site, begin, end)
                  for (kind, row, site, _), (begin, end) in self._spans.items()]
        return Result(self._ends[-1] - (self._ends[-2] if self._steps > 1 else 0.0), self._work.seconds,
                      sum(m.rebuild for m in self._moves) + max(owned.values(), default=0.0),
                      tuple(sent), tuple(received),
                      tuple(sorted(events, key=lambda e: (e.begin, e.node, e.row, e.site))))

    def _count(self, what, needed, then, *arguments):
        """Counts one of `needed` things, and calls `then` when it is the last."""
        missing = self._missing.pop(what, needed) - 1
        if missing:
            self._missing[what] = missing
        else:
            then(*arguments)

    # ---- computing ----

    def _begin(self, kind, step):
        if step < self._steps:
            late = self._machines.late(self._kinds[kind][0])
            self._clock.at(self._clock.now + late, lambda: self._compute(kind, step, 0))

    def _compute(self, kind, step, index):
        if index == len(self._program):
            if not self._system.barrier:
                self._begin(kind, step + 1)
            self._end_part(kind, step)
            return
        name, seconds, waits, emits = self._program[index]
        if any(step >= before and (step - before, i) not in self._done[kind] for before, i in waits):
            self._blocked[kind] = step, index
            return

        def done(begin, end):
            if seconds:
                self._note(kind, "compute", name, step, "", begin, end)
            for i in emits:
                self._up[kind].do(self._moves[i].up_seconds, lambda *_, i=i: self._start(kind, (step, i)))
            self._compute(kind, step, index + 1)

        self._device[kind].do(seconds, done)

    def _end_part(self, kind, step):
        """Computing, or one of the gradients, is done."""
        self._count(("step", kind, step), 1 + len(self._moves), self._end, step)

    def _end(self, step):
        self._ends[step] = self._clock.now  # of the last kind

    # ---- exchanging ----

    def _start(self, kind, gradient):
        """A kind's own part of a gradient is on its way to the network."""
        move = self._moves[gradient[1]]
        self._arrived(kind, gradient)
        if move.ring_bytes is not None:
            self._count(("ring", gradient), len(self._kinds), self._join_ring, gradient)
        if move.peer_bytes is not None:
            for to in self._others[kind]:
                self._send(kind, to, move.peer_bytes, 1.0, gradient, "", self._arrived)
        if move.root_bytes is not None and kind == _ROOT:
            for to in self._others[kind]:
                self._send(kind, to, move.root_bytes, 1.0, gradient, "", self._arrived)
        for pair in self._pairs[gradient[1]]:
            number, owner, count = pair
            self._contributed(owner, gradient, pair)
            if owner in self._others[kind]:
                self._send(kind, owner, move.rounds[number].up, count / len(self._kinds[owner]), gradient,
                           "up", functools.partial(self._contributed, pair=pair))

    def _order(self, i):
        """Returns what messages are ordered by; of the same order, the first handed over is the first."""
        return self._moves[i].needed if self._system.order == "priority" else 0.0

    def _send(self, kind, to, num_bytes, width, gradient, phase, then):
        move, (step, i) = self._moves[gradient[1]], gradient

        def done(begin, end):
            self._note(kind, "send", move.site, step, phase, begin, end)
            self._note(to, "receive", move.site, step, phase, begin, self._clock.now)
            then(to, gradient)

        start = move.message_us * 1e-6 * min(self._rates[kind], self._rates[to])
        self._network.send(kind, to, num_bytes + start, width, self._order(i), done)

    def _contributed(self, owner, gradient, pair):
        """One kind's part is on the servers: a server's own, or what the nodes of a kind have sent."""
        self._count((gradient, pair), len(self._kinds) + len(self._others[owner]), self._sum, gradient, pair)

    def _sum(self, gradient, pair):
        move, (number, owner, _) = self._moves[gradient[1]], pair

        def rebuilt(begin, end):
            self._note(owner, "rebuild", move.site, gradient[0], "", begin, end)
            self._summed(gradient, pair)

        def summed(*_):
            if move.owner_rebuild:
                self._device[owner].do(move.owner_rebuild, rebuilt)
            else:
                self._summed(gradient, pair)

        num_bytes = move.rounds[number].up * self._machines.nodes
        self._adder[owner].do(num_bytes / (self._machines.sum_gbytes_per_s * 1e9), summed)

    def _summed(self, gradient, pair):
        """Answers, or waits until all of the step are summed."""
        step = gradient[0]
        if self._system.exchange != "whole":
            self._answer(gradient, pair)
            return
        self._answers[step].append((gradient, pair))
        if len(self._answers[step]) == sum(map(len, self._pairs)):
            for held in self._answers.pop(step):
                self._answer(*held)

    def _answer(self, gradient, pair):
        number, owner, count = pair
        self._arrived(owner, gradient)  # the server's own copy
        down, width = self._moves[gradient[1]].rounds[number].down, count / len(self._kinds[owner])
        for to in self._others[owner]:
            self._send(owner, to, down, width, gradient, "down", self._arrived)

    def _arrived(self, kind, gradient):
        i = gradient[1]
        self._count((kind, gradient), self._parts[i][kind], self._down[kind].do, self._moves[i].down_seconds,
                    lambda *_: self._rebuild(kind, gradient))

    def _rebuild(self, kind, gradient):
        move = self._moves[gradient[1]]

        def done(begin, end):
            if move.rebuild:
                self._note(kind, "rebuild", move.site, gradient[0], "", begin, end)
            self._done[kind].add(gradient)
            self._end_part(kind, gradient[0])
            if self._blocked[kind]:
                blocked, self._blocked[kind] = self._blocked[kind], None
                self._compute(kind, *blocked)

        if move.rebuild:
            self._device[kind].do(move.rebuild, done)
        else:
            done(self._clock.now, self._clock.now)

    def _join_ring(self, gradient):
        heapq.heappush(self._ring, (self._order(gradient[1]), next(self._joined), gradient))
        self._poll_ring()

    def _poll_ring(self):
        """Lets the ring look for tensors at the next end of a cycle."""
        if self._ring_is_busy or not self._ring:
            return
        now, cycle = self._clock.now, self._system.cycle_seconds
        if cycle and self._ring_last > -math.inf:
            cycles = max(1, math.ceil((now - self._ring_last) / cycle - 1e-9))
            now = max(now, self._ring_last + cycles * cycle)
        self._ring_is_busy = True
        self._clock.at(now, self._run_ring)

    def _run_ring(self):
        """All-reduces what is ready: each node sends a P-th of it to the next one, 2 (P - 1) times."""
        nodes, taken, num_bytes = self._machines.nodes, [], 0.0
        while self._ring:
            more = self._moves[self._ring[0][2][1]].ring_bytes
            if taken and num_bytes + more > self._system.buffer_bytes:
                break
            taken.append(heapq.heappop(self._ring)[2])
            num_bytes += more
        each = (self._machines.latency_us + self._machines.message_us) / 1e6
        each += num_bytes / nodes / min(self._rates)
        begin = self._ring_last = self._clock.now
        end = begin + 2 * (nodes - 1) * each

        def done():
            self._ring_is_busy = False
            for gradient, kind in itertools.product(taken, self._all):
                for row in ("send", "receive"):
                    self._note(kind, row, self._moves[gradient[1]].site, gradient[0], "", begin, end)
                self._arrived(kind, gradient)
            self._poll_ring()

        self._clock.at(end, done)

    def _note(self, kind, row, site, step, phase, begin, end):
        """Remembers when the last step's events begin and end; messages of one phase of a site are one."""
        if step == self._steps - 1:
            first, last = self._spans.get((kind, row, site, phase), (begin, end))
            self._spans[kind, row, site, phase] = min(first, begin), max(last, end)


def _kinds(machines, system, moves, is_each_by_itself):
    """Returns lists of nodes that do the same at the same time: not servers that own whole tensors."""
    servers = machines.servers or machines.nodes
    alone = {owner for move in moves if system.exchange == "whole" or move.owner_rebuild
             for part in move.rounds for owner in part.owners}
    if any(move.root_bytes is not None for move in moves):
        alone.add(0)
    kinds = collections.defaultdict(list)
    for node in range(machines.nodes):
        kinds[machines.bytes_per_s(node), machines.late(node), node < servers,
              node if is_each_by_itself or node in alone else None].append(node)
    return list(kinds.values())


def simulate(work, machines, system, plan=None, is_each_by_itself=False):
    """Simulates a step.

    Args:
        work: The `Work` of each accelerator.
        machines: The `Machines`.
        system: The `System`, such as one of SYSTEMS.
        plan: The `planning.Plan` to follow; by default the system's policy makes one.
        is_each_by_itself: Simulates every node, also those of one kind: slow, and the same.

    Returns:
        A `Result`.

    Raises:
        PoseidonError: If the plan is for other nodes, or its bytes are not known.
    """
    plan = plan or make_plan(work, machines, system)
    moves = transfers(work, machines, system, plan)
    return _Run(work, machines, system, moves, is_each_by_itself).run()
