"""Traces functions of one process, and has ranks agree whether they run them partitioned or as they are.

Tests: tests/training/test_distribution.py, tests/faults/test_failures.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import contextlib
import dataclasses
import enum
import functools
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import shortened
from tf_poseidon.graph_passes.graph import garbage
from tf_poseidon.job import agreement
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.job_variables import sharing
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import context
from tf_poseidon.one_process import partitioning
from tf_poseidon.one_process import step_verifier
from tf_poseidon.one_process.clocked import clocked_step
from tf_poseidon.one_process.graphs import flat_graphs
from tf_poseidon.one_process.graphs import graph_texts
from tf_poseidon.one_process.job_functions import JobFunction
from tf_poseidon.one_process.partition_options import PartitionOptions
from tf_poseidon.one_process.rank_graphs import RankGraphs
from tf_poseidon.one_process.sharding import master_weights
from tf_poseidon.one_process.sharding import sharded_variables
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
    # Where a result consists of rows, this rank's suffice.
    ROWS = "rows"


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How functions are traced.

    Attributes:
        replica: Returns the context in which they are traced.
        trains: Whether they may train: then ranks compare what they exchange, and `strategy.plan` shows it.
        accumulators: Called after a function is traced, returns the `tf.Variable`s in which it accumulates gradients;
            these will hold summands.
        is_clocked: Whether it is for steps that may read stale weights.
    """

    replica: Replica = contextlib.nullcontext
    trains: bool = False
    accumulators: Callable[[], list[tf.Variable]] = list
    is_clocked: bool = False


@garbage.unsearched()
def trace(function: Callable[..., Any], call: calls.Call, job: Job, options: TraceOptions, rows: int | None = None,
          form: ResultForm = ResultForm.WHOLE) -> JobFunction:
    """Traces a function for a call, and partitions it.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        job: The job.
        options: The `TraceOptions`.
        rows: Usual number of rows of a global batch, None for that of the call.
        form: What the caller needs of its results.

    Returns:
        A `JobFunction`.

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
    concrete = traced(function, call, options.replica)
    whole = functools.partial(calls.whole, dimensions=call.dimensions) if call.has_own_rows else None
    with tf.init_scope():
        job.new_variables.broadcast()  # of a model that its first step builds
        job.held.add(options.accumulators())
        variables = [variable for _, variable in flat_graphs.variables_of(concrete.graph)]
        summands = [variable for variable in variables if job.held.holds(variable)]
        sharded = sharded_variables.among(variables)
        masters = master_weights.among(variables)
        sharded_variables.check_assigned(sharded)
        sharded_variables.hold_wanted(sharded, job.communicator)
        sharing.share([variable for variable in variables if not job.held.holds(variable) and (
            not any(variable is other for other in sharded) or variable.is_whole)], job.communicator, name)
        partition_options = PartitionOptions(
            job.size, call.rows() if rows is None else rows, options.trains, job.wire_dtype, job.strict,
            job.verifier if options.trains else None, session=job.graph_pass.session, loads=job.shards.loads,
            shard_update=job.shard_update, only_if_shorter=job.shards_if_shorter, memory_bytes=job.memory_bytes)
        problem, graphs = "", None
        try:
            candidates = _read_later(variables) if form is ResultForm.READ_LATER and isinstance(
                concrete.structured_outputs, dict) else None
            graphs = RankGraphs(partitioning.partition(concrete, partition_options, summands, candidates,
                                                       form is ResultForm.ROWS))
        except Exception as error:  # whatever goes wrong, the unmodified function computes the same
            problem = f"{type(error).__name__}: {error}"
        text = ["it is not partitioned"] if graphs is None else [
            "it is partitioned", graphs.partition.agreement_text, *graph_texts.captured_values(concrete)]
        comparison = agreement.CommunicatorComparison(job.communicator)
        difference = comparison.difference(f"distribute/{name}", "\n".join(text))
        job.shards.forget()
        if graphs is None or difference:
            _check_trained(concrete, job.communicator, name)
            _check_same(concrete, comparison, name)
            _refuse(call.name, _problem_of_ranks(problem, job.communicator, name) or str(difference), job,
                    options.is_clocked)
            job.held.release(summands, name)
            for variable in sharded:
                variable.hold_whole()
            return JobFunction(name, job, concrete, whole=whole, masters=masters)
        for refusal in graphs.partition.refusals:
            _say_refused(refusal, job)
        job.held.use(summands)
        for variable, division in zip(graphs.partition.shards, graphs.partition.divisions):
            variable.hold_shard(division)
        for variable in graphs.partition.held_whole:
            variable.hold_whole()
        for master in masters:
            master.begin_whole()
    clocked = None if not options.is_clocked else clocked_step.ClockedStep(
        graphs.partition, job.clocks, job.graph_pass.session)
    verifier = _step_verifier(concrete, name, job, summands, graphs.partition.shards)
    if verifier is None:
        # The graph and its operations refer to each other where Python's collector cannot see it; it takes tens of MB.
        tf_compat.dismantle(concrete.graph)
    return JobFunction(name, job, graphs, verifier, whole, masters, clocked)


def _read_later(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Returns the variables that may hold summands until they are read outside of steps, as those of metrics."""
    return [variable for variable in variables if getattr(variable, "can_be_own", False)]


def _step_verifier(function: tf.types.experimental.ConcreteFunction, name: str, job: Job,
                   held: Sequence[tf.Variable], shards: Sequence[tf.Variable]) -> step_verifier.StepVerifier | None:
    """Returns what compares a partitioned function with that of one process.

    None without verify mode, and if nothing can compare them, which rank 0 says.
    """
    if job.verifier is None:
        return None
    flat, _, variables = flat_graphs.flat(function)
    if problem := step_verifier.obstacle(flat, held, shards):
        if job.rank == 0:
            _log.info("verify compares the gradients of '%s' with plain sums, but not the step with one process: %s.",
                      name, problem)
        return None
    return step_verifier.StepVerifier(function, name, variables.values(), flat, job.verifier.every, job.communicator)


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
    text = "\n".join([f"the digest of the graph is {digest}", *values])
    difference = comparison.difference(f"distribute/{name}/structure", text)
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


def _refuse(name: str, reason: str, job: Job, is_clocked: bool) -> None:
    sentence = f"The function '{name}' was not partitioned: {reason.rstrip('.')}."
    sentence = shortened(sentence)
    if is_clocked:
        raise GraphError(f"synchrony={job.clocks.synchrony}, but: {sentence}")
    if job.strict:
        raise GraphError(f"strict=True, but: {sentence}")
    if job.rank == 0:
        _log.warning("%s %s", sentence, WHOLE)


def _say_refused(sentence: str, job: Job) -> None:
    if job.strict:
        raise GraphError(f"strict=True, but: {sentence}")
    if job.rank == 0:
        _log.warning("%s", sentence)


def traced(function: Callable[..., Any], call: calls.Call,
           replica: Replica = contextlib.nullcontext) -> tf.types.experimental.ConcreteFunction:
    """Returns the ConcreteFunction of a call, in which each input with rows goes through a PoseidonRows.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        replica: Returns the context in which the function is traced.
    """

    def body(*tensors: tf.Tensor) -> Any:
        part = [tensors[-1]] if call.has_own_rows else []
        rows = [tensor if dimension is None else library.load()[0].poseidon_rows(
            values=[tensor], part=part, dimensions=[dimension], names=[name])[0]
            for tensor, dimension, name in zip(tensors, call.dimensions, call.names)]
        args, kwargs = call.arguments(rows)
        with context.inside(), replica():
            return function(*args, **kwargs)

    body.__name__ = call.name
    return tf.function(body, autograph=False).get_concrete_function(*call.specs())
