"""Values that hold in a context: in the thread that has entered it, until it is left.

Tests: tests/training/test_distribution.py, tests/training/test_training.py.
"""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def holding(variable: contextvars.ContextVar[_T], value: _T) -> Iterator[None]:
    """A context in which a variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
