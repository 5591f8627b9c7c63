"""What tf.distribute promises of a strategy, as small checks: functions of any strategy that return plain values.

A check returns what programs see. What each replica has is wrapped in `Replicas`, so that the results of processes with
one replica each can be laid end to end; everything else must be the same in all of them.
"""

from collections.abc import Callable
import copy
import itertools
import os
import pickle
from typing import Any

import keras
import numpy as np
import tensorflow as tf

CHECKS: dict[str, Callable[[tf.distribute.Strategy], Any]] = {}  # by "group/name[column-column]"

_REDUCE = ("SUM", "MEAN")
_NUMBERS = ("int32", "int64", "float16", "bfloat16", "float32", "float64")
_AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
_SYNCHRONIZATIONS = ("AUTO", "ON_WRITE", "ON_READ")
_ASSIGN = ("assign", "assign_add", "assign_sub")
_SCATTER = ("scatter_add", "scatter_sub", "scatter_update", "scatter_min", "scatter_max", "scatter_mul", "scatter_div")
_HOW = ("eager", "graph")


class Replicas(list):
    """One value per replica of this process, in order."""


def check(group: str, *columns: tuple[Any, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as a check for each row of the product of columns, which are its arguments."""
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for row in itertools.product(*columns):
            suffix = f"[{'-'.join(map(str, row))}]" if row else ""
            CHECKS[f"{group}/{function.__name__}{suffix}"] = lambda strategy, row=row: function(strategy, *row)
        return function
    return register


def plain(value: Any) -> Any:
    """Returns a result as JSON has it; tensors with their types."""
    if isinstance(value, Replicas):
        return {"replicas": [plain(part) for part in value]}
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        dense = value.to_tensor() if isinstance(value, tf.RaggedTensor) else tf.sparse.to_dense(value)
        return plain([type(value).__name__, dense])
    if isinstance(value, tf.IndexedSlices):
        return plain(tf.convert_to_tensor(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.kind == "c":
        return [array.dtype.name, array.real.tolist(), array.imag.tolist()]
    if array.dtype.kind in "OS":
        return [text.decode("latin-1") for text in array.ravel().tolist()]
    return [array.dtype.name, array.astype("float64").tolist() if array.dtype.kind in "fV" else array.tolist()]


def local(strategy: tf.distribute.Strategy, value: Any) -> Replicas:
    """Returns what the replicas of this process have."""
    return Replicas(strategy.experimental_local_results(value))


def replica() -> tf.Tensor:
    """Returns the number of the replica that runs this, a scalar int32."""
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)


def of_replica(dtype: str = "float32", shape: tuple[int, ...] = ()) -> tf.Tensor:
    """Returns a tensor of small integers that are different on each replica."""
    count = int(np.prod(shape))
    return tf.cast(tf.reshape(tf.range(1, count + 1), shape) * 2 * (replica() + 1), dtype)


def runner(strategy: tf.distribute.Strategy, how: str) -> Callable[..., Any]:
    """Returns `strategy.run`, in a `tf.function` if asked to."""
    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = lambda *args, **kwargs: strategy.run(function, args=args, kwargs=kwargs)
        return (tf.function(call) if how == "graph" else call)(*args, **kwargs)
    return run


def folder(name: str) -> str:
    """Returns a path in a directory of this process."""
    return os.path.join(os.environ["CONTRACT_DIRECTORY"], name)


# ---- contexts ----------------------------------------------------------------------------------------------------


@check("context")
def number_of_replicas(strategy):
    return strategy.num_replicas_in_sync


@check("context", _HOW)
def replica_numbers(strategy, how):
    return local(strategy, runner(strategy, how)(replica))


@check("context")
def scope_is_cross_replica(strategy):
    before = tf.distribute.has_strategy(), tf.distribute.in_cross_replica_context()
    with strategy.scope():
        inside = (tf.distribute.has_strategy(), tf.distribute.in_cross_replica_context(),
                  tf.distribute.get_strategy() is strategy, tf.distribute.get_replica_context() is None)
    return before, inside, tf.distribute.has_strategy()


@check("context", _HOW)
def step_is_replica_context(strategy, how):
    seen = []

    def step():
        context = tf.distribute.get_replica_context()
        seen.append([tf.distribute.in_cross_replica_context(), tf.distribute.get_strategy() is strategy,
                     context.strategy is strategy, context.num_replicas_in_sync == strategy.num_replicas_in_sync])

    runner(strategy, how)(step)
    return seen[0]


@check("context")
def scopes_may_be_nested(strategy):
    with strategy.scope(), strategy.scope():
        return tf.distribute.get_strategy() is strategy


@check("context")
def scope_of_another_strategy(strategy):
    with strategy.scope(), tf.distribute.OneDeviceStrategy("CPU:0").scope():
        return "entered"


@check("context")
def scope_within_a_step(strategy):
    def step():
        with strategy.scope():
            return replica()
    return local(strategy, strategy.run(step))


@check("context", _HOW)
def merge_call(strategy, how):
    def merged(of_strategy, value):
        return of_strategy.reduce("SUM", value, axis=None)
    return local(strategy, runner(strategy, how)(
        lambda: tf.distribute.get_replica_context().merge_call(merged, args=(of_replica(),))))


@check("context")
def experimental_set_strategy(strategy):
    tf.distribute.experimental_set_strategy(strategy)
    try:
        return tf.distribute.has_strategy(), tf.distribute.get_strategy() is strategy
    finally:
        tf.distribute.experimental_set_strategy(None)


@check("context")
def devices(strategy):
    extended = strategy.extended
    return Replicas([1] * len(extended.worker_devices)), Replicas([1] * len(extended.parameter_devices))


@check("context")
def is_a_strategy_of_tensorflow(strategy):
    return isinstance(strategy, tf.distribute.Strategy), isinstance(strategy.extended, tf.distribute.StrategyExtended)


# ---- run ---------------------------------------------------------------------------------------------------------


@check("run", _HOW, ("args", "kwargs"))
def arguments(strategy, how, kind):
    step = lambda x, y: x - y + tf.cast(replica(), x.dtype)
    x, y = tf.constant([5., 6.]), tf.constant(2.)
    run = runner(strategy, how)
    return local(strategy, run(step, x, y) if kind == "args" else run(step, x=x, y=y))


@check("run", _HOW, ("dict", "tuple", "list", "nested"))
def structure_of_the_result(strategy, how, kind):
    make = {"dict": lambda x: {"a": x, "b": -x}, "tuple": lambda x: (x, -x), "list": lambda x: [x, -x],
            "nested": lambda x: {"a": (x, [-x, {"b": 2 * x}])}}[kind]
    result = runner(strategy, how)(lambda: make(of_replica()))
    return tf.nest.map_structure(lambda part: local(strategy, part), result)


@check("run", _HOW)
def nothing_is_returned(strategy, how):
    return runner(strategy, how)(lambda: None)


@check("run", _HOW, ("string", "bool", "int64", "complex64", "uint8"))
def types_of_results(strategy, how, dtype):
    def step():
        return tf.strings.as_string(replica()) if dtype == "string" else tf.cast(replica(), dtype)
    return local(strategy, runner(strategy, how)(step))


@check("run")
def ragged_result(strategy):
    return local(strategy, strategy.run(lambda: tf.ragged.constant([[1, 2], [3]]) * (replica() + 1)))


@check("run")
def sparse_result(strategy):
    return local(strategy, strategy.run(lambda: tf.sparse.from_dense(tf.reshape(tf.range(4), [2, 2]) * replica())))


@check("run", _HOW)
def exception_in_a_step(strategy, how):
    def step():
        raise ValueError("on purpose")
    runner(strategy, how)(step)


@check("run", _HOW)
def function_within_a_step(strategy, how):
    inner = tf.function(lambda x: x * 3)
    return local(strategy, runner(strategy, how)(lambda: inner(of_replica())))


@check("run")
def autograph_converts_a_step(strategy):
    def step(x):
        if tf.reduce_sum(x) > 100:
            return x
        for i in tf.range(3):
            x += tf.cast(i + replica(), x.dtype)
        return x
    return local(strategy, tf.function(lambda: strategy.run(step, args=(tf.constant(4.),)))())


@check("run", _HOW)
def several_runs_in_a_loop(strategy, how):
    def loop():
        total = tf.constant(0.)
        for _ in range(3):
            total += strategy.reduce("SUM", strategy.run(of_replica), axis=None)
        return total
    return (tf.function(loop) if how == "graph" else loop)()


@check("run", _HOW)
def values_of_replicas(strategy, how):
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10 * context.replica_id_in_sync_group + context.num_replicas_in_sync))
    return local(strategy, values), local(strategy, runner(strategy, how)(lambda x: x + 1, values))


@check("run", _HOW)
def results_of_a_run_are_given_to_the_next(strategy, how):
    run = runner(strategy, how)
    return local(strategy, run(lambda x: x + 1, run(lambda: of_replica(shape=(2,)))))


# ---- reduce, gather ----------------------------------------------------------------------------------------------


@check("reduce", _REDUCE, _NUMBERS, (None, 0, 1, -1))
def reduce(strategy, op, dtype, axis):
    return strategy.reduce(op, strategy.run(lambda: of_replica(dtype, (2, 3))), axis=axis)


@check("reduce", _REDUCE, _HOW)
def reduce_scalars(strategy, op, how):
    function = lambda: strategy.reduce(op, strategy.run(of_replica), axis=None)
    return (tf.function(function) if how == "graph" else function)()


@check("reduce", _REDUCE)
def reduce_enum(strategy, op):
    return strategy.reduce(tf.distribute.ReduceOp[op], strategy.run(of_replica), axis=None)


@check("reduce", _REDUCE)
def reduce_structure(strategy, op):
    return strategy.reduce(op, strategy.run(lambda: {"a": of_replica(shape=(2,)), "b": (of_replica(shape=(3,)),)}),
                           axis=None)


@check("reduce", (None, 0, 1, 7))
def reduce_scalars_along_an_axis(strategy, axis):
    return strategy.reduce("SUM", strategy.run(of_replica), axis=axis)


@check("reduce", ("MAX", "sum", "PRODUCT"))
def reduce_by_another_name(strategy, op):
    return strategy.reduce(op, strategy.run(of_replica), axis=None)


@check("reduce", ("string", "bool", "uint8", "complex64"))
def reduce_other_types(strategy, dtype):
    def step():
        return tf.strings.as_string(replica()) if dtype == "string" else tf.cast(replica(), dtype)
    return strategy.reduce("SUM", strategy.run(step), axis=None)


@check("reduce", _REDUCE)
def reduce_rows_of_open_number(strategy, op):
    data = tf.data.Dataset.from_tensor_slices(tf.range(10.)).batch(4)
    step = tf.function(lambda batch: strategy.reduce(op, strategy.run(lambda x: x * 2, args=(batch,)), axis=0))
    return [step(batch) for batch in strategy.experimental_distribute_dataset(data)]


@check("reduce", _REDUCE)
def reduce_a_python_number(strategy, op):
    return strategy.reduce(op, 4., axis=None)


@check("reduce", _REDUCE)
def reduce_to(strategy, op):
    value = strategy.run(of_replica)
    with strategy.scope():
        return local(strategy, strategy.extended.reduce_to(tf.distribute.ReduceOp[op], value, value))


@check("reduce", _REDUCE)
def batch_reduce_to(strategy, op):
    values = [strategy.run(of_replica), strategy.run(lambda: of_replica(shape=(2,)))]
    with strategy.scope():
        found = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp[op], [(v, v) for v in values])
        return [local(strategy, value) for value in found]


@check("all_reduce", _REDUCE, _NUMBERS, _HOW)
def all_reduce(strategy, op, dtype, how):
    return local(strategy, runner(strategy, how)(
        lambda: tf.distribute.get_replica_context().all_reduce(op, of_replica(dtype, (2,)))))


@check("all_reduce", _REDUCE)
def all_reduce_structure(strategy, op):
    result = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(
        op, {"a": of_replica(), "b": [of_replica(shape=(2,)), of_replica("float64")]}))
    return tf.nest.map_structure(lambda part: local(strategy, part), result)


@check("all_reduce", _REDUCE, _HOW)
def all_reduce_slices(strategy, op, how):
    def step():
        slices = tf.IndexedSlices(of_replica(shape=(2, 2)), tf.stack([0, 1 + replica()]), tf.constant([4, 2]))
        return tf.convert_to_tensor(tf.distribute.get_replica_context().all_reduce(op, slices))
    return local(strategy, runner(strategy, how)(step))


@check("all_reduce", _REDUCE, _HOW)
def gradient_of_all_reduce(strategy, op, how):
    def step():
        x = of_replica(shape=(2,))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.distribute.get_replica_context().all_reduce(op, x * x))
        return tape.gradient(y, x)
    return local(strategy, runner(strategy, how)(step))


@check("all_reduce")
def all_reduce_by_another_name(strategy):
    return local(strategy, strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("MAX", of_replica())))


@check("all_reduce")
def all_reduce_several_times(strategy):
    def step():
        x = of_replica()
        for _ in range(3):
            x += tf.distribute.get_replica_context().all_reduce("SUM", x)
        return x
    return local(strategy, tf.function(lambda: strategy.run(step))())


@check("gather", ("int32", "float32", "float64", "bool", "string"), (0, 1, -1))
def gather(strategy, dtype, axis):
    def step():
        value = of_replica("int32", (2, 3))
        return tf.strings.as_string(value) if dtype == "string" else tf.cast(value, dtype)
    return strategy.gather(strategy.run(step), axis=axis)


@check("gather", (0, 1))
def gather_different_lengths(strategy, axis):
    def step():
        value = tf.ones([1 + replica(), 2]) * tf.cast(replica() + 1, tf.float32)
        return value if axis == 0 else tf.transpose(value)
    return strategy.gather(strategy.run(step), axis=axis)


@check("gather", ("scalar", "axis 2", "axis -3"))
def gather_what_cannot_be(strategy, kind):
    step = of_replica if kind == "scalar" else lambda: of_replica(shape=(2, 2))
    return strategy.gather(strategy.run(step), axis={"axis 2": 2, "axis -3": -3}.get(kind, 0))


@check("gather")
def gather_structure(strategy):
    return strategy.gather(strategy.run(lambda: {"a": of_replica(shape=(1,)), "b": [of_replica(shape=(2,))]}), axis=0)


@check("gather", ("ragged", "sparse"))
def gather_composites(strategy, kind):
    make = {"ragged": lambda: tf.ragged.constant([[1, 2], [3]]),
            "sparse": lambda: tf.sparse.from_dense([[0, 1], [2, 0]])}[kind]
    return strategy.gather(strategy.run(make), axis=0)


@check("gather", _HOW, ("int32", "float32", "string"), (0, 1))
def all_gather(strategy, how, dtype, axis):
    def step():
        value = of_replica("int32", (2, 3))
        value = tf.strings.as_string(value) if dtype == "string" else tf.cast(value, dtype)
        return tf.distribute.get_replica_context().all_gather(value, axis=axis)
    return local(strategy, runner(strategy, how)(step))


@check("gather", _HOW)
def all_gather_different_lengths(strategy, how):
    return local(strategy, runner(strategy, how)(lambda: tf.distribute.get_replica_context().all_gather(
        tf.ones([1 + replica(), 2]) * tf.cast(replica() + 1, tf.float32), axis=0)))


@check("gather", _HOW)
def gradient_of_all_gather(strategy, how):
    def step():
        x = of_replica(shape=(2,))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.distribute.get_replica_context().all_gather(x * x, axis=0))
        return tape.gradient(y, x)
    return local(strategy, runner(strategy, how)(step))


# ---- variables ---------------------------------------------------------------------------------------------------


def variable(strategy, synchronization="AUTO", aggregation="NONE", dtype="float32", value=(6, 4)):
    """Returns a variable of the strategy's scope."""
    with strategy.scope():
        return tf.Variable(tf.constant(value, dtype), synchronization=tf.VariableSynchronization[synchronization],
                           aggregation=tf.VariableAggregation[aggregation], trainable=False)


@check("variables", _SYNCHRONIZATIONS, _AGGREGATIONS, _ASSIGN, _HOW)
def assigned_in_a_step(strategy, synchronization, aggregation, method, how):
    """The value that the step sees afterwards."""
    v = variable(strategy, synchronization, aggregation)

    def step():
        getattr(v, method)(of_replica(shape=(2,)))
        return v.read_value()

    return local(strategy, runner(strategy, how)(step))


@check("variables", _SYNCHRONIZATIONS, _AGGREGATIONS, _ASSIGN)
def read_after_a_step(strategy, synchronization, aggregation, method):
    v = variable(strategy, synchronization, aggregation)
    strategy.run(lambda: getattr(v, method)(of_replica(shape=(2,))))
    return v.read_value()


@check("variables", _SYNCHRONIZATIONS, _AGGREGATIONS, _ASSIGN)
def assigned_outside(strategy, synchronization, aggregation, method):
    v = variable(strategy, synchronization, aggregation)
    getattr(v, method)(tf.constant([2., 8.]))
    return local(strategy, strategy.run(lambda: tf.identity(v)))


@check("variables", ("AUTO", "ON_READ"), ("SUM", "MEAN"), ("int32", "int64", "float16", "float64"))
def types_of_variables(strategy, synchronization, aggregation, dtype):
    v = variable(strategy, synchronization, aggregation, dtype)
    strategy.run(lambda: v.assign_add(of_replica(dtype, (2,))))
    return v.read_value()


@check("variables", _SCATTER, _AGGREGATIONS)
def scattered_in_a_step(strategy, method, aggregation):
    v = variable(strategy, "AUTO", aggregation, value=(8, 4, 2))

    def step():
        getattr(v, method)(tf.IndexedSlices(tf.constant([2., 6.]), tf.constant([0, 2])))
        return tf.identity(v)

    return local(strategy, strategy.run(step))


@check("variables", _SCATTER)
def scattered_outside(strategy, method):
    v = variable(strategy, value=(8, 4, 2))
    getattr(v, method)(tf.IndexedSlices(tf.constant([2., 6.]), tf.constant([0, 2])))
    return v.read_value()


@check("variables", _SCATTER)
def on_read_scattered(strategy, method):
    v = variable(strategy, "ON_READ", "SUM", value=(8, 4, 2))
    strategy.run(lambda: getattr(v, method)(tf.IndexedSlices(tf.constant([2., 6.]), tf.constant([0, 2]))))
    return v.read_value()


@check("variables", _SYNCHRONIZATIONS, ("read_value", "value", "convert", "numpy", "identity", "plus", "index"))
def ways_to_read(strategy, synchronization, way):
    v = variable(strategy, synchronization, "SUM")
    if synchronization == "ON_READ":
        strategy.run(lambda: v.assign_add([1., 2.]))
    return {"read_value": lambda: v.read_value(), "value": lambda: v.value(),
            "convert": lambda: tf.convert_to_tensor(v),
            "numpy": lambda: v.numpy(), "identity": lambda: tf.identity(v), "plus": lambda: v + 1,
            "index": lambda: v[0]}[way]()


@check("variables", _SYNCHRONIZATIONS, _AGGREGATIONS)
def what_it_is(strategy, synchronization, aggregation):
    v = variable(strategy, synchronization, aggregation)
    return isinstance(v, tf.Variable), v.aggregation.name, v.shape.as_list(), v.dtype.name, v.trainable


@check("variables")
def synchronization_none(strategy):
    return variable(strategy, "NONE").read_value()


@check("variables", ("ON_WRITE", "ON_READ"))
def mean_of_integers(strategy, synchronization):
    v = variable(strategy, synchronization, "MEAN", "int32")
    strategy.run(lambda: v.assign(of_replica("int32", (2,))))
    return v.read_value()


@check("variables", ("tensor", "callable", "NumPy", "Python"))
def initial_values(strategy, kind):
    value = {"tensor": tf.constant([1., 2.]), "callable": lambda: tf.constant([1., 2.]), "NumPy": np.ones(2, "float32"),
             "Python": [1., 2.]}[kind]
    with strategy.scope():
        return tf.Variable(value).read_value()


@check("variables", _HOW)
def random_initial_values_are_equal(strategy, how):
    with strategy.scope():
        v = tf.Variable(lambda: tf.random.uniform([3]))
    values = strategy.gather(runner(strategy, how)(lambda: tf.expand_dims(v.read_value(), 0)), axis=0).numpy()
    return bool((values == values[0]).all())


@check("variables")
def strings(strategy):
    with strategy.scope():
        v = tf.Variable(["a", b"\xff"])
    return v.read_value(), local(strategy, strategy.run(lambda: tf.strings.join([v, tf.strings.as_string(replica())])))


@check("variables")
def created_in_a_step(strategy):
    made = []

    @tf.function
    def run():
        def step():
            if not made:
                made.append(tf.Variable(3.))
            return made[0] * 2
        return strategy.run(step)

    return local(strategy, run())


@check("variables")
def created_in_the_scope(strategy):
    inside, outside = variable(strategy), tf.Variable(1.)
    return strategy.extended.variable_created_in_scope(inside), strategy.extended.variable_created_in_scope(outside)


@check("variables")
def colocated(strategy):
    v = variable(strategy)
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        return tf.Variable(2.).read_value()


@check("variables", _HOW)
def updated_by_the_strategy(strategy, how):
    v = variable(strategy)

    def update():
        with strategy.scope():
            strategy.extended.update(v, lambda each, value: each.assign_add(value), args=(tf.constant([1., 2.]),))

    (tf.function(update) if how == "graph" else update)()
    return v.read_value()


@check("variables", _SYNCHRONIZATIONS)
def read_by_the_strategy(strategy, synchronization):
    v = variable(strategy, synchronization, "MEAN")
    with strategy.scope():
        return strategy.extended.read_var(v)


@check("variables", _HOW)
def trained_by_its_gradient(strategy, how):
    with strategy.scope():
        v = tf.Variable([3., 1.], aggregation=tf.VariableAggregation.SUM)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(v * v * tf.cast(replica() + 1, tf.float32))
        v.assign_sub(tape.gradient(loss, v))

    runner(strategy, how)(step)
    return v.read_value()


@check("variables")
def deep_copy(strategy):
    v = variable(strategy)
    with strategy.scope():
        other = copy.deepcopy(v)
    other.assign_add([1., 1.])
    return v.read_value(), other.read_value()


@check("variables")
def used_under_another_strategy(strategy):
    v = variable(strategy, "AUTO", "SUM")
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        v.assign_add([1., 1.])
        return v.read_value()


# ---- datasets ----------------------------------------------------------------------------------------------------


def rows(count: int, batch: int, drop_remainder: bool = False) -> tf.data.Dataset:
    """Returns a dataset of the numbers up to `count`, in batches."""
    return tf.data.Dataset.range(count).batch(batch, drop_remainder)


def read(strategy: tf.distribute.Strategy, dataset: Any) -> list[Any]:
    """Returns what the replicas of this process have of each batch."""
    return [tf.nest.map_structure(lambda part: local(strategy, part), batch) for batch in dataset]


@check("datasets", (8, 10, 9), (4, 5), (True, False))
def split(strategy, count, batch, drop_remainder):
    return read(strategy, strategy.experimental_distribute_dataset(rows(count, batch, drop_remainder)))


@check("datasets", (8, 10, 9), _HOW)
def rows_of_steps(strategy, count, how):
    """All rows, whichever replica has them."""
    run = lambda batch: strategy.gather(strategy.run(lambda x: x + 1, args=(batch,)), axis=0)
    run = tf.function(run) if how == "graph" else run
    return [run(batch) for batch in strategy.experimental_distribute_dataset(rows(count, 4))]


@check("datasets", ("dict", "tuple", "nested"))
def structures(strategy, kind):
    make = {"dict": lambda x: {"a": x, "b": x + 1}, "tuple": lambda x: (x, x * 2),
            "nested": lambda x: (x, {"a": (x, x)})}[kind]
    return read(strategy, strategy.experimental_distribute_dataset(rows(8, 4, True).map(make)))


@check("datasets", ("string", "bool", "float64"))
def types_of_rows(strategy, dtype):
    change = tf.strings.as_string if dtype == "string" else lambda x: tf.cast(x, dtype)
    return read(strategy, strategy.experimental_distribute_dataset(rows(8, 4, True).map(change)))


@check("datasets", ("ragged", "sparse"))
def composite_rows(strategy, kind):
    data = tf.data.Dataset.from_tensor_slices(
        tf.ragged.constant([[1], [2, 3], [], [4]]) if kind == "ragged" else tf.sparse.from_dense(tf.eye(4)))
    return read(strategy, strategy.experimental_distribute_dataset(data.batch(4)))


@check("datasets")
def repeated_epochs(strategy):
    data = strategy.experimental_distribute_dataset(rows(8, 4, True))
    return [read(strategy, data) for _ in range(2)]


@check("datasets")
def end_of_an_iterator(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(rows(8, 4, True)))
    for _ in range(3):
        next(iterator)


@check("datasets", _HOW)
def next_or_nothing(strategy, how):
    iterator = iter(strategy.experimental_distribute_dataset(rows(8, 4, True)))
    has_value = lambda: iterator.get_next_as_optional().has_value()
    has_value = tf.function(has_value) if how == "graph" else has_value
    return [bool(has_value()) for _ in range(3)]


@check("datasets")
def loop_within_a_function(strategy):
    data = strategy.experimental_distribute_dataset(rows(12, 4, True))

    @tf.function
    def total():
        result = tf.constant(0, tf.int64)
        for batch in data:
            result += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
        return result

    return total()


@check("datasets")
def iterator_within_a_function(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(rows(12, 4, True).repeat()))

    @tf.function
    def total():
        result = tf.constant(0, tf.int64)
        for _ in tf.range(5):
            result += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(next(iterator),)), axis=None)
        return result

    return total(), total()


@check("datasets")
def iterator_as_an_argument(strategy):
    @tf.function
    def total(iterator):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(next(iterator),)), axis=None)

    iterator = iter(strategy.experimental_distribute_dataset(rows(12, 4, True)))
    return total(iterator), total(iterator)


@check("datasets", (0, 1, 3))
def small_datasets(strategy, count):
    run = tf.function(lambda batch: strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None))
    return [run(batch) for batch in strategy.experimental_distribute_dataset(rows(count, 4))]


@check("datasets")
def without_a_batch(strategy):
    return read(strategy, strategy.experimental_distribute_dataset(tf.data.Dataset.range(4)))


@check("datasets")
def batch_that_replicas_do_not_divide(strategy):
    return read(strategy, strategy.experimental_distribute_dataset(rows(9, 3, True)))


@check("datasets", ("num_input_pipelines", "input_pipeline_id", "num_replicas_in_sync", "per replica"))
def input_context(strategy, field):
    seen = []

    def make(context):
        batch = context.get_per_replica_batch_size(8 * context.num_replicas_in_sync)
        seen.append(batch if field == "per replica" else getattr(context, field))
        return rows(8 * context.num_replicas_in_sync, batch)

    iter(strategy.distribute_datasets_from_function(make))
    return Replicas(seen) if field == "input_pipeline_id" else seen[0]


@check("datasets")
def made_by_a_function(strategy):
    def make(context):
        data = rows(12 * context.num_replicas_in_sync, 3)
        return data.shard(context.num_input_pipelines, context.input_pipeline_id)
    run = tf.function(lambda batch: strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None))
    return sum(int(run(batch)) for batch in strategy.distribute_datasets_from_function(make))


@check("datasets")
def per_replica_batch_size_that_is_no_integer(strategy):
    iter(strategy.distribute_datasets_from_function(lambda context: rows(9, context.get_per_replica_batch_size(
        context.num_replicas_in_sync + 1))))


@check("datasets")
def spec_as_an_input_signature(strategy):
    data = strategy.experimental_distribute_dataset(rows(8, 4, True))

    @tf.function(input_signature=[data.element_spec])
    def run(batch):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)

    return [run(batch) for batch in data]


@check("datasets", ("OFF", "FILE", "DATA", "AUTO"))
def sharding_policy(strategy, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[policy]
    return read(strategy, strategy.experimental_distribute_dataset(rows(8, 4, True).with_options(options)))


# ---- training ----------------------------------------------------------------------------------------------------

_OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.5), "momentum": lambda: keras.optimizers.SGD(0.5, 0.5),
               "adam": lambda: keras.optimizers.Adam(0.1), "rmsprop": lambda: keras.optimizers.RMSprop(0.1),
               "adagrad": lambda: keras.optimizers.Adagrad(0.1), "ftrl": lambda: keras.optimizers.Ftrl(0.1),
               "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=1.),
               "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=1.),
               "ema": lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=2),
               "accumulation": lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
               "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))}


@check("training", tuple(_OPTIMIZERS), _HOW)
def optimizers(strategy, name, how):
    """Two updates of a linear layer, whose loss is a mean over the rows of all replicas."""
    with strategy.scope():
        kernel = keras.Variable(np.arange(6, dtype="float32").reshape(3, 2))
        optimizer = _OPTIMIZERS[name]()
        optimizer.build([kernel])
    x = np.arange(24, dtype="float32").reshape(8, 3) % 5
    y = np.ones((8, 2), "float32")
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(4, True))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ kernel - y)**2) / 8
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, [kernel.value]), [kernel])
        return loss

    run = lambda *batch: strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
    run = tf.function(run) if how == "graph" else run
    return [run(*batch) for batch in data], kernel.value.read_value(), optimizer.iterations.value.read_value()


@check("training", _HOW)
def embedding(strategy, how):
    with strategy.scope():
        table = keras.Variable(np.arange(10, dtype="float32").reshape(5, 2))
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([table])

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table.value, ids)**2)
        optimizer.apply(tape.gradient(loss, [table.value]), [table])

    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices([0, 1, 1, 4]).batch(4, True))
    run = lambda ids: strategy.run(step, args=(ids,))
    run = tf.function(run) if how == "graph" else run
    for ids in data:
        run(ids)
    return table.value.read_value()


@check("training", ("compute_average_loss", "scale_regularization_loss"))
def scaled_losses(strategy, name):
    def step():
        value = of_replica(shape=(2,))
        return (tf.nn.compute_average_loss(value) if name == "compute_average_loss" else
                tf.nn.scale_regularization_loss(tf.constant(4.)))
    return strategy.reduce("SUM", strategy.run(step), axis=None)


@check("training", ("none", "sum", "sum_over_batch_size"))
def losses_of_keras(strategy, reduction):
    with strategy.scope():
        loss = keras.losses.MeanSquaredError(reduction=reduction)
    return local(strategy, strategy.run(lambda: loss(tf.zeros([2, 3]), of_replica(shape=(2, 3)))))


@check("training", (True, False))
def batch_normalisation(strategy, synchronized):
    """What a step sees; and the moving mean that it leaves."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5, synchronized=synchronized)
        layer.build([None, 2])
    output = tf.function(lambda: strategy.run(lambda: layer(of_replica(shape=(4, 2)), training=True)))()
    return local(strategy, output), layer.moving_mean.value.read_value()


@check("training")
def moving_average(strategy):
    with strategy.scope():
        v = tf.Variable([4., 8.], aggregation=tf.VariableAggregation.MEAN)
        average = tf.train.ExponentialMovingAverage(0.5)
        average.apply([v])
    strategy.run(lambda: v.assign(of_replica(shape=(2,))))
    with strategy.scope():
        average.apply([v])
    return average.average(v).read_value()


@check("metrics", ("Mean", "Sum", "MeanSquaredError", "BinaryAccuracy", "AUC", "Precision", "Recall", "TruePositives",
                   "RootMeanSquaredError", "MeanIoU", "CosineSimilarity"), _HOW)
def metrics(strategy, name, how):
    """Updated twice, read outside, reset, and updated again."""
    with strategy.scope():
        metric = getattr(keras.metrics, name)(*([2] if name == "MeanIoU" else []))

    def step():
        predicted = tf.constant([[0.1], [0.6], [0.9]]) * tf.cast(replica() + 1, tf.float32) / 2
        if name in ("Mean", "Sum"):
            metric.update_state(predicted)
        else:
            metric.update_state(tf.constant([[0.], [1.], [1.]]),
                                tf.round(predicted) if name == "MeanIoU" else predicted)

    run = runner(strategy, how)
    found = []
    for _ in range(2):
        run(step)
        run(step)
        found.append(metric.result())
        metric.reset_state()
    return found


@check("metrics")
def weighted_metric(strategy):
    with strategy.scope():
        metric = keras.metrics.Mean()
    strategy.run(lambda: metric.update_state(of_replica(shape=(2,)), sample_weight=[1., 3.]))
    return metric.result()


@check("metrics")
def result_within_a_step(strategy):
    with strategy.scope():
        metric = keras.metrics.Mean()

    def step():
        metric.update_state(of_replica(shape=(2,)))
        return metric.result()

    return local(strategy, strategy.run(step))


# ---- checkpoints -------------------------------------------------------------------------------------------------


@check("checkpoints", _SYNCHRONIZATIONS, ("SUM", "MEAN", "ONLY_FIRST_REPLICA"), ("in the scope", "without a strategy"))
def saved_and_restored(strategy, synchronization, aggregation, where):
    """The value after a step is saved; it is restored into a variable like it, or into a plain one."""
    v = variable(strategy, synchronization, aggregation)
    strategy.run(lambda: v.assign_add(of_replica(shape=(2,))))
    path = tf.train.Checkpoint(v=v).write(folder("checkpoint"))
    if where == "in the scope":
        other = variable(strategy, synchronization, aggregation, value=(0, 0))
        tf.train.Checkpoint(v=other).read(path).assert_consumed()
        return other.read_value(), local(strategy, strategy.run(lambda: tf.identity(other)))
    other = tf.Variable([0., 0.])
    tf.train.Checkpoint(v=other).read(path).assert_consumed()
    return other.read_value()


@check("checkpoints", _SYNCHRONIZATIONS, ("SUM", "MEAN"))
def restored_from_a_plain_variable(strategy, synchronization, aggregation):
    path = tf.train.Checkpoint(v=tf.Variable([2., 4.])).write(folder("plain"))
    v = variable(strategy, synchronization, aggregation, value=(0, 0))
    tf.train.Checkpoint(v=v).read(path).assert_consumed()
    return v.read_value(), local(strategy, strategy.run(lambda: tf.identity(v)))


@check("checkpoints", ("SUM", "MEAN"))
def restored_after_a_step(strategy, aggregation):
    """Replicas have values of their own when the checkpoint is read."""
    path = tf.train.Checkpoint(v=tf.Variable([2., 4.])).write(folder("plain"))
    v = variable(strategy, "ON_READ", aggregation)
    strategy.run(lambda: v.assign_add(of_replica(shape=(2,))))
    tf.train.Checkpoint(v=v).read(path).assert_consumed()
    strategy.run(lambda: v.assign_add(of_replica(shape=(2,))))
    return v.read_value()


@check("checkpoints")
def manager(strategy):
    v = variable(strategy)
    made = tf.train.CheckpointManager(tf.train.Checkpoint(v=v), folder("manager"), max_to_keep=1)
    for value in (1., 2.):
        v.assign([value, value])
        made.save()
    v.assign([0., 0.])
    made.restore_or_initialize()
    return v.read_value(), [os.path.basename(path) for path in made.checkpoints]


@check("checkpoints", _SYNCHRONIZATIONS)
def saved_model(strategy, synchronization):
    module = tf.Module()
    module.v = variable(strategy, synchronization, "MEAN")
    module.add = tf.function(lambda x: x + module.v, [tf.TensorSpec([2])])
    tf.saved_model.save(module, folder("saved_model"))
    loaded = tf.saved_model.load(folder("saved_model"))
    return loaded.add(tf.constant([1., 1.]))


@check("checkpoints")
def model_of_keras(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
    model.save_weights(folder("model.weights.h5"))
    model.set_weights([np.zeros((3, 2)), np.ones(2)])
    model.load_weights(folder("model.weights.h5"))
    return [weight.value.read_value() for weight in model.weights]


# ---- interfaces that are experimental, or for other libraries ----------------------------------------------------


@check("interfaces")
def local_results_are_a_tuple(strategy):
    found = strategy.experimental_local_results(strategy.run(replica))
    return type(found).__name__, type(strategy.experimental_local_results(3)).__name__


@check("interfaces", ("should_checkpoint", "should_save_summary"))
def files(strategy, name):
    """Whether this process writes files: in every job, one does."""
    return Replicas([getattr(strategy.extended, name)])


@check("interfaces", ("experimental_require_static_shapes", "experimental_between_graph", "experimental_should_init"))
def facts(strategy, name):
    return getattr(strategy.extended, name)


@check("interfaces")
def cluster_resolver(strategy):
    return strategy.cluster_resolver is None


@check("interfaces")
def value_container(strategy):
    v = variable(strategy)
    return strategy.extended.value_container(v) is v


@check("interfaces")
def pickled_strategy(strategy):
    return pickle.dumps(strategy) is not None


@check("interfaces")
def options_of_communication(strategy):
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1024)
    return local(strategy, strategy.run(
        lambda: tf.distribute.get_replica_context().all_reduce("SUM", of_replica(), options)))


@check("interfaces")
def random_generator(strategy):
    """Replicas draw different numbers from a generator of the scope."""
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1)
    drawn = strategy.gather(strategy.run(lambda: tf.expand_dims(generator.uniform([4]), 0)), axis=0).numpy()
    return len({row.tobytes() for row in drawn}) == strategy.num_replicas_in_sync


@check("interfaces")
def lookup_table(strategy):
    with strategy.scope():
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1)
    return local(strategy, strategy.run(lambda: table.lookup(tf.constant(["b", "c"]))))
