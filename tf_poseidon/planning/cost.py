"""What each scheme costs, in bytes and in seconds.

Bytes are table 1 of H. Zhang et al., USENIX ATC 2017, section 3.2, in bytes instead of numbers. Symbols
as there: a layer's gradient is M x N, K is the batch of one worker, P1 the number of workers and P2 the
number of servers. All bytes are what one node, both worker and server, sends plus receives in a step. Ranks
of one node combine what they have before it leaves the node: then P1 and P2 count nodes, and K a node's rows.

Seconds are what the paper leaves out: the time until a message is there, and the arithmetic by which
every rank makes the gradients of the other ranks anew. They are those of one gradient by itself; what of
them backpropagation hides depends on all gradients of a step (timeline.py).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one gradient costs a rank in a step.

    Attributes:
        num_bytes: Payload that its node sends plus receives, if it is worker and server.
        latency: Seconds until the messages that follow each other are there, without their bytes.
        transfer: Seconds for these bytes.
        rebuild: Seconds for the arithmetic that one process alone would not have.
    """

    num_bytes: float
    latency: float = 0.0
    transfer: float = 0.0
    rebuild: float = 0.0

    @property
    def seconds(self):
        return self.latency + self.transfer + self.rebuild


def parameter_server(dense_bytes, p1, p2):
    """Returns 2 MN (P1 + P2 - 2) / P2, for a gradient of `dense_bytes`.

    A node's part as a worker is 2 MN (P2 - 1) / P2, since it holds one of P2 shards itself, and as a
    server 2 MN (P1 - 1) / P2.
    """
    return 2 * dense_bytes * (p1 + p2 - 2) / p2


def factor_broadcasting(factor_bytes, p1):
    """Returns 2 K (P1 - 1)(M + N), for factors of `factor_bytes`: to and from each other worker."""
    return 2 * factor_bytes * (p1 - 1)


def dense_bytes(num_bytes, cluster):
    """Returns what a node of a cluster sends plus receives for a dense gradient."""
    return parameter_server(num_bytes, cluster.nodes, cluster.server_nodes)


def broadcast_bytes(num_bytes, cluster):
    """Returns what a node sends plus receives for the factors, or slices, of which each rank has as many bytes."""
    return factor_broadcasting(num_bytes * cluster.ranks_per_node, cluster.nodes)


def dense(site, cluster):
    """Returns the `Cost` of a site over the parameter server, None if its shape is unknown."""
    if site.num_bytes is None:
        return None
    num_bytes = dense_bytes(site.num_bytes, cluster)
    # Half of that in each direction. To the server and back: two messages.
    return Cost(num_bytes, latency=2 * cluster.latency_seconds if cluster.nodes > 1 else 0.0,
                transfer=cluster.send_seconds(num_bytes / 2))


def factors(site, cluster):
    """Returns the `Cost` of broadcasting a site's factors.

    The matrix product of this rank's own rows is part of training; that of the other ranks' rows, 2 K
    (P1 - 1) M N operations with one rank on a node, comes on top.
    """
    parts = site.factors
    operations = 2 * parts.k * (cluster.workers - 1) * parts.m * parts.n
    return _broadcast(parts.num_bytes, cluster, rebuild=cluster.compute_seconds(operations))


def slices(site, cluster):
    """Returns the `Cost` of sending a site's slices to all: an upper bound, see `Slices`."""
    return _broadcast(site.slices.num_bytes, cluster)


def gathered(num_bytes, cluster):
    """Returns the `Cost` of giving all ranks what each has, so many bytes."""
    return _broadcast(num_bytes, cluster)


def broadcast(num_bytes, cluster):
    """Returns the `Cost` of giving all ranks what one has: what the node that sends most sends."""
    num_bytes *= cluster.nodes - 1
    return Cost(num_bytes, latency=cluster.latency_seconds if cluster.nodes > 1 else 0.0,
                transfer=cluster.send_seconds(num_bytes))


def _broadcast(num_bytes, cluster, rebuild=0.0):
    num_bytes = broadcast_bytes(num_bytes, cluster)
    return Cost(num_bytes, latency=cluster.latency_seconds if cluster.nodes > 1 else 0.0,
                transfer=cluster.send_seconds(num_bytes / 2), rebuild=rebuild)
