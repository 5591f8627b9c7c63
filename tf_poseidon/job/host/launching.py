"""Starts a job with mpiexec, and starts it again when it fails: `tf-poseidon run`, and `poseidon.run`.

A program that writes backups (keras.callbacks.BackupAndRestore) resumes from the last one. Nothing here imports
TensorFlow: this process outlives the job, and should be small.

Tests: tests/unit/test_launching.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from typing import NamedTuple

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job import log_lines
from tf_poseidon.job.host import mpi_library

# A host that cannot be reached twice, with this time in between, is gone. Its ranks are missed by the others, too, and
# end (`heartbeat_timeout_s`), but mpiexec would wait for it.
_WATCH_S = 15.0
_REACH_S = 20.0  # longest time to start a process on a host
_END_S = 10.0  # what the ranks get to end when the job is interrupted
# Of mpiexec that ends with the number of a rank's signal: what programs seldom end with by themselves.
_SIGNALS = {number.value: number.name for number in (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)}
RESTARTS = "TF_POSEIDON_RESTARTS"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # not in the child, which may have a lock of another thread


class Start(NamedTuple):
    """One start of a job.

    Attributes:
        launcher: The path of mpiexec.
        ranks: The number of ranks.
        places: How many of them run on each host; empty if all run here.
        number: How often the job was started before.
        left: How often it may be started again.
    """

    launcher: str
    ranks: int
    places: Mapping[str, int]
    number: int
    left: int


class LaunchedJob:
    """A job that mpiexec runs: until all ranks have ended, a host is gone, or someone ends it."""

    def __init__(self, start: Start, command: Sequence[str], environment: Mapping[str, str] = os.environ,
                 has_pipes: bool = False) -> None:
        """Starts the job.

        Args:
            start: How, and where.
            command: What each rank runs.
            environment: The environment variables of ranks.
            has_pipes: Whether the process's stdout and stderr are pipes, and nothing is read from stdin.
        """
        places = start.places
        where = ["-hosts", ",".join(f"{host}:{number}" for host, number in places.items())] if places else []
        read, written = (subprocess.DEVNULL, subprocess.PIPE) if has_pipes else (None, None)
        job = log_lines.job(environment) or f"{socket.gethostname()}-{os.getpid()}"
        # A group of its own: a Ctrl-C of the terminal would reach mpiexec twice, which then does not wait for the
        # ranks.
        self.process = subprocess.Popen(
            [start.launcher, "-n", str(start.ranks), *where, *command], start_new_session=True,
            preexec_fn=_end_with_parent, env={**environment, RESTARTS: str(start.number), log_lines.JOB: job},
            stdin=read, stdout=written, stderr=written)
        self._last: float | None = None  # the time by which it must have ended
        self._gone, self._over = threading.Event(), threading.Event()
        remote = [host for host in places if not is_here(host)]
        threading.Thread(target=_watch, args=(start.launcher, remote, self._gone, self._over), daemon=True).start()

    def end(self, number: int | None, within_s: float = _END_S) -> None:
        """Has the job end.

        Args:
            number: A signal for all ranks; None if they end without one.
            within_s: The time after which they are killed; that of an earlier call, if that comes sooner, holds.
        """
        last = time.monotonic() + within_s
        self._last = last if self._last is None else min(self._last, last)
        if number is not None:
            self.process.send_signal(number)

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called, or a host is gone."""
        return self._last is not None

    def has_ended(self) -> bool:
        """Returns whether it has ended; has to be called again and again, since it kills ranks whose time is up."""
        if self.process.poll() is not None:
            self._over.set()
            return True
        if self._last is None and self._gone.is_set():
            self.end(None, 0)
        if self._last is not None and time.monotonic() > self._last:
            # The proxies of mpiexec end with it, and their ranks with them.
            os.killpg(self.process.pid, signal.SIGKILL)
        return False

    @property
    def status(self) -> int:
        """The exit status of a job that has ended; 128 and the number of the signal if one has ended mpiexec."""
        status = self.process.returncode
        return status if status >= 0 else 128 - status


def run(command: Sequence[str], ranks: int, hosts: Sequence[str] = (), restarts: int = 0, mpiexec: str = "",
        tell: Callable[[str], None] = print) -> int:
    """Runs a job until it succeeds, at most 1 + `restarts` times, without hosts that are gone.

    Args:
        command: What each rank runs.
        ranks: Number of ranks; hosts share them evenly, the first take what is left over.
        hosts: Where they run; by default here.
        restarts: How often the job may be started again.
        mpiexec: The launcher; by default that of this Python environment, or the first in PATH.
        tell: Called with a sentence when the job is started again, or not.

    The ranks find the number of restarts so far in the environment variable TF_POSEIDON_RESTARTS.

    Returns:
        The exit status of the last job; 128 and the number of the signal if a signal has ended it.

    Raises:
        ConfigurationError: If there is no launcher, or fewer ranks than hosts.
    """

    def attempt(start: Start) -> tuple[int, bool]:
        status, is_interrupted = _run_once(start, command)
        if status and not is_interrupted and not start.left:
            tell(f"the job ended with {_named(status)}, and --restarts={restarts} does not let it start again.")
        return status, is_interrupted

    return repeat(attempt, ranks, hosts, restarts, mpiexec, tell)


def repeat(attempt: Callable[[Start], tuple[int, bool]], ranks: int, hosts: Sequence[str], restarts: int,
           mpiexec: str, tell: Callable[[str], None]) -> int:
    """Calls a function that runs a job until the job succeeds; as `run`, which says what the arguments are.

    Args:
        attempt: Runs the job once, and returns its exit status, and whether it was told to end it.
    """
    launcher = find(mpiexec)
    places = _places(ranks, hosts)
    for number in range(restarts + 1):
        left = restarts - number
        status, is_interrupted = attempt(Start(launcher, ranks, places, number, left))
        if status == 0 or is_interrupted or not left:
            break
        ended = f"the job ended with {_named(status)}"
        gone = _unreachable(launcher, list(places))
        if gone:
            places = {host: number for host, number in places.items() if host not in gone}
            ended += f", and {_listed(gone)} cannot be reached"
            if not places:
                tell(f"{ended}; there is no host left.")
                break
            ranks = sum(places.values())
        tell(f"{ended}; it starts again on {ranks} rank{'s' if ranks > 1 else ''}"
             f"{f' of {_listed(list(places))}' if places else ''} "
             f"({left - 1} more restart{'s' if left != 2 else ''}).")
        time.sleep(1)  # a fault that comes back at once should not fill a disk with logs
    return status


def find(mpiexec: str = "") -> str:
    """Returns the path of the launcher, `mpiexec` as in `run`; raises ConfigurationError if there is none."""
    beside = os.path.join(sysconfig.get_path("scripts"), "mpiexec")  # that of the mpich wheel
    places = ["mpiexec", beside] if mpi_library.is_own() else [beside, "mpiexec"]
    path = next(filter(None, map(shutil.which, [mpiexec] if mpiexec else places)), None)
    if path is None:
        raise ConfigurationError(f"There is no launcher '{mpiexec or 'mpiexec'}'; pip install 'mpich>=5', or give "
                                 "the path of MPICH's mpiexec.")
    return path


def _places(ranks: int, hosts: Sequence[str]) -> dict[str, int]:
    """Returns the number of ranks on each host."""
    if len(set(hosts)) < len(hosts):
        raise ConfigurationError(f"The hosts {_listed(hosts)} name one twice; name each once.")
    if hosts and ranks < len(hosts):
        raise ConfigurationError(f"{ranks} ranks cannot run on {len(hosts)} hosts, which need at least one each; give "
                                 f"{len(hosts)} ranks or more, or fewer hosts.")
    base, extra = divmod(ranks, len(hosts) or 1)
    return {host: base + (number < extra) for number, host in enumerate(hosts)}


def _run_once(start: Start, command: Sequence[str]) -> tuple[int, bool]:
    """Returns how a job ended, and whether this process was told to end it."""
    received: list[int] = []
    job = LaunchedJob(start, command)

    def forward(number: int, _: object) -> None:
        received.append(number)
        job.end(number)

    handlers = {}
    if threading.current_thread() is threading.main_thread():  # only it may set handlers
        handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        while not job.has_ended():
            time.sleep(0.05)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return (128 + received[0], True) if received else (job.status, False)


def _end_with_parent() -> None:
    """Makes mpiexec, and so the job, end with this process, also when that is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def is_here(host: str) -> bool:
    """Whether a host is known to be this one, by its name."""
    return host in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _watch(launcher: str, hosts: Sequence[str], gone: threading.Event, ended: threading.Event) -> None:
    """Sets `gone` when a host cannot be reached."""
    missed = dict.fromkeys(hosts, 0)
    while hosts and not ended.wait(_WATCH_S):
        unreachable = _unreachable(launcher, hosts)
        missed = {host: missed[host] + 1 if host in unreachable else 0 for host in hosts}
        if max(missed.values()) >= 2:
            gone.set()
            return


def _named(status: int) -> str:
    """Returns a job's status, with the signal of which it tells: MPICH's mpiexec gives its number, others 128 more."""
    name = _SIGNALS.get(status - 128 if status > 128 else status)
    if status == signal.SIGKILL:
        name = "SIGKILL, which also ends the other ranks when one fails; look above for its error"
    return f"status {status} ({name})" if name else f"status {status}"


def _unreachable(launcher: str, hosts: Sequence[str]) -> list[str]:
    """Returns the hosts on which mpiexec cannot start a process."""

    def reaches(host: str) -> bool:
        try:
            return subprocess.run([launcher, "-n", "1", "-hosts", host, sys.executable, "-S", "-c", ""],
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  timeout=_REACH_S).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    if not hosts:
        return []
    with futures.ThreadPoolExecutor(len(hosts)) as pool:
        return [host for host, is_reached in zip(hosts, pool.map(reaches, hosts)) if not is_reached]


def _listed(hosts: Sequence[str]) -> str:
    return ", ".join(hosts)
