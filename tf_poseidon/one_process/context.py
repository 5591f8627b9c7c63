"""What a thread is in: a function of one process, a step of it, or a loop that takes what `strategy.run` is given.

Tests: tests/training/test_distribution.py, tests/graphs/test_unroll.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import contextvars
import functools
from typing import Any
from typing import Protocol

from tf_poseidon.base.context_values import holding


class Runner(Protocol):
    """What `strategy.run` may hand functions to: `stepping.Steps`."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function; returns its result."""


_is_inside = contextvars.ContextVar("is_inside", default=False)
_is_step = contextvars.ContextVar("is_step", default=False)
_is_renewing = contextvars.ContextVar("is_renewing", default=False)
_runner: contextvars.ContextVar[Runner | None] = contextvars.ContextVar("runner", default=None)


def is_inside() -> bool:
    """Whether this thread traces, or eagerly runs, a function of one process: then there is one replica."""
    return _is_inside.get()


def inside() -> contextlib.AbstractContextManager[None]:
    """A context in which this thread is in a function of one process."""
    return holding(_is_inside, True)


def is_step() -> bool:
    """Whether this thread is in a step of `Steps`."""
    return _is_inside.get() and _is_step.get()


def as_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in which `is_step` holds."""
    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with holding(_is_step, True):
            return function(*args, **kwargs)

    return step


def renewing() -> contextlib.AbstractContextManager[None]:
    """A context in which this thread calls graphs that are made anew when functions in them are traced anew."""
    return holding(_is_renewing, True)


def is_renewing() -> bool:
    """Whether what this thread traces is made anew when functions in it are traced anew."""
    return _is_renewing.get()


def handing_to(runner: Runner) -> contextlib.AbstractContextManager[None]:
    """A context in which `strategy.run` hands functions to a runner."""
    return holding(_runner, runner)


def current_runner() -> Runner | None:
    """Returns what `strategy.run` hands functions to in this thread, None if it runs them itself."""
    return None if _is_inside.get() else _runner.get()
