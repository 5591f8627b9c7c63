"""Starts Python programs on several ranks, with a time limit that turns a hang into a failure."""

import atexit
import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time

import tiers

from evaluation.faults import fault_table

TESTS = pathlib.Path(__file__).resolve().parents[1]
FAULTS = TESTS.parent / "evaluation" / "faults"  # whose programs tests use too
SERVERS = 2  # a rank and the next one come from different ones
_STARTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: int
    output: str  # of all ranks
    seconds: float

    @property
    def own_lines(self):
        """The lines that our processes printed: without TensorFlow's log and hydra's banner."""
        return fault_table.own_lines(self.output)


def mpiexec():
    """Returns the mpiexec of the mpich wheel."""
    return os.path.join(sysconfig.get_path("scripts"), "mpiexec")


def _launcher(name, ranks, python):
    """Returns the command that starts a job; horovodrun is itself a program for Python, which imports TensorFlow."""
    if name == "mpiexec":
        return [mpiexec(), "-n", str(ranks)]
    return [*python, os.path.join(sysconfig.get_path("scripts"), "horovodrun"), "--gloo", "-np", str(ranks),
            "-H", f"localhost:{ranks}"]


@functools.cache
def _program(name):
    """Returns the path of a test program, which any room may have; other names are unchanged."""
    if os.path.dirname(name) or not name.endswith(".py"):
        return name
    if (FAULTS / name).exists():
        return str(FAULTS / name)
    path, = TESTS.glob(f"*/{name}")
    return str(path)


def _environment(more=()):
    # TensorFlow reads its log level when it is imported, so before a fork: warnings, which some tests look for.
    # Unbuffered, Python writes a line and its end separately, and another rank's line comes between.
    # Programs import helpers of other rooms, and the package of this checkout, whichever is installed.
    # Two jobs run at a time, whose ranks would meet on the same cores: they keep to none, unless a test asks for it.
    rooms = os.pathsep.join(str(room) for room in [TESTS.parent, *sorted(TESTS.iterdir())] if room.is_dir())
    threads = str(len(os.sched_getaffinity(0)))
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONUNBUFFERED": "", "PYTHONPATH": rooms,
            "TF_NUM_INTRAOP_THREADS": threads, **dict(more)}


class _Servers:
    """Servers of forking.py, which live as long as this process.

    A rank and the next one are forked from different servers, and so are a rank and that of the next job: each server
    has another order of Python's sets.
    """

    def __init__(self):
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        self._sockets = [os.path.join(folder.name, str(number)) for number in range(SERVERS)]
        self._inputs = [self._start(path) for path in self._sockets]
        self._jobs = itertools.count()

    def _start(self, path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(path)
            listener.listen()
            return subprocess.Popen(
                [sys.executable, _program("forking.py"), str(listener.fileno())], pass_fds=[listener.fileno()],
                cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True, env=_environment()).stdin

    def stand_in(self):
        """Returns the program to start instead of `python`."""
        first = next(self._jobs) % SERVERS
        sockets = self._sockets[first:] + self._sockets[:first]
        return [sys.executable, "-I", "-S", _program("stand_in.py"), ",".join(sockets)]


@functools.cache
def _servers_once():
    return _Servers()


def _servers():
    with _STARTING:  # two jobs may begin at a time
        return _servers_once()


def run(arguments, ranks, timeout_s, environment=(), launcher="mpiexec", through=(), fresh=False):
    """Runs `python *arguments` on `ranks` processes, without a launcher when `ranks` is 0.

    `launcher` is "mpiexec" or "horovodrun"; `through` is a command that gets the command of each rank. With `fresh`,
    processes start like those of users; others are forked from one that has already imported Keras. Test programs
    are named without their directory.

    Raises:
        AssertionError: If the job takes longer than `timeout_s`; all its processes are ended.
    """
    tiers.check_may_start_jobs()
    python = [sys.executable] if fresh else _servers().stand_in()
    command = [*(_launcher(launcher, ranks, python) if ranks else ()), *through, *python]
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, _program(str(arguments[0])), *map(str, arguments[1:])], cwd=TESTS, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=_environment(environment))
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"The job hung: not finished after {timeout_s} s. It printed:\n{output}") from None
    return Outcome(process.returncode, output, time.monotonic() - begin)


def run_fault(fault, directory, launcher="mpiexec"):
    """Runs a job in which a `fault_table.Fault` happens, and asserts that it ends as it must."""
    time_of_fault = directory / "fault"
    outcome = run(["faulty_program.py", *fault.program], fault.ranks, timeout_s=120, launcher=launcher,
                  # What the launcher sees of a rank, or of its children, is that of a process of its own.
                  fresh=fault.program[0] in (
                      "start_a_subprocess", "die_with_a_child_on_rank_1", "signal_dedicated_server"),
                  environment={"FAULT_TIME": str(time_of_fault), **dict(fault.environment)})
    seconds = time.time() - float(time_of_fault.read_text()) if time_of_fault.exists() else None
    ended = fault_table.Ended(outcome.status, outcome.output, seconds)
    problem = fault_table.wrong(fault, ended, launcher == "mpiexec")
    assert not problem, problem


def run_ok(arguments, ranks, timeout_s, **options):
    """Runs a job like `run` and asserts that it succeeds."""
    outcome = run(arguments, ranks, timeout_s, **options)
    assert outcome.status == 0, f"exit status {outcome.status}:\n{outcome.output}"
    return outcome
