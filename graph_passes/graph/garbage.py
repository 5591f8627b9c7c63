"""Disables Python's garbage collector while passes run: it takes a third of their time, and finds nothing.

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
