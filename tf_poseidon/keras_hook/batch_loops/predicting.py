"""predict without exchanges in its steps: each rank keeps the rows that it predicts, and gathers all at the end.

Tests: tests/training/test_training.py, tests/faults/test_failures.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon.errors import JobError
from tf_poseidon.job import agreement
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process import job_functions
from tf_poseidon.one_process import stepping


@dataclasses.dataclass(frozen=True)
class _Output:
    """One output of a step.

    Attributes:
        tensor: Its value.
        is_rows: Whether that is this rank's rows.
    """

    tensor: Any
    is_rows: bool


@dataclasses.dataclass(frozen=True)
class Outputs:
    """One output of the steps of an execution, in their order.

    Attributes:
        of_steps: The `_Output` of each.
        communicator: This rank's communicator.
    """

    of_steps: tuple[_Output, ...]
    communicator: Communicator


class PredictFunction:
    """Keras' predict function, whose outputs are `Outputs`."""

    def __init__(self, steps: stepping.Steps, function: tf.types.experimental.PolymorphicFunction,
                 job: Job) -> None:
        """Makes a function.

        Args:
            steps: The `stepping.Steps`.
            function: Keras' function, which takes a list of batches.
            job: The job.
        """
        self._steps = steps
        self._of_batches = function.python_function
        self._communicator = job.communicator
        self._function = job_functions.Renewed(
            lambda: tf.function(self._traced, reduce_retracing=True, autograph=False), job)
        # By number of a trace: in the structure of its outputs, whether each is this rank's rows.
        self._are_rows: list[Any] = []

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Returns `Outputs` in the structure of a step's outputs."""
        steps = []
        for batch in batches:
            outputs, number = self._function([batch])
            steps.append(keras.tree.map_structure(_Output, outputs, self._are_rows[int(number)]))
        return keras.tree.map_structure(lambda *of_steps: Outputs(of_steps, self._communicator), *steps)

    def _traced(self, batches: Sequence[Any]) -> tuple[Any, tf.Tensor]:
        with self._steps.keeping_rows() as are_rows:
            outputs = self._of_batches(batches)
        self._are_rows.append(are_rows[0] if len(are_rows) == 1 else keras.tree.map_structure(lambda _: False, outputs))
        return outputs, tf.constant(len(self._are_rows) - 1)


def concatenated(original: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """Returns an output of all steps, of which ranks gather the rows."""
    if not isinstance(tensors[0], Outputs):
        return original(tensors)
    outputs = [output for execution in tensors for output in execution.of_steps]
    rows = [output.tensor for output in outputs if output.is_rows]
    if not rows:
        return original([output.tensor for output in outputs])
    values, shapes = _gathered(rows, tensors[0].communicator)
    if len(rows) == len(outputs) and len({shape[1:] for shape in shapes}) == 1:
        return original([tf.reshape(values, (sum(shape[0] for shape in shapes), *shapes[0][1:]))])
    parts = np.split(values, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    whole = iter([tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)])
    return original([next(whole) if output.is_rows else output.tensor for output in outputs])


def _gathered(tensors: Sequence[tf.Tensor], communicator: Communicator) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Returns (the elements of tensors with the rows of all ranks, one tensor after the other, their shapes).

    Args:
        tensors: Of each step, this rank's rows, whose sizes may depend on the step.
        communicator: This rank's communicator.

    Raises:
        JobError: If ranks have different numbers of tensors, or rows of different sizes in one of them.
    """
    agreement.check_steps(communicator.gather("predict/steps", [[len(tensors)]])[:, 0])
    shapes = [tuple(tensor.shape) for tensor in tensors]
    of_row = [math.prod(shape[1:]) for shape in shapes]
    elements = communicator.gather("predict/elements", [of_row])
    if (elements != elements[0]).any():
        rank, step = map(int, np.argwhere(elements != elements[0])[0])
        raise JobError(
            f"In step {step + 1} of predict a row has {elements[rank, step]} numbers on rank {rank}, expected "
            f"{elements[0, step]} as on rank 0; return tensors whose shape does not depend on the values of a row.")
    rows = communicator.gather("predict/rows", [[shape[0] for shape in shapes]])
    numbers = np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors])
    gathered = communicator.gather("rows/predict", numbers.reshape(-1, 1)).reshape(-1)
    # By rank and step, where its elements begin in what was gathered, and where they belong.
    sizes = rows * of_row
    begins = (np.cumsum(sizes) - sizes.ravel()).reshape(sizes.shape)
    places = (np.cumsum(sizes.T) - sizes.T.ravel()).reshape(sizes.T.shape).T
    values = np.empty_like(gathered)
    for rank, step in np.ndindex(sizes.shape):
        begin, place, size = begins[rank, step], places[rank, step], sizes[rank, step]
        values[place:place + size] = gathered[begin:begin + size]
    return values, [(int(number), *shape[1:]) for number, shape in zip(rows.sum(0), shapes, strict=True)]
