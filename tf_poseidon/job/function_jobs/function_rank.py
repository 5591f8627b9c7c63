"""A rank of `poseidon.run`: fetches the function, calls it, and tells how that has ended.

Tests: tests/training/test_function_jobs.py.
"""

from collections.abc import Callable
import contextlib
import io
from multiprocessing import connection as connection_lib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import types

import cloudpickle

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import JobError
from tf_poseidon.errors import shown
from tf_poseidon.job.function_jobs import rank_messages
from tf_poseidon.job.function_jobs.rank_messages import RankFailure
from tf_poseidon.job.function_jobs.rank_messages import RankGreeting
from tf_poseidon.job.function_jobs.rank_messages import RankResult
from tf_poseidon.job.host import forks

_CONNECT_S = 20.0
_ORPHAN_S = 8.0  # what a rank has to end by itself when the caller has gone

# As `sys.excepthook`.
_Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], object]


def main() -> None:
    """Is the program of a rank."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines: those of ranks are not mixed then, as with unbuffered streams.
            stream.reconfigure(line_buffering=True)
    rank = rank_messages.own_rank(os.environ)
    connection = _connect(rank)
    forks.keep_from_children([connection.fileno()])  # its end says that this process has ended
    connection.send(RankGreeting(rank, socket.gethostname()))
    call = connection.recv_bytes()
    answers = threading.Event()
    threading.Thread(target=_end_with_caller, args=(connection, answers), daemon=True).start()
    told: list[BaseException] = []
    sys.excepthook = _hook(sys.excepthook, told)
    try:
        result = _answer(call, rank)
        answers.set()
        connection.send(result)
    except BaseException as error:
        told.append(error)
        answers.set()
        with contextlib.suppress(OSError):  # the caller has gone
            connection.send(_failure(error))
        raise
    finally:
        connection.close()


def _answer(call: bytes, rank: int) -> RankResult:
    """Returns what the function has returned."""
    try:
        function, args, kwargs, all_results = pickle.loads(call)
    except Exception as error:
        raise ConfigurationError(
            f"The function cannot be loaded on rank {rank} ({type(error).__name__}: {error}); its module, and those of "
            "what it uses, have to be installed, or in a folder of sys.path, on all hosts.") from error
    try:
        result = function(*args, **kwargs)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        result = None  # as of dedicated servers
    if rank != 0 and not all_results:
        return RankResult(None)
    try:
        return RankResult(cloudpickle.dumps(result))
    except Exception as error:
        raise ConfigurationError(
            f"The result of rank {rank}, {shown(result)}, cannot be sent ({type(error).__name__}: {error}); return "
            "what can be pickled, such as numbers, arrays, or model.get_weights().") from error


def _end_with_caller(connection: connection_lib.Connection, answers: threading.Event) -> None:
    """Kills this process when the caller has gone, also where it ignores the signals by which mpiexec ends ranks."""
    with contextlib.suppress(OSError):
        connection.poll(None)  # the caller says nothing more: this is the connection's end
        if not answers.wait(_ORPHAN_S):
            os.kill(os.getpid(), signal.SIGKILL)


def _connect(rank: int) -> connection_lib.Connection:
    addresses, key = rank_messages.take_environment(os.environ)  # type: ignore[arg-type]  # it is like a dict
    causes = []
    for address in addresses:
        try:
            return rank_messages.authenticated(socket.create_connection(address, _CONNECT_S), key, is_caller=False)
        except Exception as error:
            causes.append(f"{address[0]}:{address[1]}: {error or type(error).__name__}")
    raise JobError(f"Rank {rank} on {socket.gethostname()} cannot connect to the program that called poseidon.run "
                   f"({'; '.join(causes)}); let hosts of the job reach all its ports.")


def _failure(error: BaseException) -> RankFailure:
    """Returns what the caller hears of an exception."""
    from tf_poseidon.job import failures  # it takes longer to import than all else here
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    runtime = sys.modules.get("tf_poseidon.job.runtime")
    communicator = runtime and runtime.communicator()
    has_failed = communicator is not None and communicator.failure is not None
    pickled = None
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            pickled = cloudpickle.dumps(error)
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    return RankFailure(pickled, text, failures.printed(error, trace), has_failed or isinstance(error, JobEndedError),
                       communicator is not None)


def _hook(previous: _Hook, told: list[BaseException]) -> _Hook:
    """Returns an excepthook that prints no exception of which the caller was told: that raises it."""

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if not any(error is other for other in told):
            previous(kind, error, trace)

    return hook
