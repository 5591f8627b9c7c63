"""Errors of a rank: their texts for others; and the end of the job where a program catches one that only it has.

An error that nobody catches ends the job, by `runtime`. One that the program catches may be that of all ranks, as when
a tuner's trial fails: then they go on alike. If it is not, the others would wait for this rank until their time is up.
So a rank with an error tells the others, without waiting for them, and ends the job if they do not have it too.

Tests: tests/unit/test_errors.py, tests/faults/test_failures.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import re
import socket
import sys
import threading
import traceback
import types
from typing import TYPE_CHECKING
import zlib

import numpy as np

from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import LONGEST
from tf_poseidon.errors import PoseidonError
from tf_poseidon.errors import shortened

if TYPE_CHECKING:  # it loads TensorFlow
    from tf_poseidon.job.communicator import Communicator

SECONDS = 10.0  # which ranks may be apart when they have an error alike


def cause(rank: int, error: BaseException) -> str:
    """Returns the sentence by which other ranks know an error of this one."""
    text = "".join(traceback.format_exception_only(type(error), error))
    notes = getattr(error, "__notes__", [])  # which Python prints since 3.11
    text = text.rstrip("\n").removesuffix("\n".join(notes))
    # TensorFlow appends lines about its nodes to the message.
    text = re.sub(r"(?m)^\s*\[\[.*\n?", "", text).strip()
    return " ".join([f"Rank {rank} on {socket.gethostname()} failed: {shortened(text)}", *notes])


def printed(error: BaseException, trace: types.TracebackType | None) -> str:
    """Returns an error with its traceback, as Python prints it, with long messages shortened."""
    text = "".join(traceback.format_exception(type(error), error, trace))
    for cause_error in _chain(error):
        if len(message := str(cause_error)) > LONGEST:
            text = text.replace(message, shortened(message))
    if sys.version_info < (3, 11):  # whose tracebacks have no notes
        text += "".join(f"{note}\n" for note in getattr(error, "__notes__", []))
    return text


def explain(error: BaseException, sentence: str) -> None:
    """Adds a sentence to what is printed of an error, whose type stays: programs catch it by that."""
    notes = getattr(error, "__notes__", [])
    if sentence not in notes:
        error.__notes__ = [*notes, sentence]  # type: ignore[attr-defined]  # since Python 3.11


class ErrorWatch:
    """Watches over errors of this rank that the program may catch."""

    def __init__(self, communicator: "Communicator") -> None:
        self._communicator = communicator
        self._over: threading.Event | None = None  # set when all ranks have had the last error, or the job has ended

    def note(self, error: BaseException, what: str) -> None:
        """Ends the job unless all ranks have an error like this within `SECONDS`, whatever the program does meanwhile.

        Args:
            error: The error, which the caller raises.
            what: Where it came from, the same on all ranks: "fit".
        """
        self._communicator.end_turns()  # the step that failed may have had one
        # Loops end by the end of their data.
        if isinstance(error, (JobEndedError, StopIteration)) or type(error).__name__ == "OutOfRangeError" or (
                self._communicator.failure is not None):
            return
        self.settle()
        rank = self._communicator.rank
        reason = cause(rank, error)
        digests = np.zeros(self._communicator.size, np.int64)
        digests[rank] = zlib.crc32(f"{what} {type(error).__name__}".encode(errors="replace")) + 1
        wait = self._communicator.submit("failures", digests)
        self._over = threading.Event()
        threading.Thread(target=self._compare, args=(wait, reason, self._over), daemon=True).start()
        threading.Thread(target=self._end, args=(reason, self._over), daemon=True).start()

    def settle(self) -> None:
        """Waits until the last error turned out to be that of all ranks, or has ended the job."""
        if self._over is not None:
            self._over.wait(2 * SECONDS)

    def _compare(self, wait: Callable[[], np.ndarray], reason: str, over: threading.Event) -> None:
        try:
            of_ranks = wait()
            if (of_ranks != of_ranks[0]).any():
                self._communicator.abort(reason)
        except PoseidonError:  # the job has ended, or this is a child of a rank
            pass
        finally:
            over.set()

    def _end(self, reason: str, over: threading.Event) -> None:
        if not over.wait(SECONDS):
            self._communicator.abort(reason)
            over.set()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, and those during whose handling it came."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and not any(current is other for other in seen):
        seen.append(current)
        yield current
        current = current.__cause__ or current.__context__
