"""Links shared by connections, the clock of a simulation, and sequential devices.

Connections that are busy at the same time share the links of their two nodes max-min fairly, without packets,
as TCP flows do in the long run. simulation.py describes the model.
"""

import collections
import functools
import heapq
import itertools
import math

_AT_ONCE = 1e-9  # messages that end within so many seconds end at the same time


def fair_rates(bundles, sizes, rates):
    """Returns the bytes per second of one connection of each bundle, max-min fair.

    Args:
        bundles: (source, target, ...) kinds; each stands for the connections from every node of the source kind to
            every other node of the target kind. Several jobs have connections of their own.
        sizes: How many nodes are of each kind.
        rates: Bytes per second of a node's link in each direction, by kind.
    """
    links = collections.defaultdict(list)  # (kind, direction) -> [(bundle, connections on one node's link)]
    for bundle in bundles:
        source, target, *_ = bundle
        links[source, 0].append((bundle, sizes[target] - (source == target)))
        links[target, 1].append((bundle, sizes[source] - (source == target)))
    room = {link: rates[link[0]] for link in links}
    busy = {link: sum(count for _, count in users) for link, users in links.items()}
    found = {}
    while len(found) < len(bundles):
        level = min(room[link] / busy[link] for link in links if busy[link])
        full = [link for link in links if busy[link] and room[link] <= level * busy[link] * (1 + 1e-9)]
        for bundle in dict.fromkeys(bundle for link in full for bundle, _ in links[link]):
            if bundle in found:
                continue
            found[bundle] = level
            source, target, *_ = bundle
            for link, count in (((source, 0), sizes[target] - (source == target)),
                                ((target, 1), sizes[source] - (source == target))):
                room[link] -= level * count
                busy[link] -= count
    return found


class Clock:
    """Future events, in the order of time; at the same time, in the order in which they were scheduled."""

    def __init__(self):
        self.now = 0.0
        self._waiting, self._count = [], itertools.count()

    def at(self, time, call):
        heapq.heappush(self._waiting, (time, next(self._count), call))

    def run(self, network):
        while True:
            self.now = min(self._waiting[0][0] if self._waiting else math.inf, network.next_end(self.now))
            if self.now == math.inf:
                return
            network.advance(self.now)
            while self._waiting and self._waiting[0][0] <= self.now:
                heapq.heappop(self._waiting)[2]()


class Line:
    """Does one thing after the other: a device, a copy engine."""

    def __init__(self, clock):
        self._clock, self._free = clock, 0.0

    def do(self, seconds, then):
        """Queues work of `seconds`, and calls `then` with its begin and end when it is done."""
        begin = max(self._clock.now, self._free)
        self._free = end = begin + seconds
        self._clock.at(end, lambda: then(begin, end))


class _Message:
    """A message over a share of the connections from one kind to another."""

    def __init__(self, num_bytes, width, done, piece):
        self.left, self.width, self.done, self.piece = num_bytes, width, done, piece
        self.begin = math.inf


class _Bundle:
    """The connections from all nodes of one kind to all of another; they are all in the same state.

    A message over a share of them delays the others by that share of its time: the next message leaves when the bytes
    before it would be gone if they were spread evenly, or earlier over connections that nothing else uses.
    """

    def __init__(self):
        self.waiting, self.active = [], []  # heaps: by order, by end
        self.width = 0.0  # share of the connections that is busy
        self.served = 0.0  # bytes that a busy connection has carried
        self.planned = 0.0  # that it has carried when the next message may leave
        self.rate = 0.0

    @property
    def is_free(self):
        """Whether the first message that waits may leave."""
        return (not self.active or self.width + self.waiting[0][2].width <= 1 + 1e-9
                or self.planned <= self.served + self.rate * _AT_ONCE)

    @property
    def next_change(self):
        """How many bytes it has carried when a message arrives or the next may leave."""
        end = self.active[0][0]
        return min(end, self.planned) if self.waiting and self.planned > self.served else end


class Network:
    """The links of all nodes, and the connections that share them."""

    def __init__(self, clock, sizes, rates, latency):
        self._clock, self._sizes, self._rates, self._latency = clock, sizes, rates, latency
        self._bundles = collections.defaultdict(_Bundle)
        self._changed, self._busy, self._then, self._count = set(), {}, 0.0, itertools.count()

    def send(self, source, target, num_bytes, width, order, done, piece=math.inf, job=0):
        """Sends a message over each of a share `width` of the connections from one kind to another.

        Calls `done` with its begin and end when it has arrived. Others overtake it after each piece of `piece` bytes.
        Messages of another `job` have other connections.
        """
        heapq.heappush(self._bundles[source, target, job].waiting,
                       (order, next(self._count), _Message(num_bytes, width, done, piece)))
        self._changed.add((source, target, job))

    def next_end(self, now):
        """Returns when the next message ends, or may leave."""
        needs_new_shares = False
        for pair in sorted(self._changed):
            bundle = self._bundles[pair]
            while bundle.waiting and bundle.is_free:
                order, number, message = heapq.heappop(bundle.waiting)
                num_bytes = min(message.left, message.piece)
                message.left -= num_bytes
                message.begin = min(message.begin, now)
                heapq.heappush(bundle.active, (bundle.served + num_bytes, number, order, message))
                bundle.width += message.width
                bundle.planned = max(bundle.planned, bundle.served) + message.width * num_bytes
            if bool(bundle.active) != (pair in self._busy):
                needs_new_shares = True
                if bundle.active:
                    self._busy[pair] = bundle
                else:
                    del self._busy[pair]
        self._changed.clear()
        if needs_new_shares:
            for pair, rate in fair_rates(sorted(self._busy), self._sizes, self._rates).items():
                self._busy[pair].rate = rate
        return min((now + (b.next_change - b.served) / b.rate for b in self._busy.values()), default=math.inf)

    def advance(self, now):
        """Carries bytes until now, and ends the finished messages."""
        seconds, self._then = now - self._then, now
        for pair, bundle in self._busy.items():
            bundle.served += bundle.rate * seconds
            while bundle.active and bundle.active[0][0] <= bundle.served + bundle.rate * _AT_ONCE:
                _, number, order, message = heapq.heappop(bundle.active)
                bundle.width = bundle.width - message.width if bundle.active else 0.0
                if message.left:
                    heapq.heappush(bundle.waiting, (order, number, message))
                else:
                    self._clock.at(now + self._latency, functools.partial(message.done, message.begin, now))
                self._changed.add(pair)
            if bundle.waiting and bundle.is_free:
                self._changed.add(pair)
