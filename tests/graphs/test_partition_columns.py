"""Layers of which each rank has some columns, on many ranks in this process against one process.

The rules are tested by the table of partition_column_cases. A head is a step that trains such a layer: its variables,
and what ranks exchange in it, which would be more if an op needed whole columns.
"""

import collections
import types
import typing

import numpy as np
import partition_column_cases
import partition_table
from partition_table import K
import partitioning
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon import grappler
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.rules import columns
from tf_poseidon.graph_passes.partition.rules.columns import makers
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.partition.updates import awaited_reads
from tf_poseidon.graph_passes.partition.updates import last_readers

# Batches of some steps: without rows, with fewer rows than ranks, uneven ones.
BATCHES = (7, 1, 0, 12)
_CASES_OF_A_GRAPH = 60
FEATURES, CLASSES = 5, 70  # with 16 columns together, five ranks have 16 each but for the last one, which has 6


@pytest.mark.parametrize("first", range(0, len(partition_column_cases.CASES), _CASES_OF_A_GRAPH))
def test_ranks_compute_what_one_process_does(first):
    cases = partition_column_cases.CASES[first:first + _CASES_OF_A_GRAPH]
    lines = partition_table.check(cases, all_rows=(0, 2, 7))
    assert not lines, "\n".join(lines)


def test_every_rule_has_a_case():
    named = {op for case in partition_column_cases.CASES for op in case.ops.split()}
    without = columns.RULES.keys() - named
    assert not without, f"Rules without a case in partition_column_cases: {sorted(without)}"


def test_what_is_needed_in_columns_is_computed_again():
    """And not sliced from all of it."""
    cases = partition_column_cases.MADE
    named = {op for case in cases for op in case.ops.split()}
    without = {op for op in makers.MAKERS if not op.endswith(("Grad", "Gradient"))} - named
    assert not without, f"Rules without a case in partition_column_cases.MADE: {sorted(without)}"
    batch = partition_table.Batch(cases)
    made = {f"poseidon/{node.name}" for node in batch.flat.node for scope, _, _ in [node.name.partition("/")]
            if scope.startswith("case") and node.op in cases[int(scope.removeprefix("case"))].ops.split()}
    _, graph_def, _ = batch.partition()
    sliced = {node.name for node in graph_def.node if node.op == "Slice"
              and node.name.rpartition("/columns")[0] in made}
    assert not sliced


@pytest.mark.parametrize("number", [-1, partition_table.COLUMNS])
@pytest.mark.parametrize("build", [
    lambda logits, number: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.repeat(number, 3), logits),
    lambda table, number: tf.gather(tf.transpose(table), [3, number])], ids=["label", "lookup"])
def test_each_rank_fails_where_there_is_no_such_column(build, number):
    """On its own, before it waits for others: in no other way would those fail that have columns."""
    batch = partition_table.Batch([partition_table.Case("", build, [
        partition_table.columns(3, K), partition_table.of(dtype="int32", low=number, high=number + 1)], "",
        has_gradient=False)])
    _, graph_def, fetches = batch.partition()
    joined, of_ranks = partitioning.on_ranks(types.SimpleNamespace(graph_def=graph_def, fetches=fetches[0]), 3)
    with tf.compat.v1.Session(graph=joined) as session:
        for rank in range(3):
            feeds = {f"rank{rank}/{name}:0": value for name, value in batch.feeds(1).items()}
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"is not in \[0, 20\)"):
                session.run(of_ranks[0][rank], feeds)


@pytest.mark.parametrize("largest", [1.0, 100.0, 1e4])
def test_cross_entropies_are_those_of_float64_within_rounding(largest):
    """A loss is a difference of numbers as large as logits; a gradient, of numbers up to one."""
    def build(logits, classes, shares):
        losses = [tf.nn.sparse_softmax_cross_entropy_with_logits(classes, logits),
                  tf.nn.softmax_cross_entropy_with_logits(shares, logits)]
        return [*losses, *(tf.gradients(loss, logits)[0] for loss in losses)]

    rows, precision = 64, float(np.finfo(np.float32).eps)
    batch = partition_table.Batch([partition_table.Case("", build, [
        partition_table.columns(rows, K, dtype="float32",
                                make=lambda rng, shape: rng.uniform(-largest, largest, shape)),
        partition_table.of(rows, dtype="int32", low=0, high=partition_table.COLUMNS),
        partition_table.of(rows, partition_table.COLUMNS, dtype="float32", make=lambda rng, shape: rng.dirichlet(
            np.ones(shape[1]), shape[0]))], "", has_gradient=False)])
    logits, classes, shares, _ = (value.astype(np.float64) for value in batch.feeds(1).values())
    shifted = logits - logits.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    targets = [np.eye(partition_table.COLUMNS)[classes.astype(int)], shares]
    want = [*(-(target * logs).sum(1) for target in targets), *(np.exp(logs) - target for target in targets)]
    _, graph_def, fetches = batch.partition()
    for _, results in batch.on_ranks(graph_def, fetches, partitioning.RANKS, [1]):
        for values in results[1]:
            for got, expected, bound in zip(values[0], want, [8 * largest, 8 * largest, 8, 8], strict=True):
                np.testing.assert_allclose(got, expected, rtol=0, atol=bound * precision)


class Inputs(typing.NamedTuple):
    """The inputs of a step with a row for each example: features, a class, a number for each class, and a weight."""

    x: tf.Tensor
    classes: tf.Tensor
    targets: tf.Tensor
    weight: tf.Tensor


def logits_of(inputs, variables):
    return inputs.x @ variables["kernel"].read_value() + variables["bias"].read_value()


def softmax_head(inputs, variables):
    logits = logits_of(inputs, variables)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(inputs.classes, logits)
    return tf.reduce_sum(losses * inputs.weight), tf.argmax(logits, -1), tf.math.in_top_k(
        inputs.classes, tf.cast(logits, tf.float32), 3)


def dense_labels(inputs, variables):
    logits = logits_of(inputs, variables)
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(inputs.targets, logits)), tf.argmin(logits, -1)


def probabilities(inputs, variables):
    """A loss without logits, and its mean."""
    chosen = tf.nn.softmax(logits_of(inputs, variables))
    chosen = tf.clip_by_value(chosen / tf.reduce_sum(chosen, -1, keepdims=True), 1e-7, 1 - 1e-7)
    losses = -tf.reduce_sum(inputs.targets * tf.math.log(chosen), -1)
    return tf.reduce_mean(losses), tf.reduce_mean(chosen, 0), tf.reduce_max(chosen)


def log_probabilities(inputs, variables):
    logits = tf.nn.log_softmax(logits_of(inputs, variables) / 2)
    return tf.reduce_sum(logits * inputs.targets), tf.reduce_logsumexp(logits, 1), tf.reduce_min(logits, 1)


def multi_label(inputs, variables):
    logits = logits_of(inputs, variables)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(inputs.targets, logits)
    return tf.reduce_mean(losses, -1), tf.reduce_mean(losses), tf.reduce_all(logits > -1e9), tf.nn.l2_loss(losses)


def smoothed(inputs, variables):
    """Label smoothing of classes as numbers for each class, and a mask that a step draws."""
    targets = tf.one_hot(inputs.classes, CLASSES, dtype=tf.float64) * 0.9 + 0.1 / CLASSES
    logits = logits_of(inputs, variables)
    noise = tf.random.stateless_uniform(tf.shape(logits), (3, 4), dtype=tf.float64)
    logits = tf.where(noise > 0.25, logits / 0.75, tf.zeros_like(logits))
    return tf.reduce_sum(tf.nn.softmax_cross_entropy_with_logits(targets, logits)), tf.size(logits)


def cosine(inputs, variables):
    """ArcFace: weights of length 1, a margin on the angle of the class, and a scale."""
    weights = tf.math.l2_normalize(variables["kernel"].read_value(), 0)
    cosines = tf.clip_by_value(tf.math.l2_normalize(inputs.x + 0.125, 1) @ weights, -0.999, 0.999)
    mask = tf.one_hot(inputs.classes, CLASSES, dtype=tf.float64)
    logits = 8 * tf.cos(tf.acos(cosines) + 0.5 * mask)
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(inputs.classes, logits))


def sequences(inputs, variables):
    """Two places for each example, transposed, and numbers of the largest."""
    hidden = tf.stack([inputs.x, inputs.x[:, ::-1]], 1)
    logits = tf.reshape(tf.reshape(hidden, [-1, FEATURES]) @ variables["kernel"].read_value(), [-1, 2, CLASSES])
    logits = tf.nn.bias_add(logits, variables["bias"].read_value())
    probabilities_of_classes = tf.transpose(tf.nn.softmax(logits), [0, 2, 1])
    flat = tf.reshape(logits, [-1, CLASSES])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.repeat(inputs.classes, 2), flat)
    values, indices = tf.math.top_k(logits, 20)
    return tf.reduce_sum(losses), tf.reduce_sum(probabilities_of_classes, [0, 1]), values, indices, tf.shape(flat)


def pair(inputs, variables):
    """Two layers, the first divided by its outputs, and the second by its inputs."""
    hidden = tf.nn.relu(logits_of(inputs, variables))
    return tf.reduce_sum(tf.square(tf.sinh(hidden @ variables["second"].read_value() / 64) - inputs.weight[:, None]))


def transposed(inputs, variables):
    """A head whose classes are rows, as in a table of embeddings, with rows of it besides."""
    table = variables["table"].read_value()
    found = tf.gather(table, inputs.classes)
    logits = tf.matmul(inputs.x + found, table, transpose_b=True)
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(inputs.classes, logits))


def without_rule(inputs, variables):
    """Cumulative sums over classes need whole columns."""
    logits = tf.cumsum(logits_of(inputs, variables), 1)
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(inputs.classes, logits))


class Head(typing.NamedTuple):
    """What is expected of a step.

    Attributes:
        exchanges: How many exchanges it has, by kind.
        divided: The dimension that is divided of each variable.
        whole: The shapes of other variables.
    """

    exchanges: dict[str, int]
    divided: dict[str, int] = {"kernel": 1, "bias": 0}
    whole: dict[str, tuple[int, ...]] = {}


SHAPES = {"kernel": (FEATURES, CLASSES), "bias": (CLASSES,), "second": (CLASSES, 3), "table": (CLASSES, FEATURES)}
HEADS = {
    softmax_head: Head({"columns": 6, "return": 1, "rows": 1, "sum": 1}),
    dense_labels: Head({"columns": 5, "return": 1}), probabilities: Head({"columns": 8, "return": 1}),
    log_probabilities: Head({"columns": 5, "return": 1, "rows": 1, "sum": 1}),
    multi_label: Head({"columns": 3, "return": 1, "sum": 2}), smoothed: Head({"columns": 3, "return": 1}),
    cosine: Head({"columns": 2, "return": 1, "rows": 1}, {"kernel": 1}),
    sequences: Head({"columns": 5, "return": 1, "sum": 1}),
    pair: Head({"columns": 1, "return": 2, "rows": 1, "sum": 1}, {"kernel": 1, "bias": 0, "second": 0}),
    transposed: Head({"columns": 2, "return": 2, "rows": 1, "sum": 1}, {"table": 0}),
    without_rule: Head({"columns": 2, "return": 1, "rows": 1, "sum": 3})}


def make(head):
    """Returns (the graph in one process, names of its initial operation, its fetches, and its variables' values)."""
    graph, shapes = tf.Graph(), {**{name: SHAPES[name] for name in HEADS[head].divided}, **HEADS[head].whole}
    with graph.as_default():
        given = [tf.compat.v1.placeholder(dtype, shape, name=name) for name, dtype, shape in (
            ("x", tf.float64, (None, FEATURES)), ("classes", tf.int32, (None,)),
            ("targets", tf.float64, (None, CLASSES)), ("weight", tf.float64, (None,)))]
        inputs = Inputs(*partitioning.rows(*given))
        variables = {name: tf.Variable(tf.zeros(shape, tf.float64), use_resource=True, name=name)
                     for name, shape in shapes.items()}
        # What the weights are computed from is known; no rank draws them.
        start = [variable.assign(tf.reshape(tf.range(1.0, 1.0 + np.prod(shape), dtype=tf.float64) % (i + 7) / 8 - 0.25,
                                            shape)) for i, (variable, shape) in enumerate(
                                                zip(variables.values(), shapes.values()))]
        with tf.control_dependencies(start):
            initial = tf.constant(1.0)
        found = head(inputs, variables)
        fetches = list(found) if isinstance(found, tuple) else [found]
        gradients = tf.gradients(fetches[0], list(variables.values()))
        with tf.control_dependencies(fetches):
            updates = [variable.assign_sub(0.25 * gradient)
                       for variable, gradient in zip(variables.values(), gradients)]
        with tf.control_dependencies(updates):
            done = tf.constant(1.0)
        values = {name: variable.read_value() for name, variable in variables.items()}
    return graph, initial.name, [*(fetch.name for fetch in fetches), done.name], {
        name: value.name for name, value in values.items()}


def known_variables(head):
    layouts = {name: name for name in HEADS[head].divided}
    divisions = {name: Division(name, divided=dimension, columns=(*SHAPES[name], 1)[1])
                 for name, dimension in HEADS[head].divided.items()}
    return partition_lib.KnownVariables(layouts, shards=layouts, divisions=divisions, divided=layouts)


def feeds_of(step):
    rows, draw = BATCHES[step], np.random.default_rng(step)
    return {"x:0": draw.integers(-3, 4, (rows, FEATURES)) / 4, "classes:0": draw.integers(0, CLASSES, rows),
            "targets:0": draw.integers(0, 3, (rows, CLASSES)) / 4, "weight:0": draw.integers(0, 3, rows)}


def run(session, names, of_ranks=lambda feeds: feeds):
    initial, fetches, values = names
    session.run(initial, of_ranks(feeds_of(0)))
    found = []
    for step in range(len(BATCHES)):
        found.append([session.run(fetches, of_ranks(feeds_of(step))), session.run(values)])
    return found


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_heads_run_on_columns(head):
    graph, initial, fetches, values = make(head)
    names = [initial, *fetches, *values.values()]
    flat = inline.inline(graph.as_graph_def(), names)
    step = partition_lib.partition(flat, fetches, grappler.add_shapes, known_variables(head))
    kinds = collections.Counter(exchange.kind for exchange in step.report.exchanges)
    assert kinds == HEADS[head].exchanges, step.report
    assert step.shards.keys() == HEADS[head].divided.keys()
    with tf.compat.v1.Session(graph=graph) as session:
        expected = run(session, (initial, fetches, list(values.values())))
    partitioned = partition_lib.partition(flat, names, grappler.add_shapes, known_variables(head))
    for size in partitioning.RANKS:
        joined, of_ranks = partitioning.on_ranks(partitioned, size)
        with tf.compat.v1.Session(graph=joined) as session:
            first, *others = of_ranks
            found = run(session, (first, others[:len(fetches)], others[len(fetches):]), lambda feeds: {
                f"rank{rank}/{name}": value for name, value in feeds.items() for rank in range(size)})
        for number, (got, want) in enumerate(zip(found, expected, strict=True)):
            for name, of_all, value in zip([*fetches, *values], [*got[0], *got[1]], [*want[0], *want[1]], strict=True):
                for rank in range(size):
                    np.testing.assert_allclose(of_all[rank], value, rtol=1e-11, atol=1e-11,
                                               err_msg=f"{name} on rank {rank} of {size} after step {number}")
                    assert of_all[rank].tobytes() == of_all[0].tobytes(), f"bits of {name} on rank {rank} of {size}"


def of_nodes(nodes):
    """Returns a GraphDef of (name, op, inputs) of each node."""
    return graph_pb2.GraphDef(node=[node_def_pb2.NodeDef(name=name, op=op, input=inputs) for name, op, inputs in nodes])


@pytest.mark.parametrize("is_before", [False, True])
def test_updates_wait_for_what_computes_with_a_weight(is_before):
    """Not for what reads it when it is updated, and never in a circle."""
    nodes = [("v", "VarHandleOp", []), ("x", "Placeholder", []), ("read", "ReadVariableOp", ["v"]),
             ("flat", "Reshape", ["read", "x"]), ("errors", "MatMul", ["flat", "x", *["^update"] * is_before]),
             ("update", "AssignSubVariableOp", ["v", "x"]), ("again", "ReadVariableOp", ["v", "^update"]),
             ("later", "Neg", ["again"])]
    graph_def = of_nodes(nodes)
    waiting = {node.name: list(node.input) for node in awaited_reads.awaited(graph_def, ["v"]).node}
    assert waiting["update"] == ["v", "x", *["^errors"] * (not is_before)]
    assert awaited_reads.awaited(graph_def, []) == graph_def


# Adam's update of a weight: of its slots m and v, which are independent, and then of itself.
ADAM = [
    *((name, "VarHandleOp", []) for name in ("w", "m", "v")), ("rate", "Const", []), ("errors", "Placeholder", []),
    ("gradient", "MatMul", ["errors", "errors"]), ("flat", "Reshape", ["gradient", "rate"]),
    ("read_m", "ReadVariableOp", ["m"]), ("less_m", "Sub", ["flat", "read_m"]), ("part_m", "Mul", ["less_m", "rate"]),
    ("update_m", "AssignAddVariableOp", ["m", "part_m"]), ("new_m", "ReadVariableOp", ["m", "^update_m"]),
    ("square", "Square", ["gradient"]), ("read_v", "ReadVariableOp", ["v"]), ("less_v", "Sub", ["square", "read_v"]),
    ("update_v", "AssignAddVariableOp", ["v", "less_v"]), ("new_v", "ReadVariableOp", ["v", "^update_v"]),
    ("root", "Sqrt", ["new_v"]), ("scaled", "Mul", ["new_m", "rate"]), ("step", "RealDiv", ["scaled", "root"]),
    ("update_w", "AssignSubVariableOp", ["w", "step"])]


@pytest.mark.parametrize("more, layouts, waiting", [
    ({}, "www", {"less_m": {"^square"}}), ({"read_m": ["^square"]}, "www", {}), ({"norm": ["gradient"]}, "www", {}),
    ({}, "wmv", {}), ({}, "", {})], ids=["any", "waits already", "read by others", "of other layouts", "none"])
def test_heads_overwrite_a_gradient(more, layouts, waiting):
    """The last op that computes with it waits for the others, unless somebody else has it, too."""
    graph_def = of_nodes([*((name, op, [*inputs, *more.get(name, ())]) for name, op, inputs in ADAM),
                          *([("norm", "L2Loss", more["norm"])] if "norm" in more else [])])
    result = last_readers.waiting(graph_def, dict(zip("wmv", layouts)))
    added = {node.name: {*node.input} - {*before.input} for before, node in zip(
        graph_def.node, result.node, strict=True)}
    assert {name: inputs for name, inputs in added.items() if inputs} == waiting
