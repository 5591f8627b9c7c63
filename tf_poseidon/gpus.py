"""Which GPU of a machine each of its processes uses.

Tests: tests/unit/test_gpus.py.
"""

import logging

import tensorflow as tf

from tf_poseidon.errors import ConfigurationError

_log = logging.getLogger("tf_poseidon")


def take_own(local_rank: int | None) -> None:
    """Leaves this process one of the GPUs that it sees, so that the processes of a machine do not share one.

    If there are fewer GPUs than processes, GPUs are assigned in turn.

    Args:
        local_rank: Which of this machine's processes this is, None if unknown.

    Raises:
        PoseidonError: If TensorFlow already uses several.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if len(gpus) < 2:
        return
    if local_rank is None:
        _log.warning("The launcher does not say which of this machine's processes this is, so each takes %s: let "
                     "each see a GPU of its own, by CUDA_VISIBLE_DEVICES.", gpus[0].name)
    own = gpus[(local_rank or 0) % len(gpus)]
    try:
        tf.config.set_visible_devices(own, "GPU")
    except RuntimeError as error:
        raise ConfigurationError(
            f"TensorFlow already uses {len(gpus)} GPUs, so this process cannot leave all but {own.name} to "
            "others; create the PoseidonStrategy before anything is computed, or let each process see one GPU, "
            "by CUDA_VISIBLE_DEVICES.") from error
