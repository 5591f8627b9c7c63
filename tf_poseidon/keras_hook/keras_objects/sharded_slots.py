"""Variables that optimizers have for each variable that they train: each rank holds the part that it updates.

Those of another shape may be one rank's, where one alone updates the trained variable; the step says whose they are.

Accumulated gradients are not among them: they hold summands (job/job_variables/held_variables.py), except of weights
that are to be divided into columns, whose gradients are no summands: each rank has its columns.

Tests: tests/unit/test_shard_service.py, tests/training/test_sharded_update.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextvars
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon import planning
from tf_poseidon.base.context_values import holding
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.job.job_variables.holdings import Initial
from tf_poseidon.job.joined_job import Job
from tf_poseidon.keras_hook.keras_objects.hook_tools import is_ours
from tf_poseidon.one_process.sharding import initial_values
from tf_poseidon.one_process.sharding.master_weights import MasterWeight
from tf_poseidon.one_process.sharding.sharded_variables import ShardedVariable

_ACCUMULATOR = "gradient_accumulator"
# The types of variables that may be cast to 16 bits wherever layers read them.
_MASTERS = ("float32", "float64")
# Initializers that give all elements the same value, if that is a number.
_CONSTANT = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
# Those that draw by TensorFlow alone.
_RANDOM = (keras.initializers.RandomUniform, keras.initializers.RandomNormal, keras.initializers.TruncatedNormal,
           keras.initializers.VarianceScaling)


class _Reference(NamedTuple):
    """What a variable under construction is made for.

    Attributes:
        path: The path of the trained variable; "" if that is unknown.
        job: The job; None if the variable is not sharded.
    """

    path: str
    job: Job | None


_reference: contextvars.ContextVar[_Reference | None] = contextvars.ContextVar("reference", default=None)
_initializer: contextvars.ContextVar[Any] = contextvars.ContextVar("initializer", default=None)


def add_variable_from_reference(original: Callable[..., Any], optimizer: keras.optimizers.Optimizer,
                                reference_variable: keras.Variable, name: str | None = None,
                                initializer: Any = "zeros") -> keras.Variable:
    """Adds a variable of which each rank holds a shard, if the strategy says so."""
    path: str = getattr(reference_variable, "path", "")
    job = _job() if path else None
    if job is not None and name == _ACCUMULATOR and not _is_to_divide(path, job.graph_pass.session.planner):
        job = None
    if job is not None and not job.shard_update and not isinstance(reference_variable.value, MasterWeight):
        job = None
    with holding(_reference, _Reference(path, job)):
        return original(optimizer, reference_variable, name=name, initializer=initializer)


def _is_to_divide(path: str, planner: planning.Planner) -> bool:
    """Whether a weight is to be divided, by a pin or by the given plan, or a bias that would follow its layer's kernel.

    A plan names the biases, too.
    """
    layer = path.removesuffix("/bias")
    follows = planner.given is None and layer != path
    return any(planner.divided_among([name]) for name in (path, *([f"{layer}/kernel"] if follows else [])))


def add_variable(original: Callable[..., Any], optimizer: keras.optimizers.Optimizer, shape: Sequence[int],
                 initializer: Any = "zeros", *args: Any, **kwargs: Any) -> keras.Variable:
    """Adds a variable that one rank may hold, if the strategy says so, unless it is a number."""
    job = _job() if shape else None
    reference = _reference.get() or _Reference("", job if job is not None and job.shard_update else None)
    with holding(_reference, reference):
        return original(optimizer, shape, initializer, *args, **kwargs)


def _job() -> Job | None:
    """Returns the job of the strategy if variables may be divided, of optimizers or of layers."""
    strategy = tf.distribute.get_strategy()
    job: Job | None = strategy.extended.job if is_ours(strategy) else None
    return job if job is not None and (job.shard_update or job.divides_weights) else None


def initialize_with_initializer(original: Callable[..., Any], variable: keras.Variable, initializer: Any) -> None:
    """Creates a variable whose initializer may draw parts of it."""
    with holding(_initializer, initializer):
        original(variable, initializer)


def variable_for(variable: keras.Variable, value: Any) -> Any:
    """Returns what a Keras variable is initialised with: a sharded variable if an optimizer adds or trains it."""
    reference = _reference.get()
    if reference is None:
        return _weight_for(variable, value)
    if reference.job is None or not callable(value) or isinstance(value, tf.Variable):
        return value
    shape, dtype = tuple(variable.shape), variable.dtype
    return ShardedVariable(variable.path, reference.path, tf.TensorShape(shape), tf.as_dtype(dtype),
                           _initial(_initializer.get(), shape, dtype), reference.job)


def _weight_for(variable: keras.Variable, value: Any) -> Any:
    """Returns what a variable of a model is initialised with: a `MasterWeight` if it is trained in float.

    Not one that ranks aggregate when they assign it; only matrices and vectors if no others may be divided.
    """
    job = _job()
    if job is None or not variable.trainable or isinstance(value, tf.Variable) or not tf.executing_eagerly() or (
            variable.dtype not in _MASTERS or variable.aggregation != "none"):
        return value
    dtype = tf.as_dtype(variable.dtype)
    shape = tf.TensorShape(variable.shape if callable(value) else np.shape(value))
    if not job.shard_update and not job.may_divide(tuple(shape)):
        return value
    # No rank has memory for what each is to have a part of.
    later = _drawn_later(tuple(shape), variable.dtype) if callable(value) and len(shape) == 2 and (
        job.is_to_divide(variable.path)) else None
    initial = later or Initial(value if callable(value) else lambda: value, None)
    weight = MasterWeight(variable.path, variable.name, shape, dtype, initial, job, is_held=later is None)
    if later is None:
        job.new_variables.add(weight)
    return weight


def _drawn_later(shape: tuple[int, ...], dtype: str) -> Initial | None:
    """Returns what the initializer returns, of which parts can be drawn, whenever that happens; None otherwise."""
    initializer = _initializer.get()
    initial = _initial(initializer, shape, dtype)
    if initial.of_size is not None:
        return initial
    is_drawn_alike = isinstance(initializer, _RANDOM) and isinstance(initializer.seed, int)
    parts = initial_values.traced(initial.whole) if is_drawn_alike else None
    return None if parts is None else Initial(initial.whole, None, parts)


def _initial(initializer: Any, shape: tuple[int, ...], dtype: str) -> Initial:
    """Returns what an initializer returns, without the variable: what is held of one outlives it."""
    is_constant = isinstance(initializer, _CONSTANT) and np.ndim(getattr(initializer, "value", 0)) == 0
    return Initial(lambda: initializer(shape, dtype=dtype),
                   (lambda size: initializer((size,), dtype=dtype)) if is_constant else None)


def masters(optimizers: Iterable[keras.optimizers.Optimizer]) -> dict[int, str]:
    """Returns the paths of variables that built optimizers train in float, by identity of the `tf.Variable`."""
    return {id(variable.value): variable.path for optimizer in optimizers
            for variable in keras_compat.trainable_variables(optimizer) if variable.dtype in _MASTERS}


def layouts(optimizer: keras.optimizers.Optimizer, planner: planning.Planner) -> dict[int, str]:
    """Returns the path of the trained variable for each variable of a built optimizer that may hold a shard of it.

    They are told by their names, which Keras makes of that of the trained one.

    Args:
        optimizer: The optimizer.
        planner: Says which weights are to be divided, of which accumulated gradients are among these variables.

    Returns:
        {identity of the `tf.Variable`: path, "" if that is unknown}.
    """
    found = {id(variable.value): "" for variable in optimizer.variables
             if variable.shape and not variable.name.endswith(_ACCUMULATOR)}
    trained = sorted(keras_compat.trainable_variables(optimizer), key=lambda variable: len(variable.path))
    for reference in trained:  # the longest path that fits counts
        prefix = f"{reference.path.replace('/', '_')}_"
        for variable in optimizer.variables:
            name = variable.name.removeprefix(prefix)
            if name != variable.name and tuple(variable.shape) == tuple(reference.shape) and (
                    name != _ACCUMULATOR or _is_to_divide(reference.path, planner)):
                found[id(variable.value)] = reference.path
    return found
