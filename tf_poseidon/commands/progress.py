"""Shows on the terminal what a long command is doing.

Tests: tests/saved/test_saved_commands.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
import sys
from typing import TextIO

from rich import console
from rich import progress

from tf_poseidon.commands import startup_lines


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """A context with a function to call with the name of each phase; it shows the phase and its time.

    It begins before TensorFlow is imported.
    """
    columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn())
    with _terminal() as terminal, startup_lines.left_out(), progress.Progress(
            *columns, console=console.Console(file=terminal), transient=True) as bar:
        task = bar.add_task("loading TensorFlow")
        yield lambda what: bar.update(task, description=what)


def _terminal() -> contextlib.AbstractContextManager[TextIO]:
    """Returns standard error as a file of its own, which nothing filters."""
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w")
    except (OSError, ValueError):  # it is no file
        return contextlib.nullcontext(sys.stderr)
