"""Lets ranks agree on a rewritten graph before they run it.

With the collectives of Horovod or TensorFlow all ranks have to call the same ones. So each rank rewrites its
graph, compares with the others what it would exchange, and takes the result only if all would do the same.
"""

import hashlib

import numpy as np
from tensorflow.python.eager import context

from tf_poseidon.errors import PoseidonError


class Alone:
    """Compares the texts of a single rank."""

    def difference(self, key, text):
        """As of `OverCommunicator`."""
        del key, text


class OverCommunicator:
    """Compares texts over the communicator of this process.

    A rank that never comes ends the job, after as long as in every exchange.
    """

    def __init__(self, communicator):
        self._communicator = communicator

    def difference(self, key, text):
        """Returns None if all ranks have the same text under a key, else a sentence about the first line."""
        site = f"agreement/{key}"
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        digests, = self._communicator.submit_factors(site, [digest.reshape(1, -1)])()
        differing = [r for r in range(len(digests)) if (digests[r] != digests[0]).any()]
        if not differing:
            return None
        texts = [self._communicator.broadcast_text(f"{site}/text/{r}", text, r) for r in (0, differing[0])]
        return first_difference(*texts, 0, differing[0])


class OverCoordinationService:
    """Compares texts over the coordination service that tf.distribute starts.

    Args:
        rank: This process's number.
        size: How many there are.
    """

    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def difference(self, key, text):
        """As of `OverCommunicator`."""
        service = context.context()
        service.set_config_key_value(f"poseidon/{key}/{self._rank}", text)
        for rank in range(self._size):
            theirs = service.get_config_key_value(f"poseidon/{key}/{rank}")
            if isinstance(theirs, bytes):
                theirs = theirs.decode()
            if theirs != text:
                return first_difference(text, theirs, self._rank, rank)
        return None


def first_difference(mine, theirs, rank, other):
    """Returns a sentence about the first lines in which two texts differ."""
    a, b = mine.split("\n"), theirs.split("\n")
    length = max(len(a), len(b))
    a, b = ([*lines, *["nothing"] * (length - len(lines))] for lines in (a, b))
    here, there = next(pair for pair in zip(a, b) if pair[0] != pair[1])
    return f"ranks would do different things: {here} on rank {rank}, but {there} on rank {other}"


class Agreed:
    """The plans that all ranks follow, by what they are made for.

    A function may be traced again, perhaps by one rank alone, for batches of another size: then the plan
    of the first trace stands.
    """

    def __init__(self, over):
        """Makes an empty collection; `over` compares texts, see `OverCommunicator`."""
        self._over = over
        self._plans = {}  # None where ranks did not agree

    def plan(self, found, planner):
        """Returns the `Plan` that all ranks follow for a graph.

        Args:
            found: The `pipeline.Found` of the graph.
            planner: The `planning.Planner`.

        Returns:
            (plan, None), or (None, why the graph stays as it is).

        Raises:
            PoseidonError: If the ranks have agreed on a plan before that this graph does not allow.
        """
        if all(marker.refusal for marker in found.markers):  # other ranks may not even run it
            return None, found.markers[0].refusal
        key = _key(found)
        if key in self._plans:
            plan, reason = self._plans[key]
            if plan is not None:
                plan.check(found.sites, planner.cluster)
            return plan, reason
        try:
            plan = planner.plan(found.sites, found.operations)
            text = found.form(plan)
        except PoseidonError as error:
            plan, text = None, f"refused: {error}"
        difference = self._over.difference(key, text)
        reason = difference or (text.removeprefix("refused: ") if plan is None else None)
        self._plans[key] = (None if reason else plan), reason
        return self._plans[key]


def _key(found):
    """Returns a name for a graph's gradients, whatever the size of its batches."""
    lines = []
    for site, marker in zip(found.sites, found.markers):
        node = found.graph.nodes[marker.node]
        attributes = [f"{key}={node.attr[key].SerializeToString().hex()}" for key in sorted(node.attr)
                      if not key.startswith("_")]
        # What it could be, by any scheme.
        kinds = [site.fingerprint(scheme) for scheme in ("sfb", "sparse")], site.bias_of
        lines.append(f"{site.name} {node.op} {attributes} {kinds}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
