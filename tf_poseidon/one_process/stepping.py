"""Steps of one process that a loop over batches runs: one at a time, several in one graph, or on the next batch.

Tests: tests/graphs/test_unroll.py, tests/training/test_distribution.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import logging
from typing import Any
import weakref

import tensorflow as tf

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.partition import unroll
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import context
from tf_poseidon.one_process import job_functions
from tf_poseidon.one_process import tracing
from tf_poseidon.one_process.job_functions import JobFunction

_log = logging.getLogger("tf_poseidon")


class Steps:
    """Steps of one process, which a loop over batches runs, or hands over by `strategy.run`."""

    def __init__(self, job: Job, options: tracing.TraceOptions = tracing.TraceOptions()) -> None:
        """Makes steps.

        Args:
            job: The job.
            options: How steps are traced; eager steps also run in its `replica`.
        """
        self._job = job
        self._options = options
        self._functions = job_functions.TracedFunctions()
        self._next: dict[Callable[..., Any], _OnNext] = {}
        self._changes = 0  # of shards, when these were made
        self._rows: int | None = None
        self._are_rows: list[Any] | None = None  # in `keeping_rows`
        self._has_warned = False

    @contextlib.contextmanager
    def current(self, rows: int | None = None) -> Iterator[None]:
        """A context in which `strategy.run` runs these steps.

        Args:
            rows: Usual number of rows of a global batch, None if unknown.
        """
        outer_rows, self._rows = self._rows, rows
        try:
            with context.handing_to(self):
                yield
        finally:
            self._rows = outer_rows

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a step on a global batch; its results are those of one process."""
        if tf.executing_eagerly():
            self._check_eager_code(getattr(function, "__name__", "function"))
            args, kwargs = calls.joined((args, kwargs))
            with context.inside(), self._options.replica():
                return function(*args, **kwargs)
        call = calls.Call(function, {}, args, kwargs)
        if self._are_rows is None:
            return self._job_function(function, call)(call.tensors)
        job_function = self._job_function(function, call, tracing.ResultForm.ROWS)
        results = job_function(call.tensors)
        self._are_rows.append(job_function.are_rows(results))
        return results

    @contextlib.contextmanager
    def keeping_rows(self) -> Iterator[list[Any]]:
        """A context in which `run` leaves the rows of results with the ranks that have computed them.

        Its value is a list, to which `run` appends, in the structure of its results, whether each is this rank's rows.
        """
        outer, self._are_rows = self._are_rows, []
        try:
            yield self._are_rows
        finally:
            self._are_rows = outer

    def run_unrolled(self, function: Callable[..., Any], take: Callable[[int], list[Any]], number: int,
                     specs: Sequence[tf.TypeSpec] = (), form: tracing.ResultForm = tracing.ResultForm.WHOLE) -> Any:
        """Runs a step on each of several global batches, outside graphs; several steps at a time if that is possible.

        Args:
            function: The step, which takes a batch.
            take: Returns that many more batches; fewer, if there are no more.
            number: How many batches to take, and how many there usually are.
            specs: Same as in `calls.Call`.
            form: What the caller needs of the results.

        Returns:
            The results of the last step; None if there is no batch. A `Pending`, if it has to be read.
        """
        result, left = None, list[calls.Call]()
        done, steps = 0, unroll.MOST_STEPS  # as long as no function says how many run at a time
        while done < number:
            if len(left) < min(steps, number - done):
                # Single steps need not be asked for one by one: ranks compare how many there are.
                wanted = min(steps if steps > 1 else unroll.MOST_STEPS, number - done)
                left += [calls.Call(function, {}, (batch,), {}, specs) for batch in take(wanted - len(left))]
            if not left:
                break
            job_function = self._job_function(function, left[0], form)
            steps = job_function.unrolled_steps(number)
            is_whole = len(left) >= steps and all(call.key == left[0].key for call in left[:steps])
            now = left[:steps if is_whole else 1]
            result = job_function.run([call.tensors for call in now])
            left, done = left[len(now):], done + len(now)
        return result

    def run_next(self, function: Callable[..., Any], iterator: tf.data.Iterator,
                 strategy: tf.distribute.Strategy) -> Any:
        """Runs a step on the next batch of an iterator, outside graphs; its results may be read later.

        Args:
            function: The step, which takes a batch.
            iterator: The iterator.
            strategy: The job's strategy, in whose scope the step is traced.

        Returns:
            Its results; a `Pending`, if they have to be read.

        Raises:
            tf.errors.OutOfRangeError: If there is no batch.
        """
        shards = self._job.shards
        if self._changes != shards.changes:
            self._next.clear()
        self._changes, is_new = shards.changes, function not in self._next
        if is_new:
            self._next[function] = _OnNext(
                lambda call: self._job_function(function, call, tracing.ResultForm.READ_LATER), function)
        on_next = self._next[function]
        with context.renewing():
            concrete, job_function = on_next.of(iterator, strategy)
        if is_new and self._changes != shards.changes:  # its only graph has the changes that its trace has made
            self._next, self._changes = {function: on_next}, shards.changes
        job_function.prepare()
        returned, _ = concrete(iterator)
        return job_function.pending(returned, 1)

    def run_clocked(self, function: Callable[..., Any], iterator: tf.data.Iterator, number: int,
                    strategy: tf.distribute.Strategy) -> Any:
        """Runs a step on each of the next batches of an iterator, on weights that may be stale.

        Args:
            function: The step, which takes a batch.
            iterator: The iterator.
            number: How many batches to take. Fewer are taken when they end.
            strategy: The job's strategy, in whose scope the step is traced.

        Returns:
            The results of the last step, a `Pending`.

        Raises:
            StopIteration: If there is no batch.
        """
        pending = None
        for _ in range(number):
            try:
                batch = calls.without_missing(next(iterator))
            except StopIteration:
                if pending is None:
                    raise
                break
            call = calls.Call(function, {}, (batch,), {})
            with strategy.scope():
                job_function = self._job_function(function, call, tracing.ResultForm.READ_LATER)
            pending = job_function.run_clocked(call.tensors)
        return pending

    def explain(self, error: Exception) -> None:
        """Says in an error that came while these steps ran which of them was partitioned."""
        job_functions.explain(error, self._functions, self._job.communicator)

    def _job_function(self, function: Callable[..., Any], call: calls.Call,
                      form: tracing.ResultForm = tracing.ResultForm.WHOLE) -> JobFunction:
        return self._functions.of((call.key, form), self._job, lambda: tracing.trace(
            context.as_step(function), call, self._job, self._options, self._rows, form))

    def _check_eager_code(self, name: str) -> None:
        used = self._job.held.used(self._options.accumulators())
        if used:
            raise GraphError(
                f"'{name}' runs eagerly, but it ran before as a graph, in which each rank accumulates its part of the "
                f"gradients in '{used[0].name.partition(':')[0]}', expected one or the other; compile the model with a "
                "new optimizer.")
        if not self._has_warned and self._job.rank == 0:
            _log.warning("'%s' runs eagerly, where there is no graph to partition. %s", name, tracing.WHOLE)
        self._has_warned = True


class _OnNext:
    """A step on the next batch of an iterator, in one graph."""

    def __init__(self, job_function: Callable[[calls.Call], JobFunction], function: Callable[..., Any]) -> None:
        self._job_function = job_function
        self._step = function
        self._function = tf.function(self._run, autograph=False)
        self._steps: dict[Any, JobFunction] = {}  # by ConcreteFunction: the step in it
        self._of: weakref.WeakKeyDictionary[tf.data.Iterator, tuple[Any, JobFunction]] = weakref.WeakKeyDictionary()
        self._last: JobFunction | None = None

    def of(self, iterator: tf.data.Iterator, strategy: tf.distribute.Strategy
           ) -> tuple[tf.types.experimental.ConcreteFunction, JobFunction]:
        """Returns the function that takes an iterator, and the step in it."""
        if iterator not in self._of:
            with strategy.scope():
                concrete = self._function.get_concrete_function(iterator)
            assert self._last is not None
            self._of[iterator] = concrete, self._steps.setdefault(concrete, self._last)
        return self._of[iterator]

    def _run(self, iterator: tf.data.Iterator) -> Any:
        call = calls.Call(self._step, {}, (calls.without_missing(iterator.get_next()),), {})
        self._last = self._job_function(call)
        # A function that returns no tensor is optimised less by TensorFlow, and so rounds in another way.
        return self._last(call.tensors), tf.constant(0)
