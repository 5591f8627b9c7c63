"""The expected time of a step whose exchanges overlap its computation, or that of the next step.

Wait-free backpropagation (H. Zhang et al., USENIX ATC 2017, section 3.1): a gradient leaves as soon as it is ready, and
a rank's link carries one after the other. Rebuilding takes processor time from backpropagation, whenever it happens.
The step does not compute until an exchange that it waits for is complete.

Several steps of one graph overlap: the next one waits for a gradient where it needs it, and the link carries first what
is needed first, also if that becomes ready while another gradient travels (priority-based parameter propagation: A.
Jayarajan et al., MLSys 2019, arXiv 1905.03960).

Tests: tests/unit/test_planning.py, tests/unit/test_reports.py, tests/scripts/test_simulation.py.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import heapq
import math
import typing

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.schemes import HFB
from tf_poseidon.planning.schemes import PS
from tf_poseidon.planning.site import Site


class Message(typing.NamedTuple):
    """What a rank exchanges in a step.

    Attributes:
        cost: Its `Cost`.
        operations, needed, depth, is_waited_for: Same as in `Site`.
        is_urgent: Whether it overtakes gradients between steps that overlap.
        piece: Seconds of transfer that nothing interrupts.
        ways: 2 if servers send back what they sum or rebuild, else 1.
        name: Name of its site.
    """

    cost: Cost
    operations: float
    needed: float | None = None
    depth: int | None = 0
    is_waited_for: bool = False
    is_urgent: bool = False
    piece: float = math.inf
    ways: int = 1
    name: str = ""

    def in_pieces(self, number: int) -> "Message":
        """Returns it with so many pieces in place of each."""
        return self._with(self.cost, self.piece / number)

    def slowed(self, factor: float) -> "Message":
        """Returns it with a transfer that takes `factor` times as long."""
        return self._with(dataclasses.replace(self.cost, transfer=factor * self.cost.transfer), self.piece)

    def _with(self, cost: Cost, piece: float) -> "Message":
        return Message(cost, self.operations, self.needed, self.depth, self.is_waited_for, self.is_urgent, piece,
                       self.ways, self.name)


class BusySpan(typing.NamedTuple):
    """What a rank's processor or its link does for a while.

    Attributes:
        kind: "compute", "wait" or "rebuild" of the processor, "transfer" of the link.
        site: Name of the site: whose tensor is then ready; that is then there; that is rebuilt; that travels. "" for
            computing after which none is ready.
        begin: When it begins, in seconds after the first step does.
        end: When it ends.
    """

    kind: str
    site: str
    begin: float
    end: float


# Takes the fields of a `BusySpan`. None where planning only compares times, thousands of which it looks at.
_Note = Callable[[str, str, float, float], None] | None


# What travels to another node at a time, and nothing interrupts: two pieces of a transfer of 2 MiB, see PieceBytes in
# kernels/communicator/mpi_transport.cc.
PIECE_BYTES = 256 << 10

# And between linked GPUs: kMostUnderWay copies of a KV pair, see kernels/communicator/gpu_links.h.
_LINKED_PIECE_BYTES = 8 << 20


def messages(decisions: Sequence[Decision], sites: Sequence[Site], exchanges: Iterable[Exchange],
             cluster: Cluster) -> list[Message]:
    """Returns the `Message`s of a step.

    Args:
        decisions: `Decision`s, with their costs.
        sites: Their `Site`s, in the same order.
        exchanges: Other `Exchange`s.
        cluster: The `Cluster`.
    """
    piece = (cluster.gpu_link_seconds(_LINKED_PIECE_BYTES) if cluster.are_all_linked else
             cluster.send_seconds(PIECE_BYTES * (cluster.nodes - 1))) or math.inf
    of_sites = [Message(decision.cost, site.operations, site.needed, site.depth, site.is_waited_for, site.is_waited_for,
                        piece, 2 if decision.scheme in (PS, HFB) else 1, site.name)
                for decision, site in zip(decisions, sites, strict=True)
                if decision.cost is not None and not decision.leader]
    return of_sites + [Message(cost, exchange.operations, None, exchange.depth, exchange.is_waited_for, True, piece,
                               name=exchange.site)
                       for exchange in exchanges if (cost := exchange.cost(cluster)) is not None]


def step_seconds(sent: Iterable[Message], cluster: Cluster, operations: float, steps: int = 1) -> tuple[float, float]:
    """Returns (seconds of a step, seconds of its arithmetic without any other rank).

    Args:
        sent: The `Message`s.
        cluster: The `Cluster`.
        operations: Additions and multiplications of the step.
        steps: How many steps overlap; then the first result is their mean.
    """
    seconds = _run(sent, cluster, operations, steps, None)
    return seconds / steps, cluster.compute_seconds(operations)


def spans(sent: Iterable[Message], cluster: Cluster, operations: float, steps: int = 1) -> list[BusySpan]:
    """Returns what a rank does in the time of `step_seconds`, whose arguments it has, and in all steps that overlap."""
    busy_spans: list[BusySpan] = []
    _run(sent, cluster, operations, steps, lambda *fields: busy_spans.append(BusySpan(*fields)))
    return [span for span in busy_spans if span.begin < span.end]


def _run(sent: Iterable[Message], cluster: Cluster, operations: float, steps: int, note: _Note) -> float:
    """Returns the seconds of all steps together, and notes what a rank does in them."""
    ready = sorted(sent, key=lambda message: (message.operations, message.depth or 0))
    program = [(message.operations, True, number, message) for number, message in enumerate(ready)]
    if steps > 1:
        program += [(message.needed, False, number, message) for number, message in enumerate(ready)
                    if message.needed is not None and not message.is_waited_for]
        program.sort(key=lambda action: action[:3])
    per_operation, compute = cluster.compute_seconds(1), cluster.compute_seconds(operations)
    link: _FirstInFirstOut | _ByPriority = _ByPriority(note) if steps > 1 else _FirstInFirstOut(note)
    processor = _Processor(link, note)
    for step in range(steps):
        computed = 0.0
        for point, is_ready, number, message in program:
            reached = point * per_operation
            processor.compute(reached - computed, message.name if is_ready else "")
            computed = reached
            if is_ready:
                link.send(processor.now, (step, number), message, order(step, message) if steps > 1 else ())
            if message.is_waited_for:
                processor.wait((step, number))
            elif step and not is_ready:
                processor.wait((step - 1, number))
        processor.compute(compute - computed, "")
    return processor.finish()


def uncertain_seconds(sent: Sequence[Message], cluster: Cluster, operations: float, steps: int = 1) -> list[float]:
    """Returns the seconds of a step as it may turn out to be: the arguments are those of `step_seconds`.

    The cluster's speeds may be wrong by its `uncertainty`, and between steps that overlap, the piece of a message that
    is on its way when something urgent is ready may be at its begin or at its end.
    """
    versions = [list(sent)]
    if steps > 1:
        versions.append([message.in_pieces(_MANY) for message in sent])
    if cluster.uncertainty:
        factor = 1 + cluster.uncertainty
        versions += [[message.slowed(slower) for message in sent] for slower in (factor, 1 / factor)]
    return [step_seconds(version, cluster, operations, steps)[0] for version in versions]


_MANY = 64  # pieces of one


def order(step: int, message: Message) -> tuple[int, float]:
    """Returns the key by which the link carries messages: what is needed first, in whichever step that is."""
    if message.is_urgent:
        return step, message.operations
    return step + 1, math.inf if message.needed is None else message.needed


class _Processor:
    """Computes one layer after the other, and in between rebuilds what has arrived."""

    def __init__(self, link: "_FirstInFirstOut | _ByPriority", note: _Note) -> None:
        self.now = 0.0
        self._link, self._note = link, note
        self._rebuilt: set[_Name] = set()

    def compute(self, seconds: float, site: str) -> None:
        if self._note:
            self._note("compute", site, self.now, self.now + seconds)
        self.now += seconds
        while (arrived := self._link.next_arrival(self.now)) is not None:
            self._rebuild(arrived)

    def wait(self, name: "_Name") -> None:
        """Waits until a message has arrived and is rebuilt."""
        while name not in self._rebuilt:
            arrived = self._link.next_arrival(math.inf)
            assert arrived is not None  # it was sent
            self._rebuild(arrived)

    def finish(self) -> float:
        """Returns when all messages have arrived and are rebuilt."""
        while (arrived := self._link.next_arrival(math.inf)) is not None:
            self._rebuild(arrived)
        return self.now

    def _rebuild(self, arrived: "_Arrival") -> None:
        time, name, message = arrived
        begin = max(self.now, time)
        end = begin + message.cost.rebuild
        if self._note:
            self._note("wait", message.name, self.now, begin)
            self._note("rebuild", message.name, begin, end)
        self.now = end
        self._rebuilt.add(name)


_Name = tuple[int, int]  # of a message: number of its step, and its number there
_Arrival = tuple[float, _Name, Message]  # when, and what


class _FirstInFirstOut:
    """A link that carries messages in the order in which they are sent; it has the methods of `_ByPriority`."""

    def __init__(self, note: _Note) -> None:
        self._free, self._note = 0.0, note
        self._arrivals: collections.deque[_Arrival] = collections.deque()

    def send(self, now: float, name: _Name, message: Message, key: tuple[int | float, ...]) -> None:
        del key
        begin = max(self._free, now)
        self._free = begin + message.cost.transfer
        if self._note:
            self._note("transfer", message.name, begin, self._free)
        self._arrivals.append((self._free + message.cost.latency, name, message))

    def next_arrival(self, until: float) -> _Arrival | None:
        return self._arrivals.popleft() if self._arrivals and self._arrivals[0][0] <= until else None


class _ByPriority:
    """A link that carries one message after the other, in the order of keys; one with a smaller key overtakes others.

    A piece of a message that has begun is not interrupted: it has the smallest key, (). What servers send back leaves
    when they have the sum, as a message of its own.
    """

    def __init__(self, note: _Note) -> None:
        self._now, self._note = 0.0, note
        # A heap of (key, number, seconds that are left, name, message, its key, how many ways follow). What does not
        # complete a message has no name.
        self._waiting: list[tuple[_Key, int, float, _Name | None, Message, _Key, int]] = []
        self._arrivals: list[_Arrival] = []  # a heap
        self._sent = 0

    def send(self, now: float, name: _Name, message: Message, key: "_Key") -> None:
        """Sends a message that is ready now; times must not decrease."""
        while self._waiting and self._now < now:
            self._carry(now)
        self._now = max(self._now, now)
        self._push(name, message, key, message.ways - 1)

    def next_arrival(self, until: float) -> _Arrival | None:
        """Returns the next message that arrives until then, if none is sent before that; None if none does."""
        while self._waiting and self._now < (end := min(until, self._arrivals[0][0] if self._arrivals else math.inf)):
            self._carry(end)
        return heapq.heappop(self._arrivals) if self._arrivals and self._arrivals[0][0] <= until else None

    def _push(self, name: _Name | None, message: Message, key: "_Key", more: int) -> None:
        seconds = message.cost.transfer / message.ways
        heapq.heappush(self._waiting, (key, self._sent, seconds, name, message, key, more))
        self._sent += 1

    def _carry(self, until: float) -> None:
        """Carries the first message until a time, or until its end."""
        key, number, seconds, name, message, own_key, more = heapq.heappop(self._waiting)
        begin, end = self._now, self._now + seconds
        self._now = min(end, until)
        if self._note:
            self._note("transfer", message.name, begin, self._now)
        left = end - self._now
        if not left:
            if more:
                self._push(name, message, own_key, more - 1)
            elif name is not None:
                heapq.heappush(self._arrivals, (end + message.cost.latency, name, message))
            return
        begun = left if key == () else left % message.piece
        if begun < left:
            heapq.heappush(self._waiting, (key, number, left - begun, name, message, own_key, more))
            name, more = None, 0
        if begun:
            heapq.heappush(self._waiting, ((), number, begun, name, message, own_key, more))


_Key = tuple[int | float, ...]
