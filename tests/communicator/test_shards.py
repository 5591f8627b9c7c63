"""The ops of shards: what ranks own of a tensor, its sum, and how it becomes whole again; tests/native has more."""

import loopback_ranks
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes import usual_batch
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import training_step
from tf_poseidon.graph_passes.graph import indexed_graph
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.job import communicator
from tf_poseidon.ops import library
from tf_poseidon.options import JobOptions

KV_PAIR = 4096
# Ranks, and how many of them combine; one rank alone, one per node, and with gateways.
JOBS = {"alone": (1, 1), "two": (2, 1), "nodes": (3, 1), "gateways": (4, 2), "uneven": (5, 2), "one node": (3, 3)}
KERNELS = ["", "emulated_gpu"]
COUNTS = [0, 1, 7, 4095, 20011]


@pytest.fixture
def job(request):
    size, ranks_per_node = JOBS[request.param]
    joined = communicator.join_loopback(size, JobOptions(
        timeout_s=30, kv_pair_bytes=KV_PAIR, ranks_per_node=ranks_per_node, staging_bytes=1))
    communicator.use_ranks_for_ops(joined)
    yield joined
    communicator.use_ranks_for_ops([])
    for rank in joined:
        rank.leave()


def run(job, of_rank, kernel=""):
    """Returns what each rank computes in its second step; `of_rank` builds its outputs."""
    found = loopback_ranks.run([kernel] * len(job), lambda _, rank: of_rank(rank), steps=2)
    return [steps[-1] for steps in found]


def values(count, rank):
    return np.arange(count) % 11 + rank


@pytest.mark.parametrize("job", JOBS, indirect=True)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("owner", [-1, 0])
def test_halves_of_an_exchange_have_the_bits_of_the_whole(job, count, kernel, owner):
    """Of sums that depend on the order in which they are added, where the last rank is left out."""
    layout = {"layout": "layer/kernel", "owner": owner}
    tensors = [np.random.default_rng(rank).normal(size=count).astype(np.float32) for rank in range(len(job))]

    def of_rank(rank):
        gives = {"contributes": rank == 0 or rank + 1 < len(job)}
        total = ops.sync(tf.constant(tensors[rank]), "sum", **gives)
        own = ops.reduce_scatter(tf.constant(tensors[rank]), "scatter", **layout, **gives)
        return total, own, ops.shard(total, **layout), ops.gather_shards(own, "shards", [count], **layout)

    found = run(job, of_rank, kernel)
    for total, own, of_total, whole in found:
        np.testing.assert_array_equal(total, found[0][0])
        np.testing.assert_array_equal(own, of_total)
        np.testing.assert_array_equal(whole, total)
    sizes = [own.size for _, own, _, _ in found]
    assert sum(sizes) == count
    assert owner < 0 or sizes[owner] == count
    if owner < 0 and count == COUNTS[-1]:
        assert max(sizes) - min(sizes) <= 2 * KV_PAIR // 4


@pytest.mark.parametrize("job", JOBS, indirect=True)
@pytest.mark.parametrize("count", [0, COUNTS[-1]])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_halves_in_float_have_the_bits_of_casts(job, count, dtype, kernel):
    """Also where a rank sends the cast itself; the last rank is left out."""
    tensors = [np.random.default_rng(rank).normal(size=count) for rank in range(len(job))]

    def of_rank(rank):
        options = {"layout": "x", "contributes": rank == 0 or rank + 1 < len(job)}
        half = tf.constant(tensors[rank], dtype)
        cast = tf.cast(half, tf.float32)
        return (ops.reduce_scatter(cast, "casts", **options),
                ops.reduce_scatter(cast if rank == 1 else half, "halves", dtype=tf.float32, **options))

    for of_casts, of_halves in run(job, of_rank, kernel):
        assert of_halves.dtype == np.float32
        np.testing.assert_array_equal(of_halves, of_casts)


# By type of the tensor, the one in which it is a sum; None where it cannot be added.
TYPES = {"float16": "float16", "bfloat16": "bfloat16", "float64": "float64", "int32": "int32", "int64": "int64",
         "int8": None, "uint16": None, "uint64": None, "bool": None}


@pytest.mark.parametrize("job", ["gateways"], indirect=True)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_of_all_types_are_divided_alike(job, dtype, kernel):
    count = COUNTS[-1]
    whole = np.arange(count) % 2 if dtype == "bool" else values(count, 0)

    def of_rank(rank):
        floats = ops.shard(tf.range(count, dtype=tf.float32), "x")
        own = ops.shard(tf.cast(whole, dtype), "x")
        gathered = ops.gather_shards(own, "shards", [1, count], "x")
        total = ops.reduce_scatter(tf.cast(values(count, rank), dtype), "sum", "x") if TYPES[dtype] else own
        return floats, tf.cast(own, tf.int32), tf.cast(gathered, tf.int32), tf.cast(total, tf.int32)

    expected = sum(values(count, rank) for rank in range(len(job))) if TYPES[dtype] else whole
    for floats, own, gathered, total in run(job, of_rank, kernel):
        places = floats.astype(int)
        np.testing.assert_array_equal(own, whole[places])
        np.testing.assert_array_equal(gathered, [whole])
        np.testing.assert_array_equal(total, expected[places])


@pytest.mark.parametrize("job", ["gateways"], indirect=True)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_narrow_on_the_wire(job, dtype, kernel):
    """A shard is rounded as the sum of `sync` is."""
    tensors = [np.random.default_rng(rank).normal(size=COUNTS[-1]) for rank in range(len(job))]

    def of_rank(rank):
        gradient = tf.constant(tensors[rank], dtype)
        total = ops.sync(gradient, "sum", wire_dtype="bfloat16")
        return ops.shard(total, "x"), ops.reduce_scatter(gradient, "scatter", "x", wire_dtype="bfloat16")

    for expected, own in run(job, of_rank, kernel):
        np.testing.assert_array_equal(own, expected)


# (rows, columns, the dimension that is divided); even, uneven, and with fewer blocks of 16 than ranks.
MATRICES = [(12, 960, 1), (7, 1003, 1), (1003, 7, 0), (300, 200, 0), (5, 20, 1), (3, 9, 0)]


@pytest.mark.parametrize("job", JOBS, indirect=True)
@pytest.mark.parametrize("rows, columns, divided", MATRICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_matrices_are_divided_by_columns_or_rows(job, rows, columns, divided, dtype):
    """As the ops and the communicator say."""
    division = Division("x", divided=divided, columns=columns)
    whole = np.arange(rows * columns).reshape(rows, columns)
    if dtype != "float32":
        whole %= 2

    def of_rank(rank):
        own = ops.shard(tf.cast(whole, dtype), *division)
        gathered = ops.gather_shards(own, "shards", [columns, 1, rows], *division)
        return tf.cast(own, tf.int32), tf.cast(gathered, tf.int32), ops.shard_size(whole.size, *division)

    lines, runs = job[0].shards(whole.size, division)
    assert lines == (rows if divided else 1) and {rank.shards(whole.size, division)[0] for rank in job} == {lines}
    assert max(run.stop - run.start for _, run in runs) * lines <= whole.size / len(job) + 16 * whole.size / (
        columns if divided else rows)
    of_rank_0 = dict(runs)
    for rank, (own, gathered, size) in enumerate(run(job, of_rank)):
        expected = whole.reshape(lines, -1)[:, of_rank_0.get(rank, slice(0))]
        np.testing.assert_array_equal(own, expected.reshape(-1))
        np.testing.assert_array_equal(gathered.reshape(whole.shape), whole)
        assert size == own.size
    for own, in run(job, lambda rank: [ops.shard(tf.constant(whole, tf.float32), *division)], "emulated_gpu")[:1]:
        np.testing.assert_array_equal(own, whole.reshape(lines, -1)[:, of_rank_0.get(0, slice(0))].reshape(-1))


@pytest.mark.parametrize("job", ["nodes"], indirect=True)
def test_parts_of_matrices_are_sent_once_to_each_other_rank(job):
    division = Division("x", divided=1, columns=3 * 16 * 10)

    def of_rank(rank):
        return ops.gather_shards(ops.shard(tf.ones([64, division.columns]), *division), "s", [64, division.columns],
                                 *division)

    for rank in job:
        rank.record_events(100)
    run(job, of_rank)
    for rank in job:
        site = rank.statistics()["sites"]["s"]
        each = 2 * 4 * 64 * division.columns * 2 // 3  # in two steps
        assert (site["sent_bytes"], site["received_bytes"], site["count"]) == (each, each, 2)
        assert [event[:2] for event in rank.events()["events"]] == [["shards", "s"]] * 2


# Numbers of rows by rank, of which a job takes as many as it has ranks.
ROWS = {"even": (2, 2, 2, 2, 2), "uneven": (3, 0, 1, 4, 0), "of the last": (0, 0, 0, 0, 7), "none": (0,) * 5}


def counts_of(rows, size):
    return ROWS[rows][-size:]


def own_rows(total, counts, rank):
    """Returns the rows of a rank, a padding row if it has none."""
    if not any(counts):
        return total
    per_row = len(total) // sum(counts)
    begin = per_row * sum(counts[:rank])
    own = total[begin:begin + per_row * counts[rank]]
    return own if counts[rank] else np.zeros_like(total[:per_row])


@pytest.mark.parametrize("job", JOBS, indirect=True)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("per_row, columns", [(1, (3,)), (4, (5, 7)), (3, ()), (2, (2003,)), (1, (0,)), (0, (3,))])
def test_each_rank_gets_the_sum_of_its_own_rows(job, rows, per_row, columns):
    """With the bits of the whole sum; some ranges consist of several KV pairs, others of none."""
    counts = counts_of(rows, len(job))
    shape = (per_row * sum(counts), *columns)
    summands = [np.random.default_rng(rank).normal(size=shape).astype(np.float32) for rank in range(len(job))]

    def of_rank(rank):
        summand = tf.constant(summands[rank], shape=shape)
        return ops.reduce_scatter_rows(summand, tf.constant(counts, tf.int64), "rows"), ops.sync(summand, "sum")

    for rank, (own, total) in enumerate(run(job, of_rank)):
        np.testing.assert_array_equal(own, own_rows(total, counts, rank))
        np.testing.assert_allclose(total, sum(summands), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("job", ["nodes", "uneven"], indirect=True)
@pytest.mark.parametrize("dtype", [dtype for dtype, summed in TYPES.items() if summed])
def test_rows_of_all_types_are_added_up(job, dtype):
    counts = counts_of("uneven", len(job))
    summands = [values(2 * sum(counts) * 600, rank).reshape(-1, 600) for rank in range(len(job))]

    def of_rank(rank):
        summand = tf.cast(summands[rank], dtype)
        return tf.cast(ops.reduce_scatter_rows(summand, tf.constant(counts, tf.int64), "rows"), tf.int32)

    for rank, own in enumerate(run(job, of_rank)):
        np.testing.assert_array_equal(own, own_rows(sum(summands), counts, rank))


@pytest.mark.parametrize("job", ["nodes"], indirect=True)
@pytest.mark.parametrize("counts, exchanged", [((2, 2, 2), [(4, 4)] * 3), ((4, 0, 1), [(1, 8), (5, 0), (4, 2)])])
def test_rows_are_sent_once_to_the_rank_that_has_them(job, counts, exchanged):
    """And count as one exchange, of as many bytes as plans say."""
    shape = (sum(counts), 5000)
    for rank in job:
        rank.record_events(100)
    run(job, lambda _: ops.reduce_scatter_rows(tf.ones(shape), tf.constant(counts, tf.int64), "rows"))
    traffic = planning.Exchange("rows", planning.RETURN, "float32", 4, shape).cost(planning.Cluster(3))
    for rank, (sent, received) in zip(job, exchanged, strict=True):
        site, = rank.statistics()["sites"].items()
        each = 2 * 4 * shape[1]  # bytes of a row, in two steps
        assert (site[0], site[1]["sent_bytes"], site[1]["received_bytes"], site[1]["count"]) == (
            "rows", each * sent, each * received, 2)
        assert [(event[:2], event[4]) for event in rank.events()["events"]] == [
            (["return", "rows"], 4 * sum(counts) * shape[1])] * 2
        if len(set(counts)) == 1:
            assert site[1]["sent_bytes"] + site[1]["received_bytes"] == 2 * traffic.num_bytes


@pytest.mark.parametrize("job", ["nodes"], indirect=True)
@pytest.mark.parametrize("of_others", [(1, 2, 3), (2, 1, 3), (0, 3, 3), (6, 0, 0)])
def test_ranks_must_agree_on_numbers_of_rows(job, of_others):
    def of_rank(rank):
        counts = (3, 3, 0) if rank == 0 else of_others
        return ops.reduce_scatter_rows(tf.ones([6, 2]), tf.constant(counts, tf.int64), "rows")

    with pytest.raises(tf.errors.AbortedError, match="Ranks disagree about 'rows'|'rows' .* is over on rank"):
        run(job, of_rank)


@pytest.mark.parametrize("job", ["nodes"], indirect=True)
def test_each_half_sends_half_as_much(job):
    count = 3 * 16 * 1024

    def of_rank(rank):
        gradient = tf.ones(count)
        own = ops.reduce_scatter(gradient, "scatter", "x")
        of_halves = ops.reduce_scatter(tf.cast(gradient, tf.bfloat16), "halves", "x", dtype=tf.float32)
        return ops.sync(gradient, "sum"), ops.gather_shards(own, "shards", [count], "x"), of_halves

    for rank in job:
        rank.record_events(100)
    run(job, of_rank)
    for rank in job:
        sent = {name: (site["sent_bytes"], site["received_bytes"], site["count"])
                for name, site in rank.statistics()["sites"].items()}
        half = 2 * 4 * count * 2 // 3  # in two steps
        assert sent == {"sum": (2 * half, 2 * half, 2), "scatter": (half, half, 2), "shards": (half, half, 2),
                        "halves": (half // 2, half // 2, 2)}
        events = [(event[0], event[1], event[4]) for event in rank.events()["events"]]
        assert sorted(events) == sorted(2 * [("ps", "sum", 4 * count), ("scatter", "scatter", 4 * count),
                                             ("scatter", "halves", 4 * count), ("shards", "shards", 4 * count)])


@pytest.mark.parametrize("dtype, sent_bytes", [(tf.float32, 80_000), (tf.bfloat16, 40_000)])
def test_plans_know_what_each_half_exchanges(dtype, sent_bytes):
    """Where the partitioned graph says what the step does meanwhile."""
    @tf.function(input_signature=[tf.TensorSpec((100, 200), dtype)])
    def function(gradient):
        own = ops.reduce_scatter(gradient, "up", "x", dtype=tf.float32)
        return ops.gather_shards(own, "down", [100, 200], "x")

    graph_def = function.get_concrete_function().graph.as_graph_def(add_shapes=True)
    for node in graph_def.node:
        if "site" in node.attr:
            node.attr[indexed_graph.MEANWHILE].s = b"computes"
    found = exchanges.FindExchanges().call(passes.TrainingGraph(indexed_graph.Graph(graph_def))).exchanges
    assert [(each.site, each.kind, each.num_bytes, each.traffic.both_ways[0]) for each in found] == [
        ("up", "scatter", 80_000, sent_bytes), ("down", "shards", 80_000, 80_000)]


@pytest.mark.parametrize("elements", [1, 3])
def test_plans_know_how_large_a_sum_of_all_rows_usually_is(elements):
    """Where the partitioned graph declares the rows that come of it."""
    @tf.function(input_signature=[tf.TensorSpec((None, 7)), tf.TensorSpec([None], tf.int64)])
    def function(summand, counts):
        own = ops.reduce_scatter_rows(summand, counts, "back")
        return library.load()[0].poseidon_rows(values=[own], part=[], dimensions=[0], names=["own"],
                                               elements=[elements])

    graph_def = function.get_concrete_function().graph.as_graph_def(add_shapes=True)
    for node in graph_def.node:
        if "site" in node.attr:
            node.attr[indexed_graph.MEANWHILE].s = b"waits"
    graph, facts = indexed_graph.Graph(graph_def), training_step.StepFacts(rows=4, global_rows=10)
    usual = usual_batch.with_shapes(graph, grappler.add_shapes, facts)
    found, = exchanges.FindExchanges(usual).call(passes.TrainingGraph(graph, facts)).exchanges
    assert (found.kind, found.shape, found.is_waited_for) == ("return", (10 * elements, 7), True)
    unknown, = exchanges.FindExchanges().call(passes.TrainingGraph(graph)).exchanges
    assert unknown.shape is None


@pytest.mark.parametrize("dtype", [tf.float32, tf.bool])
def test_static_shapes(dtype):
    @tf.function(input_signature=[tf.TensorSpec((2, 3), dtype)])
    def function(x):
        own = ops.shard(x, "x")
        return own, ops.gather_shards(own, "s", [2, 3], "x")

    own, whole = function.get_concrete_function().outputs
    assert own.shape.as_list() == [None] and whole.shape.as_list() == [2, 3]
    with pytest.raises(ValueError, match="must be rank 1"), tf.Graph().as_default():
        ops.gather_shards(tf.zeros([2, 3], dtype), "s", [2, 3], "x")


@pytest.mark.parametrize("job", ["alone"], indirect=True)
@pytest.mark.parametrize("build, says", [
    (lambda _: ops.shard(tf.zeros(3), "x", owner=1), "has owner 1, expected -1 or a rank of 1; give each variable"),
    (lambda _: ops.reduce_scatter(tf.zeros(3), "s", "x", dtype=tf.float64),
     "'s' sums a gradient of type float as double, expected its own type, or float for half and bfloat16"),
    (lambda _: ops.reduce_scatter_rows(tf.zeros([4, 3]), [1, 3], "s"),
     "'s' has row counts of shape .2., expected .1., one of each rank"),
    (lambda _: ops.reduce_scatter_rows(tf.zeros([4, 3]), [3], "s"),
     "'s' sums a tensor of shape .4,3. with row counts 3, expected counts of 0 or more whose sum divides dimension 0"),
    (lambda _: ops.reduce_scatter_rows(tf.zeros([4, 3]), [0], "s"), "with row counts 0, expected counts of 0 or more"),
    (lambda _: ops.reduce_scatter_rows(tf.zeros([4, 3]), [-4], "s"), "with row counts -4, expected counts of 0 or mor"),
    (lambda _: ops.gather_shards(tf.zeros(3), "s", [4], "x"),
     "'s' gathers a shard of 3 elements, expected 4 of a tensor of shape .4.; give it what PoseidonShard"),
    (lambda _: ops.shard(tf.zeros(7), "x", divided=1, columns=3),
     "divides a tensor of 7 elements, expected a matrix of 3 columns"),
    (lambda _: ops.shard(tf.zeros(6), "x", divided=2, columns=3),
     "'x' divides dimension 2 of a matrix of 3 columns of owner -1, expected 0 or 1 of 1 column or more of owner -1")])
def test_refusals(job, build, says):
    with pytest.raises(tf.errors.InvalidArgumentError, match=says):
        run(job, build)


@pytest.mark.parametrize("job", ["alone"], indirect=True)
def test_parts_of_a_matrix_are_joined_on_the_host(job):
    with pytest.raises(tf.errors.UnimplementedError, match="'s' joins parts of a matrix on a GPU, expected the host"):
        run(job, lambda _: ops.gather_shards(tf.zeros(6), "s", [2, 3], "x", divided=1, columns=3), "emulated_gpu")


@pytest.mark.parametrize("job", ["nodes"], indirect=True)
def test_other_parts_are_refused(job):
    with pytest.raises(tf.errors.InvalidArgumentError, match="'s' cannot be joined, since rank . has another kind"):
        run(job, lambda rank: ops.gather_shards(ops.shard(tf.zeros([6, 6]), "x", divided=rank % 2, columns=6), "s",
                                                [6, 6], "x", divided=rank % 2, columns=6))
