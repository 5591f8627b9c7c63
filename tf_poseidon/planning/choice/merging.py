"""Chooses the small messages that wait for each other, to travel as one.

Every message costs a latency. If the next one is ready sooner than that, waiting for it is cheaper
(MG-WFBP: S. Shi, X. Chu and B. Li, INFOCOM 2019, arXiv 1811.11141, theorem 1). Their messages follow each
other on a link; ours are small enough to share a packet, and larger ones leave at once. A message never waits
for one that is computed from it: messages wait for each other only if the same number of exchanges precedes them.

Tests: tests/unit/test_planning.py.
"""

import dataclasses
import typing

from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.plan import Plan
from tf_poseidon.planning.schemes import SCHEMES
from tf_poseidon.planning.site import Site

# The largest message that travels inside a packet, and the capacity of a packet: kInlineBytes and
# kMaxPacketBytes in kernels/communicator/frame.h.
LARGEST_MESSAGE = 32 << 10
LARGEST_GROUP = 128 << 10


class _Message(typing.NamedTuple):
    """What a rank sends to one other rank at once."""

    site: str
    num_bytes: float
    operations: float
    depth: int


def merged(plan: Plan) -> Plan:
    """Returns a plan with the `group`s of messages that travel together."""
    # Ties are in the order of backpropagation, from the last variable to the first.
    small = [_Message(site.name, num_bytes, site.operations, site.depth)
             for decision, site in reversed(list(zip(plan.decisions, plan.sites, strict=True)))
             if (num_bytes := _message_bytes(decision, site)) is not None and site.depth is not None]
    small += [_Message(e.site, e.num_bytes, e.operations, e.depth) for e in plan.exchanges
              if e.num_bytes is not None and e.depth is not None]
    small = [message for message in small if message.num_bytes <= LARGEST_MESSAGE]
    groups: list[list[_Message]] = []
    for message in sorted(small, key=lambda message: (message.depth, message.operations)):
        last = groups[-1][-1] if groups else None
        if last is not None and sum(m.num_bytes for m in groups[-1]) + message.num_bytes <= LARGEST_GROUP and (
                message.depth == last.depth) and (
                plan.cluster.compute_seconds(message.operations - last.operations) < plan.cluster.latency_seconds):
            groups[-1].append(message)
        else:
            groups.append([message])
    names = {message.site: group[0].site for group in groups if len(group) > 1 for message in group}
    return dataclasses.replace(
        plan, decisions=tuple(dataclasses.replace(d, group=names.get(d.site)) for d in plan.decisions),
        exchanges=tuple(dataclasses.replace(e, group=names.get(e.site)) for e in plan.exchanges))


def _message_bytes(decision: Decision, site: Site) -> float | None:
    """Returns the bytes that a rank sends to one other rank at once, None if it sends nothing or they are unknown.

    A gradient that is summed counts as one piece: it is small enough for at most two.
    """
    if decision.leader or decision.cost is None:
        return None
    traffic = SCHEMES[decision.scheme].traffic(site)
    return traffic.num_bytes if traffic is not None and traffic.can_wait else None
