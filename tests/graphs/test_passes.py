"""The graph passes on tiny graphs: what they find, how they rewrite it, and that the results are equal.

Golden texts are in golden/; `pytest tests/graphs/test_passes.py --update-golden` rewrites them.
"""

import dataclasses
import pathlib
import time

import loopback_ranks
import numpy as np
import pytest
import tensorflow as tf
import tiny_graphs

from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes import session
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.find import training_step
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.write import horovod_ops
from tf_poseidon.graph_passes.write import rewrite as rewrite_lib
from tf_poseidon.graph_passes.write import send_receive
from tf_poseidon.job import communicator
from tf_poseidon.ops import library

GOLDEN = pathlib.Path(__file__).with_name("golden")
BUILDERS = {builder.__name__: builder
            for builder in (*tiny_graphs.RECOGNISED, *tiny_graphs.REFUSED, *tiny_graphs.SLICES)}
NAMES = list(BUILDERS)
HALVES = ("bias", "bias_of_transposed_layer", "regularized", "verified")  # also written as half factors


def graph_def_of(name):
    return tiny_graphs.build(BUILDERS[name]).as_graph_def(add_shapes=True)


def rewrite(graph_def, policy="sfb", add_shapes=None):
    """By a policy, or wherever possible by a scheme that no policy always takes."""
    cluster = planning.Cluster(2, bandwidth_gbps=10, latency_us=50, gflops=100)
    how = dict(policy=policy) if policy in planning.POLICIES else dict(policy="ps", pins=(("*", policy),))
    outcome = session.RewriteSession(planning.Planner(cluster, **how)).rewrite(graph_def, add_shapes=add_shapes)
    if outcome.cause is not None:
        raise outcome.cause
    return outcome


@pytest.mark.parametrize("name, policy", [*((name, "sfb") for name in NAMES), *((name, "hfb") for name in HALVES)])
def test_golden(name, policy, request):
    before = graph_def_of(name)
    given = before.SerializeToString(deterministic=True)
    result = rewrite(before, policy)
    assert before.SerializeToString(deterministic=True) == given  # reading a missing attribute would add it
    known = {node.name: node for node in before.node}
    changed = [node for node in result.graph_def.node if known.get(node.name) != node]
    text = "\n".join([
        "sites:", *map(str, result.sites), "",
        str(dataclasses.replace(result.plan, operations=None)), "",  # without the arguments that the step may take
        "before:", graph_lib.to_text(before), "",
        "new or changed:", graph_lib.to_text(graph_lib.with_nodes(before, changed)), ""])
    golden = GOLDEN / (f"{name}.txt" if policy == "sfb" else f"{name}.{policy}.txt")
    if request.config.getoption("--update-golden"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", [builder.__name__ for builder in tiny_graphs.RECOGNISED])
def test_recognised(name):
    result = rewrite(graph_def_of(name))
    known = name != "unknown_rows"
    assert {d.scheme for d in result.plan.decisions} == {"sfb" if known else "ps"}
    assert all(site.factors or site.bias_of for site in result.sites)


# (M, N), the dimension of which ranks have parts, and whether these are what they make of half factors.
KEPT = [((5, 100), 1, True), ((100, 5), 0, True), ((40, 40), 0, True), ((40, 40), 1, False), ((5, 100), 0, False)]


@pytest.mark.parametrize("wire_dtype", ["", "bfloat16"])
@pytest.mark.parametrize("shape, divided, is_kept", KEPT)
def test_ranks_keep_what_they_make_of_half_factors(shape, divided, is_kept, wire_dtype):
    """With masks and terms, where nothing else is read; a rank whose graph was not rewritten has all send dense."""
    division = Division("kernel", divided=divided, columns=shape[1])
    same = np.arange(np.prod(shape)).reshape(shape) % 4

    def graph_def_of_rank(rank, more_readers=False, verifies=False):
        with tf.Graph().as_default() as graph:
            u, v = (tf.compat.v1.placeholder(tf.float32, (rank, columns), name) for columns, name in zip(shape, "uv"))
            product = tf.matmul(u, v, transpose_a=True)
            gradient = tf.add_n([product * tf.constant(same, tf.float32), 2.0 * tf.constant(same + 1, tf.float32)])
            total = tiny_graphs.sync(gradient, wire_dtype=wire_dtype)
            tf.identity(ops.shard(total, *division), "part")
            if more_readers:
                tf.identity(total)
            if verifies:
                library.load()[0].poseidon_verify(
                    gradient=gradient, synchronised=total, contributes=tf.constant(True), is_due=tf.constant(True),
                    masks=[], factors=[], site="kernel", name="verify")
        return graph.as_graph_def(add_shapes=True)

    def with_factors(graph_def, rank):
        rng = np.random.default_rng(rank)
        for node in graph_def.node:
            if node.op == "Placeholder":
                value = rng.integers(-3, 4, (rank, shape["uv".index(node.name)])).astype(np.float32)
                node.op = "Const"
                node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
                del node.attr["shape"]
        return graph_def

    def rewritten(rank, **options):
        outcome = rewrite(graph_def_of_rank(rank, **options), "hfb")
        site, = outcome.plan.sites
        assert outcome.plan.decisions[0].scheme == "hfb"
        return site.is_divided, outcome.graph_def

    assert not rewritten(1, more_readers=True)[0] and rewritten(1, verifies=True)[0] == rewritten(1)[0] == is_kept
    size, found = 3, {}
    for case in ("marker", "rewritten", "rewritten with readers", "dense"):
        graph_defs = [graph_def_of_rank(rank) if case == "marker" or (case, rank) == ("dense", 1) else rewritten(
            rank, more_readers="readers" in case)[1] for rank in range(size)]
        ranks = communicator.join_loopback(size)
        communicator.use_ranks_for_ops(ranks)
        try:
            found[case] = loopback_ranks.run([""] * size, lambda _, rank: tf.import_graph_def(
                with_factors(graph_defs[rank], rank), return_elements=["part:0"]), steps=2)
        finally:
            communicator.use_ranks_for_ops([])
            for rank in ranks:
                rank.leave()
        joins = {node.op for node in graph_defs[0].node} & {"PoseidonJoinColumns", "PoseidonSync"}
        assert joins == {"marker": {"PoseidonSync"}}.get(
            case, set() if is_kept and "readers" not in case else {"PoseidonJoinColumns"})
    assert rewritten(1)[0] == is_kept
    for case, steps in found.items():
        for of_rank, expected in zip(steps, found["marker"]):
            for (part,), (value,) in zip(of_rank, expected):
                np.testing.assert_array_equal(part, value, err_msg=case)


@pytest.mark.parametrize("scheme, expected", [
    ("ps", {}), ("sfb", {"w": None}), ("hfb", {"w": Division("w", divided=1, columns=100)})])
def test_planners_say_of_which_gradients_ranks_need_other_shards(scheme, expected):
    with tf.Graph().as_default() as graph:
        product = tf.matmul(tf.zeros([2, 5]), tf.zeros([2, 100]), transpose_a=True)
        ops.reduce_scatter(product, "kernel", "w")
    cluster = planning.Cluster(3)
    planner = planning.Planner(cluster, "ps", pins=(("*", scheme),))

    def layouts(planner):
        return session.RewriteSession(planner).layouts_of_factors(
            graph.as_graph_def(), training_step.StepFacts(), grappler.add_shapes)

    assert layouts(planner) == expected
    factors = planning.Factors(5, 100, 2, 4)
    site = planning.Site("kernel", "float32", 4, (5, 100), factors, is_divided=scheme == "hfb")
    given = planner.plan([site] if expected else [])
    assert layouts(planning.Planner(cluster, given=given)) == expected


REFUSALS = {
    "vector": "only a matrix has factors",
    "convolution": "a Conv2DBackpropFilter is not a product of two matrices",
    "times_data": "multiplied with a tensor that may differ between ranks",
    "plus_data": "a Placeholder that may differ between ranks is added to it",
    "times_variable_of_this_rank": "multiplied with a tensor that may differ between ranks",
    "times_variable_of_nobody": "multiplied with a tensor that may differ between ranks",
    "narrowing_cast": "a narrowing Cast rounds it",
    "scaled_after_cast": "multiplied after a Cast from a narrower type",
    "reduced_further": "a sum over a Reshape is not a product",
    "different_products": "its products have factors of different sizes or types",
    "scaled_bias_of_transposed_layer": "only a matrix has factors",
    "times_variable_given_away": "multiplied with a tensor that may differ between ranks",
    "times_random": "multiplied with a tensor that may differ between ranks",
    "mask_before_cast": "a mask or a term is added before a Cast from a narrower type",
    "term_before_cast": "a mask or a term is added before a Cast from a narrower type",
    "summed_to_a_column": "or one of the two is broadcast",
    "broadcast_by_scalar": "or one of the two is broadcast",
    "doubled_again_and_again": "its products lie behind more than 300 operations",
    "bias_of_part_of_the_columns": "only a matrix has factors",
    "scalar_einsum": "is not a product of two matrices",
    "unknown_columns": "the shape of its input 'Placeholder' is unknown",
    "integers": "its factors are not floating-point numbers",
    "einsum_with_batch": "the equation abc,abd->acd is not a product of two matrices",
    "einsum_that_mixes": "the equation abc,ad->bdc mixes the dimensions of its factors",
    "batch_matmul_of_rows": "its rows are not the last dimension but one of both factors",
    "batch_matmul_not_summed": "it is not summed over the batch, and only that",
    "accumulated_in_a_loop": "it is accumulated in a loop",
}


@pytest.mark.parametrize("name", [builder.__name__ for builder in tiny_graphs.REFUSED])
def test_refused_with_a_sentence_and_a_node(name):
    graph_def = graph_def_of(name)
    site = next(site for site in rewrite(graph_def).sites if site.refusal)
    assert REFUSALS[name] in site.refusal
    assert site.refusal.rpartition("node '")[2].rstrip("')") in {n.name for n in graph_def.node}


@pytest.fixture(scope="module")
def alone():
    """A job of one rank, whose sums are its own values: rewriting must change nothing."""
    rank, = communicator.join_loopback(1)
    rank.use_for_ops()
    yield
    rank.leave()


def run(graph_def, fetches, feeds):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(graph_def, name="")
        init = [node.name for node in graph_def.node if node.name == "weights/Assign"]
        session.run(init)
        return session.run(fetches, feeds)


# Not: a product of integers, which TensorFlow has no kernel for, a variable without a value, random
# numbers, and what takes TensorFlow's own optimizer for ever.
RUNNABLE = [name for name in NAMES if BUILDERS[name] not in tiny_graphs.SLICES and name not in (
    "integers", "times_variable_of_nobody", "times_random", "doubled_again_and_again")]


@pytest.mark.parametrize("policy", ["ps", "sfb", "hfb"])
@pytest.mark.parametrize("name", RUNNABLE)
def test_same_values(name, policy, alone):
    before = graph_def_of(name)
    rng = np.random.default_rng(1)
    feeds = {}
    for node in before.node:
        if node.op == "Placeholder":
            shape = [d.size if d.size > 0 else {0: tiny_graphs.K}.get(i, tiny_graphs.M)
                     for i, d in enumerate(node.attr["shape"].shape.dim)]
            dtype = tf.as_dtype(node.attr["dtype"].type).as_numpy_dtype
            feeds[f"{node.name}:0"] = rng.choice([-2, -1, 1, 2], shape).astype(dtype)
    sites = [f"{node.name}:0" for node in before.node if node.op == "PoseidonSync"]
    after = rewrite(before, policy).graph_def
    # The graph of each run has its own sites: a site that ran dense refuses factors from then on.
    expected = run(renamed(before, f"{name}/{policy}/a"), sites, feeds)
    for case in ("factors", "dense"):
        got = run(renamed(after, f"{name}/{policy}/{'a' if case == 'dense' else 'b'}"), sites, feeds)
        for a, b in zip(expected, got, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b, err_msg=case)


@pytest.mark.parametrize("name, scheme, reason", [
    ("slices_of_large_table", "sparse", "6 slices to 1 others are 192 bytes, at most the 2,400 of"),
    ("slices_of_small_table", "ps", "6 slices to 1 others are 192 bytes, more than the 96 of"),
    ("slices_of_unknown_number", "ps", "the number of rows is not known before the step")])
def test_slices_travel_by_the_cheapest_scheme(name, scheme, reason, alone):
    before = graph_def_of(name)
    result = rewrite(before)
    decision, = result.plan.decisions
    assert decision.scheme == scheme and reason in decision.reason
    indices, values = np.array([3, 0, 3, 3, 1, 0], np.int32), np.arange(18.0).reshape(6, 3)
    rows = before.node[[n.name for n in before.node].index("table")].attr["shape"].shape.dim[0].size
    expected = np.zeros((rows, 3))
    np.add.at(expected, indices, values)
    for case, graph_def in (("marker", before), ("rewritten", result.graph_def)):
        got = run(renamed(graph_def, f"{name}/{case}"), ["table:0", "table:1"],
                  {"Placeholder:0": indices, "Placeholder_1:0": values})
        all_rows = case == "rewritten" and scheme == "ps"
        np.testing.assert_array_equal(got[0], range(rows) if all_rows else [0, 1, 3])
        np.testing.assert_array_equal(got[1], expected if all_rows else expected[[0, 1, 3]])


def renamed(graph_def, prefix):
    result = graph_lib.with_nodes(graph_def, graph_def.node)
    for node in result.node:
        if "site" in node.attr:
            node.attr["site"].s = f"{prefix}/{node.attr['site'].s.decode()}".encode()
    return result


@pytest.mark.parametrize("name", NAMES)
def test_rewriting_is_idempotent_and_deterministic(name):
    before = graph_def_of(name)
    once, again = (rewrite(before).graph_def for _ in range(2))
    assert once.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    assert rewrite(once).graph_def is None


def test_site_inside_of_a_loop():
    """As with steps_per_execution: every added node must run in the loop's frame."""
    def build():
        u, v = tiny_graphs.data(tiny_graphs.K, tiny_graphs.M), tiny_graphs.data(tiny_graphs.K, 3, tiny_graphs.N)

        def body(i, total):
            rows = tf.reshape(v, [-1, tiny_graphs.N])
            wide = tf.concat([u * tf.cast(i, tf.float32)] * 3, 0)
            return i + 1, total + tiny_graphs.sync(-tf.matmul(wide, rows, transpose_a=True))

        tf.identity(tf.compat.v1.while_loop(
            lambda i, _: i < 3, body, (tf.constant(0), tf.zeros((tiny_graphs.M, tiny_graphs.N))))[1], "total")

    before = tiny_graphs.build(build).as_graph_def(add_shapes=True)
    result = rewrite(before)
    assert [d.scheme for d in result.plan.decisions] == ["sfb"]
    feeds = {"Placeholder:0": np.ones((tiny_graphs.K, tiny_graphs.M)),
             "Placeholder_1:0": np.ones((tiny_graphs.K, 3, tiny_graphs.N))}
    rank, = communicator.join_loopback(1)
    rank.use_for_ops()
    try:
        got, = run(renamed(result.graph_def, "loop"), ["total:0"], feeds)
    finally:
        rank.leave()
    np.testing.assert_array_equal(got, np.full((tiny_graphs.M, tiny_graphs.N), -(0 + 1 + 2) * 3 * tiny_graphs.K))


@pytest.mark.parametrize("dtype, wire_dtype, writer, is_before_cast", [
    (tf.bfloat16, None, send_receive.SendReceive, True), (tf.float16, None, send_receive.SendReceive, True),
    (tf.float64, None, send_receive.SendReceive, False), (tf.bfloat16, "bfloat16", send_receive.SendReceive, False),
    (tf.bfloat16, None, horovod_ops.HorovodOps, False)])
def test_what_becomes_shards_travels_as_it_was_before_its_cast(dtype, wire_dtype, writer, is_before_cast):
    """From half precision to float, if the engine adds up such parts and nobody rounds them."""
    with tf.Graph().as_default() as graph:
        ops.agree(["'kernel' float32[2, 3]"], None, None, False)
        gradient = tf.compat.v1.placeholder(dtype, [2, 3], name="gradient")
        passed_on = tf.raw_ops.Identity(input=tf.cast(gradient, tf.float32), name="passed_on")
        tf.identity(ops.reduce_scatter(passed_on, "kernel", "kernel", wire_dtype=wire_dtype))
    graph_def = graph.as_graph_def(add_shapes=True)
    for node in graph_def.node:
        if node.op == poseidon_markers.SCATTER:
            node.attr[graph_lib.MEANWHILE].s = b"computes"
    outcome = session.RewriteSession(planning.Planner(planning.Cluster(2)), writer).rewrite(graph_def)
    scatter, = (node for node in outcome.graph_def.node if node.op == poseidon_markers.SCATTER)
    sent = dtype if is_before_cast else tf.float32
    assert scatter.input[0] == ("gradient" if is_before_cast else "passed_on")
    assert (scatter.attr["T"].type, scatter.attr["Tout"].type) == (sent.as_datatype_enum, tf.float32.as_datatype_enum)
    exchange, = outcome.plan.exchanges
    assert exchange.traffic.both_ways == (sent.size * 6, 4 * 6)
    assert exchange.cast_from == (dtype.name if is_before_cast else None)


def test_large_graphs_take_linear_time():
    def seconds(length):
        def build():
            for i in range(length // 100):
                value = tiny_graphs.product()
                for _ in range(100):
                    value = tf.raw_ops.Identity(input=value)
                tiny_graphs.sync(value, f"kernel{i}")
        graph_def = tiny_graphs.build(build).as_graph_def(add_shapes=True)
        assert len(graph_def.node) > length
        taken = []
        for _ in range(3):
            begin = time.process_time()
            result = rewrite(graph_def)
            taken.append(time.process_time() - begin)
        assert {d.scheme for d in result.plan.decisions} == {"sfb"}
        return min(taken)

    # 4 times if linear, 16 times if quadratic: a ratio, since machines differ.
    assert seconds(8_000) < 9 * seconds(2_000)


class Keeps(passes.Pass):
    """Returns its argument; a test sets the complaints of its checks."""

    def __init__(self, before="", after=""):
        self._problems = before, after

    def call(self, known):
        return known

    def requires(self, known):
        return self._problems[0]

    def ensures(self, known, result):
        return self._problems[1]


def test_conditions_of_passes_are_run():
    known = passes.TrainingGraph(graph_lib.Graph(graph_def_of("matmul")))
    assert passes.run((Keeps(), Keeps()), known) is known
    with pytest.raises(passes.PreconditionError, match="^Keeps: something is missing.$"):
        passes.run((Keeps(), Keeps(before="something is missing")), known)
    with pytest.raises(passes.PostconditionError, match="^Keeps: something is wrong.$"):
        passes.run((Keeps(after="something is wrong"), Keeps()), known)


def test_nodes_say_what_they_are_there_for():
    node = rewrite(graph_def_of("matmul")).graph_def.node[0]
    about = provenance.Provenance("sum", "a site", "sfb", "another", is_fetched=True)
    about.note(node)
    assert provenance.of(node) == about
    provenance.rename_site(node, "new")
    assert provenance.of(node) == dataclasses.replace(about, site="new")
    node.attr[provenance.ATTRIBUTE].s = node.attr[provenance.ATTRIBUTE].s.replace(b"1", b"2", 1)
    with pytest.raises(GraphError, match=f"The provenance of node '{node.name}' has version '2', but .* reads 1"):
        provenance.of(node)


def test_two_sites_of_one_name_are_refused():
    graph_def = tiny_graphs.build(lambda: [tiny_graphs.sync(tiny_graphs.product()) for _ in range(2)]).as_graph_def()
    with pytest.raises(GraphError, match="synchronise the same site 'kernel'"):
        rewrite(graph_def)


@pytest.mark.parametrize("change, message", [
    (lambda nodes: nodes["kernel"].input.append("^nothing"), "reads 'nothing', which does not exist"),
    (lambda nodes: nodes["MatMul"].input.append("^kernel"), "depends on itself"),
    (lambda nodes: setattr(nodes["MatMul"], "name", "kernel"), "two nodes have the same name"),
])
def test_invalid_graphs_are_noticed(change, message):
    graph_def = graph_def_of("matmul")
    change({node.name: node for node in graph_def.node})
    with pytest.raises(passes.PreconditionError, match=message):
        rewrite(graph_def)


@pytest.mark.parametrize("change, message", [
    (lambda nodes: nodes["MatMul"].input.reverse(), "node 'MatMul' is not what it was"),
    (lambda nodes: nodes["kernel"].CopyFrom(nodes["MatMul"]), "two nodes have the same name"),
    (lambda nodes: setattr(nodes["Placeholder"], "name", "p"), "reads 'Placeholder'"),
])
def test_wrong_rewrites_are_noticed(change, message):
    before = graph_def_of("matmul")
    after = rewrite(before).graph_def
    markers = poseidon_markers.find(graph_lib.Graph(before))
    assert not rewrite_lib.problem_of(before, after, markers, {})
    change({node.name: node for node in after.node})
    assert message in rewrite_lib.problem_of(before, after, markers, {})


def test_rebuilt_gradient_waits_for_what_its_own_waits_for():
    """TensorFlow 1 lets an update wait so until all have read the variable: it hands out references."""
    with tf.Graph().as_default() as graph:
        x, error = (tf.compat.v1.placeholder(tf.float32, (tiny_graphs.K, n)) for n in (tiny_graphs.M, tiny_graphs.N))
        back = tf.identity(error, name="back")
        with tf.control_dependencies([back]):
            gradient = tf.identity(tf.matmul(x, error, transpose_a=True))
            bias = tf.identity(tf.raw_ops.BiasAddGrad(out_backprop=error))
        tiny_graphs.sync(gradient)
        tiny_graphs.sync(bias, "bias")
    result = rewrite(graph.as_graph_def(add_shapes=True))
    assert [d.scheme for d in result.plan.decisions] == ["sfb", "sfb"]
    nodes = {node.name: node for node in result.graph_def.node}
    for site in ("kernel", "bias"):
        total = next(name for name in nodes[site].input if not name.startswith(f"{site}/dense"))
        assert "^back" in nodes[total].input


@pytest.mark.parametrize("op", exchanges.OF_SHARDS)
def test_exchanges_of_shards_wait_for_others_and_overtake_them(op):
    """Rewritten nodes have these attributes, which TensorFlow would ignore if their op did not know them."""
    library.load()
    assert {"group", "group_size", "priority"} <= {attribute.name for attribute in tf_compat.op_def(op).attr}
