"""Functions of one process, as the ranks of a job run them.

Tests: tests/unit/test_job_functions.py, tests/training/test_distribution.py, tests/training/test_verify.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import functools
from typing import Any

import tensorflow as tf

from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import failures
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process import context
from tf_poseidon.one_process import late_results
from tf_poseidon.one_process import step_verifier
from tf_poseidon.one_process.clocked.clocked_step import ClockedStep
from tf_poseidon.one_process.rank_graphs import RankGraphs
from tf_poseidon.one_process.sharding.master_weights import MasterWeight
from tf_poseidon.ops import sites


class JobFunction:
    """A function of one process, as ranks run it: partitioned, or as it was traced.

    Attributes:
        name: The function's name.
        report: The `report.PartitionReport`, None if the function runs as traced.
    """

    def __init__(self, name: str, job: Job, runs: RankGraphs | tf.types.experimental.ConcreteFunction,
                 verifier: step_verifier.StepVerifier | None = None,
                 whole: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
                 masters: Sequence[MasterWeight] = (), clocked: ClockedStep | None = None) -> None:
        """Makes a function; if it trains and is partitioned, `strategy.plan` becomes its plan.

        Args:
            name: The function's name.
            job: The job.
            runs: What runs: its `RankGraphs`, or the traced ConcreteFunction.
            verifier: Compares its runs with those of one process, in verify mode.
            whole: Gathers its inputs from all ranks; None if every rank has them.
            masters: The weights in float that it uses.
            clocked: Runs it, where it may read stale weights.
        """
        partition = runs.partition if isinstance(runs, RankGraphs) else None
        self.name = name
        self.report = None if partition is None else partition.report
        self._job = job
        self._runs = runs
        self._verifier = verifier
        self._whole = whole
        self._masters = tuple(masters)
        self._clocked = clocked
        self._results = None if partition is None else partition.results
        self._plan = job.graph_pass.expect(partition.number, partition.facts, partition.has_sites) if (
            partition is not None and partition.options.trains) else None
        if self._plan is not None and clocked is not None:
            self._plan.note(clocked.plan)
            self._plan.overlap = clocked.overlap

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        self._job.clocks.finish()
        self._job.shards.take_back()
        if not isinstance(self._runs, RankGraphs):
            return self._runs(*(tensors if self._whole is None else self._whole(tensors)))
        run = functools.partial(self._run_partitioned, self._runs)
        if self._verifier is not None and tf.executing_eagerly():
            return self._verifier.run(run, tensors, self._whole)
        return run(tensors)

    def are_rows(self, results: Any) -> Any:
        """Returns, in the structure of the function's results, whether each of them is this rank's rows."""
        numbers = self._runs.partition.row_outputs if isinstance(self._runs, RankGraphs) else ()
        return tf.nest.pack_sequence_as(results, [i in numbers for i in range(len(tf.nest.flatten(results)))])

    def unrolled_steps(self, number: int) -> int:
        """Returns how many of a number of runs become one graph."""
        if self._verifier is not None or not isinstance(self._runs, RankGraphs):
            return 1
        return self._runs.unrolled_steps(number)

    def run(self, inputs: Sequence[Sequence[tf.Tensor]]) -> Any:
        """Runs the function as often as there are inputs, in one graph.

        Returns:
            The results of the last run; a `Pending` if they have to be read.
        """
        self.prepare()
        if isinstance(self._runs, RankGraphs):
            if self._plan is not None:
                self._plan.overlap = str(self._runs.order)
            if len(inputs) > 1:
                concrete = self._runs.unrolled(len(inputs))
                return self.pending(concrete(*(tensor for tensors in inputs for tensor in tensors)), len(inputs))
        return self.pending(self(inputs[0]), 1)

    def run_clocked(self, tensors: Sequence[tf.Tensor]) -> late_results.Pending:
        """Runs the function as a step of this rank's worker; returns its results."""
        assert self._clocked is not None and self._results is not None
        self.prepare()
        outputs = self._clocked.run(tensors)
        self._job.held.count(1)
        return late_results.Pending(self._results, outputs, self._job.held)

    def prepare(self) -> None:
        """Prepares variables for runs outside graphs."""
        self._job.shards.take_back()
        self._job.held.hold_until_read(self._results.held if self._results else ())

    def pending(self, returned: Any, steps: int) -> Any:
        """Returns the results of some steps, given what they have returned; a `Pending` if they have to be read."""
        self._job.held.count(steps)
        return late_results.Pending(self._results, returned, self._job.held) if self._results else returned

    def hold_masters_whole(self) -> None:
        """Makes every rank hold the whole of the weights that it uses, which a graph calls that stays as it is."""
        for master in self._masters:
            master.hold_whole()

    def _run_partitioned(self, graphs: RankGraphs, tensors: Sequence[tf.Tensor]) -> Any:
        # Each exchange of one function needs its own name, also if the function calls several of ours.
        mark = sites.unique_site("distribute").removeprefix("distribute")
        with tf.init_scope():
            concrete = graphs.marked(mark)
        results = concrete(*tensors)
        partition = graphs.partition
        if partition.options.verifier and partition.weights:
            partition.options.verifier.check_weights(partition.weights, sites.unique_site)
        return results


class Renewed:
    """A function of TensorFlow in whose graphs functions of a job run: made anew when these are to be traced anew."""

    def __init__(self, make: Callable[[], Callable[..., Any]], job: Job) -> None:
        """Makes the function by `make`, for the first time."""
        self._make, self._job = make, job
        self._function, self._changes = make(), job.shards.changes
        self._is_new = True  # it has no graph

    def __call__(self, *args: Any) -> Any:
        shards = self._job.shards
        shards.take_back()
        if self._changes != shards.changes:
            self._function, self._is_new = self._make(), True
        before = shards.changes
        with context.renewing():
            result = self._function(*args)
        # A trace of its own has made changes: that one has them, others of the same function have not.
        self._changes = shards.changes if self._is_new else before
        self._is_new = False
        return result


class TracedFunctions:
    """Functions of a job, each until a weight becomes a shard, or whole again: then it is to be traced anew."""

    def __init__(self) -> None:
        self._functions: dict[Any, JobFunction] = {}
        self._changes = 0  # of shards, when they were traced

    def of(self, key: Any, job: Job, trace: Callable[[], JobFunction]) -> JobFunction:
        """Returns the function of a key, which `trace` returns the first time."""
        self._drop_former(job)
        if key not in self._functions:
            traced = trace()
            self._drop_former(job)  # this one may be the first that divides weights
            self._functions[key] = traced
        if not tf.executing_eagerly() and not context.is_renewing():
            with tf.init_scope():
                self._functions[key].hold_masters_whole()
            if self._changes != job.shards.changes:
                return self.of(key, job, trace)
        return self._functions[key]

    def __iter__(self) -> Iterator[JobFunction]:
        return iter(self._functions.values())

    def _drop_former(self, job: Job) -> None:
        if self._changes != job.shards.changes:
            self._changes = job.shards.changes
            self._functions.clear()


def explain(error: Exception, functions: Iterable[JobFunction], communicator: Communicator) -> None:
    """Says in an error that came while functions ran which of them was partitioned, if it is not one of ours."""
    partitioned = next((function.name for function in functions if function.report is not None), None)
    is_end = isinstance(error, (StopIteration, tf.errors.OutOfRangeError))  # of data
    if partitioned is None or is_end or isinstance(error, PoseidonError) or communicator.failure is not None:
        return
    failures.explain(error, f"'{partitioned}' was partitioned by rows, so rank {communicator.rank} computed a part of "
                     "each batch; to run it as it is written, start the program as one process, without a launcher.")
