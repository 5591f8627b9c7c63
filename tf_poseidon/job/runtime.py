"""Joins the job that this process was launched in, once.

Tests: tests/unit/test_options.py, tests/faults/test_failures.py.
"""

import dataclasses
import functools
import logging
import os
import sys
from typing import TYPE_CHECKING

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import ending
from tf_poseidon.job import engines
from tf_poseidon.job import gpus
from tf_poseidon.options import JobOptions
from tf_poseidon.options import TrainingOptions

if TYPE_CHECKING:  # it loads TensorFlow
    from tf_poseidon.job.communicator import Communicator

_log = logging.getLogger("tf_poseidon")


@dataclasses.dataclass(frozen=True)
class _Membership:
    """How this process has joined its job.

    Attributes:
        communicator: Its communicator; None if it runs alone.
        options: The options with which it has joined.
        engine: The job's engine.
    """

    communicator: "Communicator | None"
    options: JobOptions
    engine: engines.Engine


_membership: _Membership | None = None
_is_announced = False


def communicator() -> "Communicator | None":
    """Returns this process's communicator; None if it runs alone, or has not joined."""
    return None if _membership is None else _membership.communicator


def size() -> int:
    """Returns the number of ranks of the job."""
    ranks = communicator()
    return 1 if ranks is None else ranks.size


def servers() -> tuple[int, ...]:
    """Returns the ranks that hold KV pairs, empty for all."""
    return _joined().options.servers


def ranks_that_combine() -> int:
    """Returns how many ranks of a node combine their contributions, 1 if they do not."""
    ranks = communicator()
    return ranks.most_on_a_node if ranks and len(set(ranks.nodes)) > 1 else 1


def described() -> str:
    """Returns what has joined this job: ranks, hosts, the library between them, and the versions of others."""
    import tensorflow as tf  # loaded with the ops
    who = "one process"
    if ranks := communicator():
        hosts = len(set(ranks.hosts or ()))
        where = " on one host" if hosts == 1 else f" on {hosts} hosts" if hosts else ""
        who = f"{ranks.size} ranks{where} over {engine().library()}"
    return f"{who}, TensorFlow {tf.__version__}, Keras {keras_compat.TABLE.version}"


def announce(how: str) -> None:
    """Says on rank 0, once per process, what has joined the job, and `how` it trains; nothing in one process.

    Not by the logger, which Python shows warnings of alone; but where that is told to be quiet, this is.
    """
    global _is_announced
    ranks = communicator()
    is_first = ranks is not None and ranks.rank == 0 and not _is_announced
    if is_first and _log.isEnabledFor(logging.WARNING):
        print(f"tf_poseidon: {described()}; {how}", file=sys.stderr, flush=True)
    _is_announced = True


def announce_nothing() -> None:
    """Lets a program that says itself what has joined begin without `announce`."""
    global _is_announced
    _is_announced = True


def engine() -> engines.Engine:
    """Returns the job's engine."""
    return _joined().engine


def _joined() -> _Membership:
    assert _membership is not None, "before `start`"
    return _membership


def check(job: JobOptions, training: TrainingOptions) -> None:
    """Refuses options that are not possible in the job that this process was launched in.

    Args:
        job: The `options.JobOptions`.
        training: The `options.TrainingOptions`.

    Raises:
        PoseidonError: For the first such option.
    """
    launch = engines.launch(job.engine)
    has_own_ops = engines.load(launch.engine).writer.has_to_agree
    job = dataclasses.replace(job, engine=launch.engine)
    training.check(job, launch.size, has_own_ops)
    job.check(launch.size, has_own_ops)


def start(options: JobOptions) -> "Communicator | None":
    """Joins the job that this process was launched in, once per process.

    Args:
        options: The `JobOptions`.

    Returns:
        The communicator, or None if this process was launched alone.

    Raises:
        PoseidonError: If the job cannot be joined, or was joined with different options.
    """
    global _membership
    launch = engines.launch(options.engine)
    engine = engines.load(launch.engine)
    options = dataclasses.replace(options, engine=launch.engine)
    options.check(launch.size, engine.writer.has_to_agree)
    if _membership is not None:
        # None accepts the present value; ranks of a single node, or a process alone, have nothing to combine.
        given = options.ranks_per_node
        if given is None or ranks_that_combine() == (given if given < launch.size else 1):
            options = dataclasses.replace(options, ranks_per_node=_membership.options.ranks_per_node)
        if options != _membership.options:
            raise ConfigurationError(f"This process has joined its job with {_membership.options}, and cannot "
                                     f"change that to {options}: give every PoseidonStrategy of a "
                                     "process, and poseidon.calibrate before them, the same options; for others, "
                                     "start a new process (in a notebook, restart the kernel).")
        return _membership.communicator
    if _is_notebook():
        _advise_notebook(launch.size)
    ranks = _join(launch.size, engine, options) if launch.size > 1 else None
    _membership = _Membership(ranks, options, engine)
    return ranks


def _join(size: int, engine: engines.Engine, options: JobOptions) -> "Communicator":
    """Joins the other processes, and guards the end of this one."""
    gpus.take_own(engine.local_rank(os.environ))
    try:
        ranks = engine.join(size, options)
    except PoseidonError:
        # From here on the engine may keep the process from ending in the usual way.
        sys.excepthook = functools.partial(ending.report_and_exit, sys.excepthook)
        raise
    ranks.use_for_ops()
    ending.Ending(ranks, engine).guard()
    return ranks


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def _advise_notebook(size: int) -> None:
    """Says how to train on several processes from a notebook; raises ConfigurationError if its kernel is one of them.

    Args:
        size: The number of processes, according to the launcher.
    """
    instead = "save the program as a file and start that, for example in a cell: !mpiexec -n {} python train.py"
    if size > 1:
        raise ConfigurationError(
            f"The kernel of this notebook is one of {size} processes that a launcher has started, but a notebook runs "
            f"in 1: start Jupyter without mpiexec; to train on several processes, {instead.format(size)}")
    _log.warning("A notebook trains in this process alone. To train on several, %s", instead.format(4))
