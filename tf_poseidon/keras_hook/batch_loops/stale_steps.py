"""Executions of steps that may read stale weights.

Ranks are at different clocks then, so nothing is exchanged between steps: logs are read when an epoch is over, when all
ranks have made as many steps. Where a callback may read logs or weights after a batch, all are at the same clock after
each.

Tests: tests/training/test_clocks.py.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_poseidon.errors import GraphError
from tf_poseidon.keras_hook.batch_loops import reading
from tf_poseidon.keras_hook.coordination import coordinated_callbacks as callbacks_lib
from tf_poseidon.keras_hook.keras_objects import optimizers
from tf_poseidon.one_process import stepping
from tf_poseidon.staleness.bounds import Synchrony


def execute(steps: stepping.Steps, step: Any, model: keras.Model, batches: Any, loop: reading.Loop | None) -> Any:
    """Runs steps on the next batches; returns the logs of the last one.

    Args:
        steps: The `stepping.Steps`.
        step: What is done with a batch.
        model: The model.
        batches: An iterator over batches.
        loop: The loop of Keras that reads logs when it is over; None if they are read now.

    Raises:
        GraphError: If the steps are no graph.
    """
    strategy = model.distribute_strategy
    if model.run_eagerly or tf.config.functions_run_eagerly():
        raise GraphError(f"synchrony={strategy.extended.job.clocks.synchrony}, but the steps of '{model.name}' run "
                         "eagerly, where there is no graph to divide between worker and server; use "
                         "compile(run_eagerly=False).")
    check(model, strategy.extended.job.clocks.synchrony)
    pending = steps.run_clocked(step, batches, model.steps_per_execution, strategy)
    if loop is not None:
        return reading.Logs(pending)
    strategy.extended.job.clocks.finish()
    return pending.read()


def check(model: keras.Model, synchrony: Synchrony) -> None:
    """Refuses a model whose training steps have no version of what they read; raises GraphError."""
    scaled = [inner for optimizer in callbacks_lib.optimizers_of(model) for inner in optimizers.with_inner(optimizer)
              if isinstance(inner, keras.optimizers.LossScaleOptimizer)]
    if scaled:
        raise GraphError(f"synchrony={synchrony}, but '{scaled[0].name}' of '{model.name}' scales losses by the newest "
                         "factor, and workers read former ones; train in mixed_bfloat16, or with synchrony='bsp'.")
