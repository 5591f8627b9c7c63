"""Variables of loops over `strategy.run` that have an aggregation, or are synchronised when they are read.

They do what tf.distribute says of them. In functions of one process there is one replica, and they are as any variable.

Tests: tests/training/test_replica_variables.py.
"""

from collections.abc import Callable
import contextlib
import contextvars
import functools
from typing import Any
from typing import cast

import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.base.context_values import holding
from tf_poseidon.errors import GraphError
from tf_poseidon.job.joined_job import Job
from tf_poseidon.loops import step as step_lib
from tf_poseidon.one_process import context
from tf_poseidon.ops import sites

_SUM, _MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
_is_of_keras = contextvars.ContextVar("is_of_keras", default=False)


def of_keras() -> contextlib.AbstractContextManager[None]:
    """A context in which Keras creates a variable: it aggregates what it assigns itself."""
    return holding(_is_of_keras, True)


def distributed(variable: tf.Variable, job: Job) -> tf.Variable:
    """Returns a new variable of a strategy's scope that follows its `synchronization` and `aggregation`.

    Raises:
        GraphError: If that is not defined, as under TensorFlow's strategies.
    """
    if variable.synchronization == tf.VariableSynchronization.NONE:
        raise GraphError(f"'{variable.name}' has synchronization=NONE, which no strategy supports; leave it out, or "
                         "create the variable outside of the scope.")
    if variable.aggregation == _MEAN and not (variable.dtype.is_floating or variable.dtype.is_complex):
        raise GraphError(f"'{variable.name}' has aggregation=MEAN and dtype {variable.dtype.name}, which rounds means; "
                         "give it a floating-point dtype, or aggregation=SUM.")
    if variable.synchronization == tf.VariableSynchronization.ON_READ:
        kind: type[_Distributed] = OnRead
    elif variable.aggregation == tf.VariableAggregation.NONE or _is_of_keras.get():
        return variable
    else:
        kind = OnWrite
    # The creators of TensorFlow know their own classes only: a tf.function's variable has one that lifts its value.
    base: Any = type(variable)
    variable.__class__ = _subclass(cast(Any, kind), base)
    variable.job = job
    return variable


@functools.cache
def _subclass(kind: Any, base: Any) -> Any:
    return type(kind.__name__, (kind, base), {})


def _changing(name: str) -> Callable[..., Any]:
    """Returns a method that assigns, in which a step's value goes through `of_step`."""
    @tf.autograph.experimental.do_not_convert
    def change(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not context.is_inside():
            step = step_lib.current()
            value = tf.convert_to_tensor(value, self.dtype)
            value = self.outside_steps(value) if step is None else self.of_step(step, value, name == "assign")
        return getattr(super(_Distributed, self), name)(value, *args, **kwargs)

    return change


def _scattering(name: str) -> Callable[..., Any]:
    """Returns a method that changes some rows, which is refused in steps: ranks may change different ones."""
    @tf.autograph.experimental.do_not_convert
    def scatter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if step_lib.current() is not None and not context.is_inside():
            raise GraphError(
                f"'{sites.variable_path(self)}', a variable with {self.aggregation}, was changed by {name} inside "
                "strategy.run, where ranks may change different rows; assign all of it, use a variable without an "
                "aggregation, or decorate the step with @poseidon.distribute in place of strategy.run.")
        return getattr(super(_Distributed, self), name)(*args, **kwargs)

    return scatter


class _Distributed:
    """What both kinds have in common: the methods of `tf.Variable` that change it.

    Attributes:
        job: The job.
    """

    job: Job
    # Those of the `tf.Variable` that it is, too.
    aggregation: tf.VariableAggregation
    dtype: tf.DType
    value: Callable[[], tf.Tensor]
    is_initialized: Callable[[], tf.Tensor]

    assign, assign_add, assign_sub = map(_changing, ("assign", "assign_add", "assign_sub"))
    scatter_add, scatter_sub, scatter_update, scatter_min, scatter_max, scatter_mul, scatter_div, scatter_nd_add, \
        scatter_nd_sub, scatter_nd_update = map(_scattering, (
            "scatter_add", "scatter_sub", "scatter_update", "scatter_min", "scatter_max", "scatter_mul", "scatter_div",
            "scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"))

    def site(self, what: str) -> str:
        return f"variables/{sites.variable_path(self)}/{what}"

    def outside_steps(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what this rank assigns outside of steps, where all ranks assign the same."""
        return value


class OnWrite(_Distributed):
    """A variable that is equal on all ranks: what they assign in a step is aggregated first."""

    def of_step(self, step: step_lib.Step, value: tf.Tensor, replaces: bool) -> tf.Tensor:
        """Returns what a step assigns, or adds unless it `replaces` the value."""
        del replaces
        step.check_unconditional(f"'{sites.variable_path(self)}', a variable with {self.aggregation}, was assigned")
        site = self.site("assign")
        if self.aggregation == _SUM:
            return step.all_reduce(value, site)
        if self.aggregation == _MEAN:
            return tf.cast(step.mean(value, site), self.dtype)
        return ops.broadcast(value, step.site(site))


class OnRead(_Distributed):
    """A variable of which each rank has its own in steps; outside of them, reading it aggregates those of all ranks.

    Before its first step, and in functions of one process, all ranks have the same.
    """

    is_own = False  # whether each rank has its own
    _is_in_graphs = False  # whether a graph reads it that is not of a step, nor of one process

    def of_step(self, step: step_lib.Step, value: tf.Tensor, replaces: bool) -> tf.Tensor:
        """Returns what a step assigns, or adds unless it `replaces` the value: nothing that a padding row gives."""
        self.become_own()
        return step.select(value, self.value() if replaces else tf.zeros_like(value))

    @property
    def can_be_own(self) -> bool:
        """Whether it may hold summands in a loop over batches, and be whole behind it: whatever reads it, knows."""
        return self.aggregation == _SUM and not self.is_own and not self._is_in_graphs

    def outside_steps(self, value: tf.Tensor) -> tf.Tensor:
        is_summand = self.is_own and self.aggregation == _SUM and self.job.rank != 0
        return tf.zeros_like(value) if is_summand else value  # rank 0 alone keeps it

    def become_own(self) -> None:
        if self.is_own:
            return
        with tf.init_scope(), context.inside():
            if not bool(self.is_initialized()):
                return  # a tf.function has just created it, and will be traced again
            self.is_own = True
            if self.aggregation == _SUM:  # functions of one process then take it for a summand, too
                self.job.held.add([self])

    @tf.autograph.experimental.do_not_convert
    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        value = super()._read_variable_op(*args, **kwargs)  # type: ignore[misc]  # of the `tf.Variable`
        if context.is_inside():
            self.check_is_same()
            return value
        if step_lib.current() is not None:
            self.become_own()
            return value
        if not tf.executing_eagerly():
            self._is_in_graphs = True
        if not self.is_own:
            return value
        self.job.held.check_reader(self)
        site = sites.unique_site(self.site("read"))
        if self.aggregation == _SUM:
            return ops.all_reduce(value, site)
        if self.aggregation == _MEAN:
            total = ops.all_reduce(value, site)
            return tf.cast(total / tf.cast(self.job.size, total.dtype), self.dtype)
        if self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return ops.broadcast(value, site)
        raise GraphError(
            f"'{sites.variable_path(self)}' has synchronization=ON_READ and no aggregation, and was read outside "
            "strategy.run, where each rank has another value; give it an aggregation=.")

    def check_is_same(self) -> None:
        if self.is_own and self.aggregation != _SUM:
            raise GraphError(
                f"'{sites.variable_path(self)}' has another value on each rank since strategy.run has used it, and "
                "a function of one process needs the same on all; give each a variable of its own.")
