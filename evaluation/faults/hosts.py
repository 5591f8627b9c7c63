"""Breaks hosts and links of an emulated cluster while a job trains on it, and checks how the job ends.

A job that goes on must have the bits of one that was not disturbed; one that starts again without a host, its weights
up to rounding.
"""

from collections.abc import Callable
from collections.abc import Sequence
import os
import re
import signal
import subprocess
import sysconfig
import tempfile
import threading
import time
from typing import NamedTuple

import numpy as np

from evaluation import modules
from tf_poseidon.emulation import emulated_cluster

HOSTS, VICTIM, STEPS, FAULT_AT = 3, 1, 60, "step 10\n"
LONGEST_S = 120.0  # from the fault to the end; then the job hangs
ROUNDING = 1e-12  # of 60 steps in double precision
_RUN = os.path.join(sysconfig.get_path("scripts"), "tf-poseidon")


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


def _nothing(namespace: str) -> None:
    del namespace


class Break(NamedTuple):
    """A way to break a host.

    Attributes:
        injected: How it is made to happen, for people.
        does: Breaks it, given its network namespace.
        says: A regular expression of what the job prints.
        goes_on: Whether the job goes on.
        within_s: Longest time from the fault to the end of a job that does not go on, in seconds.
        gbps: Rate of the host's link, Gbit/s; that of others is 1.
        loss_percent: Packets that each link drops, at random.
        delay_us: Delay of each link in each direction, µs.
        restarts: Whether `tf-poseidon run` starts the job, and once more without the host, from a backup.
    """

    injected: str
    does: Callable[[str], None]
    says: str
    goes_on: bool = False
    within_s: float = 20
    gbps: float = 1
    loss_percent: float = 0
    delay_us: int = 0
    restarts: bool = False


NOTHING = "nothing breaks"
_SILENT = rf"has heard nothing of rank {VICTIM} for 12 s: the host is down"
# A host that is silent is missed after 12 s; then ranks have 1 s for their last words.
FAULTS = {
    NOTHING: Break("", _nothing, "weights", goes_on=True),
    "the link of a host is down": Break("`ip link set down`", lambda namespace: _link(namespace, "down"), _SILENT),
    "a host vanishes": Break("link down, SIGKILL of all its processes", _vanishes, _SILENT),
    "a host is frozen": Break("SIGSTOP of all its processes", lambda namespace: _signal_all(namespace, signal.SIGSTOP),
                              _SILENT),
    "a link flaps": Break("down for 5 s", _flaps, "weights", goes_on=True),
    "links lose packets": Break("1 % of them", _nothing, "weights", goes_on=True, loss_percent=1),
    "links delay packets": Break("by 20 ms", _nothing, "weights", goes_on=True, delay_us=20000),
    "a link is slow": Break("10 Mbit/s, others have 1 Gbit/s", _nothing, rf"has waited most for rank {VICTIM}$",
                            goes_on=True, gbps=0.01),
    "a job starts again without a host": Break(
        "the same, under `tf-poseidon run --restarts 1`", _vanishes,
        rf"host{VICTIM} cannot be reached; it starts again on {HOSTS - 1} ranks", within_s=90, restarts=True),
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
          emulated_cluster.EmulatedCluster(HOSTS, rates, broken.delay_us, broken.loss_percent) as cluster):
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
        command = [*modules.command("faults.faulty_program"), "take_steps", str(STEPS), directory]
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
    broken, found = FAULTS[fault], []
    if (ended.status == 0) != (broken.goes_on or broken.restarts):
        found.append(f"the status is {ended.status}")
    if not re.search(broken.says, ended.output, re.MULTILINE):
        found.append(f"{broken.says!r} is not said")
    if not ended.seconds < (LONGEST_S if broken.goes_on else broken.within_s):
        found.append(f"it took {ended.seconds:.1f} s, or there was no fault")
    if broken.goes_on and digests(ended.output) != HOSTS * digests(undisturbed.output)[:1]:
        found.append("it has other bits than an undisturbed job")
    if broken.restarts and not _is_close(ended.weights, undisturbed.weights):
        found.append("its weights differ from those of an undisturbed job by more than rounding")
    return ", ".join(found) + (f"; it printed:\n{ended.output}" if found else "")


def _is_close(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    """Whether values are the same up to rounding: fewer ranks add in another order."""
    return len(values) == len(others) and all(
        np.allclose(a, b, rtol=ROUNDING, atol=ROUNDING) for a, b in zip(values, others))
