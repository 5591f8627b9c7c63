"""What a thread is in: a function of one process, a step of it, or a loop that takes what `strategy.run` is given.

Tests: tests/training/test_distribution.py, tests/graphs/test_unroll.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import functools
import threading
from typing import Any
from typing import Protocol


class Runner(Protocol):
    """What `strategy.run` may hand functions to: `stepping.Steps`."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function; returns its result."""


class _Thread(threading.local):
    """Where each thread is."""

    is_inside = False
    is_step = False
    runner: Runner | None = None


_thread = _Thread()


@contextlib.contextmanager
def _with(name: str, value: object) -> Iterator[None]:
    before = getattr(_thread, name)
    setattr(_thread, name, value)
    try:
        yield
    finally:
        setattr(_thread, name, before)


def is_inside() -> bool:
    """Whether this thread traces, or eagerly runs, a function of one process: then there is one replica."""
    return _thread.is_inside


def inside() -> contextlib.AbstractContextManager[None]:
    """A context in which this thread is in a function of one process."""
    return _with("is_inside", True)


def is_step() -> bool:
    """Whether this thread is in a step of `Steps`."""
    return _thread.is_inside and _thread.is_step


def as_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in which `is_step` holds."""
    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with _with("is_step", True):
            return function(*args, **kwargs)

    return step


def handing_to(runner: Runner) -> contextlib.AbstractContextManager[None]:
    """A context in which `strategy.run` hands functions to a runner."""
    return _with("runner", runner)


def current_runner() -> Runner | None:
    """Returns what `strategy.run` hands functions to in this thread, None if it runs them itself."""
    return None if _thread.is_inside else _thread.runner
