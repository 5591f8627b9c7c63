"""Which gradients overtake others, those that the next step needs first; when it needs them; operations in loops."""

import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import operations as operations_lib
from tf_poseidon.graph_passes.find import priorities
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition.preparation import inline

LAYERS = ("first", "middle", "last")


def graph_of_steps(number, joint=False, frozen=False, moments=False, shards=False):
    """Returns a graph that trains a chain of layers.

    Args:
        number: Its number of steps.
        joint: Whether gradients are scaled by their norm.
        frozen: Whether two layers that are not trained come first.
        moments: Whether a sum of the forward pass comes after the first product.
        shards: Whether gradients become shards before they are whole.
    """
    with tf.Graph().as_default() as graph:
        weights = {name: tf.compat.v1.placeholder(tf.float32, [2, 2], name=f"{name}_weights") for name in LAYERS}
        untrained = tf.compat.v1.placeholder(tf.float32, [2, 2], name="untrained")
        for step in range(number):
            mark = f"#{step}" if step else ""
            ops.agree([f"'{name}{mark}' float32[2, 2]" for name in (*LAYERS, *(["moments"] if moments else ()))], None,
                      None, False)
            value = tf.compat.v1.placeholder(tf.float32, [2, 2], name=f"batch{step}")
            if frozen:
                value = (value @ untrained) @ untrained
            for name in LAYERS:
                value = value @ weights[name]
                if moments and name == LAYERS[0]:
                    value -= ops.sync(tf.reduce_mean(value), "moments" + mark, True, [])
            gradients, error = {}, value
            for name in reversed(LAYERS):
                gradients[name] = ops.gather_shards(
                    ops.reduce_scatter(error * 2, name + mark, name), f"shards/{name}{mark}", [2, 2], name,
                ) if shards else ops.sync(error * 2, name + mark, True, [2, 2])
                error = error @ weights[name]
            if joint:
                norm = tf.add_n([tf.reduce_sum(g * g) for g in gradients.values()])
                gradients = {name: gradient / norm for name, gradient in gradients.items()}
            weights = {name: weights[name] - gradients[name] for name in LAYERS}
        tf.identity_n(list(weights.values()))
    graph_def = graph.as_graph_def(add_shapes=True)
    for node in graph_def.node:
        if node.op in exchanges.OF_SHARDS:
            node.attr[graph_lib.MEANWHILE].s = b"computes"
    return graph_def


def found(graph_def):
    planner = planning.Planner(planning.Cluster(4))
    known = session.RewriteSession(planner).find(graph_def)
    return dict(priorities.FindPriorities()(known).priorities)


def test_one_step_has_no_priorities():
    assert found(graph_of_steps(1)) == {}


def test_the_order_of_the_next_forward_pass_counts_and_earlier_steps_are_first():
    assert found(graph_of_steps(3)) == {
        "first": 1, "middle": 2, "last": 3, "first#1": 4, "middle#1": 5, "last#1": 6,
        **{f"{name}#2": 7 for name in LAYERS}}


def test_shards_have_them_too():
    graph_def = graph_of_steps(2, shards=True)
    of_first = {"first": 1, "shards/first": 2, "middle": 2, "shards/middle": 3, "last": 3, "shards/last": 4}
    assert found(graph_def) == of_first | {f"{name}#1": 5 for name in of_first}
    rewritten = session.RewriteSession(planning.Planner(planning.Cluster(4))).rewrite(graph_def).graph_def
    given = {node.attr["site"].s.decode(): node.attr["priority"].i for node in rewritten.node
             if node.op in exchanges.OF_SHARDS}
    assert given == found(graph_def)


def test_a_graph_that_follows_a_given_plan_is_not_compared_with_it_again():
    """TensorFlow hands it over twice; it has exchanges left, but no gradients to plan."""
    with tf.Graph().as_default() as graph:
        ops.agree(["'w' float32[2, 2]"], None, None, False)
        ops.sync(tf.ones([2, 2]), "w", True, [2, 2])
        ops.all_gather(tf.ones([2, 2]), "rows")
    graph_def = graph.as_graph_def(add_shapes=True)
    for node in graph_def.node:
        if node.op == "PoseidonAllGather":
            node.attr[graph_lib.MEANWHILE].s = b"computes"
    first = session.RewriteSession(planning.Planner(planning.Cluster(4))).rewrite(graph_def)
    again = session.RewriteSession(planning.Planner(planning.Cluster(4), given=first.plan)).rewrite(first.graph_def)
    assert (again.graph_def, again.plan, again.refusal) == (None, None, "")


def test_gradients_that_are_needed_together_have_the_same_priority():
    of_joint = found(graph_of_steps(2, joint=True))
    assert len({of_joint[name] for name in LAYERS}) == 1 and of_joint["first"] < of_joint["first#1"]


def test_the_rewritten_graph_carries_them():
    planner = planning.Planner(planning.Cluster(4), "sfb")
    rewritten = session.RewriteSession(planner).rewrite(graph_of_steps(2)).graph_def
    sent = {node.attr["site"].s.decode(): node.attr["priority"].i for node in rewritten.node
            if node.op == "PoseidonSend"}
    assert sent["first"] == 1 and sent["last#1"] == 4


@pytest.mark.parametrize("options, needed, ready", [
    (dict(number=1), [None, None, None], [80, 64, 48]), (dict(number=3), [0, 16, 32], [80, 64, 48]),
    (dict(number=3, joint=True), [0, 0, 0], [80, 64, 48]),
    # What is not trained comes before the first trained layer in each step.
    (dict(number=3, frozen=True), [32, 48, 64], [112, 96, 80]),
    # A sum that the step itself needs does not make its arithmetic that of the next step.
    (dict(number=3, moments=True), [0, 16, 32], [80, 64, 48])],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None)
def test_the_operations_before_a_sum_is_needed_are_counted(options, needed, ready):
    """Each product takes 16; with a joint norm all gradients are needed before the first product of the next step."""
    plan = session.RewriteSession(planning.Planner(planning.Cluster(4), "ps")).rewrite(graph_of_steps(**options)).plan
    by_name = {site.name: site for site in plan.sites}
    assert plan.steps == options["number"]
    assert [by_name[name].needed for name in LAYERS] == needed
    assert [by_name[name].operations for name in LAYERS] == ready


# ---- loops -----------------------------------------------------------------------------------------------------------

ROWS, WIDE, NARROW = 8, 6, 4


def repeated(rounds, condition=None):
    """Returns a function that multiplies so many times, unless a condition ends it."""
    def step():
        weights = tf.compat.v1.placeholder(tf.float32, [WIDE, WIDE])
        return tf.while_loop(condition or (lambda value: True), lambda value: [value @ weights],
                             [tf.compat.v1.placeholder(tf.float32, [ROWS, WIDE])], maximum_iterations=rounds)
    return step


def nested(inner, outer):
    """Returns a function that multiplies `inner` times in each of `outer` rounds."""
    def step():
        weights = tf.compat.v1.placeholder(tf.float32, [WIDE, WIDE])

        def body(value):
            return tf.while_loop(lambda value: True, lambda value: [value @ weights], [value], maximum_iterations=inner)
        return tf.while_loop(lambda value: True, body, [tf.compat.v1.placeholder(tf.float32, [ROWS, WIDE])],
                             maximum_iterations=outer)
    return step


def huge():
    """Multiplies large matrices in many rounds: 2 * 1000 * 2^42 operations."""
    weights = tf.compat.v1.placeholder(tf.float32, [1 << 14, 1 << 14])
    return tf.while_loop(lambda value: True, lambda value: [value @ weights], [
        tf.compat.v1.placeholder(tf.float32, [1 << 14, 1 << 14])], maximum_iterations=1000)


def growing():
    """Multiplies until a limit, which begins with 5 and grows: up to 100 times."""
    weights = tf.compat.v1.placeholder(tf.float32, [WIDE, WIDE])
    return tf.while_loop(lambda i, limit, value: i < limit,
                         lambda i, limit, value: (i + 1, tf.minimum(limit + 1, 100), value @ weights),
                         [0, 5, tf.compat.v1.placeholder(tf.float32, [ROWS, WIDE])])


def mapped():
    """Multiplies each row by itself."""
    return tf.map_fn(lambda row: row @ tf.transpose(row), tf.compat.v1.placeholder(tf.float32, [ROWS, WIDE, NARROW]),
                     fn_output_signature=tf.TensorSpec([WIDE, WIDE]))


@pytest.mark.parametrize(("step", "operations"), [
    (repeated(7), 7 * 2 * ROWS * WIDE * WIDE),
    (repeated(7, lambda value: tf.reduce_sum(value) < 1), 7 * 2 * ROWS * WIDE * WIDE),  # at most
    (repeated(2**31 - 1), 0),  # a limit that says nothing
    (repeated(None, lambda value: tf.reduce_sum(value) < 1), 0),  # nobody knows
    (nested(3, 5), 5 * 3 * 2 * ROWS * WIDE * WIDE),
    (nested(10**6, 10**6), 0),
    (huge, 1 << 50),
    (growing, 0),
    (mapped, ROWS * 2 * WIDE * WIDE * NARROW),
], ids=["7 rounds", "7 or fewer", "no limit", "unknown", "nested", "nested without limit", "huge", "a limit that grows",
        "map_fn"])
@pytest.mark.parametrize("is_optimized", [True, False])
def test_operations_in_loops_count_in_each_round(step, operations, is_optimized):
    with tf.Graph().as_default() as graph:
        outputs = tf.nest.flatten(step())
    graph_def = graph.as_graph_def(add_shapes=True)
    meta_graph = tf.compat.v1.train.export_meta_graph(graph=graph, graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(tensor.name for tensor in outputs)
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1
    lowered = grappler.add_shapes(tf_compat.optimize(config, meta_graph) if is_optimized else
                                  inline.inline(graph_def, [tensor.op.name for tensor in outputs]))
    assert any(node.op == "Enter" for node in lowered.node)
    assert operations_lib.count(graph_lib.Graph(lowered)).numbers.sum() == operations
