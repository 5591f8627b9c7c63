"""Executions of several steps, as `compile(steps_per_execution=n)` asks for, in which steps overlap.

Keras runs the steps of an execution in a loop, one after the other. Here they are one graph, in which a step waits for
the variables that it reads, and for nothing else: its first layers run while gradients of the step before still travel.
"""

import logging
from typing import Any

import keras
import tensorflow as tf

from tf_poseidon import data
from tf_poseidon import one_process

_log = logging.getLogger("tf_poseidon")


def applies(model: keras.Model, batches: Any) -> bool:
    """Whether a model's train or test function runs several steps with these batches."""
    runs_eagerly = model.run_eagerly or tf.config.functions_run_eagerly()
    return model.steps_per_execution > 1 and not runs_eagerly and isinstance(batches, tf.data.Iterator)


def execute(steps: one_process.Steps, step: Any, strategy: tf.distribute.Strategy, iterator: tf.data.Iterator,
            number: int) -> Any:
    """Takes batches from an iterator, and runs a step for each; returns the results of the last step.

    Args:
        steps: The `one_process.Steps`.
        step: What is done with a batch.
        strategy: The `PoseidonStrategy`.
        iterator: The iterator.
        number: The number of batches. Fewer are taken when they end.

    Raises:
        StopIteration: If there are none.
    """
    batches, error = _taken(iterator, number)
    if batches:
        specs = _joined(_without_missing(iterator.element_spec))
        specs = [spec for spec in tf.nest.flatten(specs, expand_composites=True) if isinstance(spec, tf.TensorSpec)]
        if error is not None and not isinstance(error, StopIteration):
            # If other ranks have all batches, they make other steps, and this is not the error with which the job ends.
            _log.error("After %d of the %d batches of an execution, the data of rank %d failed: %s: %s", len(batches),
                       number, strategy.rank, type(error).__name__, error)
        with strategy.scope():
            results = steps.run_unrolled(step, batches, number, specs)
    # The end of the data is noticed by an execution without batches; any other error, after the steps before it.
    if error is not None and not (batches and isinstance(error, StopIteration)):
        raise error
    return results


def _taken(iterator: tf.data.Iterator, number: int) -> tuple[list[Any], Exception | None]:
    """Returns (at most a number of batches, the error that has ended them, if any)."""
    batches: list[Any] = []
    while len(batches) < number:
        try:
            batches.append(_without_missing(next(iterator)))
        except Exception as error:
            return batches, error
    return batches, None


def _joined(specs: Any) -> Any:
    """Returns the specs of batches whose ranks' rows are joined."""
    return tf.nest.map_structure(lambda spec: spec.value if isinstance(spec, data.Rows.Spec) else spec, specs)


def _without_missing(batch: Any) -> Any:
    """Returns a batch, or what holds for all, in which parts that may be missing are None, as Keras has it."""
    optional = tf.experimental.Optional, tf.OptionalSpec
    return tf.nest.map_structure(lambda part: None if isinstance(part, optional) else part, batch)
