"""Keras' fit, evaluate and predict in a job of several processes.

Tests: tests/training/test_training.py, tests/training/test_keras_programs.py, tests/faults/test_failures.py.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import functools
import inspect
import itertools
import threading
from typing import Any
import weakref

import keras
import tensorflow as tf

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.data import datasets
from tf_poseidon.data import fingerprints
from tf_poseidon.errors import GraphError
from tf_poseidon.job import runtime
from tf_poseidon.keras_hook.batch_loops import building
from tf_poseidon.keras_hook.batch_loops import descriptions
from tf_poseidon.keras_hook.batch_loops import freeing
from tf_poseidon.keras_hook.batch_loops import predicting
from tf_poseidon.keras_hook.batch_loops import reading
from tf_poseidon.keras_hook.batch_loops import stale_steps
from tf_poseidon.keras_hook.batch_loops import unrolling
from tf_poseidon.keras_hook.checkpoints import resuming
from tf_poseidon.keras_hook.coordination import comparing
from tf_poseidon.keras_hook.coordination import coordinated_callbacks as callbacks_lib
from tf_poseidon.keras_hook.coordination import rebalancing
from tf_poseidon.keras_hook.keras_objects.hook_tools import is_ours
from tf_poseidon.one_process import context
from tf_poseidon.one_process import job_functions
from tf_poseidon.one_process import stepping
from tf_poseidon.one_process import tracing
from tf_poseidon.stragglers import watch

# By model: the number of calls of each method for one batch.
_calls: weakref.WeakKeyDictionary[keras.Model, collections.Counter[str]] = weakref.WeakKeyDictionary()
# The thread that uses a model, and what it does.
_user, _user_lock = None, threading.Lock()


def run(original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Checks the model, coordinates callbacks, and shows progress on rank 0 only."""
    strategy, method = check_model(model), original.__name__
    job = strategy.extended.job
    with contextlib.ExitStack() as stack:
        is_outermost = stack.enter_context(_only_thread(model, method))
        is_new = getattr(model, f"{_PHASES[method]}_function") is None
        _check_function(model, method)
        bound = inspect.signature(original).bind(model, *args, **kwargs)
        if is_outermost:  # fit calls evaluate
            stack.enter_context(strategy.extended.in_method(method))
            descriptions.compare(model, method, bound.arguments, is_new, job.communicator)
        callbacks = callbacks_lib.coordinate(bound.arguments.get("callbacks"), job, method,
                                             bound.arguments.get("verbose", "auto"))
        bound.arguments["callbacks"] = callbacks
        if is_outermost:
            job.held.end()
        stack.enter_context(reading.loop(model, _PHASES[method], callbacks_lib.needs_of(callbacks)))
        if strategy.rank != 0:
            bound.arguments["verbose"] = 0
        if is_outermost:
            stack.enter_context(_noting_errors(strategy, method))
        if method == "fit":
            watch.of(job).begin()
            stack.enter_context(resuming.in_fit(model, bound.arguments, callbacks))
        return original(*bound.args, **bound.kwargs)


def on_batch(original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
    """Checks the model; then trains, tests or predicts with one global batch, which ranks compare ever less often."""
    strategy, method = check_model(model), original.__name__
    with _only_thread(model, method), reading.no_loop():
        _check_function(model, method)
        strategy.extended.job.held.end()
        calls = _calls.setdefault(model, collections.Counter())
        calls[method] += 1
        if calls[method] == 1:
            descriptions.compare(model, method, {}, True, strategy.extended.job.communicator)
        if not (number := calls[method]) & (number - 1):  # the first call, the second, the fourth
            given = inspect.signature(original).bind(model, *args, **kwargs).arguments
            batch = [given.get(part) for part in ("x", "y", "sample_weight", "class_weight")]
            fingerprints.compare(batch, strategy.extended.job.communicator, f"call {number} of '{model.name}.{method}'")
        with _noting_errors(strategy, method):
            return original(model, *args, **kwargs)


@contextlib.contextmanager
def _noting_errors(strategy: tf.distribute.Strategy, method: str) -> Iterator[None]:
    """A context whose errors end the job, also if the program catches them, unless all ranks have them."""
    try:
        yield
    except Exception as error:
        job = strategy.extended.job
        held = job.held.note_error()
        job.errors.note(error, f"{method}, {held} variables hold summands")
        if job.clocks.has_failed:
            job.errors.settle()  # all ranks have the error, or the job ends
            job.clocks.recover(job.communicator)
        raise


@contextlib.contextmanager
def _only_thread(model: keras.Model, method: str) -> Iterator[bool]:
    """A context in which Keras uses models in this thread alone; its value says whether it is in no other of these.

    Raises:
        PoseidonError: If another thread is in such a context, since ranks could exchange in different orders. It ends
            the job: ranks whose other thread came first would wait for this one.
    """
    global _user
    user = (threading.get_ident(), f"'{model.name}.{method}'")
    with _user_lock:
        outer_user = _user
        if outer_user is None or outer_user[0] == user[0]:
            _user = user
    if outer_user is not None and outer_user[0] != user[0]:
        error = GraphError(
            f"{user[1]} was called in a thread while another thread is in {outer_user[1]}, but ranks would exchange in "
            "different orders; use models one after another, in one thread.")
        communicator = model.distribute_strategy.extended.job.communicator
        communicator.abort(f"Rank {communicator.rank} failed: {type(error).__name__}: {error}")
        raise error
    try:
        yield outer_user is None
    finally:
        _user = outer_user


def check_model(model: keras.Model) -> tf.distribute.Strategy:
    """Returns the strategy of a model that can be used in this job; otherwise raises PoseidonError with the reason."""
    strategy = model.distribute_strategy
    if not is_ours(strategy):
        raise GraphError(
            f"The model '{model.name}' was built outside strategy.scope(), so its "
            f"{runtime.size()} processes would train separately; build "
            "and compile it inside `with strategy.scope():`.")
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise GraphError(
                f"The variable '{variable.path}' of model '{model.name}' was created outside "
                "strategy.scope(), so it may differ between processes; create all layers inside "
                "`with strategy.scope():`, and call there what adds variables to them (enable_lora, quantize).")
    optimizer = getattr(model, "optimizer", None)  # None if the model is not compiled
    if optimizer is not None and not is_ours(keras_compat.strategy_of(optimizer)):
        raise GraphError(
            f"The optimizer '{optimizer.name}' of model '{model.name}' was created outside "
            "strategy.scope(); create it inside `with strategy.scope():`, like the model.")
    if getattr(model, "jit_compile", False):
        raise GraphError(
            f"The model '{model.name}' is compiled with jit_compile=True, but XLA cannot compile "
            "the exchange with other processes; use compile(jit_compile=False).")
    return strategy


_PHASES = {"fit": "train", "train_on_batch": "train", "evaluate": "test", "test_on_batch": "test",
           "predict": "predict", "predict_on_batch": "predict"}


def _check_function(model: keras.Model, method: str) -> None:
    """Refuses models that make their own training functions: nothing says that these take global batches."""
    phase = _PHASES[method]
    make = f"make_{phase}_function"
    if getattr(type(model), make) is getattr(keras.Model, make):
        return
    getattr(model, make)()
    if not getattr(getattr(model, f"{phase}_function"), "runs_steps", False):
        raise GraphError(
            f"The model '{model.name}' overrides {make} with its own function, whose steps cannot be partitioned; "
            f"override {phase}_step instead, or call super().{make}().")


def maybe_symbolic_build(original: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> None:
    """Leaves it to the first step to build the model, as without a strategy; Keras would read a batch for it."""
    if not hasattr(model.distribute_strategy.extended, "job"):
        original(model, *args, **kwargs)


def is_interactive(original: Callable[..., bool]) -> bool:
    """Makes Keras print on rank 0 only; what other ranks would print, they log as information, which is not shown."""
    communicator = runtime.communicator()
    return (communicator is None or communicator.rank == 0) and original()


def get_tf_dataset(original: Callable[..., Any], adapter: Any) -> tf.data.Dataset:
    """Notes the batch size of arrays, which their dataset does not have."""
    dataset = original(adapter)
    datasets.batch_sizes[dataset] = adapter.batch_size
    return dataset


def make_function(original: Callable[..., Any], model: keras.Model,
                  step_function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes Keras' train or test function run steps of one process."""
    trains = step_function == model.train_step
    if not is_ours(model.distribute_strategy):
        return original(model, step_function)
    function = job_functions.Renewed(lambda: original(model, step_function), model.distribute_strategy.extended.job)
    return _running(model, function, trains, step_function)


def make_predict_function(original: Callable[..., Any], model: keras.Model, force: bool = False) -> None:
    """Makes Keras' predict function run steps of one process."""
    former = model.predict_function
    original(model, force)
    if model.predict_function is not former:
        model.predict_function = _predicting(model, model.predict_function)


def _predicting(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' predict function, in which `strategy.run` runs steps of one process."""
    strategy = model.distribute_strategy
    if not is_ours(strategy):
        return function
    job = strategy.extended.job
    steps = stepping.Steps(job, tracing.TraceOptions(strategy.extended.one_replica_in_scope))
    reads, keeps = function, None  # one that runs eagerly keeps no rows
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        keeps = predicting.PredictFunction(steps, function, job)
        reads = job_functions.Renewed(lambda: tf.function(function.python_function, reduce_retracing=True), job)

    @functools.wraps(function)
    def running(batches: Any) -> Any:
        is_read = reading.current(model, "predict") is None or tf.config.functions_run_eagerly()
        try:
            with steps.current(datasets.usual_rows(batches)):
                return reads(batches) if keeps is None or is_read else keeps(batches)
        except Exception as error:
            steps.explain(error)
            raise

    return _marked(running)


def _running(model: keras.Model, function: Callable[..., Any], trains: bool,
             step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' train or test function, which runs the steps itself, partitioned.

    Keras' own function runs where steps are eager, or their logs are read in each: by `strategy.run` it hands the steps
    over (`stepping.Steps.run`).

    Args:
        model: The model.
        function: Keras' function, which takes an iterator.
        trains: Whether its steps train.
        step: What it does with each batch.
    """
    strategy = model.distribute_strategy
    accumulators = functools.partial(callbacks_lib.accumulators, model) if trains else list
    job = strategy.extended.job
    is_clocked = trains and job.clocks.synchrony is not None
    steps = stepping.Steps(job, tracing.TraceOptions(strategy.extended.one_replica_in_scope, trains, accumulators,
                                                     is_clocked))
    calls = itertools.count(1)

    def running(batches: Any) -> Any:
        rows = datasets.usual_rows(batches)
        if trains:
            strategy.extended.job.row_shares.usual_rows = rows
        try:
            with steps.current(rows):
                loop = reading.current(model, "train" if trains else "test")
                if isinstance(batches, tf.data.Iterator):
                    building.build(model, datasets.specs(batches.element_spec), trains)
                if is_clocked:
                    result = stale_steps.execute(steps, step, model, batches, loop)
                elif _needs_keras_function(model, batches):
                    result = function(batches)
                elif unrolling.applies(model):  # several steps for each call
                    form = tracing.ResultForm.WHOLE if loop is None else tracing.ResultForm.READ_LATER
                    result = unrolling.execute(steps, step, strategy, batches, model.steps_per_execution, form)
                elif loop is not None:  # as fit and evaluate usually do
                    result = steps.run_next(step, batches, strategy)
                else:  # logs are read in each step
                    result = function(batches)
        except Exception as error:
            steps.explain(error)
            raise
        if is_clocked:
            return result
        if trains and watch.of(job).after(model.steps_per_execution):
            rebalancing.after_window(model, batches)
        if loop is not None:
            result = loop.logs(result)
        if trains and (number := next(calls)) % comparing.EVERY == 0:
            callbacks_lib.compare_state(model, f"the end of call {number} of its steps")
        return result

    return _marked(running)


def _marked(function: Any) -> Callable[..., Any]:
    """Marks a function in which `strategy.run` runs steps of one process; returns it."""
    function.runs_steps = True
    return function


def _needs_keras_function(model: keras.Model, batches: Any) -> bool:
    """Whether steps run eagerly, or on single batches."""
    return model.run_eagerly or tf.config.functions_run_eagerly() or not isinstance(batches, tf.data.Iterator)


def enumerate_iterator(original: Callable[..., Iterator[Any]], iterator: Any) -> Iterator[Any]:
    """Reads rows as ranks share them now, past what was trained before, and lets threads free the iterators.

    Of data that are read in part, rows for the next epoch may have been made ahead, as many as each rank came to: these
    stay shared as they were.
    """
    if iterator.steps_per_epoch is None:
        with context.inside():
            keras_compat.distribute_anew(iterator, lambda strategy, dataset: (
                strategy.extended.with_present_shares(dataset) if is_ours(strategy) else dataset))
    return freeing.steps(resuming.enumerate_iterator(original, iterator))


def results(original: Callable[..., Any], model: keras.Model, logs: Any) -> Any:
    """Reads metrics and logs after the last step of a loop over batches."""
    if is_ours(model.distribute_strategy):
        job = model.distribute_strategy.extended.job
        job.clocks.finish()
        watch.of(job).pause()
        job.held.end()
    return resuming.results(original, model, reading.read(logs))


def make_iterator(original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> None:
    """Makes Keras read global batches: its functions are those of one process."""
    with context.inside():
        original(iterator, *args, **kwargs)
    resuming.note_iterator(iterator)
