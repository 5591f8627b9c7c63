"""The expected time of a step whose exchanges overlap its computation.

Wait-free backpropagation (H. Zhang et al., USENIX ATC 2017, section 3.1): a gradient leaves as soon as
it is ready, and a rank's link carries one after the other. Rebuilding takes processor time from
backpropagation, whenever it happens. The step does not compute until an exchange that it waits for is complete.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.site import Site


@dataclasses.dataclass(frozen=True)
class Message:
    """What a rank exchanges in a step.

    Attributes:
        cost: Its `Cost`.
        operations, depth, is_waited_for: Same as in `Site`.
    """

    cost: Cost
    operations: float
    depth: int | None = 0
    is_waited_for: bool = False


def messages(decisions: Sequence[Decision], sites: Sequence[Site], exchanges: Iterable[Exchange],
             cluster: Cluster) -> list[Message]:
    """Returns the `Message`s of a step.

    Args:
        decisions: `Decision`s, with their costs.
        sites: Their `Site`s, in the same order.
        exchanges: Other `Exchange`s.
        cluster: The `Cluster`.
    """
    found = [Message(decision.cost, site.operations, site.depth, site.is_waited_for)
             for decision, site in zip(decisions, sites, strict=True)
             if decision.cost is not None and not decision.leader]
    return found + [Message(cost, exchange.operations, exchange.depth, exchange.is_waited_for)
                    for exchange in exchanges if (cost := exchange.cost(cluster)) is not None]


def step_seconds(sent: Iterable[Message], cluster: Cluster, operations: float) -> tuple[float, float]:
    """Returns (seconds of a step, seconds of its arithmetic without any other rank).

    Args:
        sent: The `Message`s.
        cluster: The `Cluster`.
        operations: Additions and multiplications of the step.
    """
    compute = cluster.compute_seconds(operations)
    link_is_free = last_arrival = rebuild = last_rebuild = waited = 0.0
    for message in sorted(sent, key=lambda message: (message.operations, message.depth or 0)):
        cost = message.cost
        ready = cluster.compute_seconds(message.operations) + waited
        link_is_free = max(link_is_free, ready) + cost.transfer
        arrival = link_is_free + cost.latency
        rebuild += cost.rebuild
        if message.is_waited_for:
            waited += arrival - ready
        if arrival >= last_arrival:
            last_arrival, last_rebuild = arrival, cost.rebuild
    return max(compute + waited + rebuild, last_arrival + last_rebuild), compute
