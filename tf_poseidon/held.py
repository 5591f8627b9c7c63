"""Which variables hold summands from step to step: those in which optimizers accumulate gradients.

Each rank accumulates the gradients of its own rows; one synchronisation is enough when the sum is used.

Tests: tests/training/test_training.py, tests/faults/test_failures.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import weakref

import tensorflow as tf

from tf_poseidon.communicator import Communicator
from tf_poseidon.errors import GraphError


class Held:
    """The variables that hold summands."""

    def __init__(self) -> None:
        self._variables = {}  # by identity: (reference to the variable, whether a partitioned function uses it)

    def add(self, variables: Iterable[tf.Variable], rank: int) -> None:
        """Makes variables hold summands. Their values have been the same on all ranks: only rank 0 keeps them."""
        for variable in variables:
            if not self.holds(variable):
                self._variables[id(variable)] = weakref.ref(variable), False
                if rank != 0:
                    variable.assign(tf.zeros_like(variable))

    def holds(self, variable: tf.Variable) -> bool:
        """Whether a `tf.Variable` holds summands."""
        found = self._variables.get(id(variable))
        return found is not None and found[0]() is variable

    def use(self, variables: Iterable[tf.Variable]) -> None:
        """Notes that a partitioned function uses variables as summands."""
        self._variables |= {id(variable): (weakref.ref(variable), True) for variable in variables}

    def used(self, variables: Iterable[tf.Variable]) -> list[tf.Variable]:
        """Returns the variables that a partitioned function uses as summands."""
        return [variable for variable in variables if self.holds(variable) and self._variables[id(variable)][1]]

    def release(self, variables: Sequence[tf.Variable], communicator: Communicator, name: str) -> None:
        """Makes variables whole, for a function that is not partitioned.

        Args:
            variables: Variables that hold summands.
            communicator: This rank's communicator.
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
        waits = [communicator.submit(f"held/{name}/{i}", variable.numpy()) for i, variable in enumerate(variables)]
        for variable, wait in zip(variables, waits):
            variable.assign(wait())
            del self._variables[id(variable)]
