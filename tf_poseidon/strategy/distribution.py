"""`distribute`: turns a function written for one process into a function of the whole job.

Tests: tests/training/test_distribution.py.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any
import weakref

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import datasets
from tf_poseidon.data import fingerprints
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.partition import report
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import job_functions
from tf_poseidon.one_process import tracing
from tf_poseidon.stragglers import watch
from tf_poseidon.strategy import poseidon_strategy
from tf_poseidon.strategy.poseidon_strategy import PoseidonStrategy


def distribute(function: Callable[..., Any] | None = None, *, inputs: Mapping[str, Any] | None = None,
               strategy: PoseidonStrategy | None = None) -> Callable[..., Any]:
    """Turns a function of one process into a function of the job.

    ```python
    @poseidon.distribute
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        variables = model.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.1 * gradient)
        return loss

    for x, y in batches:  # global batches, the same on all ranks
        loss = step(x, y)
    ```

    The function keeps the meaning that it has in one process: its inputs are global batches, its losses and norms are
    over all rows, and random numbers are drawn as in one process. Each rank computes its rows. Results are those of one
    process, with the same bits on all ranks. Variables get rank 0's values before the function first runs.

    Args:
        function: A `tf.function`, or a Python function, which becomes one. Arguments that are arrays or tensors
            are inputs; others are constants of a trace. None returns a decorator.
        inputs: Which inputs have rows: {name of an argument: "rows", for tensors whose first dimension is that of the
            batch; a number, for another dimension; or "same", for tensors that belong to no row}. For an argument that
            is a structure, a structure of these. In arguments not named here, each tensor that has a dimension has
            rows. All inputs with rows have the same number of them.
        strategy: The `PoseidonStrategy` of the job; None for the latest of this process, or a first one with default
            options.

    Returns:
        A function like `function`. Its attribute `report` lists what the last trace exchanges, and what it runs
        whole (`graph_passes.partition.report.PartitionReport`); None as long as it runs unmodified.

    Raises:
        PoseidonError: When it is called: if `inputs` does not match the arguments; if the function is not the same on
            all ranks; or, under `strict`, if it cannot be partitioned.
    """
    if function is None:
        return functools.partial(distribute, inputs=inputs, strategy=strategy)
    return _Distributed(function, inputs or {}, strategy)


class _Distributed:
    """A function of the job.

    Attributes:
        report: The `report.PartitionReport` of the last trace; None if it runs unmodified.
    """

    def __init__(self, function: Callable[..., Any], inputs: Mapping[str, Any],
                 strategy: PoseidonStrategy | None) -> None:
        self._python = getattr(function, "python_function", function)
        self._function = function if hasattr(function, "get_concrete_function") else tf.function(function)
        self._inputs = inputs
        self._given = strategy
        self._job_functions = job_functions.TracedFunctions()
        self._calls = 0
        self._bound: weakref.WeakKeyDictionary[object, _Distributed] = weakref.WeakKeyDictionary()
        self.report: report.PartitionReport | None = None
        functools.update_wrapper(self, self._python)
        tf_compat.unconverted(self)  # AutoGraph does not convert this object; it still converts the function

    def __get__(self, instance: object, owner: type | None = None) -> "_Distributed":
        """Binds a method to its object."""
        if instance is None:
            return self
        if instance not in self._bound:
            method = self._function.__get__(instance, owner)
            self._bound[instance] = _Distributed(method, self._inputs, self._given)
        return self._bound[instance]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        strategy = self._strategy()
        if strategy.num_replicas_in_sync == 1:
            return self._function(*args, **kwargs)
        if tf.config.functions_run_eagerly():
            args, kwargs = calls.joined((args, kwargs))
            return self._function(*args, **kwargs)
        if not tf.executing_eagerly():
            return self._run(strategy, args, kwargs)
        job = strategy.extended.job
        try:
            results = self._run(strategy, args, kwargs)
            watch.of(job).after(1)
            return results
        except Exception as error:
            job_functions.explain(error, self._job_functions, job.communicator)
            job.errors.note(error, getattr(self._python, "__name__", "function"))
            raise

    def _run(self, strategy: PoseidonStrategy, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs the function of the job."""
        call = calls.Call(self._python, self._inputs, args, kwargs)
        if call.has_own_rows:
            datasets.check_divided_alike(datasets.all_rows((args, kwargs)), lambda parts: parts, (
                f"The arguments of '{call.name}' are batches that ranks divide in different ways, but its inputs have "
                "the same rows; zip the datasets in front of batch, or give it whole tensors."))
        self._check_inputs(call, strategy)
        job_function = self._job_functions.of(call.key, strategy.extended.job, lambda: self._traced(call, strategy))
        self.report = job_function.report
        return job_function(call.tensors)

    def _traced(self, call: calls.Call, strategy: PoseidonStrategy) -> job_functions.JobFunction:
        if all(dimension is None for dimension in call.dimensions):
            raise GraphError(f"No input of '{call.name}' has rows; give it a batch, or name its inputs by inputs=.")
        strategy.extended.job.clocks.check_bsp(f"the function '{call.name}' of poseidon.distribute")
        options = tracing.TraceOptions(strategy.extended.one_replica_in_scope, trains=True)
        return tracing.trace(self._function, call, strategy.extended.job, options)

    def _check_inputs(self, call: calls.Call, strategy: PoseidonStrategy) -> None:
        """Compares the ranks' inputs, in the first call and then ever less often."""
        if not tf.executing_eagerly():
            return
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        fingerprints.compare(call.common_tensors(), strategy.extended.job.communicator,
                             f"call {self._calls} of '{call.name}'")

    def _strategy(self) -> PoseidonStrategy:
        if self._given is None:
            self._given = poseidon_strategy.of_process()
        return self._given
