"""Unrolled steps against as many runs of one step, on one rank: variables, results, and what waits for what."""

import collections
import itertools
import re
import types

import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import functions
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import unroll
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import partition_options
from tf_poseidon.one_process import partitioning
from tf_poseidon.one_process import rank_graphs
from tf_poseidon.one_process import stepping
from tf_poseidon.one_process import tracing

pytestmark = pytest.mark.usefixtures("alone")

STEPS = 3


class State:
    """Variables of a step."""

    def __init__(self):
        self.w, self.v = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
        self.count = tf.Variable(0, dtype=tf.int64)
        self.table = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))

    @property
    def values(self):
        return [v.numpy() for v in (self.w, self.v, self.count, self.table)]


def update_each_from_itself(state, x):
    state.w.assign_sub(tf.reduce_sum(x, 0) * state.w)
    state.v.assign(state.v * 2 + tf.reduce_sum(x))
    return state.w + state.v


def update_one_from_another(state, x):
    state.w.assign(state.w + state.v)
    state.v.assign(tf.reduce_sum(state.w * x))
    return state.v.read_value()


def read_after_writing(state, x):
    state.count.assign_add(1)
    before = tf.cast(state.count, tf.float32)
    state.count.assign_add(1)
    return x * before


def accumulate(state, x):
    state.w.assign_add(tf.reduce_sum(x, 0))
    state.count.assign_add(1)
    if_due = state.count % 2 == 0

    def apply():
        state.v.assign_add(tf.reduce_sum(state.w))
        state.w.assign(tf.zeros_like(state.w))
        return 1.0

    return tf.cond(if_due, apply, lambda: 0.0)


def loop(state, x):
    def body(i, total):
        state.v.assign_add(1.0)
        return i + 1, total * state.v

    return tf.while_loop(lambda i, _: i < 3, body, [0, tf.reduce_sum(x)])


def gather_and_scatter(state, x):
    rows = tf.gather(state.table, [1, 3])
    state.table.scatter_sub(tf.IndexedSlices(rows * tf.reduce_sum(x), tf.constant([1, 3])))
    return rows


def check(state, x):
    tf.debugging.assert_greater(tf.reduce_sum(x), -1e9)
    state.v.assign_add(1.0)
    return x


def only_read(state, x):
    return x * state.w


SAME = (update_each_from_itself, update_one_from_another, read_after_writing, accumulate, loop, gather_and_scatter,
        check, only_read)


def partitioned(function):
    """Returns (a function's state, its graphs for one rank)."""
    state, x = State(), tf.ones((4, 2))
    call = calls.Call(lambda x: function(state, x), {}, (x,), {})
    traced = tracing.traced(call_of(function, state), call)
    return state, rank_graphs.RankGraphs(partitioning.partition(traced, partition_options.PartitionOptions(1, rows=4)))


def call_of(function, state):
    def step(x):
        return function(state, x)
    return step


@pytest.mark.parametrize("function", SAME, ids=lambda function: function.__name__)
def test_unrolled_steps_compute_what_single_steps_do(function):
    batches = [tf.constant(np.random.default_rng(i).integers(-3, 4, (4, 2)), tf.float32) for i in range(STEPS)]
    state, single = partitioned(function)
    for batch in batches:
        result = single.marked("")(batch)
    again, unrolled = partitioned(function)
    assert not unrolled.order.obstacle
    others = unrolled.unrolled(STEPS)(*batches)
    for mine, theirs in zip(tf.nest.flatten(result), tf.nest.flatten(others), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(state.values, again.values, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def body_of(function):
    """Returns the `FunctionBody` of the nodes that a partitioned function calls."""
    graph_def = function.graph.as_graph_def()
    calls, = (node for node in graph_def.node if node.op == "StatefulPartitionedCall")
    return functions.Library(graph_def).body(calls.attr["f"].func.name)


def test_a_variable_waits_for_its_own_accesses_only():
    """Between steps, nothing that concerns one variable waits for another one."""
    _, step = partitioned(update_each_from_itself)
    assert step.order.whole == 0
    graph = graph_lib.Graph(functions.to_graph(body_of(step.unrolled(2))))
    kinds = collections.defaultdict(set)
    for node in graph.graph_def.node:
        if node.name.startswith("step1/after/"):
            for control in graph_lib.control_inputs(node):
                kinds[node.name].add(graph.node(graph_lib.data_inputs(graph.node(control))[0]).name)
    assert kinds and all(len(sources) == 1 for sources in kinds.values())


@pytest.mark.parametrize("function", SAME, ids=lambda function: function.__name__)
def test_a_step_begins_when_the_last_but_one_is_over(function):
    """So the intermediate results of two are in memory at a time, also where nothing waits for variables."""
    _, partitioned_step = partitioned(function)
    controls = body_of(partitioned_step.marked("")).control_returns
    body = body_of(partitioned_step.unrolled(4))
    graph = graph_lib.Graph(functions.to_graph(body))
    for step, (batch, _) in enumerate(body.arguments[:4]):
        begin = f"step{step}/after/step{step - 2}"
        users = [node for node in graph.graph_def.node if batch in map(graph_lib.node_of, node.input)]
        assert users and {f"^{begin}" in node.input for node in users} == {step >= 2}
        if step >= 2:
            before = set(map(graph_lib.node_of, graph.node(begin).input))
            assert before == {unroll.renamed(name, step - 2) for name in controls}


@pytest.mark.parametrize("function", [accumulate, loop])
def test_variables_of_branches_and_loops_wait_for_the_whole_step(function):
    assert partitioned(function)[1].order.whole


def draw(state, x):
    state.v.assign_add(tf.random.normal([]))
    return x


def print_in_branch(state, x):
    return tf.cond(state.v > 0, lambda: [tf.print("positive"), x][1], lambda: x)


def assign_in_python(state, x):
    tf.py_function(lambda: state.v.assign(2.0), [], [])
    return x * state.v


def name_like_a_step(state, x):
    with tf.name_scope("step1"):
        return x + 1.0


def own_resource(state, x):
    return x * tf.raw_ops.StackPopV2(handle=tf.raw_ops.StackV2(max_size=1, elem_type=tf.float32), elem_type=tf.float32)


@pytest.mark.parametrize("function,reason", [
    (draw, r"the RandomStandardNormal '\S+' keeps its state in the op itself"),
    (print_in_branch, "the PrintV2 'cond/then/_0/cond/PrintV2' must run in order, but is in a branch or loop"),
    (assign_in_python, r"the EagerPyFunc '\S+' may use variables in Python, where the graph does not show it"),
    (name_like_a_step, r"'step1/\S+' is named like a node of a later step"),
    (own_resource, "the StackV2 'StackV2' keeps its state in the op itself"),
])
def test_steps_that_cannot_be_unrolled_are_refused_by_name(function, reason):
    _, step = partitioned(function)
    assert re.fullmatch(reason, step.order.obstacle)
    with pytest.raises(GraphError, match="A step cannot be unrolled, since"):
        step.unrolled(STEPS)


@pytest.mark.parametrize("number,nodes,expected", [
    (1, 100, 1), (2, 100, 2), (8, 100, 8), (9, 100, 8), (10, 100, 5), (11, 100, 5), (16, 100, 8), (100, 100, 8),
    (8, 10_000, 4), (8, 15_000, 2), (8, 30_000, 1), (8, 100_000, 1)])
def test_steps_become_as_few_graphs_as_possible(number, nodes, expected):
    assert unroll.length(number, nodes) == expected


@pytest.mark.parametrize("at_a_time, number, available, taken, ran", [
    (8, 8, 99, [8], [8]), (5, 20, 99, [8, 2, 5, 5], [5, 5, 5, 5]), (8, 18, 99, [8, 8, 2], [8, 8, 1, 1]),
    (1, 20, 99, [8, 8, 4], [1] * 20),  # not one by one, since ranks compare how many there are
    (8, 16, 11, [8, 8], [8, 1, 1, 1]), (4, 8, 5, [8], [4, 1]), (8, 8, 0, [8], [])])
def test_batches_are_taken_as_many_at_a_time_as_run(monkeypatch, at_a_time, number, available, taken, ran):
    batches, asked, lengths, given = iter(range(available)), [], [], []

    def take(wanted):
        if len(given) < sum(asked):
            return []  # the data have ended, as `unrolling` knows
        asked.append(wanted)
        given.extend(more := list(itertools.islice(batches, wanted)))
        return [tf.constant([float(batch)]) for batch in more]

    def run(inputs):
        lengths.append(len(inputs))
        return float(inputs[-1][0][0])

    function = types.SimpleNamespace(unrolled_steps=lambda number: at_a_time, run=run)
    steps = stepping.Steps(types.SimpleNamespace())
    monkeypatch.setattr(steps, "_job_function", lambda step, call, form: function)
    result = steps.run_unrolled(lambda x: x, take, number)
    assert (lengths, result) == (ran, min(number, available) - 1 if available else None)
    assert asked == taken


def test_names_of_steps():
    assert [unroll.renamed("a:1", step) for step in range(2)] == ["a:1", "step1/a:1"]
