"""Has the ranks of a host share its processors, before TensorFlow makes threads.

TensorFlow gives every process a thread for each processor that it may use. Several ranks of a host then have several
threads for each, which take it from each other, and every step waits for the last one. What the program, its
environment or the launcher has chosen stays as it is.

Tests: tests/training/test_thread_shares.py, tests/communicator/test_agreement.py.
"""

import hashlib
import logging
import os

import numpy as np
import tensorflow as tf

from tf_poseidon.errors import JobError
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.host import kernel_settings
from tf_poseidon.job.host import processors

_log = logging.getLogger("tf_poseidon")

# How many ops start at a time where ranks keep to no cores: as many as TensorFlow, with oneDNN, starts where they do.
_OPS_AT_A_TIME = 2


def take(communicator: Communicator, planned: int = 0) -> str:
    """Has this rank compute with its share of its host's processors; all ranks call this.

    Ranks with GPUs share the threads, and keep to no cores: which of them are near a GPU is not known.

    Args:
        communicator: The rank's communicator.
        planned: The number of threads of an op that a plan was made with, which the job keeps; 0 if there is none.

    Returns:
        In a few words, how ranks share; "" if they do not.

    Raises:
        JobError: If ranks have chosen different numbers of threads.
    """
    own = processors.found()
    identity = hashlib.sha256(repr(own.cores).encode()).digest()[:7]
    facts = communicator.gather("processors", np.array([[
        kernel_settings.chosen_threads(), not _can_choose(), bool(tf.config.get_visible_devices("GPU")),
        len(own.numbers), len(own.cores), own.quota, int.from_bytes(identity, "little") % 2**52]], np.float64))
    chosen, is_late, has_gpu = facts[:, 0].astype(int), facts[:, 1].astype(bool), facts[:, 2].astype(bool)
    ranks = [processors.Sharer(host, int(allowed), int(cores), quota) for host, (cores, quota, allowed) in
             zip(communicator.hosts or range(communicator.size), facts[:, 4:].tolist())]
    shares = processors.shares(ranks, may_bind=not has_gpu.any())
    is_sharing = shares[communicator.rank] is not None
    if chosen.any() or is_late.any():
        shares = [None] * communicator.size
    elif planned:
        shares = [processors.ProcessorShare(planned, None if share is None else share.cores) for share in shares]
    threads = np.where(chosen, chosen, [share.threads if share else count for share, count in
                                        zip(shares, facts[:, 3].astype(int).tolist())])
    _agree(communicator, threads, chosen)
    if communicator.rank == 0 and is_late.any() and len(set(ranks)) < len(ranks) and not chosen.any():
        _log.warning("TensorFlow has made its threads on rank %d before ranks could share the processors of their "
                     "hosts, so they take them from each other: create the PoseidonStrategy before anything is "
                     "computed, or choose TF_NUM_INTRAOP_THREADS.", int(np.argmax(is_late)))
    share = shares[communicator.rank]
    if share is None:
        return ""
    tf.config.threading.set_intra_op_parallelism_threads(share.threads)
    if share.cores is not None:
        first, last = share.cores
        os.sched_setaffinity(0, {number for core in own.cores[first:last + 1] for number in core})
    elif is_sharing and not tf.config.threading.get_inter_op_parallelism_threads():
        tf.config.threading.set_inter_op_parallelism_threads(_OPS_AT_A_TIME)
    return _described(threads, own, share)


def compare_with_plan(planned: int) -> None:
    """Says so if kernels may compute other bits than those of the job in which a plan was made.

    Args:
        planned: Same as in `take`.
    """
    if planned and planned != (threads := kernel_settings.threads()):
        _log.warning("The plan was made with another number of threads of an op, %d, than this job has, %d: kernels "
                     "whose bits depend on that compute other ones. To have the same, omit what chooses this number.",
                     planned, threads)


def _agree(communicator: Communicator, threads: np.ndarray, chosen: np.ndarray) -> None:
    """Ends the job if ranks have chosen different numbers of threads; says so if their hosts have.

    Raises:
        JobError: On all ranks.
    """
    other = int(np.argmax(threads != threads[0]))
    if not other:
        return
    what = " and ".join(f"{threads[rank]} on rank {rank} ({'as chosen' if chosen[rank] else 'that of its processors'})"
                        for rank in (other, 0))
    if chosen.any():
        raise JobError(
            f"Ranks differ in the number of threads of an op: {what}, and with other numbers kernels may compute other "
            "bits; give all ranks the same TF_NUM_INTRAOP_THREADS, or "
            "tf.config.threading.set_intra_op_parallelism_threads.")
    if communicator.rank == 0:
        _log.warning("Ranks have other numbers of threads in an op: %s. Kernels whose bits depend on that could make "
                     "ranks differ, which ends the job; give all ranks the same TF_NUM_INTRAOP_THREADS to exclude it.",
                     what)


def _can_choose() -> bool:
    """Whether TensorFlow has not made its threads yet, which it does when it first computes."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:  # it does not mind the number that it has
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        return False
    return True


def _described(threads: np.ndarray, own: processors.Processors, share: processors.ProcessorShare) -> str:
    count = " to ".join(map(str, sorted({threads.min(), threads.max()})))
    text = f"with {count} thread{'s' if threads.max() > 1 else ''} each"
    if share.cores is None:
        return text
    first, last = share.cores
    return f"{text}, on {last + 1 - first} of {len(own.cores)} cores"
