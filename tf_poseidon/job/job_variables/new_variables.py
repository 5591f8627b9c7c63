"""The variables that this process has created and that do not have rank 0's values yet.

Tests: tests/training/test_training.py, tests/faults/test_failures.py.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import re

import tensorflow as tf

from tf_poseidon.errors import GraphError
from tf_poseidon.job.communicator import Communicator

_NAME = "variables"  # of what is exchanged here


class NewVariables:
    """Variables that wait for rank 0's values."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._waiting: list[tf.Variable] = []

    def add(self, variable: tf.Variable) -> None:
        """Lets a variable wait."""
        self._waiting.append(variable)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """A context whose variables belong to this rank alone, as what rank 0 creates to save a model."""
        number = len(self._waiting)
        try:
            yield
        finally:
            del self._waiting[number:]

    def broadcast(self) -> None:
        """Gives the variables that wait rank 0's values.

        Raises:
            PoseidonError: If the variables that this rank has created differ from rank 0's.
        """
        if not self._waiting:
            return
        variables, self._waiting = self._waiting, []
        communicator = self._communicator
        with tf.init_scope():
            self._check_same([_describe(variable) for variable in variables])
            numbers = [variable for variable in variables if variable.dtype != tf.string]
            waits = [communicator.submit(f"{_NAME}/{i}", variable.numpy(), root=0)
                     for i, variable in enumerate(numbers)]
            for variable, wait in zip(numbers, waits):
                value = wait()
                if communicator.rank != 0:
                    variable.assign(value)
            for i, variable in enumerate(variable for variable in variables if variable.dtype == tf.string):
                self._broadcast_strings(variable, f"{_NAME}/strings/{i}")

    def _broadcast_strings(self, variable: tf.Variable, name: str) -> None:
        """Gives a variable with strings, of any bytes, rank 0's value."""
        own_bytes = tf.io.serialize_tensor(variable.read_value()).numpy()
        of_rank_0 = self._communicator.broadcast_text(name, own_bytes.decode("latin-1")).encode("latin-1")
        if of_rank_0 != own_bytes:
            variable.assign(tf.io.parse_tensor(of_rank_0, tf.string))

    def _check_same(self, descriptions: Sequence[str]) -> None:
        rank = self._communicator.rank
        of_rank_0 = self._communicator.broadcast_text(_NAME, "\n".join(descriptions)).split("\n")
        if list(map(_without_numbers, descriptions)) == list(map(_without_numbers, of_rank_0)):
            return
        length = max(len(descriptions), len(of_rank_0))
        padded = [[*lines, *["missing"] * (length - len(lines))] for lines in (descriptions, of_rank_0)]
        number, (here, there) = next((i, pair) for i, pair in enumerate(zip(*padded))
                                     if _without_numbers(pair[0]) != _without_numbers(pair[1]))
        error = GraphError(
            f"Rank {rank} has created different variables than rank 0: number {number} is {here} on rank {rank}, and "
            f"{there} on rank 0. Build the same model, in the same order, on all ranks.")
        # Ends the job: rank 0 does not know of it, and a program that catches the error would leave it waiting.
        self._communicator.abort(f"Rank {rank} failed: GraphError: {error}")
        raise error


def _describe(variable: tf.Variable) -> str:
    return f"'{variable.name.partition(':')[0]}' {variable.dtype.name}{list(variable.shape)}"


def _without_numbers(description: str) -> str:
    """Returns a description without the numbers that Keras has appended to names.

    They depend on everything else that the process has created: a rank that saves a model uses more numbers.
    """
    return re.sub(r"_\d+(?=[/'])", "", description)
