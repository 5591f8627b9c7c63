"""The transfers of a step: how a system exchanges each tensor, over which servers, and with how many bytes.

Messages, their bytes and schemes are those of `tf_poseidon.planning`; simulation.py says when things happen.
"""

import dataclasses
import math

from tf_poseidon import options
from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError
from tf_poseidon.planning import step_time

_MIN_KV_PAIR_BYTES = 16 << 10  # kMinKvPairBytes in kv_pairs.cc
_BLOCK_BYTES = 64  # kBlock
_MOST_TURNS = 4  # kMostPlaces
STEADY = 6  # steps without a barrier, until one repeats the one before


@dataclasses.dataclass(frozen=True)
class Round:
    """KV pairs of one tensor that travel at the same time, at most one per server.

    Attributes:
        owners: Servers that own one of them.
        up: Bytes that each node that computes sends to each of them.
        down: Bytes that each of them sends to each such node.
    """

    owners: tuple[int, ...]
    up: float
    down: float


@dataclasses.dataclass(frozen=True)
class Transfer:
    """The exchange of one tensor. One of `rounds`, `peer_bytes`, `root_bytes` and `ring_bytes` is set, or two.

    Attributes:
        message: What plans say about it, with what this step's work says about its need.
        ready: When it may leave, in seconds of computing.
        rounds: Over servers: its KV pairs.
        peer_bytes: To all other nodes: bytes to each.
        root_bytes: The same, from the first node only.
        ring_bytes: Over a ring: bytes of the tensor.
        rebuild: Seconds of each node's device, when everything has arrived.
        owner_rebuild: Seconds of the server's device, before it answers.
        up_seconds: Copying from a node's accelerators to the network, `down_seconds` back.
        message_us: Same as in `Machines`; 0 if it travels with another site.
    """

    message: step_time.Message
    ready: float
    rounds: tuple[Round, ...] = ()
    peer_bytes: float | None = None
    root_bytes: float | None = None
    ring_bytes: float | None = None
    rebuild: float = 0.0
    owner_rebuild: float = 0.0
    up_seconds: float = 0.0
    down_seconds: float = 0.0
    message_us: float = 0.0


def cut(num_bytes, kv_pair_bytes, servers):
    """Returns how many KV pairs a tensor is cut into, as kernels/communicator/kv_pairs.cc does."""
    parts = math.ceil(math.ceil(num_bytes / _BLOCK_BYTES) / (kv_pair_bytes // _BLOCK_BYTES))
    parts = max(parts, min(servers, math.ceil(num_bytes / _MIN_KV_PAIR_BYTES)))
    return math.ceil(parts / servers) * servers if parts > servers else parts


def places(nodes, serving, dedicated):
    """Returns which nodes get KV pairs in turn, as `WithServers` in kernels/communicator/options.cc does.

    Args:
        nodes: Number of nodes that compute.
        serving: How many of them are servers, the first ones.
        dedicated: Number of nodes behind them that only serve.
    """
    of_node, of_dedicated = _turns(nodes, serving, dedicated) if dedicated else (1, 0)
    of_all_dedicated = of_dedicated * dedicated
    total, found, taken = of_node * serving + of_all_dedicated, [], 0
    for place in range(total):  # evenly mixed
        if (place + 1) * of_all_dedicated // total > taken:
            found.append(nodes + taken % dedicated)
            taken += 1
        else:
            found.append((place - taken) % serving)
    return tuple(found)


def _turns(nodes, serving, dedicated):
    """Returns how many turns each node and each dedicated server have, as `PlacesOf` in kv_pairs.cc does."""
    if serving and nodes == 1:
        return 1, 0
    if not serving or dedicated >= nodes:
        return 0, 1
    others, missing = serving + nodes - 2, nodes - dedicated
    more, less = 7 * min(2 * missing, others), 8 * missing
    if nodes * (less * serving + more * dedicated) <= dedicated * (more * dedicated + less * others):
        return 0, 1
    for of_node in range(1, _MOST_TURNS + 1):
        of_dedicated = (2 * more * of_node + less) // (2 * less)
        if abs(of_dedicated * less - more * of_node) * 32 <= more * of_node:
            break
    return of_node, of_dedicated


def make_plan(work, machines, system):
    """Returns the `planning.Plan` that a system follows; systems other than "plan" use only its sites."""
    cluster = dataclasses.replace(machines.cluster(1e-9 / work.rebuild_seconds_per_operation),
                                  accelerators=work.accelerators)
    # A cluster has one speed of arithmetic, so computing is expressed as rebuilding that takes as long.
    scale = work.seconds / work.operations / work.rebuild_seconds_per_operation
    scaled = [dataclasses.replace(site, operations=scale * site.operations,
                                  needed=None if (needed := work.needed(site)) is None else scale * needed)
              for site in work.sites]
    exchanges = [dataclasses.replace(e, operations=scale * e.operations) for e in work.exchanges]
    planner = planning.Planner(cluster, system.policy, system.pins, system.merge)
    plan = planner.plan(scaled, scale * work.operations, exchanges, system.steps or STEADY)
    groups = {exchange.site: exchange.group for exchange in plan.exchanges}
    return dataclasses.replace(plan, sites=work.sites, operations=work.operations, exchanges=tuple(
        dataclasses.replace(exchange, group=groups[exchange.site]) for exchange in work.exchanges))


def transfers(work, machines, system, plan):
    """Returns the `Transfer`s of a step, in the order in which they are ready.

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
    exchanges = {exchange.site: exchange for exchange in plan.exchanges if system.exchange == "plan"}
    sites = {site.name: (site, decision) for site, decision in zip(plan.sites, plan.decisions, strict=True)}
    for part in (*(decision for decision in plan.decisions if not decision.leader), *exchanges.values()):
        if part.num_bytes is None:
            raise PoseidonError(f"The bytes of '{part.site}' are unknown before the step, expected known shapes: make "
                                "a plan with fixed shapes.")
    messages = step_time.messages(plan.decisions, plan.sites, exchanges.values(), plan.cluster)
    if system.exchange == "whole":  # values are pulled when all are updated, so nothing arrives before
        messages = [message._replace(is_waited_for=False, is_urgent=False) for message in messages]
    groups = {part.site: part.group or part.site for part in (*plan.decisions, *exchanges.values())}
    ready, leaders, place = {}, {}, _Placement(machines, system)
    for message in messages:
        group = groups[message.name]
        ready[group] = max(ready.get(group, 0.0), work.seconds_at(message.operations))
        leaders.setdefault(group, message.name)

    def transfer(message, made):
        group = groups[message.name]
        return Transfer(message, ready[group] if system.overlap or message.is_waited_for else work.seconds,
                        message_us=machines.message_us if leaders[group] == message.name else 0.0, **made)

    gradients, others = [], []
    for message in messages:
        if message.name in exchanges:
            others.append(transfer(message, _other_transfer(exchanges[message.name], machines)))
        else:
            site, decision = sites[message.name]
            gradients.append(transfer(message._replace(needed=work.needed(site)),
                                      _transfer(site, decision, work, machines, system, place)))
    gradients.reverse()  # ties in the order of backpropagation, from the last variable to the first
    return tuple(sorted((*gradients, *others), key=lambda move: (move.ready, move.message.depth or 0)))


def _transfer(site, decision, work, machines, system, place):
    """Returns the attributes of a site's `Transfer` that describe the exchange."""
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
    traffic = planning.SCHEMES[planning.PS if system.exchange == "adam" else decision.scheme].traffic(site)
    if traffic.kind == planning.SUM:
        up, down = traffic.both_ways if gpus == 1 else (dense, dense)
        return made | {"rounds": place.pairs(down, up)}
    made = _to_all(traffic.num_bytes, machines) | {"rebuild": _rebuild(traffic, work, machines)}
    if traffic.kind == planning.DIVIDE:
        divided, joined = gpus * traffic.divided_bytes, traffic.joined_bytes
        made["rounds"] = place.evenly(divided, joined)
        made["up_seconds"] += divided / copy
        made["down_seconds"] += (gpus - 1) * joined / local + joined / copy
    return made


def _rebuild(traffic, work, machines):
    """Returns the seconds in which an accelerator processes what others gave, beyond what it saves of its own work."""
    servers = (machines.serving_nodes or machines.nodes) * machines.gpus_per_node
    operations = traffic.rebuild_operations(machines.nodes * machines.gpus_per_node, servers)
    return operations * work.rebuild_seconds_per_operation


def _other_transfer(exchange, machines):
    """Returns the attributes of a `Transfer` that describe an exchange other than a gradient."""
    if exchange.kind == "gather":
        return _to_all(exchange.num_bytes, machines)
    num_bytes, gpus = exchange.num_bytes, machines.gpus_per_node
    copy = num_bytes / (machines.copy_gbytes_per_s * 1e9)
    of_all = (gpus - 1) * num_bytes / (machines.local_gbytes_per_s * 1e9) + copy
    if exchange.kind == planning.BROADCAST:
        return {"root_bytes": num_bytes, "up_seconds": copy, "down_seconds": of_all}
    # One way of a sum: each node has a shard, or its own rows, of which every other node gives its part, or gets it.
    sent = exchange.traffic.both_ways[0] if gpus == 1 else num_bytes
    shard, of_shard = sent / machines.nodes, copy / machines.nodes
    up, down = (of_shard, of_all) if exchange.kind == planning.SHARDS else (of_all, of_shard)
    return {"peer_bytes": shard, "up_seconds": up, "down_seconds": down}


def _to_all(num_bytes, machines):
    """Returns the attributes of a `Transfer` of so many bytes from each accelerator to all others."""
    gpus, nodes, parts = machines.gpus_per_node, machines.nodes, machines.gpus_per_node * num_bytes
    local, copy = machines.local_gbytes_per_s * 1e9, machines.copy_gbytes_per_s * 1e9
    # Each other accelerator of the node gets the parts of all accelerators but its own.
    return {"peer_bytes": parts, "up_seconds": (1 - 1 / gpus) * parts / local + parts / copy,
            "down_seconds": (gpus - 1) * parts * (nodes - 1 / gpus) / local + parts * (nodes - 1) / copy}


class _Placement:
    """Assigns tensors to servers, one tensor after the other."""

    def __init__(self, machines, system):
        self._servers = places(machines.nodes, machines.serving_nodes, machines.dedicated_servers)
        # Dedicated servers have no columns of factors.
        self._dividing = machines.serving_nodes or machines.nodes
        self._kv_pair_bytes = options.JobOptions(kv_pair_bytes=system.kv_pair_bytes,
                                                 dedicated_servers=machines.dedicated_servers).kv_pair_bytes
        self._is_greedy = system.balance == "greedy"
        self._next, self._loads = 0, dict.fromkeys(self._servers, 0.0)

    def one(self, num_bytes):
        """Returns the server of a whole tensor."""
        owner = min(self._loads, key=self._loads.__getitem__) if self._is_greedy else self._take(1)[0]
        self._loads[owner] += num_bytes
        return owner

    def pairs(self, num_bytes, sent_bytes):
        """Returns the `Round`s of a sum that is cut into KV pairs, whose parts have `sent_bytes`."""
        count, rounds = cut(num_bytes, self._kv_pair_bytes, len(self._servers)), [[]]
        for owner in self._take(count):
            if owner in rounds[-1]:
                rounds.append([])
            rounds[-1].append(owner)
        return tuple(Round(tuple(owners), sent_bytes / count, num_bytes / count) for owners in rounds if owners)

    def evenly(self, up, down):
        """Returns the `Round`s of a tensor of which each server gets as much, and gives as much of another to all."""
        return (Round(tuple(range(self._dividing)), up / self._dividing, down / self._dividing),)

    def _take(self, count):
        first, number = self._next, len(self._servers)
        self._next = (first + count) % number
        return tuple(self._servers[(first + i) % number] for i in range(count))


def node_bytes(moves, machines):
    """Returns (bytes that each node sends, bytes that each receives), two lists, of `Transfer`s."""
    nodes, everybody_sent, everybody_received = machines.nodes, 0.0, 0.0
    sent, received = [0.0] * machines.all_nodes, [0.0] * machines.all_nodes
    for move in moves:
        same = (move.peer_bytes or 0.0) * (nodes - 1) + (move.ring_bytes or 0.0) * 2 * (nodes - 1) / nodes
        for part in move.rounds:
            for owner in part.owners:
                sent[owner] += nodes * part.down
                received[owner] += nodes * part.up
                if owner < nodes:  # what it gives itself does not travel
                    of_itself = part.up + part.down
                    sent[owner] -= of_itself
                    received[owner] -= of_itself
        if move.root_bytes is not None:
            sent[0] += (nodes - 1) * move.root_bytes
            received = [r + move.root_bytes * (0 < node < nodes) for node, r in enumerate(received)]
        everybody_sent += same + sum(len(part.owners) * part.up for part in move.rounds)
        everybody_received += same + sum(len(part.owners) * part.down for part in move.rounds)
    return ([s + everybody_sent * (node < nodes) for node, s in enumerate(sent)],
            [r + everybody_received * (node < nodes) for node, r in enumerate(received)])
