"""Ranks compare what they are about to do, over whichever channel exists, and agree on options and seeds.

Tests: tests/communicator/test_agreement.py, tests/faults/test_failures.py, tests/training/test_rewritten.py.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import random

import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import JobError
from tf_poseidon.errors import shortened
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.host import gpus
from tf_poseidon.job.host import kernel_settings

_log = logging.getLogger("tf_poseidon")
_CONTAINER_LIMIT = pathlib.Path("/sys/fs/cgroup/memory.max")


def check_steps(steps: np.ndarray) -> None:
    """Raises JobError if ranks have made different numbers of steps, given those of each rank."""
    if (steps != steps[0]).any():
        fewest, most = int(np.argmin(steps)), int(np.argmax(steps))
        raise JobError(f"Rank {fewest} has made {steps[fewest]} steps, expected {steps[most]}: its data ended; "
                       f"give all ranks as many batches as rank {most} has.")


class SingleRankComparison:
    """Compares the texts of a single rank."""

    def difference(self, key: str, text: str) -> None:
        """Same as in `CommunicatorComparison`."""
        del key, text


class CommunicatorComparison:
    """Compares texts over the communicator of this process.

    If a rank never joins, the job ends after the timeout of all exchanges.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def difference(self, key: str, text: str) -> str | None:
        """Returns None if all ranks have the same text under a key, else a sentence about the first difference."""
        site = f"agreement/{key}"
        digest = np.frombuffer(hashlib.sha256(text.encode(errors="surrogatepass")).digest(), np.uint8)
        digests = self._communicator.gather(site, digest.reshape(1, -1))
        differing = [r for r in range(len(digests)) if (digests[r] != digests[0]).any()]
        if not differing:
            return None
        of_rank_0, of_other = (self._communicator.broadcast_text(f"{site}/text/{r}", text, r)
                               for r in (0, differing[0]))
        return first_difference(of_rank_0, of_other, 0, differing[0])


class CoordinationServiceComparison:
    """Compares texts over the coordination service that tf.distribute starts.

    Args:
        rank: This process's number.
        size: Number of processes.
        timeout_s: Longest wait for another rank, in seconds.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self._rank, self._size, self._timeout_ms = rank, size, int(1e3 * timeout_s)

    def difference(self, key: str, text: str) -> str | None:
        """Same as in `CommunicatorComparison`."""
        tf_compat.publish_text(f"poseidon/{key}/{self._rank}", text)
        texts = [tf_compat.published_text(f"poseidon/{key}/{rank}", self._timeout_ms)
                 for rank in range(self._size)]
        differing = [rank for rank in range(self._size) if texts[rank] != texts[0]]
        return first_difference(texts[0], texts[differing[0]], 0, differing[0]) if differing else None


def first_difference(own: str, theirs: str, rank: int, other: int) -> str:
    """Returns a sentence about the first lines in which two texts differ: if possible, lines that only one has."""
    a, b = own.split("\n"), theirs.split("\n")
    only_a, only_b = ([line for line in lines if line and line not in others]
                      for lines, others in ((a, set(b)), (b, set(a))))
    if only_a or only_b:
        here, there = (lines[0] if lines else "nothing" for lines in (only_a, only_b))
    else:  # the same lines in another order, or another number of times
        length = max(len(a), len(b))
        a, b = ([*lines, *["nothing"] * (length - len(lines))] for lines in (a, b))
        here, there = next(pair for pair in zip(a, b) if pair[0] != pair[1])
    here, there = shortened(here, 1000), shortened(there, 1000)
    return f"ranks would do different things: {here} on rank {rank}, but {there} on rank {other}"


def agree_on_options(communicator: Communicator, **options: object) -> None:
    """Ends the job unless all ranks have the same options, packages, and settings that change the bits of kernels.

    Raises:
        PoseidonError: If this rank differs from rank 0.
    """
    own_options = {
        **{name: str(value) for name, value in options.items()},
        **{name: importlib.metadata.version(name) for name in ("tf_poseidon", "keras", "numpy")},
        "tensorflow": tf.__version__,
        "products and sums of factors": ops.rounding(),
        **kernel_settings.settings(),
    }
    of_rank_0 = json.loads(communicator.broadcast_text("options", json.dumps(own_options)))
    for name, value in own_options.items():
        if of_rank_0.get(name) != value:
            raise JobError(
                f"Ranks differ in {name}: {value} on rank {communicator.rank}, and "
                f"{of_rank_0.get(name)} on rank 0. Start the same program, in the same environment, "
                "on all ranks.")
    gpus.warn_of_shared(communicator)


def difference_of_kernels(communicator: Communicator) -> str | None:
    """Returns a sentence about what now makes ranks' kernels compute other bits, None if nothing is known to."""
    lines = [f"{name} is {value}" for name, value in kernel_settings.settings().items()]
    return CommunicatorComparison(communicator).difference(
        "settings of kernels", "\n".join([*lines, f"the number of threads of an op is {kernel_settings.threads()}"]))


def least_memory(communicator: Communicator) -> int:
    """Returns the bytes of memory of the rank that has least: of its GPU, or its share of what its host has."""
    of_host = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # there is no container, or it has no limit
        of_host.append(int(_CONTAINER_LIMIT.read_text()))
    own = gpus.memory_bytes() or min(of_host) // communicator.most_on_a_node
    return int(communicator.gather("memory", np.array([[own]], np.int64)).min())


def agree_on_seed(communicator: Communicator) -> None:
    """Gives all ranks rank 0's random seed, or a common one when it has none.

    Without a seed, `Dataset.shuffle` and `fit(shuffle=True)` draw a different order in every process.
    """
    own_seed = tf_compat.global_seed()
    proposal = random.SystemRandom().randrange(2**31) if own_seed is None else own_seed
    agreed = int(communicator.broadcast("seed", tf.constant(proposal, tf.int64).numpy()))
    if agreed != own_seed:
        tf.random.set_seed(agreed)
