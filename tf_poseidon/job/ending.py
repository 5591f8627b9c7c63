"""How a rank ends, so that no other is left waiting for it, and the launcher says what happened.

A job ends in one of two ways. At the normal end, all ranks say goodbye to each other, and MPI is finalized.
After an exception, a rank sends the reason to the others, and all leave with a non-zero status; MPI is not
finalized then, since that would wait for ranks that never come.

Only the process that has joined leaves: its forks have the rank's exit handlers too, and run them when they end.

Tests: tests/unit/test_ending.py, tests/faults/test_failures.py.
"""

import atexit
from collections.abc import Callable
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
import types
from typing import NoReturn
from typing import TYPE_CHECKING

from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import engines
from tf_poseidon.job import failures
from tf_poseidon.job import log_lines
from tf_poseidon.job.host import interrupts

if TYPE_CHECKING:  # it loads TensorFlow
    from tf_poseidon.job.communicator import Communicator

_WORDS_OF_RANK_0_S = 5.0  # how long other ranks wait for them

# As `sys.excepthook`.
_Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], object]


class Ending:
    """What happens when this process ends, which is a rank.

    Attributes:
        communicator: Its communicator.
        errors: Watches over its errors.
        failure_status: The exit status after an exception.
    """

    def __init__(self, communicator: "Communicator", engine: engines.Engine) -> None:
        """Guards the end of this process.

        Args:
            communicator: Its communicator.
            engine: The job's engine.
        """
        self.communicator = communicator
        self.errors = failures.ErrorWatch(communicator)
        self.failure_status = 1
        self._engine = engine
        self._pid = os.getpid()
        self._exit = os._exit

    def guard(self) -> None:
        """Lets what follows be done when the process ends, however it does."""
        interrupts.note()
        sys.excepthook = functools.partial(self.abort, sys.excepthook)
        os._exit = self.exit
        atexit.register(self.leave)

    def exit(self, status: int) -> NoReturn:
        """`os._exit` of a rank: with status 0 before the end of the job, the launcher would report success."""
        if os.getpid() == self._pid and status == 0:
            cause = (f"Rank {self.communicator.rank} on {socket.gethostname()} called os._exit(0) before the job had "
                     "ended; let the program reach its end, or call sys.exit.")
            _say(f"[rank {self.communicator.rank}] The job has ended. {cause}\n")
            flush()
            self.communicator.abort(cause)
            self._end(1)
        self._exit(status)

    def abort(self, previous_hook: _Hook, kind: type[BaseException], error: BaseException,
              trace: types.TracebackType | None) -> None:
        """The excepthook of a rank: the first failure is the last thing that any rank prints."""
        if os.getpid() != self._pid:
            previous_hook(kind, error, trace)
            return
        cause = self.communicator.failure
        interrupted = interrupts.is_interrupt(error)
        if interrupted:
            # Ctrl-C reaches all ranks; where it happened to interrupt the program says nothing.
            if self.communicator.rank == 0:
                _say("[rank 0] The job was interrupted.\n")
            cause = cause or f"Rank {self.communicator.rank} was interrupted."
        elif cause is None:
            if previous_hook is sys.__excepthook__:
                # At once: where ranks have an error alike, the first that has printed it ends the others.
                _say(failures.printed(error, trace))
            else:
                previous_hook(kind, error, trace)
            cause = failures.cause(self.communicator.rank, error)
        else:
            # This exception is only the echo of that failure; its own traceback would hide the cause.
            _say(f"[rank {self.communicator.rank}] The job has ended. {cause}\n")
        flush()
        self.communicator.abort(cause)
        if interrupted and self.communicator.rank != 0:
            # The launcher ends rank 0 when this rank ends, and this one when rank 0 does.
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_WORDS_OF_RANK_0_S)
        self._end(128 + signal.SIGINT if interrupted else self.failure_status)

    def leave(self) -> None:
        """Leaves at the normal end of the program, once all ranks have reached theirs."""
        if os.getpid() != self._pid:
            return
        self.errors.settle()
        try:
            self.communicator.goodbye()
            os._exit = self._exit
        except PoseidonError as error:
            _say(f"[rank {self.communicator.rank}] The job has ended. {error}\n")
            flush()
            # MPI is not finalized; and with status 0, the launcher would report success.
            self._end(1)

    def _end(self, status: int) -> NoReturn:
        """Ends this process after a failure of the job, and the launcher if that cannot notice it."""
        if self.communicator.has_lost_a_host:
            self._engine.end_launcher()
        self._engine.disconnect()
        self._exit(status)


def report_and_exit(previous_hook: _Hook, kind: type[BaseException], error: BaseException,
                    trace: types.TracebackType | None) -> None:
    """The excepthook of a process that could not join its job, whose engine may keep it from ending as usual."""
    previous_hook(kind, error, trace)
    flush()
    os._exit(1)


def _say(text: str) -> None:
    log_lines.say(text, logging.ERROR)


def flush() -> None:
    """Writes what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed or broken: nothing to flush
            stream.flush()
