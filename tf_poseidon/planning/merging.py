"""Which small messages wait for each other, to travel as one.

Every message costs a latency. If the next gradient is there sooner than that, waiting for it is less
(MG-WFBP: S. Shi, X. Chu and B. Li, INFOCOM 2019, arXiv 1811.11141, theorem 1). Their messages follow each
other on a link; ours are small enough to share a packet, and larger ones leave at once.
"""

import dataclasses

# What travels inside of packets, and how much of it fits into one: kInlineBytes and kMaxPacketBytes
# in kernels/communicator/frame.h.
LARGEST_MESSAGE = 32 << 10
LARGEST_GROUP = 128 << 10


def with_groups(decisions, sites, cluster):
    """Returns the decisions with `group` set where messages shall travel together.

    Args:
        decisions: `Decision`s.
        sites: Their `Site`s, in the same order.
        cluster: The `Cluster`.
    """
    groups, last_ready = [], None
    small = [(site, d, num_bytes) for d, site in zip(decisions, sites, strict=True)
             if (num_bytes := _message_bytes(d, site)) is not None and num_bytes <= LARGEST_MESSAGE]
    # Ties in the order of backpropagation, which is that of the variables from last to first.
    for site, decision, num_bytes in sorted(reversed(small), key=lambda entry: entry[0].operations):
        ready = cluster.compute_seconds(site.operations)
        fits = groups and sum(b for _, b in groups[-1]) + num_bytes <= LARGEST_GROUP
        if fits and ready - last_ready < cluster.latency_seconds:
            groups[-1].append((decision.site, num_bytes))
        else:
            groups.append([(decision.site, num_bytes)])
        last_ready = ready
    names = {site: group[0][0] for group in groups if len(group) > 1 for site, _ in group}
    return tuple(dataclasses.replace(d, group=names.get(d.site)) for d in decisions)


def _message_bytes(decision, site):
    """Returns what a rank sends to one other at once, None if it sends nothing or that is unknown."""
    if decision.rides_on or decision.cost is None:
        return None
    if decision.scheme == "ps":
        return site.num_bytes  # not cut into KV pairs, as small as it is
    return site.factors.num_bytes if decision.scheme == "sfb" else None
