"""A lower bound of the time of a step: what bytes and arithmetic alone take, whichever schemes are chosen.

A step is no shorter than its arithmetic with all rebuilding, and no shorter than all transfers, which begin when the
first of them is ready. No choice of schemes makes both of these short: so neither any mean of them, which is least if
each gradient has the scheme with the least share of it. The bound is the largest of these means, or the arithmetic with
the transfers for which it stops.

Tests: tests/unit/test_planning.py.
"""

from collections.abc import Sequence

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.schemes import costs_of
from tf_poseidon.planning.site import Site

_HALVINGS = 30  # of the interval of weights


def least_seconds(sites: Sequence[Site], exchanges: Sequence[Exchange], cluster: Cluster, operations: float,
                  steps: int = 1) -> float:
    """Returns seconds that a step takes at least, of steps that overlap their mean.

    Args:
        sites: The `Site`s; biases that can use the exchange of their layer count nothing.
        exchanges: The other `Exchange`s.
        cluster: The `Cluster`.
        operations: Additions and multiplications of a step.
        steps: How many steps overlap.
    """
    # (seconds of the processor, seconds of the link) of each scheme.
    free = [site for site in sites if site.bias_of is None]
    choices = [[(cost.rebuild, cost.transfer) for cost in costs] for site in free
               if (costs := costs_of(site, cluster).values())]
    others = [(exchange, cost) for exchange in exchanges if (cost := exchange.cost(cluster)) is not None]
    processor, link = cluster.compute_seconds(operations), sum(cost.transfer for _, cost in others)
    # Meanwhile what has arrived may be rebuilt.
    stopped = sum(e.is_waited_for * cost.transfer for e, cost in others) + sum(
        min(cost.transfer for cost in costs) for site in free
        if site.is_waited_for and (costs := costs_of(site, cluster).values()))
    if cluster.nodes > 1:
        tensors: tuple[Site | Exchange, ...] = (*sites, *exchanges)
        ready = min((tensor.operations for tensor in tensors), default=0.0)
        link += cluster.compute_seconds(ready) / steps

    def mean(weight: float) -> tuple[float, float]:
        """Returns the mean with a weight of the link between 0 and 1, and by how much it grows with the weight."""
        parts = [min(((1 - weight) * a + weight * b, b - a) for a, b in choice) for choice in choices]
        return ((1 - weight) * processor + weight * link + sum(part for part, _ in parts),
                link - processor + sum(slope for _, slope in parts))

    low, high, best = 0.0, 1.0, processor + stopped
    for weight in (low, high):
        best = max(best, mean(weight)[0])
    for _ in range(_HALVINGS):  # the mean is concave
        weight = (low + high) / 2
        value, slope = mean(weight)
        best = max(best, value)
        low, high = (weight, high) if slope > 0 else (low, weight)
    return best
