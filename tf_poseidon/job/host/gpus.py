"""Which GPU of a machine each of its processes uses, and how much of it.

Tests: tests/unit/test_gpus.py.
"""

from collections.abc import Sequence
import contextlib
import hashlib
import logging

import numpy as np
import tensorflow as tf

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.host import gpu_driver
from tf_poseidon.ops import library

_log = logging.getLogger("tf_poseidon")


def take_own(local_rank: int | None) -> None:
    """Leaves this process one of the GPUs that it sees, so that the processes of a machine do not share one.

    If there are fewer GPUs than processes, GPUs are assigned in turn. TensorFlow takes memory of it as it needs that,
    unless the program has chosen otherwise, so that there is some for others: libraries, and processes that share it.

    Args:
        local_rank: Which of this machine's processes this is, None if unknown.

    Raises:
        PoseidonError: If TensorFlow already uses several.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return
    if len(gpus) > 1 and local_rank is None:
        _log.warning("The launcher does not say which of this machine's processes this is, so each takes %s: let "
                     "each see a GPU of its own, by CUDA_VISIBLE_DEVICES.", gpus[0].name)
    own = gpus[(local_rank or 0) % len(gpus)]
    if len(gpus) > 1:
        try:
            tf.config.set_visible_devices(own, "GPU")
        except RuntimeError as error:
            raise ConfigurationError(
                f"TensorFlow already uses {len(gpus)} GPUs, so this process cannot leave all but {own.name} to "
                "others; create the PoseidonStrategy before anything is computed, or let each process see one GPU, "
                "by CUDA_VISIBLE_DEVICES.") from error
    if tf.config.experimental.get_memory_growth(own) is None and not _parts(own):
        with contextlib.suppress(RuntimeError):  # TensorFlow uses the GPU already, and has taken memory
            tf.config.experimental.set_memory_growth(own, True)
    if not local_rank and (problem := library.gpu_problem()):
        why, remedy = problem.split("; ", 1)
        _log.warning("Gradients go to the host and back as whole tensors, and are rebuilt from factors there, since "
                     "%s. That takes longer; to change it, %s.", why, remedy)


def warn_of_shared(communicator: Communicator) -> None:
    """Says so if ranks share a GPU of which one of them may take all memory; called by all ranks."""
    identities, are_limited = communicator.gather("gpus", np.array([[_identity(), _is_limited()]])).T
    own = identities[communicator.rank]
    sharing = [rank for rank, identity in enumerate(identities) if identity and identity == own]
    unlimited = [rank for rank in sharing if not are_limited[rank]]
    if unlimited and len(sharing) > 1 and sharing[0] == communicator.rank:
        _log.warning("Ranks %s share a GPU, and %s may take all of its memory: start as many processes on a machine as "
                     "it has GPUs, or let each say how much it may use, by tf.config.set_logical_device_configuration "
                     "with a memory_limit.", _listed(sharing), _listed(unlimited))


def name() -> str | None:
    """Returns what names this process's GPU among those of all machines; None if it has none that is known."""
    identity = _identity()
    return f"GPU {identity:014x}" if identity else None


def refusal_to_share(crossover: str) -> str:
    """Returns why this process's GPU cannot have a process of another job beside it, a sentence; "" if it can."""
    own = _own()
    if own is None or _is_limited() or tf.config.experimental.get_memory_growth(own):
        return ""
    return (f"crossover='{crossover}', but this process may take all memory of {own.name}, expected some for the other "
            "job: leave it to PoseidonStrategy, or say how much it may use, by "
            "tf.config.set_logical_device_configuration with a memory_limit.")


def memory_bytes() -> int | None:
    """Returns how much memory of its GPU this process may use; None if it has none, or its memory is unknown."""
    own, driver = _own(), gpu_driver.find()
    if own is None:
        return None
    if _is_limited():
        return sum(part.memory_limit for part in _parts(own)) << 20
    try:
        return None if driver is None else driver.memory_bytes(_number(own))
    except OSError:
        return None


def _own() -> tf.config.PhysicalDevice | None:
    return next(iter(tf.config.get_visible_devices("GPU")), None)


def _identity() -> int:
    """Returns what identifies this process's GPU among those of all machines, 0 if it has none that is known."""
    own, driver = _own(), gpu_driver.find()
    if own is None or driver is None:
        return 0
    try:
        uuid = driver.uuid(_number(own))
    except OSError:
        return 0
    return int.from_bytes(hashlib.sha256(uuid).digest()[:7], "little")


def _number(gpu: tf.config.PhysicalDevice) -> int:
    return int(gpu.name.rpartition(":")[2])


def _is_limited() -> bool:
    own = _own()
    parts = [] if own is None else _parts(own)
    return bool(parts) and all(part.memory_limit is not None for part in parts)


def _parts(gpu: tf.config.PhysicalDevice) -> Sequence[tf.config.LogicalDeviceConfiguration]:
    """Returns the parts of a GPU that the program has made."""
    return tf.config.get_logical_device_configuration(gpu) or []


def _listed(ranks: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, ranks[:-1])), str(ranks[-1])]))
