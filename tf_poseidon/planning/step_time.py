"""The expected time of a step whose exchanges overlap its computation, or that of the next step.

Wait-free backpropagation (H. Zhang et al., USENIX ATC 2017, section 3.1): a gradient leaves as soon as it is ready, and
a rank's link carries one after the other. Rebuilding takes processor time from backpropagation, whenever it happens.
The step does not compute until an exchange that it waits for is complete.

Several steps of one graph overlap: the next one waits for a gradient where it needs it, and the link carries first what
is needed first, also if that becomes ready while another gradient travels (priority-based parameter propagation: A.
Jayarajan et al., MLSys 2019, arXiv 1905.03960).
"""

from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import heapq
import math

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.schemes import PS
from tf_poseidon.planning.site import Site


@dataclasses.dataclass(frozen=True)
class Message:
    """What a rank exchanges in a step.

    Attributes:
        cost: Its `Cost`.
        operations, needed, depth, is_waited_for: Same as in `Site`.
        is_urgent: Whether it overtakes gradients between steps that overlap.
        piece: Seconds of transfer that nothing interrupts.
    """

    cost: Cost
    operations: float
    needed: float | None = None
    depth: int | None = 0
    is_waited_for: bool = False
    is_urgent: bool = False
    piece: float = math.inf


# The default size of KV pairs; one to each other node travels at a time. Other messages are not cut.
_KV_PAIR_BYTES = 2 << 20


def messages(decisions: Sequence[Decision], sites: Sequence[Site], exchanges: Iterable[Exchange],
             cluster: Cluster) -> list[Message]:
    """Returns the `Message`s of a step.

    Args:
        decisions: `Decision`s, with their costs.
        sites: Their `Site`s, in the same order.
        exchanges: Other `Exchange`s.
        cluster: The `Cluster`.
    """
    pairs = cluster.send_seconds(_KV_PAIR_BYTES * (cluster.nodes - 1))
    found = [Message(decision.cost, site.operations, site.needed, site.depth, site.is_waited_for,
                     site.is_waited_for, pairs if decision.scheme == PS else math.inf)
             for decision, site in zip(decisions, sites, strict=True)
             if decision.cost is not None and not decision.leader]
    return found + [Message(cost, exchange.operations, None, exchange.depth, exchange.is_waited_for, True)
                    for exchange in exchanges if (cost := exchange.cost(cluster)) is not None]


def step_seconds(sent: Iterable[Message], cluster: Cluster, operations: float, steps: int = 1) -> tuple[float, float]:
    """Returns (seconds of a step, seconds of its arithmetic without any other rank).

    Args:
        sent: The `Message`s.
        cluster: The `Cluster`.
        operations: Additions and multiplications of the step.
        steps: How many steps overlap; then the first result is their mean.
    """
    ready = sorted(sent, key=lambda message: (message.operations, message.depth or 0))
    needs = [(message.needed, False, number, message) for number, message in enumerate(ready)
             if message.needed is not None and not message.is_waited_for] if steps > 1 else []
    program = sorted(needs + [(message.operations, True, number, message) for number, message in enumerate(ready)],
                     key=lambda action: action[:3])
    later = sum(message.cost.rebuild for message in ready if message.needed is None and not message.is_waited_for)
    compute, now = cluster.compute_seconds(operations), 0.0
    link = _Link() if steps > 1 else _FirstInFirstOut()
    for step in range(steps):
        computed = 0.0
        for point, is_ready, number, message in program:
            reached = cluster.compute_seconds(point)
            now += reached - computed
            computed = reached
            if is_ready:
                link.send(now, (step, number), message, _order(step, message) if steps > 1 else ())
            if message.is_waited_for or step and not is_ready:
                arrival = link.arrival((step if is_ready else step - 1, number)) + message.cost.latency
                now = max(now, arrival) + message.cost.rebuild
        now += compute - computed + (later if step else 0.0)
    # Nothing hides what is left of the last step.
    left = [(link.arrival((steps - 1, number)) + message.cost.latency, number, message.cost.rebuild)
            for number, message in enumerate(ready) if not message.is_waited_for]
    last_arrival, _, last_rebuild = max(left, default=(0.0, 0, 0.0))
    return max(now + sum(rebuild for _, _, rebuild in left), last_arrival + last_rebuild) / steps, compute


def _order(step: int, message: Message) -> tuple[int, float]:
    """Returns the key by which the link carries messages: what is needed first, in whichever step that is."""
    if message.is_urgent:
        return step, message.operations
    return step + 1, math.inf if message.needed is None else message.needed


class _FirstInFirstOut:
    """A link that carries messages in the order in which they are sent; it has the methods of `_Link`."""

    def __init__(self) -> None:
        self._free = 0.0
        self._arrivals: dict[Hashable, float] = {}

    def send(self, now: float, name: Hashable, message: Message, key: tuple[int | float, ...]) -> None:
        del key
        self._free = max(self._free, now) + message.cost.transfer
        self._arrivals[name] = self._free

    def arrival(self, name: Hashable) -> float:
        return self._arrivals[name]


class _Link:
    """Carries one message after the other, in the order of keys; one with a smaller key overtakes others.

    A piece of a message that has begun is not interrupted: it has the smallest key, ().
    """

    def __init__(self) -> None:
        self._now = 0.0
        # A heap of (key, number, name; seconds that are left, seconds of a piece). What does not complete a message has
        # no name.
        self._waiting: list[tuple[tuple[int | float, ...], int, Hashable, float, float]] = []
        self._arrivals: dict[Hashable, float] = {}
        self._sent = 0

    def send(self, now: float, name: Hashable, message: Message, key: tuple[int | float, ...]) -> None:
        """Sends a message that is ready now; times must not decrease."""
        while self._waiting and self._now < now:
            self._carry(now)
        self._now = max(self._now, now)
        heapq.heappush(self._waiting, (key, self._sent, name, message.cost.transfer, message.piece))
        self._sent += 1

    def arrival(self, name: Hashable) -> float:
        """Returns when a message has arrived, if none is sent before that."""
        while name not in self._arrivals:
            self._carry(math.inf)
        return self._arrivals[name]

    def _carry(self, until: float) -> None:
        """Carries the first message until a time, or until it has arrived."""
        key, number, name, seconds, piece = heapq.heappop(self._waiting)
        end = self._now + seconds
        self._now = min(end, until)
        left = end - self._now
        if not left:
            self._arrivals[name] = end
            return
        begun = left if key == () else left % piece
        if begun < left:
            heapq.heappush(self._waiting, (key, number, name, left - begun, piece))
            name = None
        if begun:
            heapq.heappush(self._waiting, ((), number, name, begun, piece))
