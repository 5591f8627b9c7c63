"""What each scheme costs: table 1 of H. Zhang et al., USENIX ATC 2017, in bytes instead of numbers.

Symbols as in the paper: a layer's gradient is M x N, K is the batch of one worker, P1 the number of
workers and P2 the number of servers. All costs are what one node, both worker and server, sends
plus receives in a step.
"""


def parameter_server(dense_bytes, p1, p2):
    """Returns 2 MN (P1 + P2 - 2) / P2, for a gradient of `dense_bytes`.

    A node's part as a worker is 2 MN (P2 - 1) / P2, since it holds one of P2 shards itself, and as a
    server 2 MN (P1 - 1) / P2.
    """
    return 2 * dense_bytes * (p1 + p2 - 2) / p2


def factor_broadcasting(factor_bytes, p1):
    """Returns 2 K (P1 - 1)(M + N), for factors of `factor_bytes`: to and from each other worker."""
    return 2 * factor_bytes * (p1 - 1)


def mean_parameter_server(dense_bytes, p1):
    """Returns the mean of `parameter_server` over P1 workers, whichever of them are servers too.

    Each shard is sent by and to all workers but its own server, 2 MN (P1 - 1) in all, and every byte
    is counted where it is sent and where it is received.
    """
    return 4 * dense_bytes * (p1 - 1) / p1
