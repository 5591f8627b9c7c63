"""Which variables hold summands from step to step: their one-process value is the sum over all ranks.

Those in which optimizers accumulate gradients do so for good: each rank accumulates the gradients of its own rows, and
one synchronisation is enough when the sum is used. Those of metrics do so until they are read: from the first step of a
loop over batches on.

Tests: tests/training/test_training.py, tests/faults/test_failures.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import threading
import weakref

import numpy as np
import tensorflow as tf

from tf_poseidon.errors import GraphError
from tf_poseidon.job import agreement
from tf_poseidon.job.communicator import Communicator


class Held:
    """The variables that hold summands."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # By identity: (reference to the variable, whether a partitioned function uses it).
        self._variables: dict[int, tuple[weakref.ref[tf.Variable], bool]] = {}
        self._until_read: tuple[tf.Variable, ...] = ()
        self._steps = 0  # since these hold summands
        self._thread = 0  # in which these steps run

    def add(self, variables: Iterable[tf.Variable]) -> None:
        """Makes variables hold summands. Their values have been the same on all ranks: only rank 0 keeps them."""
        for variable in variables:
            if not self.holds(variable):
                self._variables[id(variable)] = weakref.ref(variable), False
                if self._communicator.rank != 0:
                    variable.assign(tf.zeros_like(variable))

    def holds(self, variable: tf.Variable) -> bool:
        """Whether a `tf.Variable` holds summands."""
        entry = self._variables.get(id(variable))
        return entry is not None and entry[0]() is variable

    def use(self, variables: Iterable[tf.Variable]) -> None:
        """Notes that a partitioned function uses variables as summands."""
        self._variables |= {id(variable): (weakref.ref(variable), True) for variable in variables}

    def used(self, variables: Iterable[tf.Variable]) -> list[tf.Variable]:
        """Returns the variables that a partitioned function uses as summands."""
        return [variable for variable in variables if self.holds(variable) and self._variables[id(variable)][1]]

    def release(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Makes variables whole, for a function that is not partitioned.

        Args:
            variables: Variables that hold summands.
            name: The name of the function.

        Raises:
            PoseidonError: If a partitioned function uses one as a summand.
        """
        used = self.used(variables)
        if used:
            raise GraphError(
                f"The function '{name}' was not partitioned, but a partitioned one accumulates "
                f"gradients in '{used[0].name.partition(':')[0]}', expected both or neither to be partitioned; give "
                "all batches the same structure.")
        for variable, value in zip(variables, self._sums(variables)):
            del self._variables[id(variable)]
            variable.assign(value)

    def hold_until_read(self, variables: tuple[tf.Variable, ...]) -> None:
        """Makes variables hold summands until they are read, before steps that need none of them whole.

        Args:
            variables: The variables; others that hold summands until they are read become whole.
        """
        if variables is not self._until_read:
            self.end()
            self.add(variables)
            for variable in variables:
                variable.is_own = True
            self._until_read, self._steps, self._thread = variables, 0, threading.get_ident()

    def count(self, steps: int) -> None:
        """Counts steps that were made since; ranks compare how many when variables become whole."""
        self._steps += steps

    def check_reader(self, variable: tf.Variable) -> None:
        """Refuses to read a variable in another thread while it holds summands: ranks would read at different steps."""
        if threading.get_ident() != self._thread and any(variable is held for held in self._until_read):
            raise GraphError(
                f"'{variable.name.partition(':')[0]}', a variable of a metric, was read in another thread while fit or "
                "evaluate ran, where each rank has a part of it; read metrics in a callback's methods for batches.")

    def whole(self, variables: Sequence[tf.Variable]) -> list[np.ndarray]:
        """Returns the one-process values of variables, which all ranks read: some may hold summands until then.

        Raises:
            JobError: If ranks have made different numbers of steps.
        """
        held = [variable for variable in variables if any(variable is other for other in self._until_read)]
        if not held:
            return [_of_rank(variable) for variable in variables]
        steps_of_ranks = np.zeros(self._communicator.size, np.int64)
        steps_of_ranks[self._communicator.rank] = self._steps
        wait = self._communicator.submit("held/steps", steps_of_ranks)
        sums = self._sums(held)
        steps = wait()
        agreement.check_steps(steps)
        values = {id(variable): value for variable, value in zip(held, sums)}
        return [values[id(variable)] if id(variable) in values else _of_rank(variable) for variable in variables]

    def end(self) -> None:
        """Makes the variables whole that hold summands until they are read, on all ranks."""
        values = self.whole(self._until_read)
        variables, self._until_read = self._until_read, ()
        for variable, value in zip(variables, values):
            del self._variables[id(variable)]
            variable.is_own = False
            variable.assign(value)

    def note_error(self) -> int:
        """Lets ranks have made different numbers of steps, as when an error has ended a loop.

        Returns:
            How many variables hold summands until they are read, the same on all ranks if they have failed alike; they
            become whole when they are next used.
        """
        self._steps = 0
        return len(self._until_read)

    def _sums(self, variables: Sequence[tf.Variable]) -> list[np.ndarray]:
        """Returns the sums of variables over all ranks; they share messages."""
        waits = [self._communicator.submit(f"held/{i}", _of_rank(variable)) for i, variable in enumerate(variables)]
        return [wait() for wait in waits]


def _of_rank(variable: tf.Variable) -> np.ndarray:
    """Returns what this rank has of a variable; reading one that is synchronised then would give its sum."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype).numpy()
