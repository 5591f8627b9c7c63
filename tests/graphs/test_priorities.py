"""Which gradients overtake others, those that the next step needs first; and when it needs them."""

import pytest
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.find import priorities

LAYERS = ("first", "middle", "last")


def graph_of_steps(number, joint=False):
    """Returns a graph that trains a chain of layers; `joint` scales gradients by their norm."""
    with tf.Graph().as_default() as graph:
        weights = {name: tf.compat.v1.placeholder(tf.float32, [2, 2], name=f"{name}_weights") for name in LAYERS}
        for step in range(number):
            mark = f"#{step}" if step else ""
            ops.agree([f"'{name}{mark}' float32[2, 2]" for name in LAYERS], None, None, False)
            value = tf.ones([2, 2])
            for name in LAYERS:
                value = value @ weights[name]
            gradients, error = {}, value
            for name in reversed(LAYERS):
                gradients[name] = ops.sync(error * 2, name + mark, True, [2, 2])
                error = error @ weights[name]
            if joint:
                norm = tf.add_n([tf.reduce_sum(g * g) for g in gradients.values()])
                gradients = {name: gradient / norm for name, gradient in gradients.items()}
            weights = {name: weights[name] - gradients[name] for name in LAYERS}
        tf.identity_n(list(weights.values()))
    return graph.as_graph_def(add_shapes=True)


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


def test_gradients_that_are_needed_together_have_the_same_priority():
    of_joint = found(graph_of_steps(2, joint=True))
    assert len({of_joint[name] for name in LAYERS}) == 1 and of_joint["first"] < of_joint["first#1"]


def test_the_rewritten_graph_carries_them():
    planner = planning.Planner(planning.Cluster(4), "sfb")
    rewritten = session.RewriteSession(planner).rewrite(graph_of_steps(2)).graph_def
    sent = {node.attr["site"].s.decode(): node.attr["priority"].i for node in rewritten.node
            if node.op == "PoseidonSend"}
    assert sent["first"] == 1 and sent["last#1"] == 4


@pytest.mark.parametrize("number, joint, needed", [
    (1, False, [None, None, None]), (3, False, [0, 16, 32]), (3, True, [0, 0, 0])])
def test_the_operations_before_a_sum_is_needed_are_counted(number, joint, needed):
    """Each product takes 16; with a joint norm all gradients are needed before the first product of the next step."""
    planner = planning.Planner(planning.Cluster(4), "ps")
    plan = session.RewriteSession(planner).rewrite(graph_of_steps(number, joint)).plan
    by_name = {site.name: site for site in plan.sites}
    assert plan.steps == number
    assert [by_name[name].needed for name in LAYERS] == needed
    assert [by_name[name].operations for name in LAYERS] == [80, 64, 48]
