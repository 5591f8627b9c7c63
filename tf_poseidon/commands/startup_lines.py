"""Keeps the lines from the terminal that TensorFlow writes whenever it is imported, whatever its level of logs.

A process of its own leaves them out, so that all else is shown even if TensorFlow ends this one.

Tests: tests/training/test_explaining.py.
"""

from collections.abc import Iterator
import contextlib
import os
import subprocess
import sys

LEVEL, QUIET = "TF_CPP_MIN_LOG_LEVEL", "3"  # which commands set, unless their user has

_LINES = r"^WARNING: All log messages before absl::InitializeLog|^I0000 |^To enable the following instructions: "


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """A context in which standard error has none of these lines, unless the user has set a level of logs."""
    command = ["grep", "--line-buffered", "-v", "-E", _LINES]
    try:
        sys.stderr.flush()
        others = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2) if os.environ.get(LEVEL) == QUIET else None
    except (OSError, AttributeError):  # no grep, no process, or no standard error
        others = None
    if others is None:
        yield
        return
    assert others.stdin is not None
    terminal = os.dup(2)
    os.dup2(others.stdin.fileno(), 2)
    others.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)
        others.wait()
