"""Starts Python programs on several ranks, with a time limit that turns a hang into a failure."""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import time

TESTS = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    status: int
    output: str  # of all ranks
    seconds: float

    @property
    def own_lines(self):
        """The lines that our processes printed: without TensorFlow's log and hydra's banner."""
        lines = []
        for line in self.output.splitlines():
            if line.startswith("=====") or line.startswith("YOUR APPLICATION TERMINATED"):
                break
            line = re.sub(r"^\[\d+\]<std(out|err)>:", "", line)  # horovodrun says whose line it is
            # "[[" is the second line of some of TensorFlow's.
            if line.strip() and not line.startswith(("WARNING", "I0", "W0", "E0", "To enable the",
                                                     "\t [[")):
                lines.append(line)
        return lines


def mpiexec():
    """Returns the mpiexec of the mpich wheel."""
    return os.path.join(sysconfig.get_path("scripts"), "mpiexec")


def _launcher(name, ranks):
    """Returns the command that starts a job."""
    if name == "mpiexec":
        return [mpiexec(), "-n", str(ranks)]
    return [os.path.join(sysconfig.get_path("scripts"), "horovodrun"), "--gloo", "-np", str(ranks),
            "-H", f"localhost:{ranks}"]


def run(arguments, ranks, timeout_s, environment=(), launcher="mpiexec",
        program=sys.executable, nice=0):
    """Runs `python *arguments` on `ranks` processes, without a launcher when `ranks` is 0.

    `launcher` is "mpiexec" or "horovodrun"; `program` what runs in the place of Python; with `nice`, what
    runs besides has the processor first.

    Programs of this folder, named without it, are run by start.py.

    Raises:
        AssertionError: If the job takes longer than `timeout_s`; all its processes are ended.
    """
    command = ["nice", "-n", str(nice)] if nice else []
    command += _launcher(launcher, ranks) if ranks else []
    starter = [] if os.path.isabs(arguments[0]) else ["start.py"]
    begin = time.monotonic()
    process = subprocess.Popen(
        [*command, program, *starter, *map(str, arguments)], cwd=TESTS, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        # Unbuffered, Python writes a line and its end apart, and another rank's line comes between.
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "",
             **dict(environment)})
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"The job hung: not over after {timeout_s} s. It printed:\n{output}")
    return Outcome(process.returncode, output, time.monotonic() - begin)


def run_ok(arguments, ranks, timeout_s, **options):
    """Runs a job as `run` does and asserts that it ends well."""
    outcome = run(arguments, ranks, timeout_s, **options)
    assert outcome.status == 0, f"exit status {outcome.status}:\n{outcome.output}"
    return outcome
