"""Traces of functions of one process, and whether ranks run them partitioned or as they are.

Tests: tests/training/test_distribution.py, tests/faults/test_failures.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import enum
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.errors import shortened
from tf_poseidon.graph_passes.graph import garbage
from tf_poseidon.job import agreement
from tf_poseidon.job import failures
from tf_poseidon.job import held_variables
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import context
from tf_poseidon.one_process import flat_graphs
from tf_poseidon.one_process import graph_texts
from tf_poseidon.one_process import late_results
from tf_poseidon.one_process import partitioning
from tf_poseidon.one_process import step_verifier
from tf_poseidon.ops import library

Replica = Callable[[], contextlib.AbstractContextManager[Any]]  # returns the context of a function's only replica

_log = logging.getLogger("tf_poseidon")
WHOLE = "Every rank computes the whole batch: correct, but no faster than one process."


class ResultForm(enum.Enum):
    """What a function's caller needs of its results."""

    WHOLE = "whole"
    # The caller may read results later, all ranks after the same step. Variables that are synchronised when they are
    # read may then hold summands until they are.
    READ_LATER = "read later"
    # Where a result consists of rows, a rank's own suffice.
    OWN_ROWS = "own rows"


class Trace:
    """One trace of a function.

    Attributes:
        name: The function's name.
        report: The `report.PartitionReport`, None if the function runs as traced.
    """

    def __init__(self, name: str, held: held_variables.Held,
                 traced: tf.types.experimental.ConcreteFunction | None = None,
                 partitioned: partitioning.PartitionedFunction | None = None,
                 verifier: step_verifier.StepVerifier | None = None,
                 planned: grappler.PlannedFunction | None = None) -> None:
        """Makes a trace.

        Args:
            name: The function's name.
            held: The `held_variables.Held` of the job.
            traced: The traced ConcreteFunction; None if it need not be kept.
            partitioned: The `PartitionedFunction`; None if the traced one runs.
            verifier: Compares both, in verify mode.
            planned: What has the function's plan, if it trains and is partitioned.
        """
        self.name = name
        self.report = None if partitioned is None else partitioned.report
        self._held = held
        self._traced = traced
        self._partitioned = partitioned
        self._results = None if partitioned is None else partitioned.results
        self._verifier = verifier
        self._planned = planned

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if self._partitioned is None:
            assert self._traced is not None
            return self._traced(*tensors)
        if self._verifier is not None and tf.executing_eagerly():
            return self._verifier.run(self._partitioned, tensors)
        return self._partitioned(tensors)

    def own_rows(self, results: Any) -> Any:
        """Returns, in the structure of the function's results, whether each of them is this rank's rows."""
        own = self._partitioned.own if self._partitioned else ()
        return tf.nest.pack_sequence_as(results, [i in own for i in range(len(tf.nest.flatten(results)))])

    def unrolled_steps(self, number: int) -> int:
        """Returns how many of a number of runs become one graph."""
        if self._partitioned is None or self._verifier is not None:
            return 1
        return self._partitioned.unrolled_steps(number)

    def run(self, inputs: Sequence[Sequence[tf.Tensor]]) -> Any:
        """Runs the function as often as there are inputs, in one graph.

        Returns:
            The results of the last run; a `Pending` if they have to be read.
        """
        self.before()
        if self._planned is not None and self._partitioned is not None:
            self._planned.overlap = str(self._partitioned.order)
        if self._partitioned is None or len(inputs) == 1:
            return self.pending(self(inputs[0]), 1)
        return self.pending(self._partitioned.unrolled(len(inputs))(
            *(tensor for tensors in inputs for tensor in tensors)), len(inputs))

    def before(self) -> None:
        """Prepares variables for runs outside graphs."""
        self._held.meanwhile(self._results.held if self._results else ())

    def pending(self, returned: Any, steps: int) -> Any:
        """Returns the results of some steps, given what they have returned; a `Pending` if they have to be read."""
        self._held.count(steps)
        return Pending(self._results, returned, self._held) if self._results else returned


class Pending:
    """The results of a step, which are computed when they are read."""

    def __init__(self, results: late_results.LateResults, others: Sequence[tf.Tensor],
                 held: held_variables.Held) -> None:
        """Makes pending results.

        Args:
            results: The `late_results.LateResults`.
            others: What the step has returned.
            held: The `held_variables.Held` of the job.
        """
        self._results = results
        self._others = others
        self._held = held

    def read(self) -> Any:
        """Returns the results; all ranks call this after the same step, and before the next one."""
        return self._results.read(self._held.whole(self._results.variables), self._others)


def explain(error: Exception, traces: Iterable[Trace], communicator: Communicator) -> None:
    """Says in an error that came while functions ran which of them was partitioned, if it is not one of ours."""
    partitioned = next((trace.name for trace in traces if trace.report is not None), None)
    is_end = isinstance(error, (StopIteration, tf.errors.OutOfRangeError))  # of data
    if partitioned is None or is_end or isinstance(error, PoseidonError) or communicator.failure is not None:
        return
    failures.explain(error, f"'{partitioned}' was partitioned by rows, so rank {communicator.rank} computed a part of "
                     "each batch; to run it as it is written, start the program as one process, without a launcher.")


@garbage.unsearched()
def trace(function: Callable[..., Any], call: calls.Call, job: Job, replica: Replica = contextlib.nullcontext,
          rows: int | None = None, trains: bool = True, accumulators: Callable[[], list[tf.Variable]] = list,
          form: ResultForm = ResultForm.WHOLE) -> Trace:
    """Traces a function for a call, and partitions it.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        job: The job.
        replica: Returns the context in which the function is traced.
        rows: Usual number of rows of a global batch, None for that of the call.
        trains: Whether it may train: then ranks compare what it exchanges, and `strategy.plan` shows it.
        accumulators: Called after the function is traced, returns the `tf.Variable`s in which it accumulates
            gradients; these will hold summands.
        form: What the caller needs of its results.

    Returns:
        A `Trace`.

    Raises:
        PoseidonError: If the function is not the same on all ranks; or if it was not partitioned, and `strict` is set
            or the function uses variables that hold summands.
    """
    # All ranks trace one function after the other, so functions of one name, of which a process that trains one model
    # after the other has ever more, can use the same exchanges.
    name = call.name
    with tf.init_scope():
        job.held.end()
    job.new_variables.broadcast()
    # Not in an init_scope, in which tapes record nothing.
    concrete = traced(function, call, replica)
    with tf.init_scope():
        job.new_variables.broadcast()  # of a model that its first step builds
        job.held.add(accumulators())
        variables = [variable for _, variable in flat_graphs.variables_of(concrete.graph)]
        summands = [variable for variable in variables if job.held.holds(variable)]
        _share([variable for variable in variables if not job.held.holds(variable)], job.communicator, name)
        options = partitioning.PartitionOptions(job.size, job.wire_dtype, job.strict, job.verifier)
        problem, partitioned = "", None
        try:
            candidates = _read_later(variables) if form is ResultForm.READ_LATER and isinstance(
                concrete.structured_outputs, dict) else None
            partitioned = partitioning.PartitionedFunction(concrete, options, call.rows() if rows is None else rows,
                                                           summands, trains, candidates, form is ResultForm.OWN_ROWS)
        except Exception as error:  # whatever goes wrong, the unmodified function computes the same
            problem = f"{type(error).__name__}: {error}"
        text = ["it is not partitioned"] if partitioned is None else [
            "it is partitioned", partitioned.agreement_text, *graph_texts.captured_values(concrete)]
        comparison = agreement.CommunicatorComparison(job.communicator)
        difference = comparison.difference(f"distribute/{name}", "\n".join(text))
        if partitioned is None or difference:
            _check_trained(concrete, job.communicator, name)
            _check_same(concrete, comparison, name)
            _refuse(call.name, _problem_of_ranks(problem, job.communicator, name) or str(difference), job)
            job.held.release(summands, name)
            return Trace(name, job.held, concrete)
        job.held.use(summands)
    planned = job.graph_pass.expect(partitioned.number, partitioned.whole, partitioned.has_sites) if trains else None
    if job.verifier is not None and (verifier := _step_verifier(
            concrete, call.name, job, job.verifier.every, summands)):
        return Trace(name, job.held, concrete, partitioned, verifier, planned)
    # The graph and its operations refer to each other where Python's collector cannot see it; a graph takes tens of MB.
    tf_compat.dismantle(concrete.graph)
    return Trace(name, job.held, partitioned=partitioned, planned=planned)


def _read_later(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Returns the variables that may hold summands until they are read outside of steps, as those of metrics."""
    return [variable for variable in variables if getattr(variable, "can_be_own", False)]


def _step_verifier(function: tf.types.experimental.ConcreteFunction, name: str, job: Job, every: int,
                   held: Sequence[tf.Variable]) -> step_verifier.StepVerifier | None:
    """Returns what compares a partitioned function with that of one process; None, and says so, if nothing can."""
    flat, _, variables = flat_graphs.flat(function)
    if problem := step_verifier.obstacle(flat, held):
        if job.rank == 0:
            _log.info("verify compares the gradients of '%s' with plain sums, but not the step with one process: %s.",
                      name, problem)
        return None
    return step_verifier.StepVerifier(function, name, variables.values(), flat, every, job.communicator)


def _check_trained(function: tf.types.experimental.ConcreteFunction, communicator: Communicator, name: str) -> None:
    """Refuses functions that train different variables on some rank: whole batches would not make them equal.

    Args:
        function: The ConcreteFunction.
        communicator: This rank's communicator.
        name: A name for the exchange, the same on all ranks.

    Raises:
        PoseidonError: On all ranks.
    """
    try:
        trained = "\n".join(flat_graphs.updated(function))
    except Exception:  # a function that runs whole need not be understood, and other ranks wait for this one
        trained = None
    unknown = communicator.sum(f"distribute/{name}/unknown", np.array([trained is None], np.int64))[0]
    difference = agreement.CommunicatorComparison(communicator).difference(f"distribute/{name}/trained", trained or "")
    if difference and not unknown:
        raise GraphError(
            f"Ranks train different variables, so {difference}; build and freeze the same layers on all ranks.")


def _check_same(function: tf.types.experimental.ConcreteFunction, comparison: agreement.CommunicatorComparison,
                name: str) -> None:
    """Refuses functions that differ between ranks: whole batches would not make their results the same.

    Args:
        function: The ConcreteFunction, as it was traced.
        comparison: Compares texts of all ranks.
        name: A name for the exchange, the same on all ranks.

    Raises:
        PoseidonError: On all ranks.
    """
    values = graph_texts.captured_values(function)
    try:
        digest = graph_texts.structure(function)
    except Exception as error:  # a function that runs whole need not be understood, and other ranks wait for this one
        digest = f"not known: {type(error).__name__}"
    own = "\n".join([f"the digest of the graph is {digest}", *values])
    difference = comparison.difference(f"distribute/{name}/structure", own)
    if difference is None:  # their names may differ
        return
    named = comparison.difference(f"distribute/{name}/nodes", "\n".join([*values, *flat_graphs.lines_of(function)]))
    raise GraphError(
        f"The function '{name}' is not the same on all ranks: {named or difference}. Make its constants, branches and "
        "layers the same on all ranks: they must not depend on the rank, the time, or what only some hosts have.")


def _problem_of_ranks(problem: str, communicator: Communicator, name: str) -> str:
    """Returns why a function was not partitioned, and on which rank; "" if it was, on all ranks."""
    have = np.zeros(communicator.size, np.int64)
    have[communicator.rank] = bool(problem)
    failing = np.flatnonzero(communicator.sum(f"distribute/{name}/problems", have))
    if not failing.size:
        return ""
    text = communicator.broadcast_text(f"distribute/{name}/problem", problem, int(failing[0]))
    return text if failing.size == communicator.size else f"on rank {failing[0]}, {text}"


def _refuse(name: str, reason: str, job: Job) -> None:
    sentence = f"The function '{name}' was not partitioned: {reason.rstrip('.')}."
    sentence = shortened(sentence)
    if job.strict:
        raise GraphError(f"strict=True, but: {sentence}")
    if job.rank == 0:
        _log.warning("%s %s", sentence, WHOLE)


def traced(function: Callable[..., Any], call: calls.Call,
           replica: Replica = contextlib.nullcontext) -> tf.types.experimental.ConcreteFunction:
    """Returns the ConcreteFunction of a call, in which each input with rows goes through a PoseidonRows.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        replica: Returns the context in which the function is traced.
    """

    def body(*tensors: tf.Tensor) -> Any:
        rows = [tensor if dimension is None else library.load()[0].poseidon_rows(
            values=[tensor], dimensions=[dimension], names=[name])[0]
            for tensor, dimension, name in zip(tensors, call.dimensions, call.names)]
        args, kwargs = call.arguments(rows)
        with context.inside(), replica():
            return function(*args, **kwargs)

    body.__name__ = call.name
    return tf.function(body, autograph=False).get_concrete_function(*call.specs())


def _share(variables: Iterable[tf.Variable], communicator: Communicator, name: str) -> None:
    """Gives all ranks rank 0's values of the variables that a function uses, where they differ."""
    variables = [variable for variable in variables if variable.dtype not in (tf.resource, tf.variant, tf.string)]
    own_digests, site = ops.digests(variables).numpy(), f"distribute/{name}"
    differs = own_digests != communicator.broadcast(f"{site}/digests", own_digests)
    differs = communicator.sum(f"{site}/differs", differs.astype(np.int64))
    waits = [(variable, communicator.submit(f"{site}/variables/{i}", np.asarray(variable.numpy()), root=0))
             for i, variable in enumerate(variables) if differs[i]]
    for variable, wait in waits:
        value = wait()
        if communicator.rank != 0:
            variable.assign(value)
