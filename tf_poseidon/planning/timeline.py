"""How long a step is expected to take when gradients travel while backpropagation goes on.

Wait-free backpropagation (H. Zhang et al., USENIX ATC 2017, section 3.1): a gradient leaves as soon as
it is there, and a rank's link carries one after the other. Rebuilding takes the processor from
backpropagation, whenever it happens.
"""


def step_seconds(decisions, sites, cluster, operations):
    """Returns (seconds of a step, seconds of its arithmetic without any other rank).

    Args:
        decisions: `Decision`s, with their costs.
        sites: Their `Site`s, in the same order.
        cluster: The `Cluster`.
        operations: Additions and multiplications of the step.
    """
    compute = cluster.compute_seconds(operations)
    link_is_free = last_arrival = rebuild = last_rebuild = 0.0
    by_readiness = sorted(zip(decisions, sites, strict=True), key=lambda pair: pair[1].operations)
    for decision, site in by_readiness:
        if decision.rides_on or decision.cost is None:
            continue
        cost = decision.cost
        start = max(link_is_free, cluster.compute_seconds(site.operations))
        link_is_free = start + cost.transfer
        rebuild += cost.rebuild
        if link_is_free + cost.latency >= last_arrival:
            last_arrival, last_rebuild = link_is_free + cost.latency, cost.rebuild
    return max(compute + rebuild, last_arrival + last_rebuild), compute
