"""Functions with the meaning that they have in one process, run on the ranks of a job.

A function is traced for global batches, with an unknown number of rows. Its graph is partitioned by rows
(graph_passes/partition), and the result runs in its place. If it cannot be partitioned, and is the same on all ranks,
it runs unmodified, on the global batch on every rank: correct, and as slow as one process. A function that is not the
same on all ranks ends the job, since their variables would drift apart. Inside it there is one replica.

Tests: tests/training/test_distribution.py, tests/graphs/test_unroll.py, tests/faults/test_failures.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
import logging
import threading
from typing import Any
from typing import TYPE_CHECKING
import weakref

import numpy as np
import tensorflow as tf

from tf_poseidon import calls
from tf_poseidon import graph_texts
from tf_poseidon import held
from tf_poseidon import ops
from tf_poseidon import partitioning
from tf_poseidon import step_verifier
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.errors import shortened
from tf_poseidon.graph_passes.graph import garbage
from tf_poseidon.graph_passes.partition import unroll
from tf_poseidon.job import agreement
from tf_poseidon.job import failures
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.ops import library

if TYPE_CHECKING:  # it imports this module
    from tf_poseidon.strategy.strategy import Extended

_log = logging.getLogger("tf_poseidon")
_thread = threading.local()


def is_inside() -> bool:
    """Whether this thread traces, or eagerly runs, a function of one process: then there is one replica."""
    return getattr(_thread, "is_inside", False)


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """A context in which this thread is in a function of one process."""
    before, _thread.is_inside = is_inside(), True
    try:
        yield
    finally:
        _thread.is_inside = before


def is_step() -> bool:
    """Whether this thread is in a step of `Steps`."""
    return is_inside() and getattr(_thread, "is_step", False)


def as_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in which `is_step` holds."""
    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        before, _thread.is_step = getattr(_thread, "is_step", False), True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.is_step = before

    return step


class Steps:
    """Steps of one process that a caller such as Keras runs by `strategy.run`."""

    def __init__(self, extended: "Extended", trains: bool = False,
                 accumulators: Callable[[], list[tf.Variable]] = list) -> None:
        """Makes steps.

        Args:
            extended: The `Extended` of the job's strategy.
            trains: Whether they are training steps, whose plan is `strategy.plan`.
            accumulators: Same as in `trace`.
        """
        self._extended = extended
        self._trains = trains
        self._accumulators = accumulators
        self._traces = {}
        self._next = {}  # by function: its `_OnNext`
        self._plan = None  # of its last execution of several steps
        self._rows = None
        self._has_warned = False

    @contextlib.contextmanager
    def current(self, rows: int | None = None) -> Iterator[None]:
        """A context in which `strategy.run` runs these steps.

        Args:
            rows: Usual number of rows of a global batch, None if unknown.
        """
        before = getattr(_thread, "steps", None), self._rows
        _thread.steps, self._rows = self, rows
        try:
            yield
        finally:
            _thread.steps, self._rows = before

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a step on a global batch; its results are those of one process."""
        if tf.executing_eagerly():
            self._check_eager_code(getattr(function, "__name__", "function"))
            args, kwargs = calls.joined((args, kwargs))
            with inside(), self._extended.one_replica():
                return function(*args, **kwargs)
        call = calls.Call(function, {}, args, kwargs)
        return self._trace_of(function, call, reads_later=False)(call.tensors)

    def run_unrolled(self, function: Callable[..., Any], take: Callable[[int], list[Any]], number: int,
                     specs: Sequence[tf.TypeSpec] = (), reads_later: bool = False) -> Any:
        """Runs a step on each of several global batches, outside graphs; several steps at a time if that is possible.

        Args:
            function: The step, which takes a batch.
            take: Returns that many more batches; fewer, if there are no more.
            number: How many batches to take, and how many there usually are.
            specs: Same as in `calls.Call`.
            reads_later: Whether the caller may read results later, all ranks after the same step. Variables that are
                synchronised when they are read may then hold summands until they are.

        Returns:
            The results of the last step; None if there is no batch. A `Pending`, if it has to be read.
        """
        result, left = None, []
        done, steps = 0, unroll.MOST_STEPS  # as long as no trace says how many run at a time
        while done < number:
            if len(left) < min(steps, number - done):
                # Single steps need not be asked for one by one: ranks compare how many there are.
                wanted = min(steps if steps > 1 else unroll.MOST_STEPS, number - done)
                left += [calls.Call(function, {}, (batch,), {}, specs) for batch in take(wanted - len(left))]
            if not left:
                break
            traced = self._trace_of(function, left[0], reads_later)
            steps = traced.unrolled_steps(number)
            is_whole = len(left) >= steps and all(call.key == left[0].key for call in left[:steps])
            now = left[:steps if is_whole else 1]
            graph_pass = self._extended.graph_pass
            shown = graph_pass.plan
            result = traced.run([call.tensors for call in now])
            # Not if the plan is that of another model, whose steps have run since.
            if self._trains and (self._plan is None or graph_pass.plan is not shown or shown is self._plan):
                self._plan = graph_pass.note_overlap(traced.overlap, self._plan)
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
        if function not in self._next:
            self._next[function] = _OnNext(lambda call: self._trace_of(function, call, reads_later=True), function)
        concrete, traced = self._next[function].of(iterator, strategy)
        traced.before()
        returned, _ = concrete(iterator)
        return traced.pending(returned, 1)

    def explain(self, error: Exception) -> None:
        """Says in an error that came while these steps ran which of them was partitioned."""
        explain(error, self._traces.values(), self._extended.communicator)

    def _trace_of(self, function: Callable[..., Any], call: calls.Call, reads_later: bool) -> "Trace":
        key = call.key, reads_later
        if key not in self._traces:
            self._traces[key] = trace(as_step(function), call, self._extended, self._rows, self._trains,
                                      self._accumulators, reads_later)
        return self._traces[key]

    def _check_eager_code(self, name: str) -> None:
        used = self._extended.held.used(self._accumulators())
        if used:
            raise GraphError(
                f"'{name}' runs eagerly, but it ran before as a graph, in which each rank accumulates its part of the "
                f"gradients in '{used[0].name.partition(':')[0]}', expected one or the other; compile the model with a "
                "new optimizer.")
        if not self._has_warned and self._extended.rank == 0:
            _log.warning("'%s' runs eagerly, where there is no graph to partition. %s", name, _WHOLE)
        self._has_warned = True


class _OnNext:
    """A step on the next batch of an iterator, in one graph."""

    def __init__(self, trace_of: Callable[[calls.Call], "Trace"], function: Callable[..., Any]) -> None:
        self._trace_of = trace_of
        self._step = function
        self._function = tf.function(self._run, autograph=False)
        self._traces = {}  # by ConcreteFunction: the `Trace` in it
        self._of = weakref.WeakKeyDictionary()  # by iterator: what `of` returns
        self._last: Trace | None = None

    def of(self, iterator: tf.data.Iterator, strategy: tf.distribute.Strategy
           ) -> "tuple[tf.types.experimental.ConcreteFunction, Trace]":
        """Returns the function that takes an iterator, and the `Trace` of the step in it."""
        if iterator not in self._of:
            with strategy.scope():
                concrete = self._function.get_concrete_function(iterator)
            self._of[iterator] = concrete, self._traces.setdefault(concrete, self._last)
        return self._of[iterator]

    def _run(self, iterator: tf.data.Iterator) -> Any:
        call = calls.Call(self._step, {}, (calls.without_missing(iterator.get_next()),), {})
        self._last = self._trace_of(call)
        # A function that returns no tensor is optimised less by TensorFlow, and so rounds in another way.
        return self._last(call.tensors), tf.constant(0)


def current_steps() -> Steps | None:
    """Returns the `Steps` that `strategy.run` runs in this thread, None if it does not run any."""
    return None if is_inside() else getattr(_thread, "steps", None)


_WHOLE = "Every rank computes the whole batch: correct, but no faster than one process."


class Trace:
    """One trace of a function.

    Attributes:
        name: The function's name.
        report: The `report.Report`, None if the function runs as traced.
    """

    def __init__(self, name: str, extended: "Extended", traced: tf.types.experimental.ConcreteFunction | None = None,
                 partitioned: partitioning.Partitioned | None = None,
                 verifier: step_verifier.StepVerifier | None = None) -> None:
        """Makes a trace.

        Args:
            name: The function's name.
            extended: The `Extended` of the job's strategy.
            traced: The traced ConcreteFunction; None if it need not be kept.
            partitioned: The `Partitioned` function; None if the traced one runs.
            verifier: Compares both, in verify mode.
        """
        self.name = name
        self.report = partitioned and partitioned.report
        self._held = extended.held
        self._traced = traced
        self._partitioned = partitioned
        self._results = partitioned and partitioned.results
        self._verifier = verifier

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        if self._partitioned is None:
            return self._traced(*tensors)
        if self._verifier is not None and tf.executing_eagerly():
            return self._verifier.run(self._partitioned, tensors)
        return self._partitioned(tensors)

    def unrolled_steps(self, number: int) -> int:
        """Returns how many of a number of runs become one graph."""
        is_single = self._partitioned is None or self._verifier is not None
        return 1 if is_single else self._partitioned.unrolled_steps(number)

    @property
    def overlap(self) -> str:
        """Whether several runs of the function overlap, and what holds them back, a sentence."""
        return "Steps do not overlap, since they are not partitioned." if self._partitioned is None else str(
            self._partitioned.order)

    def run(self, inputs: Sequence[Sequence[tf.Tensor]]) -> Any:
        """Runs the function as often as there are inputs, in one graph.

        Returns:
            The results of the last run; a `Pending` if they have to be read.
        """
        self.before()
        if len(inputs) == 1:
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

    def __init__(self, results: partitioning.Results, others: Sequence[tf.Tensor], variables: held.Held) -> None:
        """Makes pending results.

        Args:
            results: The `partitioning.Results`.
            others: What the step has returned.
            variables: The `held.Held` of the job.
        """
        self._results = results
        self._others = others
        self._variables = variables

    def read(self) -> Any:
        """Returns the results; all ranks call this after the same step, and before the next one."""
        return self._results.read(self._variables.whole(self._results.variables), self._others)


def explain(error: Exception, traces: Iterable[Trace], communicator: Communicator) -> None:
    """Says in an error that came while functions ran which of them was partitioned, if it is not one of ours."""
    partitioned = next((trace.name for trace in traces if trace.report is not None), None)
    is_end = isinstance(error, (StopIteration, tf.errors.OutOfRangeError))  # of data
    if partitioned is None or is_end or isinstance(error, PoseidonError) or communicator.failure is not None:
        return
    failures.explain(error, f"'{partitioned}' was partitioned by rows, so rank {communicator.rank} computed a part of "
                     "each batch; to run it as it is written, start the program as one process, without a launcher.")


@garbage.unsearched()
def trace(function: Callable[..., Any], call: calls.Call, extended: "Extended", rows: int | None = None,
          trains: bool = True, accumulators: Callable[[], list[tf.Variable]] = list,
          reads_later: bool = False) -> Trace:
    """Traces a function for a call, and partitions it.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        extended: The `Extended` of the job's strategy.
        rows: Usual number of rows of a global batch, None for that of the call.
        trains: Whether it may train: then ranks compare what it exchanges, and `strategy.plan` shows it.
        accumulators: Called after the function is traced, returns the `tf.Variable`s in which it accumulates
            gradients; these will hold summands.
        reads_later: Same as in `Steps.run_unrolled`.

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
        extended.held.end()
    extended.broadcast_new_variables()
    # Outside the strategy's scope, the context in which the function runs is the program's own.
    in_scope = tf.distribute.get_strategy().extended is extended
    # Not in an init_scope, in which tapes record nothing.
    function = traced(function, call, extended.one_replica if in_scope else contextlib.nullcontext)
    with tf.init_scope():
        extended.broadcast_new_variables()  # of a model that its first step builds
        extended.held.add(accumulators())
        variables = [variable for _, variable in partitioning.variables_of(function.graph)]
        summands = [variable for variable in variables if extended.held.holds(variable)]
        _share([variable for variable in variables if not extended.held.holds(variable)], extended.communicator, name)
        job = partitioning.Job(extended.size, extended.wire_dtype, extended.graph_pass.strict, extended.verifier)
        problem, partitioned = "", None
        try:
            candidates = _read_later(variables) if reads_later and isinstance(
                function.structured_outputs, dict) else None
            partitioned = partitioning.Partitioned(function, job, call.rows() if rows is None else rows, summands,
                                                   trains, candidates)
        except Exception as error:  # whatever goes wrong, the unmodified function computes the same
            problem = f"{type(error).__name__}: {error}"
        text = ["it is not partitioned"] if partitioned is None else [
            "it is partitioned", partitioned.agreement_text, *graph_texts.captured_values(function)]
        comparison = agreement.CommunicatorComparison(extended.communicator)
        difference = comparison.difference(f"distribute/{name}", "\n".join(text))
        if problem or difference:
            _check_trained(function, extended.communicator, name)
            _check_same(function, comparison, name)
            _refuse(call.name, _problem_of_ranks(problem, extended.communicator, name) or difference, extended)
            extended.held.release(summands, name)
            return Trace(name, extended, function)
        extended.held.use(summands)
    if trains:
        extended.graph_pass.expect(partitioned.whole, partitioned.has_sites)
    if extended.verifier is not None and (verifier := _step_verifier(
            function, call.name, extended, summands)):
        return Trace(name, extended, function, partitioned, verifier)
    # The graph and its operations refer to each other where Python's collector cannot see it; a graph takes tens of MB.
    tf_compat.dismantle(function.graph)
    return Trace(name, extended, partitioned=partitioned)


def _read_later(variables: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Returns the variables that may hold summands until they are read outside of steps, as those of metrics."""
    return [variable for variable in variables if getattr(variable, "can_be_own", False)]


def _step_verifier(function: tf.types.experimental.ConcreteFunction, name: str, extended: "Extended",
                   held: Sequence[tf.Variable]) -> step_verifier.StepVerifier | None:
    """Returns what compares a partitioned function with that of one process; None, and says so, if nothing can."""
    flat, _, variables = partitioning.flat(function)
    if problem := step_verifier.obstacle(flat, held):
        if extended.rank == 0:
            _log.info("verify compares the gradients of '%s' with plain sums, but not the step with one process: %s.",
                      name, problem)
        return None
    return step_verifier.StepVerifier(function, name, variables.values(), flat, extended.verifier.every,
                                      extended.communicator)


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
        trained = "\n".join(partitioning.updated(function))
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
    named = comparison.difference(f"distribute/{name}/nodes", "\n".join([*values, *partitioning.lines_of(function)]))
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


def _refuse(name: str, reason: str, extended: "Extended") -> None:
    sentence = f"The function '{name}' was not partitioned: {reason.rstrip('.')}."
    sentence = shortened(sentence)
    if extended.graph_pass.strict:
        raise GraphError(f"strict=True, but: {sentence}")
    if extended.rank == 0:
        _log.warning("%s %s", sentence, _WHOLE)


def traced(function: Callable[..., Any], call: calls.Call,
           replica: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
           ) -> tf.types.experimental.ConcreteFunction:
    """Returns the ConcreteFunction of a call, in which each input with rows goes through a PoseidonRows.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        replica: Returns the context in which the function is traced.
    """

    def body(*tensors: tf.Tensor) -> Any:
        tensors = [tensor if dimension is None else library.load()[0].poseidon_rows(
            values=[tensor], dimensions=[dimension], names=[name])[0]
            for tensor, dimension, name in zip(tensors, call.dimensions, call.names)]
        args, kwargs = call.arguments(tensors)
        with inside(), replica():
            return function(*args, **kwargs)

    body.__name__ = call.name
    return tf.function(body, autograph=False).get_concrete_function(*call.specs())


def _share(variables: Iterable[tf.Variable], communicator: Communicator, name: str) -> None:
    """Gives all ranks rank 0's values of the variables that a function uses, where they differ."""
    variables = [variable for variable in variables if variable.dtype not in (tf.resource, tf.variant, tf.string)]
    mine, site = ops.digests(variables).numpy(), f"distribute/{name}"
    differs = communicator.sum(f"{site}/differs", (mine != communicator.broadcast(f"{site}/digests", mine)).astype(
        np.int64))
    waits = [(variable, communicator.submit(f"{site}/variables/{i}", np.asarray(variable.numpy()), root=0))
             for i, variable in enumerate(variables) if differs[i]]
    for variable, wait in waits:
        value = wait()
        if communicator.rank != 0:
            variable.assign(value)
