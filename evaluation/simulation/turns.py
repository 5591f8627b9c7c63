"""Turns of simulated jobs on the accelerators of the same nodes, in the order of numbers that all nodes share."""

import collections

# A sum over all ranks says that they are ready, to a server and back; then one rank tells its number to the others.
_MESSAGES = 3


class Turns:
    """The turns of all jobs; a kind of nodes is as in simulation.py."""

    def __init__(self, clock, kinds, latency):
        """Begins without turns.

        Args:
            clock: The `links.Clock`.
            kinds: The kinds of nodes that compute.
            latency: Of a message, in seconds.
        """
        self._clock, self._kinds, self._latency = clock, kinds, latency
        self._ready = collections.defaultdict(dict)  # by job: what its kinds do in their turn
        self._queues = {kind: collections.deque() for kind in kinds}  # of what jobs do; the first has its turn

    def begin(self, job, kind, then):
        """Calls `then` when the turn of a job begins on a kind, which is ready for it now."""
        self._ready[job][kind] = then
        if len(self._ready[job]) == len(self._kinds):
            whole = self._ready.pop(job)
            self._clock.at(self._clock.now + _MESSAGES * self._latency, lambda: self._give_number(whole))

    def end(self, kind):
        """Ends the turn on a kind."""
        self._queues[kind].popleft()
        if self._queues[kind]:
            self._queues[kind][0]()

    def _give_number(self, whole):
        for kind, then in whole.items():
            self._queues[kind].append(then)
            if len(self._queues[kind]) == 1:
                then()
