"""Lets ranks agree on a rewritten graph before they run it.

With the collectives of Horovod or TensorFlow all ranks have to call the same ones. So each rank rewrites its
graph, compares with the others what it would exchange, and takes the result only if all would do the same.
"""

import collections
import hashlib

import numpy as np

from tf_poseidon.compat import tensorflow as tf_compat


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
        timeout_s: Longest wait for another rank.
    """

    def __init__(self, rank, size, timeout_s):
        self._rank, self._size, self._timeout_ms = rank, size, int(1e3 * timeout_s)

    def difference(self, key, text):
        """As of `OverCommunicator`."""
        tf_compat.tell_others(f"poseidon/{key}/{self._rank}", text)
        texts = [tf_compat.told_by_others(f"poseidon/{key}/{rank}", self._timeout_ms)
                 for rank in range(self._size)]
        differing = [rank for rank in range(self._size) if texts[rank] != texts[0]]
        return first_difference(texts[0], texts[differing[0]], 0, differing[0]) if differing else None


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
        self._plans = collections.defaultdict(list)
        self._refused = {}  # why there is no plan, by what all ranks know of a function
        self._times = collections.Counter()

    def rewrite(self, markers, found, planner, collective_ops, problem=""):
        """Rewrites a graph as all ranks do.

        Args:
            markers: The nodes of the graph over which gradients are synchronised.
            found: The `pipeline.Found` of the graph; None if that was not possible on this rank.
            planner: The `planning.Planner`.
            collective_ops: As of `engines.Engine`.
            problem: Why `found` is None.

        Returns:
            (GraphDef, plan, None), or (None, None, why the graph stays as it is).

        Raises:
            PoseidonError, InvalidGraph: If this rank cannot follow the plan that ranks have agreed on before.
        """
        if found is not None and all(marker.refusal for marker in found.markers):
            return None, None, found.markers[0].refusal  # other ranks may not even run it
        lines = found and _lines(found)
        key = lines and _digest(lines)
        for plan in self._plans[key]:
            if found.fits(plan):
                plan.check(found.sites, planner.cluster)
                return found.rewrite(plan, collective_ops), plan, None
        # Whatever a rank has found out, it knows these.
        name = _digest(sorted(f"{node.op} {node.name}" for node in markers))
        if name in self._refused:
            return None, None, self._refused[name]
        result, plan = None, None
        if found is not None:
            try:
                plan = planner.plan(found.sites, found.operations, found.exchanges)
                result = found.rewrite(plan, collective_ops)
            except Exception as error:  # as of `found`, the graph as it is computes the same
                problem = f"{type(error).__name__}: {error}"
        self._times[name] += 1
        text = f"not rewritten: {problem}" if result is None else "\n".join([found.form(plan), *lines])
        difference = self._over.difference(f"{name}/{self._times[name]}", text)
        if result is not None and difference is None:
            self._plans[key].append(plan)
            return result, plan, None
        self._refused[name] = difference or problem
        return None, None, self._refused[name]


def _lines(found):
    """Returns texts of a graph's gradients, whatever the size of its batches."""
    lines = []
    for site, marker in zip(found.sites, found.markers):
        node = found.graph.nodes[marker.node]
        attributes = [f"{key}={node.attr[key].SerializeToString().hex()}" for key in sorted(node.attr)
                      if not key.startswith("_")]
        # What it could be, by any scheme.
        kinds = [site.fingerprint(scheme) for scheme in ("sfb", "sparse")], site.bias_of
        lines.append(f"'{site.name}' {node.op} {' '.join(attributes)} {kinds}")
    return sorted(lines)


def _digest(lines):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
