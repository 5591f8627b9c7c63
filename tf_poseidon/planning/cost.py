"""The cost of exchanges, in bytes and in seconds.

Bytes follow table 1 of H. Zhang et al., USENIX ATC 2017, section 3.2, in bytes instead of numbers. The symbols
are the paper's: a layer's gradient is M x N, K is the batch of one worker, P1 the number of workers and P2 the
number of servers. All bytes are what one node, both worker and server, sends plus receives in a step. Ranks
of one node combine their contributions before these leave the node: then P1 and P2 count nodes, and K is a
node's rows.

Half factors are not in that table: narrow factors go to all workers, columns of wide ones to servers, and parts of the
gradient from these to all workers, unless servers update these parts.

Where the GPUs of a node are linked, its ranks combine over these links: a sum is added up by the node's ranks, each as
the server of a part of it. With several nodes, links are a resource beside the network, and KV pairs pass through both
one after the other, so the slower of the two determines the time. On one machine there are the links alone.

Seconds cover what the paper leaves out: latency, and the arithmetic by which every rank rebuilds the other ranks'
gradients. They are those of one gradient alone; how much backpropagation hides depends on all gradients of a step
(step_time.py).

Tests: tests/unit/test_planning.py, tests/scripts/test_simulation.py.
"""

import dataclasses

from tf_poseidon.planning.cluster import Cluster


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one exchange for a rank in a step.

    Attributes:
        num_bytes: Payload that its node sends plus receives, if it is worker and server.
        latency: Seconds of latency of all consecutive messages.
        transfer: Seconds to transfer the payload.
        rebuild: Seconds of arithmetic that one process alone would not need.
    """

    num_bytes: float
    latency: float = 0.0
    transfer: float = 0.0
    rebuild: float = 0.0

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer + self.rebuild


# Servers sum a tensor, and all ranks get the sum; all ranks get every rank's tensor; all ranks get rank 0's tensor; all
# ranks get every rank's tensor, servers get parts of another one, and all ranks get what each server makes of both;
# servers keep their shards of a sum; servers give all ranks their shards of a tensor; each rank gets the sum of its own
# rows.
SUM, GATHER, BROADCAST, DIVIDE = "sum", "gather", "broadcast", "divide"
SCATTER, SHARDS, RETURN = "scatter", "shards", "return"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What ranks exchange for one site, independent of the cluster.

    Attributes:
        kind: SUM, GATHER, BROADCAST, DIVIDE, SCATTER, SHARDS or RETURN.
        num_bytes: Bytes of one rank's contribution; of a sum, of the result; of shards and of RETURN, of the whole
            tensor.
        sent_bytes: Of a sum, or its way up: bytes of one rank's contribution, if these are not `num_bytes`. What the
            ranks of a node add up leaves it as `num_bytes`.
        divided_bytes: Of DIVIDE: bytes of one rank's tensor that is divided among servers.
        joined_bytes: Of DIVIDE: bytes of what all servers together make of it; 0 if they keep it.
        operations: Additions and multiplications by which the contribution of a rank is processed: on each other rank,
            or if it is divided, on all servers together, which spares that rank its own.
        can_wait: Whether the message can wait for others, to travel as one with them.
        takes_links: Whether it travels between the GPUs of a node where these are linked, and not through the host.
    """

    kind: str
    num_bytes: float
    operations: float = 0.0
    can_wait: bool = True
    sent_bytes: float | None = None
    takes_links: bool = False
    divided_bytes: float = 0.0
    joined_bytes: float = 0.0

    @property
    def both_ways(self) -> tuple[float, float]:
        """Bytes of a sum (from a rank to its servers, from these to a rank)."""
        return (self.num_bytes if self.sent_bytes is None else self.sent_bytes), self.num_bytes

    def rebuild_operations(self, workers: int, servers: int) -> float:
        """Returns the additions and multiplications of a rank that one process alone would not need."""
        if self.kind == DIVIDE:
            return self.operations * (workers / servers - 1)
        return self.operations * (workers - 1)

    def cost(self, cluster: Cluster) -> Cost:
        """Returns the `Cost` in a step."""
        if self.kind in (DIVIDE, SCATTER, SHARDS):
            cluster = cluster.of_workers
        elif self.kind == RETURN:  # all workers have rows, whoever serves
            cluster = dataclasses.replace(cluster, servers=0, dedicated_servers=0)
        seconds = cluster.latency_seconds if cluster.nodes > 1 else 0.0
        if self.kind == BROADCAST:  # of the node that sends most
            num_bytes = self.num_bytes * (cluster.nodes - 1)
            return Cost(num_bytes, latency=seconds, transfer=cluster.send_seconds(num_bytes))
        up, down = self.both_ways if cluster.ranks_per_node == 1 else (self.num_bytes, self.num_bytes)
        if self.kind in (SCATTER, SHARDS, RETURN):  # one of the ways of a sum; what comes down has no `sent_bytes`
            num_bytes = dense_bytes(up, cluster) / 2
            return Cost(num_bytes, latency=seconds, transfer=cluster.send_seconds(num_bytes / 2))
        if self.kind == SUM:  # to the server and back: two messages
            num_bytes, seconds = dense_bytes((up + down) / 2, cluster, max(up, down)), 2 * seconds
            between_gpus = linked_dense_bytes(sum(self.both_ways) / 2, cluster)
        else:
            num_bytes = gathered_bytes(self.num_bytes, cluster)
            if self.kind == DIVIDE:  # parts go from rank to rank, and what is made of them once to a node
                up, down = self.divided_bytes * cluster.ranks_per_node, self.joined_bytes
                num_bytes += dense_bytes((up + down) / 2, cluster)
                seconds *= 2 if down else 1
            between_gpus = factor_broadcasting(self.num_bytes, cluster.gpus_per_node)
        # Half of the bytes in each direction.
        transfer = cluster.send_seconds(num_bytes / 2)
        if self.takes_links:
            linked = cluster.gpu_link_seconds(between_gpus / 2)
            transfer = linked if cluster.are_all_linked else max(transfer, linked)
        return Cost(num_bytes, latency=seconds, transfer=transfer,
                    rebuild=cluster.compute_seconds(self.rebuild_operations(cluster.workers, cluster.servers)))


def parameter_server(num_bytes: float, p1: int, p2: int) -> float:
    """Returns 2 MN (P1 + P2 - 2) / P2, for a gradient of `num_bytes`.

    A node contributes 2 MN (P2 - 1) / P2 as a worker, since it holds one of P2 shards itself, and
    2 MN (P1 - 1) / P2 as a server.
    """
    return 2 * num_bytes * (p1 + p2 - 2) / p2


def factor_broadcasting(num_bytes: float, p1: int) -> float:
    """Returns 2 K (P1 - 1)(M + N), for factors of `num_bytes`: to and from each other worker."""
    return 2 * num_bytes * (p1 - 1)


def dense_bytes(num_bytes: float, cluster: Cluster, one_way: float | None = None) -> float:
    """Returns the bytes that a node sends plus receives for a tensor of `num_bytes` that servers sum.

    With dedicated servers, of the busiest node: a worker, or one of them. Between these, all bytes that go up take one
    direction of a link, and all that come down the other one.

    Args:
        num_bytes: Of the tensor, the mean of both ways.
        cluster: The cluster.
        one_way: On the way with more bytes; None for `num_bytes`.
    """
    share = cluster.dedicated_share
    of_workers = parameter_server(num_bytes, cluster.nodes, cluster.server_nodes) if share < 1 else 0.0
    if not share:
        return of_workers
    of_dedicated = 2 * share * (num_bytes if one_way is None else one_way)
    return max(of_dedicated + (1 - share) * of_workers, of_dedicated * cluster.nodes / cluster.dedicated_servers)


def linked_dense_bytes(num_bytes: float, cluster: Cluster) -> float:
    """Returns the bytes that a GPU gives plus takes for a tensor of `num_bytes` that linked GPUs of a node add up."""
    return parameter_server(num_bytes, cluster.gpus_per_node, cluster.linked_servers)


def gathered_bytes(num_bytes: float, cluster: Cluster) -> float:
    """Returns the bytes that a node sends plus receives if each rank sends `num_bytes` to all ranks."""
    return factor_broadcasting(num_bytes * cluster.ranks_per_node, cluster.nodes)


def ring(num_bytes: float, cluster: Cluster) -> Cost:
    """Returns the `Cost` of a tensor that a ring of the nodes adds up, as other libraries do.

    It has the bytes of servers on all nodes, and a latency for each of 2 (P1 - 1) rounds.
    """
    of_node = parameter_server(num_bytes, cluster.nodes, cluster.nodes)
    linked = cluster.gpu_link_seconds(parameter_server(num_bytes, cluster.gpus_per_node, cluster.gpus_per_node) / 2)
    return Cost(of_node, latency=2 * (cluster.nodes - 1) * cluster.latency_seconds,
                transfer=linked if cluster.are_all_linked else max(cluster.send_seconds(of_node / 2), linked))
