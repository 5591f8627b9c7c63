"""Disables Python's garbage collector while functions are traced and passes run: it takes a third of their time.

Tests: tests/graphs/test_partition.py.
"""

from collections.abc import Iterator
import contextlib
import gc


@contextlib.contextmanager
def unsearched() -> Iterator[None]:
    """A context in which the garbage collector is disabled."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
