"""Rules of the row partitioner: the table of partition_cases on many ranks, and the effect of wrong rules."""

import dataclasses
import functools
import importlib.util
import time

import partition_cases
import partition_table
import partitioning
import pytest
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition import rules
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.rules import contractions
from tf_poseidon.graph_passes.partition.rules import control
from tf_poseidon.graph_passes.partition.rules import elementwise
from tf_poseidon.graph_passes.partition.rules import reductions
from tf_poseidon.graph_passes.partition.rules import shapes
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

FAMILIES = (elementwise, reductions, contractions, shapes, control)
_CASES_OF_A_GRAPH = 30
# As many rows on both ranks, so that rows mistaken for summands can be summed.
_EVEN_ROWS = 8


def _all_cases():
    cases = list(partition_cases.CASES)
    if importlib.util.find_spec("partition_families"):
        cases += importlib.import_module("partition_families").CASES
    return cases


def _own_rules():
    return {op for family in FAMILIES for op in family.RULES}


@pytest.mark.parametrize("first", range(0, len(partition_cases.CASES), _CASES_OF_A_GRAPH))
def test_ranks_compute_what_one_process_does(first):
    lines = partition_table.check(partition_cases.CASES[first:first + _CASES_OF_A_GRAPH])
    assert not lines, "\n".join(lines)


def _drawn(rows):
    return tf.random.stateless_uniform([rows, 3], [1, 2], dtype=tf.float64)


def _one_hot(x, depth):
    return tf.one_hot(tf.cast(x[:, 0] > 0, tf.int32), depth, dtype=tf.float64)


# Sizes that look like the number of rows, or like constants, unless there are few rows: by (rows, x).
_LIMITED = {
    "at_least_three": lambda n, x: tf.reduce_sum(_drawn(tf.maximum(n, 3)) @ tf.ones([3, 3], tf.float64)),
    "at_least_two": lambda n, x: tf.reduce_sum(_drawn(tf.maximum(n, 2)) @ tf.ones([3, 3], tf.float64)),
    "sum_of_three_columns": lambda n, x: tf.transpose(x) @ _one_hot(x, tf.minimum(n, 3)),
    "sum_of_two_columns": lambda n, x: tf.transpose(x) @ _one_hot(x, tf.minimum(n, 2)),
    "chosen": lambda n, x: tf.transpose(x) @ _one_hot(x, tf.where(n > 1, 4, 2)),
    "even": lambda n, x: tf.reduce_sum(_drawn(2 * ((n + 1) // 2) - 1) @ tf.ones([3, 3], tf.float64)),
    "first_three": lambda n, x: tf.slice(x, [0, 0], [tf.minimum(n, 3), 3]),
    "padded_to_three": lambda n, x: tf.pad(x, [[0, tf.maximum(3 - n, 0)], [0, 0]]),
}


def test_sizes_that_look_like_others_in_large_batches():
    cases = [partition_table.Case("", lambda x, build=build: build(tf.shape(x)[0], x) + tf.reduce_sum(x),
                                  [partition_table.of(partition_table.K, 3)], {}, has_gradient=False)
             for build in _LIMITED.values()]
    lines = partition_table.check(cases, all_rows=(1, 2, 3, 7))
    assert not lines, "\n".join(lines)


def test_every_rule_has_a_case():
    named = {op for case in partition_cases.CASES for op in case.ops.split()}
    without = _own_rules() - named
    assert not without, f"Rules without a case in partition_cases: {sorted(without)}"


@functools.cache
def _batch(number):
    """Returns (the graph of one case, the results of one process)."""
    batch = partition_table.Batch([_all_cases()[number]])
    return batch, batch.alone([_EVEN_ROWS])


def _claims_whole(outcome):
    return dataclasses.replace(outcome, gives=(WHOLE,) * len(outcome.gives))


def _claims_other(outcome):
    """Rows are claimed to be summands, all else to be rows."""
    return dataclasses.replace(outcome, gives=tuple(
        SUM if isinstance(state, Rows) else Rows(0) for state in outcome.gives))


def _stays_local(outcome):
    """Ops that are written differently, or get other shapes, are left unchanged."""
    return dataclasses.replace(outcome, write=None, local={})


def _mutated(rule, change, changed):
    """Returns a rule with every outcome changed; records those that differ then."""

    def wrong(case):
        outcome = rule(case)
        if outcome is None:
            return None
        other = change(outcome)
        changed.append(other != outcome)
        return other

    return wrong


def _is_noticed(number, changed):
    """Whether a case fails; not if no rule has changed anything in it."""
    batch, expected = _batch(number)
    changed.clear()
    try:
        _, graph_def, fetches = batch.partition()
        return any(changed) and any(batch.wrong_values(expected, results, size)
                                    for size, results in batch.on_ranks(graph_def, fetches, [2], [_EVEN_ROWS]))
    except (tf.errors.OpError, PoseidonError, ValueError, TypeError, KeyError, IndexError):
        partitioning.forget_jobs()
        return any(changed)


@functools.cache
def _cases_of(op):
    """Returns the numbers of the cases that name an op: those that give rows or summands first."""
    numbers = [i for i, case in enumerate(_all_cases()) if op in case.ops.split()]
    return sorted(numbers, key=lambda i: _all_cases()[i].expected(op) == {"whole"})


# Of lists, no case compares what this changes: a list's own state, and sizes that its elements have anyhow; of arrays,
# a number that orders what works on them.
_UNNOTICED = {
    "_claims_whole": {"EmptyTensorList", "TensorListReserve"},
    "_claims_other": {"TensorListPushBack", "TensorArrayWriteV3"},
    "_stays_local": {"EmptyTensorList", "TensorListGetItem", "TensorListPopBack", "TensorListGather",
                     "TensorListScatterV2", "TensorListElementShape"},
}


@pytest.mark.parametrize("change", [_claims_whole, _claims_other, _stays_local], ids=lambda change: change.__name__)
def test_wrong_rules_are_noticed(change, monkeypatch):
    unnoticed, same = [], set()
    for table, op, rule in [*((rules.RULES, *item) for item in rules.RULES.items()),
                            *((rules.BLOCKS, *item) for item in rules.BLOCKS.items())]:
        numbers = _cases_of(op)
        if not numbers:
            continue  # test_every_rule_has_a_case is about them
        changed, has_changed = [], False
        with monkeypatch.context() as patch:
            patch.setitem(table, op, _mutated(rule, change, changed))
            for number in numbers:
                if _is_noticed(number, changed):
                    break
                has_changed |= any(changed)
            else:
                if has_changed:
                    unnoticed.append(op)
                else:
                    same.add(op)
    assert set(unnoticed) <= _UNNOTICED[change.__name__]
    if change is not _stays_local:
        # Their outputs are whole anyway, or they have none.
        none = {"Assert"} if change is _claims_other else {"Assert", "Shape", "ShapeN", "Size", "Rank"}
        assert same & _own_rules() == none


def _seconds_of_processor(layers):
    """Returns how long partitioning a training step with a number of layers takes, the better of two."""
    with tf.Graph().as_default() as graph:
        h, = partitioning.rows(tf.compat.v1.placeholder(tf.float32, [None, 4]))
        kernels = [tf.ones([4, 4]) / (i + 1) for i in range(layers)]
        for kernel in kernels:
            h = tf.nn.relu(tf.matmul(h, kernel) + tf.reduce_mean(h, 0))
        fetches = [gradient.name for gradient in tf.gradients(tf.reduce_mean(h), kernels)]
    graph_def, times = graph.as_graph_def(), []
    for _ in range(2):
        started = time.process_time()
        partition_lib.partition(graph_def, fetches, grappler.add_shapes)
        times.append(time.process_time() - started)
    return min(times)


@pytest.mark.parametrize("dtype, device", [(tf.float32, "/device:GPU:0"), (tf.int64, "/device:CPU:0")])
def test_tensors_are_exchanged_where_they_are(dtype, device, monkeypatch):
    """If there is a kernel, which the table of types on GPUs stands for here."""
    monkeypatch.setattr(devices, "has_kernel", lambda op, device, T: (
        "CPU" in device or T == tf.float32.as_datatype_enum))
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(dtype, [None, 4]))
        with tf.device("/device:GPU:0"):
            y = tf.matmul(x, tf.ones((4, 4), dtype))
            fetches = [tf.reduce_sum(y, 0).name, tf.cumsum(y, 0).name]
    nodes = partition_lib.partition(graph.as_graph_def(), fetches, grappler.add_shapes).graph_def.node
    exchanges = {node.op: node.device for node in nodes if node.op in ("PoseidonAllGather", "PoseidonSync")}
    assert exchanges == {"PoseidonAllGather": device, "PoseidonSync": device}


def test_ranks_keep_their_rows_of_what_could_be_gathered():
    with tf.Graph().as_default() as graph:
        x, names = partitioning.rows(*(tf.compat.v1.placeholder(dtype, [None, 4]) for dtype in (tf.float32, tf.string)))
        fetches = [tf.matmul(x, tf.ones((4, 4))).name, tf.strings.upper(names).name]
    partitioned = partition_lib.partition(graph.as_graph_def(), fetches, grappler.add_shapes, own=fetches)
    assert partitioned.own == {0}
    assert not any(node.op == "PoseidonAllGather" for node in partitioned.graph_def.node)


def test_twice_the_nodes_take_twice_the_time():
    assert _seconds_of_processor(40) < 3 * _seconds_of_processor(20)


def test_gradients_are_exchanged_before_they_are_scaled():
    """Also behind an IdentityN, which optimizers put all gradients through, and one that nobody reads."""
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.float32, [None, 4]))
        kernel, bias, rate = tf.ones([4, 3]), tf.ones([3]), tf.sqrt(tf.constant(0.01))
        loss = tf.reduce_sum(tf.square(tf.nn.bias_add(x @ kernel, bias)))
        gradients = tf.gradients(loss, [kernel, bias])
        outputs = tf.identity_n([*gradients, *gradients])
        fetches = [tf.abs(-(rate * outputs[0])).name, tf.abs(outputs[1] / rate).name]  # as an update needs them whole
    report = partition_lib.partition(graph.as_graph_def(), fetches, grappler.add_shapes).report
    assert {exchange.tensor for exchange in report.exchanges} == {gradient.op.name for gradient in gradients}


@pytest.mark.parametrize("read, dtype", [
    (lambda total: [tf.cast(total, tf.bfloat16)], "bfloat16"),
    (lambda total: [tf.cast(total, tf.bfloat16), tf.cast(total, tf.bfloat16)], "bfloat16"),
    (lambda total: [tf.cast(total, tf.bfloat16), tf.abs(total)], "float32"),
    (lambda total: [tf.cast(total, tf.bfloat16), total], "float32"),
    (lambda total: [tf.cast(total, tf.float16)], "float32"),
    (lambda total: [tf.abs(total)], "float32")])
def test_a_sum_that_is_rounded_to_what_it_was_cast_from_is_exchanged_before_the_cast(read, dtype):
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.bfloat16, [None, 4]))
        total = tf.cast(tf.linalg.matmul(x, x, transpose_a=True, name="product"), tf.float32, name="cast")
        fetches = [value.name if value is total else tf.abs(value).name for value in read(total)]
    exchange, = partition_lib.partition(graph.as_graph_def(), fetches, grappler.add_shapes).report.exchanges
    assert (tf.as_dtype(exchange.dtype).name, exchange.tensor) == (dtype, "product" if dtype == "bfloat16" else "cast")


def test_a_sum_in_double_is_not_taken_in_float():
    with tf.Graph().as_default() as graph:
        x, = partitioning.rows(tf.compat.v1.placeholder(tf.float32, [None, 4]))
        total = tf.cast(tf.linalg.matmul(x, x, transpose_a=True), tf.float64, name="cast")
        fetches = [tf.abs(tf.cast(total, tf.float32)).name]
    exchange, = partition_lib.partition(graph.as_graph_def(), fetches, grappler.add_shapes).report.exchanges
    assert exchange.tensor == "cast"


def test_what_is_fetched_is_exchanged_by_names_of_its_own():
    """Names of exchanges omit that of an inlined call; two tensors may then have the same name."""
    with tf.Graph().as_default() as graph:
        rows, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None, 3), name="x"))
        for scope in ("", "StatefulPartitionedCall/"):
            tf.linalg.matmul(rows, tf.ones((3, 2), tf.float64), name=f"{scope}product")
        loss = tf.reduce_sum(rows, name="loss")
    kept = ["product", "StatefulPartitionedCall/product"]
    partitioned = partition_lib.partition(inline.inline(graph.as_graph_def(), [loss.name, *kept]), [loss.name],
                                          grappler.add_shapes, kept=kept)
    sites = [node.attr["site"].s for node in partitioned.graph_def.node if node.op == "PoseidonAllGather"]
    assert len(set(sites)) == len(sites) == 2, sites


def test_what_trains_one_variable_is_fetched_by_names_of_its_own():
    with tf.Graph().as_default() as graph:
        rows, = partitioning.rows(tf.compat.v1.placeholder(tf.float64, (None, 3), name="x"))
        weight = tf.Variable(tf.ones([3], tf.float64), use_resource=True, name="weight")
        gradient = tf.reduce_sum(rows * weight.read_value(), 0, name="gradient")
        update = weight.assign_sub(tf.multiply(gradient, 0.1, name="scaled"))
        done = tf.identity(update, name="done")
    kept = ["gradient", "scaled"]
    partitioned = partition_lib.partition(inline.inline(graph.as_graph_def(), [done.name, *kept]), [done.name],
                                          grappler.add_shapes, kept=kept)
    assert [exchange.site for exchange in partitioned.report.exchanges] == ["weight"]
    sites = [node.attr["site"].s for node in partitioned.graph_def.node if "site" in node.attr]
    assert len(set(sites)) == len(sites), sites
