"""Ctrl-C: tells it from errors, also where compiled code turns it into one.

Python raises KeyboardInterrupt wherever it is. Where that is within a call from C that looks at no exception, such as
an array that becomes a tensor, it ends as "SystemError: … returned a result with an exception set", and whoever reads
that looks for a defect.

Tests: tests/unit/test_interrupts.py.
"""

import signal
import threading
import types

_noted = False


def note() -> None:
    """Notes Ctrl-C from here on; a program that handles the signal itself keeps its handler."""
    if (signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and threading.current_thread() is threading.main_thread()):  # only it may set handlers
        signal.signal(signal.SIGINT, _interrupt)


def is_interrupt(error: BaseException) -> bool:
    """Returns whether an exception comes of Ctrl-C."""
    return isinstance(error, KeyboardInterrupt) or _noted and isinstance(error, SystemError)


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    global _noted
    _noted = True
    signal.default_int_handler(number, frame)
