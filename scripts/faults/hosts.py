"""Breaks hosts and links of an emulated cluster while a job trains on it, and checks how the job ends.

    sudo env "PATH=$PATH" python scripts/faults/hosts.py --faults=down --faults=flaps

Needs what scripts/benchmarks/emulated_cluster.py needs. Prints a line for each fault; the exit status is 1 if a job
hangs, ends otherwise than it must, or, where it must go on, has other bits than one that was not disturbed.
"""

from collections.abc import Callable
from collections.abc import Sequence
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

from absl import app
from absl import flags

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))  # see scripts/README.md
import emulated_cluster

HOSTS, VICTIM, STEPS, FAULT_AT = 3, 1, 60, "step 10\n"
LONGEST_S = 60.0  # from the fault to the end; then the job hangs
_PROGRAM = pathlib.Path(__file__).with_name("faulty_program.py")


def _link(namespace: str, state: str) -> None:
    subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", state], check=True, start_new_session=True)


def _signal_all(namespace: str, number: int) -> None:
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), number)


def _vanishes(namespace: str) -> None:
    _link(namespace, "down")  # first: no connection is closed
    _signal_all(namespace, signal.SIGKILL)


def _flaps(namespace: str) -> None:
    _link(namespace, "down")
    time.sleep(5)
    _link(namespace, "up")


class Break(NamedTuple):
    """A way to break a host.

    Attributes:
        does: Breaks it, given its network namespace.
        succeeds: Whether the job goes on.
        within_s: Longest time from the fault to the end of a job that does not go on, in seconds.
    """

    does: Callable[[str], None]
    succeeds: bool
    within_s: float = 20


# A host that is silent is missed after 12 s; then ranks have 1 s for their last words.
FAULTS = {
    "nothing": Break(lambda namespace: None, True),
    "down": Break(lambda namespace: _link(namespace, "down"), False),
    "vanishes": Break(_vanishes, False),
    "frozen": Break(lambda namespace: _signal_all(namespace, signal.SIGSTOP), False),
    "flaps": Break(_flaps, True),
}


def run(fault: str) -> tuple[int, float, str]:
    """Returns (status, seconds from the fault to the end, output) of a job in which a host breaks."""
    times, lines = {}, []
    with emulated_cluster.EmulatedCluster(HOSTS, 1) as cluster:
        reading, writing = os.pipe()

        def watch() -> None:
            with open(reading, errors="replace") as output:
                for line in output:
                    lines.append(line)
                    if line == FAULT_AT:
                        times["begin"] = time.monotonic()
                        hangs.start()
                        FAULTS[fault].does(cluster.namespaces[VICTIM])

        # As Ctrl-C does: the cluster ends the job, and removes itself.
        hangs = threading.Timer(LONGEST_S, os.kill, (os.getpid(), signal.SIGTERM))
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            status = cluster.run([sys.executable, str(_PROGRAM), "take_steps", str(STEPS)], stdout=writing,
                                 stderr=writing, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": ""})
        finally:
            times["end"] = time.monotonic()
            os.close(writing)
            hangs.cancel()
            watcher.join()
    return status, times["end"] - times.get("begin", float("nan")), "".join(lines)


def weights(output: str) -> list[str]:
    """Returns the digests of the ranks' final weights."""
    return re.findall(r"weights ([0-9a-f]{64})", output)


def wrong(fault: str, status: int, seconds: float, output: str, undisturbed: Sequence[str]) -> str:
    """Returns what is wrong with the end of a job, or "".

    Args:
        fault: One of `FAULTS`.
        status: The exit status of mpiexec.
        seconds: From the fault to the end; NaN if there was none.
        output: What it printed.
        undisturbed: The digests of a job that goes on without a fault.
    """
    if FAULTS[fault].succeeds:
        is_right = status == 0 and len(weights(output)) == HOSTS and weights(output) == list(undisturbed)
    else:
        is_right = (status != 0 and seconds < FAULTS[fault].within_s
                    and f"has heard nothing of rank {VICTIM} for 12 s" in output)
    return "" if is_right else f"status {status} after {seconds:.1f} s; it printed:\n{output}"


def main(_: Sequence[str]) -> int:
    _, _, output = run("nothing")
    undisturbed, failed = weights(output), 0
    for fault in _FAULTS.value:
        status, seconds, output = run(fault)
        problem = wrong(fault, status, seconds, output, undisturbed)
        print(f"{fault}: {problem or f'as it must, with status {status} after {seconds:.1f} s'}", flush=True)
        failed += bool(problem)
    return failed > 0


if __name__ == "__main__":
    _FAULTS = flags.DEFINE_multi_enum("faults", ["down", "vanishes", "frozen", "flaps"], list(FAULTS), "What breaks.")
    app.run(main)
