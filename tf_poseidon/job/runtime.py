"""This process's part in the job: joining it once, and leaving it so that no rank is left waiting.

A job ends in one of two ways. At the normal end, all ranks say goodbye to each other, and MPI is finalized.
After an exception, a rank sends the reason to the others, and all leave with a non-zero status; MPI is not
finalized then, since that would wait for ranks that never come.

Only the process that has joined leaves: its forks have the rank's exit handlers too, and run them when they end.

Tests: tests/unit/test_ending.py, tests/faults/test_failures.py, tests/unit/test_options.py.
"""

import atexit
from collections.abc import Callable
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import sys
import time
import types
from typing import NoReturn
from typing import TYPE_CHECKING

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import engines
from tf_poseidon.job import failures
from tf_poseidon.job import gpus
from tf_poseidon.job.host import interrupts
from tf_poseidon.options import JobOptions
from tf_poseidon.options import TrainingOptions

if TYPE_CHECKING:  # it loads TensorFlow
    from tf_poseidon.job.communicator import Communicator

_log = logging.getLogger("tf_poseidon")
_WORDS_OF_RANK_0_S = 5.0  # how long other ranks wait for them

# As `sys.excepthook`.
_Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], object]

_communicator = None
_options = None
_launch = None
_pid = None  # of the process that has joined
_exit = os._exit  # before it is guarded
_is_announced = False
failure_status = 1  # of a rank that ends with an exception


def communicator() -> "Communicator | None":
    """Returns this process's communicator, or None if it runs alone."""
    return _communicator


def servers() -> tuple[int, ...]:
    """Returns the ranks that hold KV pairs, empty for all."""
    return _options.servers


def ranks_that_combine() -> int:
    """Returns how many ranks of a node combine their contributions, 1 if they do not."""
    return _communicator.most_on_a_node if _communicator and len(set(_communicator.nodes)) > 1 else 1


def described() -> str:
    """Returns what has joined this job: ranks, hosts, the library between them, and the versions of others."""
    import tensorflow as tf  # loaded with the ops
    who = "one process"
    if _communicator:
        hosts = len(set(_communicator.hosts or ()))
        where = " on one host" if hosts == 1 else f" on {hosts} hosts" if hosts else ""
        who = f"{_communicator.size} ranks{where} over {engine().library()}"
    return f"{who}, TensorFlow {tf.__version__}, Keras {keras_compat.TABLE.version}"


def announce(how: str) -> None:
    """Says on rank 0, once per process, what has joined the job, and `how` it trains; nothing in one process.

    Not by the logger, which Python shows warnings of alone; but where that is told to be quiet, this is.
    """
    global _is_announced
    is_first = _communicator is not None and _communicator.rank == 0 and not _is_announced
    if is_first and _log.isEnabledFor(logging.WARNING):
        print(f"tf_poseidon: {described()}; {how}", file=sys.stderr, flush=True)
    _is_announced = True


def announce_nothing() -> None:
    """Lets a program that says itself what has joined begin without `announce`."""
    global _is_announced
    _is_announced = True


def engine() -> engines.Engine:
    """Returns the module of this process's engine, see `engines.Engine`."""
    return engines.load(_launch.engine)


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
    global _communicator, _options, _launch, _pid
    launch = engines.launch(options.engine)
    options = dataclasses.replace(options, engine=launch.engine)
    options.check(launch.size, engines.load(launch.engine).writer.has_to_agree)
    if _options is not None:
        # None accepts the present value; ranks of a single node, or a process alone, have nothing to combine.
        given = options.ranks_per_node
        if given is None or ranks_that_combine() == (given if given < launch.size else 1):
            options = dataclasses.replace(options, ranks_per_node=_options.ranks_per_node)
        if options != _options:
            raise ConfigurationError(f"This process has joined its job with {_options}, and cannot "
                                     f"change that to {options}: give every PoseidonStrategy of a "
                                     "process, and poseidon.calibrate before them, the same options; for others, "
                                     "start a new process (in a notebook, restart the kernel).")
        return _communicator
    if _is_notebook():
        _advise_notebook(launch.size)
    _launch = launch
    if launch.size > 1:
        joining = engines.load(launch.engine)
        gpus.take_own(joining.local_rank(os.environ))
        try:
            _communicator = joining.join(launch.size, options)
        except PoseidonError:
            # From here on the engine may keep the process from ending in the usual way.
            sys.excepthook = functools.partial(_report_and_exit, sys.excepthook)
            raise
        _communicator.use_for_ops()
        _pid = os.getpid()
        interrupts.note()
        sys.excepthook = functools.partial(_abort_and_exit, sys.excepthook)
        os._exit = _guarded_exit
        atexit.register(_leave)
    _options = options
    return _communicator


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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed or broken: nothing to flush
            stream.flush()


def _report_and_exit(previous_hook: _Hook, kind: type[BaseException], error: BaseException,
                     trace: types.TracebackType | None) -> None:
    previous_hook(kind, error, trace)
    _flush()
    _exit(1)


def _guarded_exit(status: int) -> None:
    """`os._exit` of a rank: with status 0 before the end of the job, the launcher would report success."""
    if os.getpid() == _pid and status == 0:
        cause = (f"Rank {_communicator.rank} on {socket.gethostname()} called os._exit(0) before the job had ended; "
                 "let the program reach its end, or call sys.exit.")
        print(f"[rank {_communicator.rank}] The job has ended. {cause}", file=sys.stderr)
        _flush()
        _communicator.abort(cause)
        _end(1)
    _exit(status)


def _abort_and_exit(previous_hook: _Hook, kind: type[BaseException], error: BaseException,
                    trace: types.TracebackType | None) -> None:
    """The excepthook of a rank: the first failure is the last thing that any rank prints."""
    if os.getpid() != _pid:
        return previous_hook(kind, error, trace)
    cause = _communicator.failure
    interrupted = interrupts.is_interrupt(error)
    if interrupted:
        # Ctrl-C reaches all ranks; where it happened to interrupt the program says nothing.
        if _communicator.rank == 0:
            print("[rank 0] The job was interrupted.", file=sys.stderr)
        cause = cause or f"Rank {_communicator.rank} was interrupted."
    elif cause is None:
        if previous_hook is sys.__excepthook__:
            # At once: where ranks have an error alike, the first that has printed it ends the others.
            print(failures.printed(error, trace), end="", file=sys.stderr)
        else:
            previous_hook(kind, error, trace)
        cause = failures.cause(_communicator.rank, error)
    else:
        # This exception is only the echo of that failure; its own traceback would hide the cause.
        print(f"[rank {_communicator.rank}] The job has ended. {cause}", file=sys.stderr)
    _flush()
    _communicator.abort(cause)
    if interrupted and _communicator.rank != 0:
        # The launcher ends rank 0 when this rank ends, and this one when rank 0 does.
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(_WORDS_OF_RANK_0_S)
    _end(128 + signal.SIGINT if interrupted else failure_status)


def _leave() -> None:
    """Leaves at the normal end of the program, once all ranks have reached theirs."""
    if os.getpid() != _pid:
        return
    failures.settle()
    try:
        _communicator.goodbye()
        os._exit = _exit
    except PoseidonError as error:
        print(f"[rank {_communicator.rank}] The job has ended. {error}", file=sys.stderr)
        _flush()
        # MPI is not finalized; and with status 0, the launcher would report success.
        _end(1)


def _end(status: int) -> NoReturn:
    """Ends this process after a failure of the job, and the launcher if that cannot notice it."""
    if _communicator.has_lost_a_host:
        engine().end_launcher()
    engine().disconnect()
    _exit(status)
