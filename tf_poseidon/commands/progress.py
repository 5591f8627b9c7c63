"""Shows on the terminal what a long command is doing.

Tests: tests/saved/test_saved_commands.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import sys

from rich import console
from rich import progress


@contextlib.contextmanager
def shown() -> Iterator[Callable[[str], None]]:
    """A context with a function to call with the name of each phase; it shows the phase and its time."""
    columns = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"), progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console.Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("loading TensorFlow")
        yield lambda what: bar.update(task, description=what)
