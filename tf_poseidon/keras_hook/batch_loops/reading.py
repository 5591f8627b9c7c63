"""When logs of fit and evaluate, and outputs of predict, are read: ranks add up metrics then, and in no other step.

Reading exchanges, so all ranks read after the same steps: after the last one of an epoch; and before, where rank 0
shows a progress bar, some times a second. Where a callback may read logs or metrics after a batch, each step exchanges
them.

Tests: tests/training/test_training.py.
"""

from collections.abc import Set
import contextlib
import contextvars
import time
from typing import Any

import keras
import numpy as np

from tf_poseidon.base.context_values import holding
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.one_process import late_results

_SECONDS = 0.2  # from one reading for a progress bar to the next


class Logs(dict[str, Any]):
    """The logs of a step that no one has read: for callbacks, empty.

    Attributes:
        pending: The `late_results.Pending`.
    """

    def __init__(self, pending: late_results.Pending) -> None:
        super().__init__()
        self.pending = pending


class Loop:
    """A loop of Keras over batches, whose logs are read after some steps.

    Attributes:
        model: The model.
        phase: "train", "test" or "predict".
    """

    def __init__(self, model: keras.Model, phase: str, communicator: Communicator, is_shown: bool) -> None:
        """Makes a loop.

        Args:
            model, phase: Same as the attributes.
            communicator: This rank's communicator.
            is_shown: Whether rank 0 shows logs while it runs, the same on all ranks.
        """
        self.model = model
        self.phase = phase
        self._communicator = communicator
        self._is_shown = is_shown
        self._left, self._interval = 1, 1  # executions to the next reading, and from one to the next
        self._last = time.monotonic()

    def logs(self, results: Any) -> Any:
        """Returns the logs of an execution, given its results."""
        if not isinstance(results, late_results.Pending):
            return results
        self._left -= 1
        if not self._is_shown or self._left:
            return Logs(results)
        logs = results.read()
        now = time.monotonic()
        factor = min(2.0, max(0.5, _SECONDS / max(now - self._last, 1e-6)))
        self._last, interval = now, max(1, round(self._interval * factor))
        self._interval = self._left = int(self._communicator.broadcast("progress", np.array(interval)))
        return logs


_loop: contextvars.ContextVar[Loop | None] = contextvars.ContextVar("loop", default=None)


def loop(model: keras.Model, phase: str, needs: Set[str]) -> contextlib.AbstractContextManager[None]:
    """A context in which Keras loops over batches.

    Args:
        model: The model.
        phase: "train", "test" or "predict".
        needs: What callbacks need, `coordinated_callbacks.needs_of`.
    """
    job = model.distribute_strategy.extended.job
    # Verify mode compares whole variables; a model with its own method may read what it likes.
    is_read = f"logs of {phase}" in needs or job.verifier is not None or not keras_compat.reads_logs_at_end(model)
    return holding(_loop, None if is_read else Loop(model, phase, job.communicator, "show progress" in needs))


def no_loop() -> contextlib.AbstractContextManager[None]:
    """A context in which Keras is in no loop over batches: what a method for one batch returns is for its caller."""
    return holding(_loop, None)


def current(model: keras.Model | None, phase: str) -> Loop | None:
    """Returns the `Loop` of a model, None if it is in none, or in one whose logs are read in each step."""
    loop = _loop.get()
    return loop if loop is not None and loop.model is model and loop.phase == phase else None


def read(logs: Any) -> Any:
    """Returns the logs of the last step of a loop, which all ranks read together."""
    return logs.pending.read() if isinstance(logs, Logs) else logs
