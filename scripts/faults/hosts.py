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
import sysconfig
import tempfile
import threading
import time
from typing import NamedTuple

from absl import app
from absl import flags
import numpy as np

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "benchmarks"))  # see scripts/README.md
import emulated_cluster

HOSTS, VICTIM, STEPS, FAULT_AT = 3, 1, 60, "step 10\n"
LONGEST_S = 120.0  # from the fault to the end; then the job hangs
ROUNDING = 1e-12  # of 60 steps in double precision
_RUN = os.path.join(sysconfig.get_path("scripts"), "tf-poseidon")
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
        gbps: Rate of the host's link, Gbit/s; that of others is 1.
        loss_percent: Packets that each link drops, at random.
        is_waited_for: Whether `strategy.stats()` names the host's rank as the one that the others wait for.
        restarts: Whether `tf-poseidon run` starts the job, and once more without the host, from a backup.
    """

    does: Callable[[str], None]
    succeeds: bool
    within_s: float = 20
    gbps: float = 1
    loss_percent: float = 0
    is_waited_for: bool = False
    restarts: bool = False


def _nothing(namespace: str) -> None:
    del namespace


# A host that is silent is missed after 12 s; then ranks have 1 s for their last words.
FAULTS = {
    "nothing": Break(_nothing, True),
    "down": Break(lambda namespace: _link(namespace, "down"), False),
    "vanishes": Break(_vanishes, False),
    "frozen": Break(lambda namespace: _signal_all(namespace, signal.SIGSTOP), False),
    "flaps": Break(_flaps, True),
    "loss": Break(_nothing, True, loss_percent=1),
    "slow": Break(_nothing, True, gbps=0.01, is_waited_for=True),
    "restart": Break(_vanishes, True, restarts=True),
}


class Ended(NamedTuple):
    """How a job ended.

    Attributes:
        status: Its exit status.
        seconds: From the fault to the end; NaN if there was none.
        output: What it printed.
        weights: Those of rank 0 at the end; empty if it did not come there.
    """

    status: int
    seconds: float
    output: str
    weights: tuple[np.ndarray, ...] = ()


def run(fault: str) -> Ended:
    """Runs a job in which a host breaks."""
    times, lines, broken = {}, [], FAULTS[fault]
    rates = [broken.gbps if host == VICTIM else 1.0 for host in range(HOSTS)]
    with (tempfile.TemporaryDirectory() as directory,
          emulated_cluster.EmulatedCluster(HOSTS, rates, loss_percent=broken.loss_percent) as cluster):
        reading, writing = os.pipe()

        def watch() -> None:
            with open(reading, errors="replace") as output:
                for line in output:
                    lines.append(line)
                    if line == FAULT_AT and not times:  # a job that starts again comes there again
                        times["begin"] = time.monotonic()
                        hangs.start()
                        broken.does(cluster.namespaces[VICTIM])

        # As Ctrl-C does: the cluster ends the job, and removes itself.
        hangs = threading.Timer(LONGEST_S, os.kill, (os.getpid(), signal.SIGTERM))
        watcher = threading.Thread(target=watch)
        watcher.start()
        command = [sys.executable, str(_PROGRAM), "take_steps", str(STEPS), directory]
        if broken.restarts:
            command = [_RUN, "run", "-n", str(HOSTS), "-hosts", ",".join(cluster.names), "--restarts", "1", "--",
                       *command]
        try:
            status = cluster.run(command, launcher="command" if broken.restarts else "mpiexec", stdout=writing,
                                 stderr=writing, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": ""})
        finally:
            times["end"] = time.monotonic()
            os.close(writing)
            hangs.cancel()
            watcher.join()
        path = os.path.join(directory, "weights.npz")
        found = tuple(np.load(path).values()) if os.path.exists(path) else ()
    return Ended(status, times["end"] - times.get("begin", float("nan")), "".join(lines), found)


def digests(output: str) -> list[str]:
    """Returns the digests of the ranks' final weights."""
    return re.findall(r"weights ([0-9a-f]{64})", output)


def wrong(fault: str, ended: Ended, undisturbed: Ended) -> str:
    """Returns what is wrong with the end of a job, or "".

    Args:
        fault: One of `FAULTS`.
        ended: How it ended.
        undisturbed: A job that goes on without a fault.
    """
    broken = FAULTS[fault]
    if not broken.succeeds:
        is_right = (ended.status != 0 and ended.seconds < broken.within_s
                    and f"has heard nothing of rank {VICTIM} for 12 s" in ended.output)
    elif broken.restarts:  # fewer ranks add in another order
        is_right = (ended.status == 0 and len(set(digests(ended.output))) == 1
                    and f"host{VICTIM} cannot be reached; it starts again on {HOSTS - 1} ranks" in ended.output
                    and len(ended.weights) == len(undisturbed.weights)
                    and all(np.allclose(a, b, rtol=ROUNDING, atol=ROUNDING)
                            for a, b in zip(ended.weights, undisturbed.weights)))
    else:
        is_right = (ended.status == 0 and len(digests(ended.output)) == HOSTS
                    and digests(ended.output) == digests(undisturbed.output)
                    and (f"rank 0 has waited most for rank {VICTIM}\n" in ended.output or not broken.is_waited_for))
    return "" if is_right else f"status {ended.status} after {ended.seconds:.1f} s; it printed:\n{ended.output}"


def main(_: Sequence[str]) -> int:
    undisturbed, failed = run("nothing"), 0
    for fault in _FAULTS.value:
        ended = run(fault)
        problem = wrong(fault, ended, undisturbed)
        right = f"as it must, with status {ended.status} after {ended.seconds:.1f} s"
        print(f"{fault}: {problem or right}", flush=True)
        failed += bool(problem)
    return failed > 0


if __name__ == "__main__":
    _FAULTS = flags.DEFINE_multi_enum("faults", list(FAULTS)[1:], list(FAULTS), "What breaks.")
    app.run(main)
