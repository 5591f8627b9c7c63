"""Where a step takes its turn on an accelerator that other jobs share, and where it gives that back."""

import pytest
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.graph import check
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.write import turns

# {number: (nodes that begin it, sites whose hand-over ends it)}
Turns = dict[int, tuple[set[str], set[str]]]


def placeholder(name):
    return tf.compat.v1.placeholder(tf.float32, [2, 2], name=name)


def variable(name):
    read = tf.raw_ops.ReadVariableOp(resource=tf.compat.v1.placeholder(tf.resource, [], name=name), dtype=tf.float32)
    return tf.ensure_shape(read, [2, 2])


def layers(step, value, weights, frozen=None, moments=False):
    """Returns (the sums of the gradients of two layers, new weights) of a step."""
    if frozen is not None:
        value = tf.matmul(value, frozen, name=f"frozen_{step}")
    for name in weights:
        value = tf.matmul(value, weights[name], name=f"{name}_{step}")
        if moments:
            value -= ops.sync(tf.reduce_mean(value), f"moments/{name}#{step}", True, [])
    error, gradients = value, {}
    for name in reversed(weights):
        gradients[name] = ops.sync(tf.multiply(error, 2, name=f"gradient_{name}_{step}"), f"{name}#{step}", True,
                                   [2, 2])
        error = error @ weights[name]
    return gradients, {name: weights[name] - gradients[name] for name in weights}


def steps(number, **options):
    weights = {name: variable(f"weights_{name}") for name in ("first", "last")}
    frozen = variable("weights_frozen") if options.pop("frozen", False) else None
    for step in range(number):
        _, weights = layers(step, placeholder(f"batch{step}"), weights, frozen, **options)
    tf.identity_n(list(weights.values()))


def two_parts():
    """The second part is trained with what the first one has become in the same step, as a generator is."""
    _, critic = layers(0, placeholder("batch"), {"critic": variable("weights_critic")})
    noise = tf.random.uniform([2, 2], name="noise")
    made = tf.matmul(noise, variable("weights_generator"), name="generator")
    error = tf.matmul(made, critic["critic"], name="judgement")
    tf.identity(ops.sync(tf.transpose(made) @ error, "generator", True, [2, 2]))


def weights_alone():
    """What is computed from weights alone waits for no turn, though a gradient needs it."""
    weights = variable("weights")
    penalty = tf.multiply(weights, weights, name="penalty")
    product = tf.matmul(placeholder("batch"), weights, name="product")
    tf.identity(ops.sync(product + penalty, "weights", True, [2, 2]))


def random_numbers():
    """Noise needs no batch, but its turn begins with the batch."""
    batch = tf.raw_ops.IteratorGetNext(iterator=tf.compat.v1.placeholder(tf.resource, [], name="data"),
                                       output_types=[tf.float32], output_shapes=[[2, 2]], name="batch")[0]
    noise = tf.random.stateless_uniform([2, 2], [1, 2], name="noise")
    tf.identity(ops.sync(tf.matmul(batch, noise, name="product") @ variable("weights"), "weights", True, [2, 2]))


def in_a_branch():
    batch = placeholder("batch")
    tf.cond(tf.reduce_sum(batch) > 0, lambda: ops.sync(batch * 2, "weights", True, [2, 2]), lambda: batch)


def in_a_loop():
    batch = placeholder("batch")
    weights = variable("weights")
    begin = tf.multiply(batch, 2, name="begin")
    _, state = tf.while_loop(lambda i, _: i < 3, lambda i, state: (i + 1, tf.random.uniform([2, 2]) + state @ weights),
                             [0, begin])
    tf.identity(ops.sync(state, "weights", True, [2, 2]))


def products():
    """Two gradients that travel as factors, one of them by the other's."""
    value = tf.matmul(placeholder("batch"), variable("weights"), name="product")
    error = tf.multiply(value, 2, name="error")
    gradient = tf.matmul(value, error, transpose_a=True)
    tf.identity_n([ops.sync(gradient, "kernel", True, [2, 2]),
                   ops.sync(tf.raw_ops.BiasAddGrad(out_backprop=error), "bias", True, [2])])


def shards():
    value = tf.matmul(placeholder("batch"), variable("weights"), name="product")
    shard = ops.reduce_scatter(tf.multiply(value, 2, name="gradient"), "weights", "weights")
    tf.identity(ops.gather_shards(shard, "shards/weights", [2, 2], "weights"))


def slices():
    rows = tf.gather(variable("table"), tf.cast(placeholder("batch")[0], tf.int64), name="rows")
    gradient = tf.multiply(rows, 2, name="gradient")
    tf.identity(ops.all_gather(gradient, "table"))
    tf.identity(ops.sync(gradient, "weights", True, [2, 2]))


def of_step(*numbers):
    return {number: ({f"first_{number}"}, {f"first#{number}", f"last#{number}"}) for number in numbers}


CASES: dict[str, tuple] = {
    "a step": (lambda: steps(1), "ps", of_step(0)),
    "steps": (lambda: steps(3), "ps", of_step(0, 1, 2)),
    "layers that are not trained": (lambda: steps(2, frozen=True), "ps", {
        0: ({"frozen_0"}, {"first#0", "last#0"}), **of_step(1)}),
    "exchanges within a step": (lambda: steps(2, moments=True), "ps", of_step(0, 1)),
    "parts": (two_parts, "ps", {0: ({"critic_0"}, {"critic#0"}), 1: ({"judgement"}, {"generator"})}),
    "weights alone": (weights_alone, "ps", {0: ({"product"}, {"weights"})}),
    "random numbers": (random_numbers, "ps", {0: ({"noise/StatelessRandomGetKeyCounter"}, {"weights"})}),
    "branch": (in_a_branch, "ps", {}),
    "loop": (in_a_loop, "ps", {0: ({"begin"}, {"weights"})}),
    "factors": (products, "sfb", {0: ({"product"}, {"kernel"})}),
    "shards": (shards, "ps", {0: ({"product"}, {"gradient"})}),
    "slices": (slices, "ps", {0: ({"strided_slice"}, {"gradient", "weights"})}),
}


def rewritten(build, policy):
    with tf.Graph().as_default() as graph:
        ops.agree(["'x' float32[2, 2]"], None, None, False)
        tf.compat.v1.disable_control_flow_v2()
        try:
            build()
        finally:
            tf.compat.v1.enable_control_flow_v2()
    graph_def = graph.as_graph_def(add_shapes=True)
    for node in graph_def.node:
        is_of_forward = node.attr["site"].s.startswith(b"moments") if "site" in node.attr else False
        if is_of_forward or node.op in (*exchanges.OF_SHARDS, "PoseidonAllGather"):
            node.attr[graph_lib.MEANWHILE].s = b"waits" if is_of_forward else b"computes"
    planner = planning.Planner(planning.Cluster(4), policy)
    without, with_turns = (session.RewriteSession(planner, takes_turns=takes_turns).rewrite(graph_def)
                           for takes_turns in (False, True))
    assert without.refusal == with_turns.refusal == ""
    return without.graph_def or graph_def, with_turns.graph_def or graph_def


def found(graph_def) -> Turns:
    """Returns the turns of a graph."""
    def is_of_batch(name):
        """Whether a node is a batch, or waits for one."""
        return name.startswith("batch") or any(map(is_of_batch, map(graph_lib.node_of, nodes[name].input)))

    nodes = {node.name: node for node in graph_def.node}
    begins = {node.name: node.attr["turn"].i for node in graph_def.node if node.op == turns.BEGIN}
    result: Turns = {number: (set(), set()) for number in begins.values()}
    for node in graph_def.node:
        waits_for = [name[1:] for name in node.input if name.startswith("^")]
        for name in waits_for:
            if name in begins:
                result[begins[name]][0].add(node.name)
                # It begins when the op could run and the batch is there, and not before.
                others = {graph_lib.node_of(tensor) for tensor in node.input} - {name}
                sources = {graph_lib.node_of(tensor) for tensor in nodes[name].input}
                assert others <= sources
                assert sources - others <= {"batch", f"batch{begins[name]}"}  # of this round alone
                assert any(map(is_of_batch, sources))
        if node.op == turns.END:
            result[node.attr["turn"].i][1].update(
                nodes[name].attr["site"].s.decode() if "site" in nodes[name].attr else name for name in waits_for)
    return result


@pytest.mark.parametrize("name", CASES)
def test_turns(name):
    build, policy, expected = CASES[name]
    without, graph_def = rewritten(build, policy)
    assert found(graph_def) == expected
    assert turns.takes_turns(graph_def) == bool(expected)
    assert check.problem_of(graph_lib.Graph(graph_def)) == ""
    # Something waits for each end, or TensorFlow would leave it out.
    waited_for = {name[1:] for node in graph_def.node for name in node.input if name.startswith("^")}
    assert {node.name for node in graph_def.node if node.op == turns.END} <= waited_for
    # Nothing else is different.
    kept = {node.name: node for node in graph_def.node if node.op not in (turns.BEGIN, turns.END)}
    assert kept.keys() == {node.name for node in without.node}
    for node in without.node:
        assert [name for name in kept[node.name].input if "poseidon_turn_" not in name] == list(node.input)
