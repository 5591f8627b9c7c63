"""Starts a job with mpiexec, and starts it again when it fails: `tf-poseidon run`.

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

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job import log_lines
from tf_poseidon.job.host import mpi_library

# A host that cannot be reached twice, with this time in between, is gone. Its ranks are missed by the others, too, and
# end (`heartbeat_timeout_s`), but mpiexec would wait for it.
_WATCH_S = 15.0
_REACH_S = 20.0  # longest time to start a process on a host
_END_S = 10.0  # what the ranks get to end when the job is interrupted
RESTARTS = "TF_POSEIDON_RESTARTS"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # not in the child, which may have a lock of another thread


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
    launcher = find(mpiexec)
    places = _places(ranks, hosts)
    for start in range(1, restarts + 2):
        status, is_interrupted = _run_once(launcher, command, ranks, places, start - 1)
        if status == 0 or is_interrupted:
            return status
        ended = f"the job ended with status {status}"
        if start > restarts:
            tell(f"{ended}, and --restarts={restarts} does not let it start again.")
            break
        gone = _unreachable(launcher, list(places))
        if gone:
            places = {host: number for host, number in places.items() if host not in gone}
            ended += f", and {_listed(gone)} cannot be reached"
            if not places:
                tell(f"{ended}; there is no host left.")
                break
            ranks = sum(places.values())
        tell(f"{ended}; it starts again on {ranks} ranks{f' of {_listed(list(places))}' if places else ''} "
             f"({restarts - start} more restarts).")
        time.sleep(1)  # a fault that comes back at once should not fill a disk with logs
    return status


def find(mpiexec: str = "") -> str:
    """Returns the path of the launcher, `mpiexec` as in `run`; raises ConfigurationError if there is none."""
    beside = os.path.join(sysconfig.get_path("scripts"), "mpiexec")  # that of the mpich wheel
    places = ["mpiexec", beside] if mpi_library.is_own() else [beside, "mpiexec"]
    path = next(filter(None, map(shutil.which, [mpiexec] if mpiexec else places)), None)
    if path is None:
        raise ConfigurationError(f"There is no launcher '{mpiexec or 'mpiexec'}'; pip install 'mpich>=5', or give "
                                 "--mpiexec the path of MPICH's mpiexec.")
    return path


def _places(ranks: int, hosts: Sequence[str]) -> dict[str, int]:
    """Returns the number of ranks on each host."""
    if len(set(hosts)) < len(hosts):
        raise ConfigurationError(f"The hosts {_listed(hosts)} name one twice; name each once.")
    if hosts and ranks < len(hosts):
        raise ConfigurationError(f"{ranks} ranks cannot run on {len(hosts)} hosts, which need at least one each; give "
                                 f"-n {len(hosts)} or more, or fewer hosts.")
    base, extra = divmod(ranks, len(hosts) or 1)
    return {host: base + (number < extra) for number, host in enumerate(hosts)}


def _run_once(launcher: str, command: Sequence[str], ranks: int, places: Mapping[str, int],
              restarts: int) -> tuple[int, bool]:
    """Returns how a job ended, and whether this process was told to end it."""
    where = ["-hosts", ",".join(f"{host}:{number}" for host, number in places.items())] if places else []
    # A group of its own: a Ctrl-C of the terminal would reach mpiexec twice, which then does not wait for the ranks.
    process = subprocess.Popen([launcher, "-n", str(ranks), *where, *command], start_new_session=True,
                               preexec_fn=_end_with_parent, env=os.environ | {
                                   RESTARTS: str(restarts),
                                   log_lines.JOB: log_lines.job() or f"{socket.gethostname()}-{os.getpid()}"})
    received: list[int] = []

    def forward(number: int, _: object) -> None:
        received.append(number)
        process.send_signal(number)

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    gone, ended = threading.Event(), threading.Event()
    remote = [host for host in places if not _is_here(host)]
    threading.Thread(target=_watch, args=(launcher, remote, gone, ended), daemon=True).start()
    last = None  # the time by which the job must have ended
    try:
        while process.poll() is None:
            if last is None and (received or gone.is_set()):
                last = time.monotonic() + (_END_S if received else 0)
            if last is not None and time.monotonic() > last:
                os.killpg(process.pid, signal.SIGKILL)  # the proxies of mpiexec end with it, and their ranks with them
            time.sleep(0.05)
    finally:
        ended.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        return 128 + received[0], True
    return process.returncode if process.returncode >= 0 else 128 - process.returncode, False


def _end_with_parent() -> None:
    """Makes mpiexec, and so the job, end with this process, also when that is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_here(host: str) -> bool:
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
