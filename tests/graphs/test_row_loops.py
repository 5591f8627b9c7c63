"""Loops with an iteration for each row: which of them run on each rank's rows; all of them compute the same."""

import dataclasses
from typing import Any

import numpy as np
import partitioning
import pytest
import tensorflow as tf

ROWS = (7, 2, 1, 0)
_F64 = tf.float64


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
        name: Its name.
        step: A function of x [K, 3], y [K, 3], both with rows, and w [3, 3], that returns tensors to compare.
        by_rows: Whether each rank runs the iterations of its rows alone.
        of: Tensors with gradients: of the sum of the squares of the first result; "-" if that is no number.
        fewest: The smallest number of rows that the step can take.
    """

    name: str
    step: Any
    by_rows: bool = True
    of: str = "xw"
    fewest: int = 0


def _map(function, *elements, **options):
    return tf.map_fn(function, elements if len(elements) > 1 else elements[0],
                     fn_output_signature=options.pop("gives", _F64), **options)


def _looped(first, body, x, *more):
    """Runs a body for each index, a TensorArray of rows and more variables, from what `first` gives."""
    count = tf.shape(x)[0]
    rows = tf.TensorArray(_F64, size=count, element_shape=[3]).unstack(x)
    begun = (tf.constant(0), *first(count), *more)
    return tf.while_loop(lambda i, *_: i < count, lambda i, *state: (i + 1, *body(i, rows, *state)), begun)


def _array(count):
    return (tf.TensorArray(_F64, size=count, element_shape=[3]),)


def _in_loop(body):
    """Returns a step that writes an array of rows, from (index, rows, array)."""
    return lambda x, y, w: _looped(_array, lambda i, rows, array: (body(i, rows, array, w),), x)[1].stack()


def _conditional(x, y, w):
    return _map(lambda row: tf.cond(tf.reduce_sum(row) > 0, lambda: tf.linalg.matvec(w, row), lambda: row**2), x)


def _summed(x, y, w):
    """A loop of one's own that only adds to sums, of which one does not begin at zero."""
    added = _looped(lambda count: (tf.reduce_sum(w), tf.constant(3)),
                    lambda i, rows, total, number: (total + tf.reduce_sum(tf.linalg.matvec(w, rows.read(i))**2),
                                                    number + tf.cast(rows.read(i)[0] > 0, tf.int32)), x)
    return added[1], added[2]


def _for_row(x, y, w):
    def step(x, w):
        total = tf.zeros([], _F64)
        for row in x:
            total += tf.reduce_sum(tf.linalg.matvec(w, row)**2)
        return total
    return tf.autograph.to_graph(step)(x, w)


def _gradients_of_rows(x, y, w):
    """A gradient of each row's loss, of whose norms there is a gradient too."""
    def norm(row):
        with tf.GradientTape() as tape:
            tape.watch(row)
            value = tf.reduce_sum(tf.tanh(tf.linalg.matvec(w, row)))
        return tape.gradient(value, row)
    return _map(norm, x)


def _second_derivative(x, y, w):
    with tf.GradientTape() as tape:
        tape.watch(x)
        values = _map(lambda row: tf.tanh(tf.linalg.matvec(w, row)), x)
    return tape.gradient(values, x)


def _nested(x, y, w):
    return _map(lambda row: tf.reduce_sum(_map(lambda number: tf.tanh(number * w[0]), row)), x)


def _counted(x, y, w):
    """An inner loop whose number of iterations depends on the row."""
    def powers(row):
        number = tf.cast(tf.reduce_max(tf.abs(row)), tf.int32)
        return tf.while_loop(lambda i, _: i < number, lambda i, value: (i + 1, tf.linalg.matvec(w, tf.tanh(value))),
                             (0, row), maximum_iterations=5)[1]
    return _map(powers, x)


def _drawn(x, y, w):
    seeds = tf.stack([tf.range(tf.shape(x)[0]), tf.ones_like(x[:, 0], tf.int32)], 1)
    return _map(lambda both: both[0] * tf.random.stateless_uniform([3], both[1], dtype=_F64), x, seeds)


def _asserted(x, y, w):
    def checked(row):
        with tf.control_dependencies([tf.debugging.assert_less(row, tf.constant(99, _F64))]):
            return tf.linalg.matvec(w, row)
    return _map(checked, x)


def _variable(x, y, w):
    table = tf.compat.v1.get_variable("table", initializer=np.arange(6.0).reshape(2, 3), use_resource=True)
    return _map(lambda row: tf.gather(table, tf.cast(row[0] > 0, tf.int32)) * row, x)


def _assigned(x, y, w):
    variable = tf.compat.v1.get_variable("last", initializer=np.zeros(3), use_resource=True)

    def note(row):
        with tf.control_dependencies([variable.assign(row)]):
            return row + 1
    rows = _map(note, x, parallel_iterations=1)
    with tf.control_dependencies([rows]):
        return rows, variable.read_value()


def _kept(x, y, w):
    """What the last iteration leaves is the last row's value."""
    left = _looped(lambda count: (*_array(count), tf.zeros(3, _F64)),
                   lambda i, rows, array, _: (array.write(i, rows.read(i)), rows.read(i) * 2), x)
    return left[1].stack(), left[2]


def _swapped(x, y, w):
    """Two sums that change places."""
    one, other = _looped(lambda count: (tf.zeros(3, _F64), tf.ones(3, _F64)),
                         lambda i, rows, one, other: (other + rows.read(i), one + 1), x)[1:]
    return one, other


# ---- lists and stacks, as only gradients use them ------------------------------------------------


def _list(x):
    return tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[3])


def _get(list_, i):
    return tf.raw_ops.TensorListGetItem(input_handle=list_, index=i, element_shape=[3], element_dtype=_F64)


def _put(list_, i, row):
    return tf.raw_ops.TensorListSetItem(input_handle=list_, index=i, item=row)


def _rows(list_):
    return tf.raw_ops.TensorListStack(input_handle=list_, element_shape=[3], element_dtype=_F64)


def _counted_to(x, body, *variables):
    """Runs a body from (index, variables) for each row, and returns the variables."""
    count = tf.shape(x)[0]
    return tf.while_loop(lambda i, *_: i < count, lambda i, *state: (i + 1, *body(i, *state)), (0, *variables))[1:]


def _stack_of(x):
    rows, empty = _list(x), tf.raw_ops.EmptyTensorList(element_shape=[3], max_num_elements=-1, element_dtype=_F64)
    return _counted_to(x, lambda i, stack: (tf.raw_ops.TensorListPushBack(
        input_handle=stack, tensor=_get(rows, i)),), empty)[0]


def _pop(stack):
    return tf.raw_ops.TensorListPopBack(input_handle=stack, element_shape=[3], element_dtype=_F64)


def _taken_back(x, y, w):
    """Takes rows from a stack in the order opposite to that of the numbers at which it writes them."""
    def take(i, stack, array):
        stack, row = _pop(stack)
        return stack, array.write(i, row)
    return _counted_to(x, take, _stack_of(x), *_array(tf.shape(x)[0]))[1].stack()


def _from_the_second(x, y, w):
    count = tf.shape(x)[0]
    rows = tf.TensorArray(_F64, size=count, element_shape=[3]).unstack(x)
    return tf.while_loop(lambda i, _: i < count, lambda i, total: (i + 1, total + tf.linalg.matvec(w, rows.read(i))),
                         (tf.constant(1), tf.zeros([3], _F64)))[1]


def _summed_back(x, y, w):
    def take(i, stack, total):
        stack, row = _pop(stack)
        return stack, total + row * w[0]
    return _counted_to(x, take, _stack_of(x), w[1])[1]


def _lists_that_change_places(x, y, w):
    rows = _list(x)
    one, other = _counted_to(x, lambda i, one, other: (other, _put(one, i, _get(rows, i))), _list(0 * x), _list(0 * y))
    return _rows(one), _rows(other)


def _lists_added(x, y, w):
    more = _list(y)
    return _rows(_counted_to(x, lambda i, rows: (tf.raw_ops.AddN(inputs=[rows, more]),), _list(x))[0])


def _list_of_zeros_each_time(x, y, w):
    rows = _list(x)
    return _rows(_counted_to(
        x, lambda i, last: (_put(tf.raw_ops.ZerosLike(x=last), i, _get(rows, i)),), _list(y))[0])


def _list_from_outside(x, y, w):
    rows, other = _list(x), _list(y)
    return _rows(_counted_to(x, lambda i, last: (_put(other, i, _get(rows, i)),), _list(0 * x))[0])


def _array_of_each_iteration(x, y, w):
    rows, array = _list(x), lambda: _array(tf.shape(x)[0])[0]
    return _counted_to(x, lambda i, last: (array().write(i, _get(rows, i)),), array().unstack(y))[0].stack()


def _last_of_a_stack(x, y, w):
    stack = _stack_of(x)
    return _counted_to(x, lambda i, total: (total + _pop(stack)[1],), w[0])[0]


def _stacks_that_change_places(x, y, w):
    def take(i, one, other, total):
        (one, row), (other, _) = _pop(one), _pop(other)
        return other, one, total + row
    return _counted_to(x, take, _stack_of(x), _stack_of(y), w[0])[2]


def _begun_with(begin):
    """A sum that begins with what follows from rows."""
    def step(x, y, w):
        rows = _list(x)
        return _counted_to(x, lambda i, total: (total + _get(rows, i) * w[0],), begin(x))[0]
    return step


def _limited_below(x, y, w):
    """In one process, the loop has an iteration in a batch without rows."""
    count = tf.maximum(tf.shape(x)[0], 1)
    return tf.while_loop(lambda i, _: i < count, lambda i, total: (i + 1, total + w[0, 0]), (0, w[1, 1]))[1]


LOOPS = (
    Loop("map_fn", lambda x, y, w: _map(lambda row: tf.tanh(tf.linalg.matvec(w, row)), x)),
    Loop("two inputs", lambda x, y, w: _map(lambda both: tf.reduce_sum(tf.linalg.matvec(w, both[0]) * both[1]), x, y)),
    Loop("two results", lambda x, y, w: _map(lambda row: (row * w[0], tf.argmax(row)), x, gives=(_F64, tf.int64))),
    Loop("one iteration at a time", lambda x, y, w: _map(lambda row: row @ w, x[:, None], parallel_iterations=1)),
    Loop("behind and before products", lambda x, y, w: tf.tanh(_map(lambda row: tf.sort(row), x @ w)) @ w),
    Loop("one behind another", lambda x, y, w: _map(lambda row: row**2, _map(lambda row: tf.linalg.matvec(w, row), x))),
    Loop("all rows against each", lambda x, y, w: _map(
        lambda row: tf.reduce_logsumexp(tf.reduce_sum((x - row)**2 * w[0], 1)), x)),
    Loop("rows of similarities", lambda x, y, w: _map(lambda row: tf.nn.softmax(row), x @ w @ tf.transpose(y)),
         fewest=1),
    Loop("gathered by number", lambda x, y, w: _map(
        lambda i: tf.linalg.matvec(w, tf.gather(x, i)) * tf.cast(i, _F64), tf.range(tf.shape(x)[0]))),
    Loop("condition", _conditional),
    Loop("nested", _nested),
    Loop("inner loop", _counted),
    Loop("random numbers by row", _drawn, of="x"),
    Loop("assertion", _asserted),
    Loop("variable", _variable, of="x"),
    Loop("gradients of rows", _gradients_of_rows),
    Loop("second derivative", _second_derivative, False),
    Loop("sums", _summed),
    Loop("for row in rows", _for_row),
    Loop("loop of one's own", _in_loop(lambda i, rows, array, w: array.write(i, tf.linalg.matvec(w, rows.read(i))))),
    Loop("each row twice", _in_loop(
        lambda i, rows, array, w: array.write(i, rows.read(i)).write(i, rows.read(i) * w[0]))),
    Loop("scan", lambda x, y, w: tf.scan(lambda state, row: tf.tanh(tf.linalg.matvec(w, state)) + row, x), False,
         fewest=1),
    Loop("backwards", _in_loop(lambda i, rows, array, w: array.write(rows.size() - 1 - i, rows.read(i) * w[0])), False),
    Loop("the number in an expression", _in_loop(
        lambda i, rows, array, w: array.write(i, rows.read(i) * tf.cast(i, _F64))), False, of="x"),
    Loop("two rows", _in_loop(
        lambda i, rows, array, w: array.write(i, rows.read(i) + rows.read(tf.maximum(i - 1, 0)) * w[0])), False),
    Loop("row written before", _in_loop(lambda i, rows, array, w: array.write(i, rows.read(i) * w[0]).write(
        0, rows.read(i))), False, of=""),
    Loop("random numbers", lambda x, y, w: _map(lambda row: row * tf.random.uniform([], 1, 1 + 1e-15, _F64), x), False,
         of=""),
    Loop("assignment", _assigned, False, of=""),
    Loop("last row", _kept, False, of=""),
    Loop("sums that change places", _swapped, False, of="x"),
    Loop("taken back", _taken_back, False, of=""),
    Loop("summed back", _summed_back, of=""),
    Loop("lists that change places", _lists_that_change_places, False, of=""),
    Loop("lists that are added", _lists_added, False, of=""),
    Loop("a list of zeros each time", _list_of_zeros_each_time, False, of=""),
    Loop("a list from outside", _list_from_outside, False, of=""),
    Loop("an array of each iteration", _array_of_each_iteration, False, of=""),
    Loop("last of a stack", _last_of_a_stack, False, of=""),
    Loop("stacks that change places", _stacks_that_change_places, False, of=""),
    Loop("a sum that begins with rows", _begun_with(lambda x: x), of=""),
    Loop("a sum that begins with a maximum", _begun_with(lambda x: tf.reduce_max(x, 0)), of=""),
    Loop("a limit of at least one", _limited_below, False, of="w"),
    Loop("from the second row on", _from_the_second, False),
    Loop("strings", lambda x, y, w: _map(tf.strings.as_string, x, gives=tf.string), False, of="-"),
    Loop("every second row", lambda x, y, w: _map(lambda row: tf.linalg.matvec(w, row), x[::2]), False),
    Loop("columns", lambda x, y, w: tf.transpose(_map(lambda column: column**2, tf.transpose(x @ w))), False),
)


@pytest.mark.parametrize("loop", LOOPS, ids=[loop.name for loop in LOOPS])
def test_loop_is_exact_on_each_number_of_ranks(loop):
    made = partitioning.check(lambda: _build(loop), [_feeds(rows) for rows in ROWS if rows >= loop.fewest])
    assert _is_by_rows(made.partitioned.graph_def) == loop.by_rows, str(made.report)


def test_loops_of_inputs_with_their_own_numbers_of_rows():
    def build():
        x, y = (partitioning.rows(tf.compat.v1.placeholder(_F64, (None, 3), name=name))[0] for name in "xy")
        rows, s = _list(y), tf.reduce_sum(tf.tanh(x), 0)
        return [_map(lambda row: row * y[0], x), _map(lambda row: row * s * tf.random.uniform([], 1, 1, _F64), y),
                *_counted_to(y, lambda i, total: (total + _get(rows, i),), tf.reduce_sum(x, 0))]

    rng = np.random.default_rng(3)
    partitioning.check(build, [{"x": rng.uniform(-2, 2, (k, 3)), "y": rng.uniform(-2, 2, (m, 3))}
                               for k, m in ((4, 7), (1, 4))])


def _build(loop):
    placeholders = {name: tf.compat.v1.placeholder(_F64, shape, name=name)
                    for name, shape in (("x", (None, 3)), ("y", (None, 3)), ("w", (3, 3)))}
    x, y = partitioning.rows(placeholders["x"], placeholders["y"])
    sources = {"x": x, "w": placeholders["w"]}
    with tf.GradientTape() as tape:
        tape.watch(list(sources.values()))
        results = tf.nest.flatten(loop.step(x, y, placeholders["w"]))
        if loop.of == "-":
            return [tf.strings.reduce_join(result) for result in results]
        loss = tf.reduce_sum(results[0]**2)
    gradients = tape.gradient(loss, [sources[name] for name in loop.of]) if loop.of else []
    return [loss, *results, *gradients]


def _feeds(rows):
    rng = np.random.default_rng(rows)
    return {"x": rng.uniform(-2, 2, (rows, 3)), "y": rng.uniform(-2, 2, (rows, 3)), "w": rng.uniform(-1, 1, (3, 3))}


def _is_by_rows(graph_def):
    """Whether the limit of a loop is this rank's number of rows."""
    enters = {node.name for node in graph_def.node if node.op == "Enter"}
    return any(node.op == "PoseidonLocalShape" and node.name[len("poseidon/"):-len("/local0")] in enters
               for node in graph_def.node)
