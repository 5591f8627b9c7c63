"""The clocks of this rank: its worker makes steps, and its server makes versions of the weights, each in a thread.

Every rank applies the gradients of a clock when those of all ranks are in, in the order of clocks; so all have the same
versions, sooner or later. What the program reads outside of steps is the version of its clock: `finish` waits for it.

Tests: tests/unit/test_staleness.py, tests/training/test_clocks.py.
"""

import array
from collections.abc import Callable
from collections.abc import Sequence
import queue
import threading
import time
from typing import Any
from typing import Protocol

import numpy as np

from tf_poseidon.errors import GraphError
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.staleness.bounds import Synchrony
from tf_poseidon.staleness.gate import VersionGate
from tf_poseidon.staleness.version_log import VersionLog

Values = Sequence[Any]  # of the weights, as tensors


class Owner(Protocol):
    """What has the steps of a worker, and the weights that they read."""

    def present(self) -> Values:
        """Returns the present values of the weights, where the server has no step to apply."""

    def restore(self, values: Values, communicator: Communicator) -> None:
        """Gives the weights values, and all ranks rank 0's values of all else that steps use; all call this."""


class Clocks:
    """The worker's clock, and the versions that its server has made. One thread calls the methods.

    Attributes:
        synchrony: How far the worker may run ahead; None for bulk synchronous training.
    """

    def __init__(self, synchrony: Synchrony | None, replayed: Sequence[int] | None = None) -> None:
        """Begins at clock 0.

        Args:
            synchrony: Same as the attribute.
            replayed: Which version to read at each clock; None for the newest.
        """
        self.synchrony = synchrony
        self._replayed = replayed
        self._gate = None if synchrony is None else VersionGate(synchrony)
        self._read = array.array("q")  # version by clock, of millions of steps
        self._waited_s = self._finishing_s = 0.0
        self._owner: Owner | None = None
        self._compute: Callable[[Values], Callable[[], Values]] | None = None  # the last step
        self._versions: dict[int, Values] = {}
        self._newest = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._updates: queue.SimpleQueue[Callable[[], Values]] = queue.SimpleQueue()
        self._server: threading.Thread | None = None

    @property
    def waiting_seconds(self) -> float:
        """How long the worker has waited for versions, and for the server to apply all of its steps."""
        return self._waited_s + self._finishing_s

    @property
    def has_failed(self) -> bool:
        """Whether an update has failed, after which there are no versions before `recover`."""
        return self._error is not None

    def check_bsp(self, what: str) -> None:
        """Refuses what knows no versions of the weights, where workers are to read stale ones."""
        if self.synchrony is not None:
            raise GraphError(f"synchrony={self.synchrony}, but {what} has no versions of the weights, expected "
                             "`fit`; train with that, or with synchrony='bsp'.")

    def log(self) -> VersionLog:
        """Returns the versions that this rank has read."""
        return VersionLog(str(self.synchrony), (tuple(self._read),), (self._waited_s,))

    def step(self, owner: Owner, compute: Callable[[Values], Callable[[], Values]]) -> None:
        """Makes a step of the worker, on the version that it may read.

        Args:
            owner: Whose step it is; before one of another owner, the server applies all steps.
            compute: Computes a step, given values of the weights; returns what applies it, with the gradients of all
                ranks, and returns the values of the weights after it. The server calls that.

        Raises:
            GraphError: If the log that is replayed has no such clock.
        """
        assert self._gate is not None
        if owner is not self._owner:
            self.finish()
            self._owner, self._versions = owner, {self._newest: owner.present()}
        if self._server is None:
            self._server = threading.Thread(target=self._serve, name="tf_poseidon server", daemon=True)
            self._server.start()
        clock = len(self._read)
        begin = time.monotonic()
        with self._changed:
            version = self._wait_for(self._oldest(clock))
            values = self._versions[version]
        self._waited_s += time.monotonic() - begin
        update = compute(values)
        self._compute = compute
        self._read.append(version)
        with self._changed:
            self._gate.note_push(time.monotonic())
        self._updates.put(update)

    def finish(self) -> None:
        """Waits until the server has applied all steps; the program may then read and change weights."""
        if self._server is None:
            return
        begin = time.monotonic()
        with self._changed:
            self._wait_for(len(self._read))
        self._finishing_s += time.monotonic() - begin
        self._owner, self._compute, self._versions = None, None, {}

    def recover(self, communicator: Communicator) -> None:
        """Lets the worker go on from the newest version, if an update has failed; on all ranks, which call this.

        Workers have run ahead of it, some farther than others, and exchanges of a site are matched by their numbers:
        who has sent less computes the last step again, until all have sent as often. None of these steps is applied or
        has a clock.
        """
        if self._error is None or communicator.failure is not None:
            return
        assert self._owner is not None and self._compute is not None and self.synchrony is not None
        of_ranks = communicator.gather("clocks/failed", np.array([[self._newest, len(self._read)]], np.int64))
        newest, sent = of_ranks[:, 0], of_ranks[:, 1]
        values = self._versions[self._newest]
        for _ in range(max(sent) - len(self._read)):
            self._compute(values)
        if (others := np.flatnonzero(newest != newest[0])).size:
            self._error = GraphError(
                f"The update of version {newest[0] + 1} has failed on rank 0, but that of version "
                f"{newest[others[0]] + 1} on rank {others[0]}, expected the same, so ranks have different weights; "
                "start the program again from a checkpoint.")
            return
        self._owner.restore(values, communicator)
        del self._read[self._newest:]
        self._gate = VersionGate(self.synchrony)
        self._updates = queue.SimpleQueue()  # whose thread has ended
        self._server = self._owner = self._compute = self._error = None
        self._versions = {}

    def _oldest(self, clock: int) -> int:
        """Returns the oldest version that the worker may read at a clock."""
        assert self._gate is not None
        if self._replayed is None:
            return clock - self._gate.bound(clock, self._newest)
        if clock >= len(self._replayed):
            raise GraphError(f"versions= has {len(self._replayed)} clocks, but this run has more; train for as many "
                             "steps as the run that has written them.")
        return self._replayed[clock]

    def _wait_for(self, oldest: int) -> int:
        """Waits for a version; returns the newest one that is there, or that of a replayed run."""
        self._changed.wait_for(lambda: self._error is not None or self._newest >= oldest)
        if self._error is not None:
            raise self._error
        version = self._newest if self._replayed is None else oldest
        for former in [number for number in self._versions if number < version]:
            del self._versions[former]
        return version

    def _serve(self) -> None:
        """Applies steps in their order, until one fails."""
        assert self._gate is not None
        while True:
            update = self._updates.get()
            try:
                values = update()
            except BaseException as error:  # which the worker raises
                with self._changed:
                    self._error = error
                    self._changed.notify()
                return
            with self._changed:
                self._newest += 1
                if self._replayed is None:
                    self._versions.clear()  # nobody will read an older one
                self._versions[self._newest] = values
                self._gate.note_version(time.monotonic())
                self._changed.notify()


def log_of_ranks(clocks: Clocks, communicator: Communicator) -> VersionLog:
    """Returns the versions that all ranks have read; all ranks call this."""
    own = clocks.log()
    (versions,), (seconds,) = own.versions, own.waiting_seconds
    of_ranks = communicator.gather("clocks/versions", np.array([versions], np.int64).reshape(1, -1))
    waiting = communicator.gather("clocks/waiting", np.array([[seconds]]))
    return VersionLog(own.synchrony, tuple(tuple(map(int, row)) for row in of_ranks), tuple(map(float, waiting[:, 0])))
