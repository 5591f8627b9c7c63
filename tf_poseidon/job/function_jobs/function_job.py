"""`poseidon.run`: calls a function on the ranks of a job, from a program or a notebook.

This process starts mpiexec, whose ranks are new processes: they fetch the function by a connection
(`rank_listener.py`, `function_rank.py`). What they print comes through pipes and is written by the thread that has
called, so it appears where that prints: in the cell of a notebook. Nothing here imports TensorFlow.
"""
# Tests: tests/training/test_function_jobs.py.

import codecs
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import inspect
import itertools
import math
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any
from typing import IO

import cloudpickle

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import JobError
from tf_poseidon.errors import shown
from tf_poseidon.job import log_lines
from tf_poseidon.job.function_jobs import rank_listener
from tf_poseidon.job.function_jobs import rank_messages
from tf_poseidon.job.function_jobs import source_lines
from tf_poseidon.job.function_jobs.rank_listener import FailedRank
from tf_poseidon.job.function_jobs.rank_listener import LostRank
from tf_poseidon.job.function_jobs.rank_listener import RankListener
from tf_poseidon.job.host import launching
from tf_poseidon.job.host import mpi_library

_numbers = itertools.count(1)  # of the jobs that this process starts
_HOROVOD = "HOROVOD_SIZE"  # how many ranks horovodrun has started
_END_S = 10.0  # what other ranks have after a failure
_INTERRUPTED_S = 8.0  # and after Ctrl-C; hydra takes a second more to kill them
_LOOK_S = 0.05
_TAIL = 4000  # characters of the output's end that may hold hydra's banner

# What hydra prints of a process that a signal has ended; the PID there may be of one that hydra itself has ended.
_KILLED = re.compile(r"EXIT STRING: [^\n]*\(signal (\d+)\)")
_BANNER = re.compile(r"\n?^={20,}\n=   BAD TERMINATION.*?^={20,}\n(YOUR APPLICATION TERMINATED.*\n)?"
                     r"(This typically refers.*\n)?(Please see the FAQ.*\n)?", re.MULTILINE | re.DOTALL)


class RemoteTraceback(Exception):
    """The traceback of an exception on a rank, as the cause of the same exception in the calling program."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n{self._text}"


def run(function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
        ranks: int = 2, hosts: Sequence[str] = (), restarts: int = 0, all_results: bool = False, mpiexec: str = "",
        environment: Mapping[str, str] | None = None, timeout_s: float | None = None) -> Any:
    """Calls a function on every rank of a new job, and returns its result: training from a notebook, or a program.

    Each rank is a new Python process, in which the function makes its `PoseidonStrategy` as usual. It may be a lambda,
    or be defined in a notebook, and use variables from around it, of which ranks get copies; modules are imported there
    from the folders of this process's `sys.path`. What ranks print appears here at once.

    Args:
        function: The function; cloudpickle has to be able to pickle it, and its arguments.
        args: Its arguments by position.
        kwargs: Its arguments by name.
        ranks: Number of ranks; hosts share them evenly.
        hosts: Where they run, by default here; `ssh HOST` has to work without a password, with the same environment.
        restarts: How often the job may be started again when it fails, without hosts that are gone; the function
            starts anew, and resumes where its `BackupAndRestore` has written.
        all_results: Whether to return what all ranks have returned.
        mpiexec: The launcher; by default that of this Python environment, or the first in PATH.
        environment: Further environment variables of ranks.
        timeout_s: How long the call may take, restarts and all; then ranks are ended, within about 20 s. None: as long
            as the function takes.

    Returns:
        The result of rank 0, or the list of those of all ranks in their order: None for ranks that have ended by
        `sys.exit()`, as dedicated servers do.

    Raises:
        Exception: What the function has raised on the rank that failed first, of the same type where that can be
            pickled. Its `__cause__` shows the traceback there. The other ranks are ended.
        JobError: If a rank was killed, or has ended in other ways than by returning, or some have not returned within
            `timeout_s`: it names these.
        ConfigurationError: If the function, an argument or the result cannot be pickled, there is no launcher, there
            are fewer ranks than hosts, or this process is itself a rank.
        KeyboardInterrupt: If this process is interrupted, after all ranks have ended, within about 10 s.
    """
    kwargs = dict(kwargs or {})
    _check(function, args, ranks, hosts, restarts, timeout_s)
    call = _pickled(function, tuple(args), kwargs, all_results)
    job = _FunctionJob(function, call, environment or {}, timeout_s)
    launching.repeat(job.attempt, ranks, hosts, restarts, mpiexec,
                     lambda text: print(f"poseidon.run: {text}", file=sys.stderr, flush=True))
    return job.outcome(all_results)


def _check(function: object, args: object, ranks: object, hosts: object, restarts: object, timeout_s: object) -> None:
    """Refuses what cannot be a job.

    Raises:
        ConfigurationError: For the first such argument, or if this process is a rank.
    """
    size, variable = mpi_library.launched_size()
    if _HOROVOD in os.environ:
        size, variable = int(os.environ[_HOROVOD]), _HOROVOD
    if rank_messages.CALLER in os.environ or size > 1:
        which = f"{variable}={size}" if size > 1 else "by poseidon.run"
        raise ConfigurationError(f"poseidon.run was called in a rank of a job ({which}), expected a program that no "
                                 "launcher has started; call it there, or call the function itself.")
    if not callable(function):
        raise ConfigurationError(f"poseidon.run was given {shown(function)}, expected a function; pass its arguments "
                                 "as args=(...), kwargs={...}.")
    if not isinstance(args, (tuple, list)):
        raise ConfigurationError(f"args={shown(args)}, expected a tuple; for one argument, args=(VALUE,).")
    for name, number, least in (("ranks", ranks, 1), ("restarts", restarts, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ConfigurationError(f"{name}={shown(number)}, expected a whole number of at least {least}.")
    if timeout_s is not None and (not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool)
                                  or not timeout_s > 0):
        raise ConfigurationError(f"timeout_s={shown(timeout_s)}, expected seconds, more than 0; for no limit, None.")
    if isinstance(hosts, str):
        raise ConfigurationError(f"hosts={shown(hosts)}, expected a list of names, such as hosts=['host1', 'host2'].")


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any],
             all_results: bool) -> bytes:
    """Returns a call as ranks get it; raises ConfigurationError, which names what cannot be pickled."""
    try:
        return cloudpickle.dumps((function, args, kwargs, all_results))
    except Exception as error:
        raise ConfigurationError(
            f"{_unpicklable(function, args, kwargs)} cannot be sent to ranks ({type(error).__name__}: {error}); make "
            "it within the function, or send what it can be made of.") from error


def _unpicklable(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Returns what of a call cannot be pickled."""
    used: dict[str, Any] = {}
    with contextlib.suppress(TypeError):  # an object that can be called
        found = inspect.getclosurevars(function)
        used = {**found.globals, **found.nonlocals}
    parts = [*((f"Argument {number} of poseidon.run's function, {shown(value)},", value)
               for number, value in enumerate(args)),
             *((f"Argument '{name}' of poseidon.run's function, {shown(value)},", value)
               for name, value in kwargs.items()),
             *((f"'{name}', which poseidon.run's function uses ({shown(value)}),", value)
               for name, value in used.items())]
    for text, value in parts:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return text
    return f"The function {shown(function)} of poseidon.run"


class _FunctionJob:
    """A call on all ranks, which a failed job repeats."""

    def __init__(self, function: Callable[..., Any], call: bytes, environment: Mapping[str, str],
                 timeout_s: float | None) -> None:
        self._function = function
        self._call = call
        self._timeout_s = timeout_s
        self._last = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # All starts of the job have one name, and no other call has it, unless the user has named it.
        own = {**os.environ, **environment}
        batch = log_lines.job(own) or f"{socket.gethostname()}-{os.getpid()}"
        self._environment = {**environment, log_lines.JOB: own.get(log_lines.JOB) or f"{batch}-{next(_numbers)}"}
        self._results: list[Any] = []
        self._error: Exception | None = None

    def attempt(self, start: launching.Start) -> tuple[int, bool]:
        """Runs the job once; returns its status, which is not 0 if the function has failed, and whether time is up."""
        with contextlib.closing(rank_listener.RankListener(self._call, list(start.places))) as listener:
            # Text as this process decodes it, whatever the locale.
            environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **self._environment, **listener.environment}
            job, output, late = None, None, ""
            try:
                with _interrupts_wait():
                    job = launching.LaunchedJob(start, _command(), environment, has_pipes=True)
                    output = _Output(job.process)
                late = _follow(job, output, listener, start.ranks, self._last)
            except BaseException as error:
                if job is not None:
                    _end(job, output, isinstance(error, KeyboardInterrupt))
                    listener.settle()  # a rank that hydra kills ends after hydra
                raise
            finally:
                if output is not None:
                    output.close()
            listener.settle()
        self._results = [result.pickled for _, result in sorted(listener.results.items())]
        if late:
            self._error = JobError(f"{late} when the timeout_s={self._timeout_s:g} of poseidon.run had passed, and "
                                   "the job was ended; see what was printed, or give it more time.")
            return job.status or 1, True
        self._error = _first_cause(listener, start.ranks, job.status, output.tail, self._function)
        failed = bool(listener.failures)  # of which mpiexec knows at most that other ranks were ended for it
        return 1 if failed else job.status or int(self._error is not None), False

    def outcome(self, all_results: bool) -> Any:
        """Returns the result of rank 0, or of all, or raises what has made the last job fail."""
        if self._error is not None:
            raise self._error
        try:
            results = [pickle.loads(result) for result in self._results if result is not None]
        except Exception as error:
            raise JobError(f"What the function has returned cannot be loaded here ({type(error).__name__}: {error}); "
                           "return numbers, arrays or texts.") from error
        return results if all_results else results[0]


def _command() -> list[str]:
    """Returns what a rank runs: not this program's main module, but with its folders of modules."""
    path = [folder or os.getcwd() for folder in sys.path]
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n"
            f"from {__package__} import function_rank; function_rank.main()"]


def _follow(job: launching.LaunchedJob, output: "_Output", listener: RankListener, ranks: int, last: float) -> str:
    """Returns when the job has ended, and its output was written: "", or who was late if it was ended for that.

    Args:
        job: The job.
        output: Of the job.
        listener: To its ranks.
        ranks: How many there are.
        last: When they have to have returned.
    """
    late = ""
    while True:
        has_ended = job.has_ended()
        if not output.pass_on(job.is_ending) and has_ended:
            return late
        if job.is_ending:
            continue
        if listener.failures or listener.lost:
            # Ranks that have joined end each other, and have a word to say; nobody tells those that have not.
            tells = listener.failures and not listener.failures[0].failure.has_joined
            job.end(signal.SIGTERM if tells else None, _END_S)
        elif time.monotonic() > last and not has_ended:
            late = _late([rank for rank in range(ranks) if rank not in listener.results])
            job.end(signal.SIGTERM, _END_S)


def _late(ranks: Sequence[int]) -> str:
    """Returns what a message says of ranks that have not returned, of at most ten by number."""
    if not ranks:
        return "All ranks had returned from the function, but not ended,"
    more = f" and {len(ranks) - 10} more" if len(ranks) > 10 else ""
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:10]))}{more} had not returned"


def _end(job: launching.LaunchedJob, output: "_Output | None", is_interrupted: bool) -> None:
    """Ends a job because of an exception in this process; at once, if there is another."""
    job.end(signal.SIGINT if is_interrupted else signal.SIGTERM, _INTERRUPTED_S)
    while True:
        try:
            has_ended = job.has_ended()
            is_quiet = output is None or not output.pass_on(holds=True)
            if has_ended and is_quiet:
                return
        except BaseException:
            job.end(None, 0)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Lets Ctrl-C wait while a process is being started that nobody could end yet."""
    if (threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt


class _Output:
    """Writes what a job prints to the streams of this process, in the thread that calls.

    Attributes:
        tail: The end of what came from stdout, where hydra says how a rank was ended.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.tail = ""
        self._held = ""
        self._pipes: dict[str, IO[bytes]] = {"stdout": process.stdout, "stderr": process.stderr}  # type: ignore[dict-item]
        self._selector = selectors.DefaultSelector()
        for name, pipe in self._pipes.items():
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._selector.register(pipe, selectors.EVENT_READ, (name, decoder))

    def pass_on(self, holds: bool) -> bool:
        """Writes what has come; returns whether anything has.

        Args:
            holds: Whether stdout is kept for the end, since hydra's words about ranks that end are among it.
        """
        came = False
        for key, _ in self._selector.select(_LOOK_S):
            data = os.read(key.fd, 1 << 16)
            if not data:
                self._selector.unregister(key.fileobj)
                continue
            came = True
            name, decoder = key.data
            text = decoder.decode(data)
            if name == "stdout":
                self.tail = (self.tail + text)[-_TAIL:]
                if holds:
                    self._held += text
                    continue
            _write(name, text)
        return came

    def close(self) -> None:
        """Writes what was kept, without what hydra says of ranks that end."""
        self._selector.close()
        for pipe in self._pipes.values():
            pipe.close()
        if text := _BANNER.sub("", self._held):
            _write("stdout", text)


def _write(name: str, text: str) -> None:
    stream = getattr(sys, name)  # the present one: programs, and notebooks, replace it
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


def _first_cause(listener: RankListener, ranks: int, status: int, tail: str,
                 function: Callable[..., Any]) -> Exception | None:
    """Returns why a job that calls a function has failed, None if it has not."""
    first = listener.first_cause()
    if isinstance(first, FailedRank):
        return _raised(first, function)
    if first is not None:
        return _lost(first, listener.failures, status, tail, function)
    missing = ranks - len(listener.results)
    if missing:
        return JobError(f"The job has ended with status {status} before {missing} of {ranks} ranks had called the "
                        "function; what was printed above says why, or tf-poseidon doctor.")
    if status:
        return JobError(f"The job has ended with status {status} after all ranks had returned from the function; what "
                        "was printed above says why.")
    return None


def _raised(failed: FailedRank, function: Callable[..., Any]) -> Exception:
    """Returns the exception that a function has raised on a rank; its cause shows where it came from."""
    (rank, host), failure = failed
    error: object = None
    if failure.pickled is not None:
        with contextlib.suppress(Exception):  # its class is not here, or takes other arguments than it says
            error = pickle.loads(failure.pickled)
    if not isinstance(error, Exception):
        error = JobError(f"Rank {rank} on {host} failed: {failure.text}")
    error.__cause__ = RemoteTraceback(
        f"Rank {rank} on {host}:\n{source_lines.completed(failure.trace, function)}")
    return error


def _lost(first: LostRank, failures: Sequence[FailedRank], status: int, tail: str,
          function: Callable[..., Any]) -> JobError:
    """Returns the error of a job of which a rank has left without a word; its cause is what others have said of it."""
    who = first.greeting
    if not first.has_ended:
        error = JobError(f"Rank {who.rank} on {who.host} has not been heard of any more, expected that the function "
                         "returns there; see whether its host is down, frozen or cut off.")
        error.__cause__ = _raised(failures[0], function) if failures else None
        return error
    how = f"has ended before the function had returned, and the job with status {status}"
    said = _KILLED.search(tail)
    if said:
        number = int(said[1])
        names = {each.value: each.name for each in signal.Signals}
        how = f"was ended by signal {number} ({names.get(number, 'unknown')}) before the function had returned"
    error = JobError(f"Rank {who.rank} on {who.host} {how}; see what it has printed, and whether its host has run out "
                     "of memory.")
    own = next((failed for failed in failures if not failed.failure.is_echo), None)  # for the case that it is the cause
    error.__cause__ = _raised(own, function) if own else None
    return error
