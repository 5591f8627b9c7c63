"""Executions of several steps, as `compile(steps_per_execution=n)` asks for, in which steps overlap.

Keras runs the steps of an execution in a loop, one after the other. Here they are one graph, in which a step waits for
the variables that it reads, and for nothing else: its first layers run while gradients of the step before still travel.

Tests: tests/training/test_overlapping.py, tests/faults/test_failures.py.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon.data import datasets
from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import JobError
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import stepping
from tf_poseidon.one_process import tracing


def applies(model: keras.Model) -> bool:
    """Whether several steps of a model are an execution, or verify mode compares steps outside of graphs."""
    return model.steps_per_execution > 1 or model.distribute_strategy.extended.job.verifier is not None


def execute(steps: stepping.Steps, step: Any, strategy: tf.distribute.Strategy, iterator: tf.data.Iterator,
            number: int, form: tracing.ResultForm) -> Any:
    """Takes batches from an iterator, and runs a step for each; returns the results of the last step.

    Args:
        steps: The `stepping.Steps`.
        step: What is done with a batch.
        strategy: The `PoseidonStrategy`.
        iterator: The iterator.
        number: The number of batches. Fewer are taken when they end.
        form: What the caller needs of the results.

    Raises:
        StopIteration: If there are none.
        JobError: If ranks have different numbers of batches. Those that are taken together, up to 8, have not run then.
    """
    batches = _Batches(iterator, strategy.extended.job.communicator)
    specs = datasets.specs(calls.without_missing(iterator.element_spec))
    specs = [spec for spec in tf.nest.flatten(specs, expand_composites=True) if isinstance(spec, tf.TensorSpec)]
    with strategy.scope():
        results = steps.run_unrolled(step, batches.take, number, specs, form)
    # The end of the data is noticed by an execution without batches; an error that all ranks have, after these steps.
    if batches.error is not None and not (batches.taken and isinstance(batches.error, StopIteration)):
        raise batches.error
    return results


class _Batches:
    """The batches of an execution, of which all ranks take the same number at a time.

    Attributes:
        taken: How many were taken.
        error: Why there are no more, if so.
    """

    def __init__(self, iterator: tf.data.Iterator, communicator: Communicator | None) -> None:
        self.taken = 0
        self.error: Exception | None = None
        self._iterator = iterator
        self._communicator = communicator

    def take(self, number: int) -> list[Any]:
        """Returns a number of batches; fewer, if there are no more.

        Raises:
            JobError: If ranks have different numbers of batches.
        """
        batches: list[Any] = []
        if self.error is not None:
            return batches
        while len(batches) < number and self.error is None:
            try:
                batches.append(calls.without_missing(next(self._iterator)))
            except Exception as error:
                self.error = error
        if self._communicator is not None:
            _compare_batches(self._communicator, len(batches), self.error)
        self.taken += len(batches)
        return batches


def _compare_batches(communicator: Communicator, taken: int, error: Exception | None) -> None:
    """Ends the job unless all ranks have taken as many batches: they would make different steps.

    All raise the same error, so that it is the one with which the job ends, whichever rank is first.

    Args:
        communicator: The ranks.
        taken: How many this rank has taken.
        error: Why it has not taken more, if it has not.

    Raises:
        JobError: If they have not.
    """
    has_failed = error is not None and not isinstance(error, StopIteration)
    try:
        of_ranks, failures = communicator.gather("execution/batches", np.array([[taken, has_failed]])).T
        if (of_ranks == of_ranks[0]).all():
            return
        fewest = min(range(communicator.size), key=lambda rank: (of_ranks[rank], not failures[rank]))
        most = int(np.argmax(of_ranks))
        reason = f"ended; give all ranks as many as rank {most} has"
        if has_failed:
            reason = f"failed with {type(error).__name__}: " + str(error).split("\n", maxsplit=1)[0]
        reason = communicator.broadcast_text("execution/reason", reason, fewest)
    except JobEndedError as ended:
        raise ended from error
    raise JobError(f"Rank {fewest} has {of_ranks[fewest]} batches for the next steps of an execution, expected "
                   f"{of_ranks[most]}: its data {reason}.") from error
