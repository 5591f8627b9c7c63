"""Joins the job that this process was launched in, once.

Tests: tests/unit/test_options.py, tests/faults/test_failures.py.
"""

import dataclasses
import functools
import logging
import os
import sys
from typing import NoReturn
from typing import TYPE_CHECKING

from tf_poseidon import planning
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import engines
from tf_poseidon.job import failures
from tf_poseidon.job import log_lines
from tf_poseidon.job.ending import Ending
from tf_poseidon.job.ending import report_and_exit
from tf_poseidon.job.host import gpus
from tf_poseidon.job.host import thread_shares
from tf_poseidon.options import JobOptions
from tf_poseidon.options import TrainingOptions

if TYPE_CHECKING:  # it loads TensorFlow
    from tf_poseidon.job.communicator import Communicator

_log = logging.getLogger("tf_poseidon")


@dataclasses.dataclass(frozen=True)
class _Membership:
    """How this process has joined its job.

    Attributes:
        ending: What happens when it ends; None if it runs alone.
        options: The options with which it has joined.
        engine: The job's engine.
        announces: Whether the first strategy says what has joined.
        sharing: How its ranks share the processors of their hosts, in a few words; "" if they do not.
    """

    ending: Ending | None
    options: JobOptions
    engine: engines.Engine
    announces: bool
    sharing: str = ""


_membership: _Membership | None = None


def communicator() -> "Communicator | None":
    """Returns this process's communicator; None if it runs alone, or has not joined."""
    return None if _membership is None or _membership.ending is None else _membership.ending.communicator


def errors() -> failures.ErrorWatch:
    """Returns what watches over the errors of this process, which is a rank."""
    ending = _joined().ending
    assert ending is not None, "it runs alone"
    return ending.errors


def fail_with(status: int) -> None:
    """Sets the exit status of this process after an exception, if it is a rank."""
    if _membership is not None and _membership.ending is not None:
        _membership.ending.failure_status = status


def size() -> int:
    """Returns the number of ranks of the job, without dedicated servers."""
    ranks = communicator()
    return 1 if ranks is None else ranks.size


def cluster() -> planning.Cluster:
    """Returns the cluster of the ranks of the job, with the speeds of no particular one."""
    options = _joined().options
    return planning.Cluster(size(), len(options.servers), ranks_per_node=ranks_that_combine(),
                            dedicated_servers=options.dedicated_servers)


def servers() -> tuple[int, ...]:
    """Returns the servers that were given, none if all ranks are."""
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
        dedicated = _joined().options.dedicated_servers
        details = [f"served by {dedicated} more"] * bool(dedicated) + [_joined().sharing] * bool(_joined().sharing)
        more = "".join(f", {detail}" for detail in details) + "," * bool(details)
        who = f"{ranks.size} ranks{where}{more} over {engine().library()}"
    return f"{who}, TensorFlow {tf.__version__}, Keras {keras_compat.TABLE.version}"


def announce(how: str) -> None:
    """Says on rank 0 what has joined the job, and `how` it trains; nothing in one process.

    Not by the logger, which Python shows warnings of alone; but where that is told to be quiet, this is.
    """
    ranks = communicator()
    if ranks is not None and ranks.rank == 0 and _joined().announces and _log.isEnabledFor(logging.WARNING):
        log_lines.say(f"tf_poseidon: {described()}; {how}")


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
    job.check(launch.size, has_own_ops)
    training.check(job, launch.size, has_own_ops)


def start(options: JobOptions, announces: bool = True, planned_threads: int = 0) -> "Communicator | None":
    """Joins the job that this process was launched in, once per process.

    A dedicated server serves the job here, and ends its process when the job does.

    Args:
        options: The `JobOptions`.
        announces: Whether the first strategy says what has joined; False for a program that does so itself.
        planned_threads: Same as in `thread_shares.take`.

    Returns:
        The communicator, or None if this process was launched alone.

    Raises:
        PoseidonError: If the job cannot be joined, or was joined with different options.
    """
    global _membership
    log_lines.begin()
    launch = engines.launch(options.engine)
    engine = engines.load(launch.engine)
    options = dataclasses.replace(options, engine=launch.engine)
    options.check(launch.size, engine.writer.has_to_agree)
    if _membership is not None:
        # None accepts the present value; ranks of a single node, or a process alone, have nothing to combine.
        given = options.ranks_per_node
        if given is None or ranks_that_combine() == (given if given < size() else 1):
            options = dataclasses.replace(options, ranks_per_node=_membership.options.ranks_per_node)
        if options != _membership.options:
            raise ConfigurationError(f"This process has joined its job with {_membership.options}, and cannot "
                                     f"change that to {options}: give every PoseidonStrategy of a "
                                     "process, and poseidon.calibrate before them, the same options; for others, "
                                     "start a new process (in a notebook, restart the kernel).")
        return communicator()
    if _is_notebook():
        _advise_notebook(launch.size)
    ending = _join(launch.size, engine, options) if launch.size > 1 else None
    _membership = _Membership(ending, options, engine, announces)
    ranks = communicator()
    if ranks is not None and ranks.rank >= ranks.size:
        _serve(ranks)
    if ranks is not None:
        _membership = dataclasses.replace(_membership, sharing=thread_shares.take(ranks, planned_threads))
    return ranks


def _join(size: int, engine: engines.Engine, options: JobOptions) -> Ending:
    """Joins the other processes, and guards the end of this one."""
    gpus.take_own(engine.local_rank(os.environ))
    try:
        ranks = engine.join(size, options)
    except PoseidonError:
        # From here on the engine may keep the process from ending in the usual way.
        sys.excepthook = functools.partial(report_and_exit, sys.excepthook)
        raise
    log_lines.is_rank(ranks.rank)
    ranks.use_for_ops()
    ending = Ending(ranks, engine)
    ending.guard()
    return ending


def _serve(ranks: "Communicator") -> NoReturn:
    """Serves the workers until all of them have reached their end; then this program has reached its own."""
    if _joined().announces and _log.isEnabledFor(logging.WARNING):
        log_lines.say(f"tf_poseidon: rank {ranks.rank} serves the {ranks.size} ranks that train")
    ranks.serve()
    raise SystemExit(0)


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def _advise_notebook(size: int) -> None:
    """Says how to train on several processes from a notebook; raises ConfigurationError if its kernel is one of them.

    Args:
        size: The number of processes, according to the launcher.
    """
    instead = "make it a function and call poseidon.run(function, ranks={}), which starts them"
    if size > 1:
        raise ConfigurationError(
            f"The kernel of this notebook is one of {size} processes that a launcher has started, but a notebook runs "
            f"in 1: start Jupyter without mpiexec; to train on several processes, {instead.format(size)}")
    _log.warning("A notebook trains in this process alone. To train on several, %s", instead.format(4))
