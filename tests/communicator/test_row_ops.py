"""The ops that give the ranks their rows of a global batch, with all ranks in this process."""

import contextlib
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context

from tf_poseidon import grappler
from tf_poseidon.data import parts as parts_lib
from tf_poseidon.errors import JobEndedError
from tf_poseidon.job import communicator
from tf_poseidon.ops import library

RANKS = [1, 2, 3, 5]
TOTALS = [0, 1, 2, 3, 4, 7, 10, 15]


def raw():
    return library.load()[0]


@contextlib.contextmanager
def job(size):
    """The ranks of a job, by which nodes can run."""
    ranks = communicator.join_loopback(size)
    communicator.use_ranks_for_ops(ranks)
    try:
        yield ranks
    finally:
        communicator.use_ranks_for_ops([])
        for rank in ranks:
            rank.leave()


def as_rank(outputs, rank):
    """Makes an op, or the op of `outputs` (a tensor or a tuple of them), run as one rank; returns the outputs."""
    first = tf.nest.flatten(outputs)[0]
    op = first if isinstance(first, tf.Operation) else first.op
    op._set_attr("_poseidon_rank", attr_value_pb2.AttrValue(i=rank))
    return outputs


def run(build):
    """Returns the values of the structure of tensors that `build()` makes in a graph of its own."""
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        return session.run(build())


def parts(totals, size, names=None, shares=None, own=None):
    """Returns (part, contributes, is_first) of each rank.

    Args:
        totals: Rows of each input.
        size: Number of ranks.
        names: Of the inputs.
        shares: By rank, None if all are equal.
        own: What the inputs have rows of, None if they are global batches.
    """
    def build():
        sizes = [tf.constant(total, tf.int64) for total in totals]
        given = names or [f"input{i}" for i in range(len(totals))]
        return [tuple(as_rank(raw().poseidon_part(
            sizes=sizes, given=[] if own is None else [tf.constant(own, tf.int64)], names=given, site="step"), rank))
                for rank in range(size)]

    with job(size) as ranks:
        for rank in ranks if shares else ():
            rank.set_row_shares(shares)
        return run(build)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("total", TOTALS)
def test_parts_of_the_ranks(total, size):
    for rank, (part, contributes, is_first) in enumerate(parts([total, total], size)):
        first, count = parts_lib.of_rank(total, rank, [1] * size)
        if count > 0:
            assert part.tolist() == [total, first, count] and contributes
        elif total > 0:
            assert part.tolist() == [total, 0, 1] and not contributes  # a padding row
        else:
            assert part.tolist() == [0, 0, 0] and contributes == (rank == 0)
        assert is_first == (rank == 0)


def test_parts_of_small_batches():
    """A table written by hand, independent of parts_lib.of_rank."""
    assert [part.tolist() for part, _, _ in parts([7], 3)] == [[7, 0, 3], [7, 3, 2], [7, 5, 2]]
    assert [part.tolist() for part, _, _ in parts([2], 3)] == [[2, 0, 1], [2, 1, 1], [2, 0, 1]]
    assert [bool(contributes) for _, contributes, _ in parts([2], 3)] == [True, True, False]


@pytest.mark.parametrize("shares", [(1, 1), (3, 1, 1), (1, 2, 3, 4), (7, 100, 3)], ids=str)
@pytest.mark.parametrize("total", TOTALS)
def test_parts_follow_shares(total, shares):
    for rank, (part, contributes, _) in enumerate(parts([total], len(shares), shares=shares)):
        first, count = parts_lib.of_rank(total, rank, shares)
        assert part.tolist() == ([total, first, count] if count else [total, 0, min(total, 1)])
        assert contributes == (count > 0 or total == 0 and rank == 0)


@pytest.mark.parametrize("sizes, own, part, contributes", [
    ([3, 3], [10, 4, 3], [10, 4, 3], True), ([1], [2, 0, 0], [2, 0, 1], False), ([5], [5, 0, 5], [5, 0, 5], True)],
    ids=str)
def test_part_of_own_rows_is_the_given_one(sizes, own, part, contributes):
    (found, contributes_found, _), *_ = parts(sizes, 2, own=own)
    assert found.tolist() == part and contributes_found == contributes


@pytest.mark.parametrize("sizes, own, message", [
    ([3], [10, 4, 4], "'input0' has 3 rows, expected 4, this rank's of 10."),
    ([3], [10, 8, 3], "'part' is [10, 8, 3], expected the rows of a batch"),
    ([3], [10, 8], "'part' has shape [2], expected [3]"),
], ids=str)
def test_part_refuses_own_rows(sizes, own, message):
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)) as error:
        parts(sizes, 2, own=own)
    assert message in str(error.value) or len(own) == 2


def test_own_rows_are_not_taken_for_a_global_batch():
    def build(part):
        return lambda: raw().poseidon_rows(values=[tf.range(3)], part=[tf.constant(part, tf.int64)], dimensions=[0],
                                           names=["x"])

    assert run(build([3, 0, 3]))[0].tolist() == [0, 1, 2]
    with pytest.raises(tf.errors.FailedPreconditionError, match="'x' has 3 rows of this rank, expected all 9"):
        run(build([9, 3, 3]))


@pytest.mark.parametrize("totals, message", [
    ([7, 7, 5], "'x' has 7 rows, but 'z' has 5; give both the same number of rows, or name one of them as the same on "
                "all ranks with inputs=."),
    ([-1, 7, 7], "'x' has -1 rows, expected 0 or more."),
])
def test_part_refuses_sizes(totals, message):
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        parts(totals, 2, ["x", "y", "z"])
    assert message in str(error.value)


def test_part_wants_a_name_for_each_size():
    with pytest.raises(tf.errors.InvalidArgumentError, match="'names' has 1 elements, but there are 2 inputs"):
        parts([7, 7], 1, ["x"])


def test_part_outside_a_job():
    with pytest.raises(tf.errors.FailedPreconditionError, match="PoseidonPart 'step' runs outside a job"):
        raw().poseidon_part(sizes=[tf.constant(3, tf.int64)], given=[], names=["x"], site="step")


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("total", TOTALS)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_sizes_of_a_rank(total, size, dtype):
    """The three ops of shapes are consistent, also where a dimension is a multiple of the rows."""
    for part, _, _ in parts([total], size):
        _, first, count = part
        for multiple in (1, 6):
            whole = tf.constant([4, total * multiple, 9], dtype)
            local = raw().poseidon_local_shape(whole, part, dimension=1)
            assert local.dtype == dtype and local.numpy().tolist() == [4, count * multiple, 9]
            again = raw().poseidon_global_shape(local, part, dimension=1)
            assert again.dtype == dtype and again.numpy().tolist() == whole.numpy().tolist()
            begin, end = raw().poseidon_row_range(whole, part, dimension=1)
            assert begin.dtype == end.dtype == dtype
            assert begin.numpy().tolist() == [0, first * multiple]
            assert end.numpy().tolist() == [0, (first + count) * multiple]


@pytest.mark.parametrize("total", TOTALS)
def test_row_range_is_for_strided_slice(total):
    value = np.arange(3 * total * 4).reshape(3, total * 2, 2)
    pieces = []
    for part, contributes, _ in parts([total], 3):
        begin, end = raw().poseidon_row_range(tf.shape(value), part, dimension=1)
        piece = tf.strided_slice(value, begin, end, begin_mask=1, end_mask=1).numpy()
        assert piece.shape == tuple(raw().poseidon_local_shape(tf.shape(value), part, dimension=1))
        pieces += [piece] if contributes else []
    np.testing.assert_array_equal(np.concatenate(pieces, 1), value)


@pytest.mark.parametrize("op", ["poseidon_local_shape", "poseidon_global_shape"])
@pytest.mark.parametrize("part", [[6, 2, 2], [0, 0, 0]])
def test_unknown_size_stays_unknown(op, part):
    part = tf.constant(part, tf.int64)
    assert getattr(raw(), op)([-1, 4], part, dimension=0).numpy().tolist() == [-1, 4]


def test_single_sizes():
    part = tf.constant([6, 2, 2], tf.int64)
    assert raw().poseidon_local_shape(12, part, dimension=0).numpy() == 4
    assert raw().poseidon_global_shape(4, part, dimension=0).numpy() == 12


@pytest.mark.parametrize("op, shape, part, dimension, message", [
    ("local_shape", [7, 2], [6, 2, 2], 0, "dimension 0 of 'shape' is 7, expected a multiple of its 6 rows."),
    ("local_shape", [-2, 2], [6, 2, 2], 0, "dimension 0 of 'shape' is -2, expected a multiple of its 6 rows."),
    ("local_shape", [2, 7], [0, 0, 0], 1, "dimension 1 of 'shape' is 7, expected 0, since there are no rows."),
    ("global_shape", [3], [6, 2, 2], 0, "dimension 0 of 'shape' is 3, expected a multiple of its 2 rows."),
    ("global_shape", [2**30], [6, 2, 2], 0, "dimension 0 of the result is 536870912 * 6, expected at most 2147483647."),
    ("row_range", [3, 8], [6, 2, 2], 1, "dimension 1 of 'shape' is 8, expected a multiple of its 6 rows."),
    ("row_range", [-1, 8], [6, 2, 2], 0, "dimension 0 of 'shape' is -1, expected a multiple of its 6 rows."),
    ("local_shape", [6], [6, 5, 2], 0, "'part' is [6, 5, 2], expected the rows of a batch"),
    ("local_shape", [6], [6, 2, 0], 0, "'part' is [6, 2, 0], expected the rows of a batch"),
    ("local_shape", [6], [6, 2], 0, "[2]"),
    ("local_shape", [6, 1], [6, 2, 2], 2, "of more than 2 elements"),
    ("local_shape", 6, [6, 2, 2], 1, "a vector of more than 1 elements"),
    ("local_shape", [[6]], [6, 2, 2], 0, "a vector of more than 0 elements, or a scalar"),
    ("row_range", 6, [6, 2, 2], 0, "a vector of more than 0 elements"),
])
def test_sizes_that_are_refused(op, shape, part, dimension, message):
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        getattr(raw(), f"poseidon_{op}")(shape, tf.constant(part, tf.int64), dimension=dimension)
    assert message in str(error.value)


def test_shapes_of_sizes():
    with tf.Graph().as_default():
        part = tf.compat.v1.placeholder(tf.int64, None)
        for length in (None, 3):
            shape = tf.compat.v1.placeholder(tf.int32, [length])
            for op in (raw().poseidon_local_shape, raw().poseidon_global_shape):
                assert op(shape, part, dimension=1).shape.as_list() == [length]
            assert [o.shape.as_list() for o in raw().poseidon_row_range(shape, part, dimension=1)] == [[2], [2]]
        with pytest.raises(ValueError, match="'shape' has 3 elements, expected more than 'dimension', which is 3"):
            raw().poseidon_local_shape(shape, part, dimension=3)


def test_rows_are_the_inputs():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        x = tf.compat.v1.placeholder(tf.int64, [8, 2])
        y = tf.compat.v1.placeholder(tf.string, [3, None])
        outputs = raw().poseidon_rows(values=[x, y], part=[], dimensions=[0, 1], names=["x", "y"])
        assert [output.shape.as_list() for output in outputs] == [[8, 2], [3, None]]
        given = [np.arange(16).reshape(8, 2), np.full((3, 8), b"text", object)]
        for output, value in zip(session.run(outputs, dict(zip([x, y], given))), given):
            np.testing.assert_array_equal(output, value)


def test_usual_rows_have_shapes_and_cannot_run():
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        values = [tf.zeros([8, 2]), tf.zeros([3, 5])]
        outputs = raw().poseidon_usual_rows(values=values, dimensions=[0, 1], names=["x", "y"], rows=4)
        assert [output.shape.as_list() for output in outputs] == [[4, 2], [3, 4]]
        with pytest.raises(tf.errors.InvalidArgumentError, match="No OpKernel was registered"):
            session.run(outputs)


@pytest.mark.parametrize("dimensions, names, message", [
    ([0, 0], ["x"], "'dimensions' has 2 elements, but there are 1 inputs"),
    ([0], [], "'names' has 0 elements, but there are 1 inputs"),
    ([1], ["x"], "'x' has shape [3], expected one with rows along dimension 1."),
    ([-1], ["x"], "'x' has shape [3], expected one with rows along dimension -1."),
])
def test_rows_refuses(dimensions, names, message):
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        raw().poseidon_rows(values=[tf.ones(3)], part=[], dimensions=dimensions, names=names)
    assert message in str(error.value)


def test_rows_refuses_sizes_without_a_number():
    with pytest.raises(ValueError, match="'rows' is 4611686018427387904 and 'elements' has 2, expected a product of"):
        run(lambda: raw().poseidon_usual_rows(
            values=[tf.zeros([4])], dimensions=[0], names=["x"], elements=[2], rows=2**62))


@pytest.mark.parametrize("size", RANKS)
def test_sums_over_the_ranks_of_one_graph(size):
    def build():
        sums = []
        for rank in range(size):
            sums.append(as_rank(raw().poseidon_sync(
                gradient=tf.fill([3], float(10**rank)), contributes=rank != 1, site="kernel"), rank))
        return sums

    with job(size):
        for total in run(build):
            assert total.tolist() == [sum(10**rank for rank in range(size) if rank != 1)] * 3


def test_a_rank_that_is_not_there():
    def build():
        return as_rank(raw().poseidon_sync(gradient=tf.ones(3), contributes=True, site="kernel"), 2)

    message = "PoseidonSync 'kernel' runs as rank 2, which this process does not hold"
    with job(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match=message):
            run(build)
    ranks = communicator.join_loopback(3)
    communicator.use_ranks_for_ops(ranks)
    for rank in ranks:
        rank.leave()  # which takes it from the ops, too
    with pytest.raises(tf.errors.FailedPreconditionError, match=message):
        run(build)
    communicator.use_ranks_for_ops([])


class Compared:
    """A node for each rank of a separate job, which may end; it compares 'first', always 7, and 'x'.

    Attributes:
        ranks: The job's communicators.
    """

    def __init__(self, dtypes):
        """Starts nothing yet; `dtypes` has that of 'x' for each rank."""
        self._dtypes = dtypes
        self._stack = contextlib.ExitStack()

    def __enter__(self):
        self.ranks = self._stack.enter_context(job(len(self._dtypes)))
        graph = tf.Graph()
        with graph.as_default():
            self._inputs = [tf.compat.v1.placeholder(dtype) for dtype in self._dtypes]
            self._ops = [as_rank(raw().poseidon_compare(values=[7, x], names=["first", "x"], site="step"), rank)
                         for rank, x in enumerate(self._inputs)]
        self._session = self._stack.enter_context(tf.compat.v1.Session(graph=graph))
        return self

    def __exit__(self, *exception):
        return self._stack.__exit__(*exception)

    def call(self, *values):
        """Runs the op once on each rank, with its 'x'."""
        self._session.run(self._ops, dict(zip(self._inputs, values)))

    def fails(self, call, *values, rank=1):
        """Expects that `rank` ends the job in this call."""
        message = (f"Rank {rank} gives 'x' another value than rank 0, in call {call}. All ranks must give a step the "
                   "same global batches in the same order: seed what shuffles or generates the data "
                   "(keras.utils.set_random_seed(...), shuffle(seed=...)).")
        with pytest.raises(tf.errors.AbortedError) as error:
            self.call(*values)
        assert message in str(error.value)
        with pytest.raises(JobEndedError) as error:  # other ranks are told, too
            self.ranks[0].sum("later", np.ones(3))
        assert message in str(error.value)


@pytest.mark.parametrize("size", RANKS)
def test_same_inputs_pass(size):
    with Compared([tf.float32] * size) as compared:
        for call in range(1, 10):
            compared.call(*[np.full([2, 3], float(call))] * size)


@pytest.mark.parametrize("other", [[1.0, 2.0, 4.0], [1.0, 2.0, np.nan], [1.0, 2.0], [[1.0, 2.0, 3.0]], []])
def test_another_input_is_noticed(other):
    with Compared([tf.float32] * 2) as compared:
        compared.call([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
        compared.fails(2, [1.0, 2.0, 3.0], other)


def test_which_rank_has_another_input():
    with Compared([tf.int64] * 3) as compared:
        compared.fails(1, 5, 5, 6, rank=2)


def test_another_type_is_noticed():
    with Compared([tf.int32, tf.float32]) as compared:
        compared.fails(1, [0, 0], [0, 0])


def test_shapes_of_nothing_are_compared():
    with Compared([tf.float32] * 2) as compared:
        compared.fails(1, np.zeros([0, 3]), np.zeros([3, 0]))


@pytest.mark.parametrize("other", [[b"ab", b"d"], [b"a", b"bc"], [b"", b"abc"], [b"ab", b"c", b""], [b"ab", b"c\0"]])
def test_strings_are_compared(other):
    texts = [b"ab", b"c"]
    with Compared([tf.string] * 2) as compared:
        compared.call(texts, list(texts))
        compared.fails(2, texts, other)


def test_long_strings_are_compared():
    text = b"x" * 1000  # not within the tensor itself
    with Compared([tf.string] * 2) as compared:
        compared.call([text], [bytes(1000).replace(b"\0", b"x")])
        compared.fails(2, [text], [text[:-1] + b"y"])


def test_calls_between_powers_of_two_are_not_compared():
    with Compared([tf.int64] * 2) as compared:
        for values in [(1, 1), (2, 2), (3, 0), (4, 4), (5, 0), (6, 0), (7, 0)]:
            compared.call(*values)
        compared.fails(8, 8, 0)


@pytest.mark.parametrize("values, names, message", [
    (lambda: [tf.ones(3)], [], "'names' has 0 elements, but there are 1 inputs"),
    (lambda: [tf.Variable(1.0).handle], ["x"], "'x' has type resource, expected numbers, bools or strings"),
    (lambda: [tf.raw_ops.TensorListReserve(element_shape=[3], num_elements=2, element_dtype=tf.float32)], ["x"],
     "'x' has type variant, expected numbers, bools or strings"),
])
def test_compare_refuses(values, names, message):
    with job(1), pytest.raises(tf.errors.InvalidArgumentError) as error:
        raw().poseidon_compare(values=values(), names=names, site="step")
    assert message in str(error.value)


@pytest.mark.parametrize("is_partitioned", [True, False])
def test_sums_are_ordered_without_passes(is_partitioned):
    grappler.order_sums()
    terms = [np.array([1e8, 1.0], np.float32), np.array([-1e8, 2.0], np.float32), np.array([1.0, 3.0], np.float32)]
    with job(2), tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        placeholders = [tf.compat.v1.placeholder(tf.float32, [2]) for _ in terms]
        total = tf.add_n(placeholders)
        fetches = {"total": total}
        if is_partitioned:
            size = tf.shape(placeholders[0], out_type=tf.int64)[0]
            fetches["part"] = as_rank(raw().poseidon_part(sizes=[size], given=[], names=["x"], site="step"), 1)[0]
        metadata = tf.compat.v1.RunMetadata()
        values = session.run(fetches, dict(zip(placeholders, terms)),
                             tf.compat.v1.RunOptions(output_partition_graphs=True), metadata)
    assert values["total"].tolist() == [1.0, 6.0]
    if is_partitioned:
        assert values["part"].tolist() == [2, 1, 1]
    ops = [node.op for partition in metadata.partition_graphs for node in partition.node]
    assert (ops.count("AddN"), ops.count("AddV2")) == ((0, 2) if is_partitioned else (1, 0))


@pytest.mark.parametrize("is_whole", [True, False])
def test_sums_of_functions_that_run_whole_are_ordered(is_whole):
    grappler.order_sums()

    @tf.function
    def total(a, b, c):
        rows = raw().poseidon_rows(values=[a], part=[], dimensions=[0], names=["x"])[0] if is_whole else a
        return tf.add_n([a, b, c]), rows

    with context.collect_graphs(optimized=True) as graphs:
        assert total(*tf.constant([[1e8, 1.0], [-1e8, 2.0], [1.0, 3.0]]))[0].numpy().tolist() == [1.0, 6.0]
    ops = [node.op for graph in graphs for node in graph.node]
    assert (ops.count("AddN"), ops.count("AddV2")) == ((0, 2) if is_whole else (1, 0))


def test_order_sums_keeps_the_passes(monkeypatch):
    """Also while another GraphPass than that of `enable` runs."""
    plugged = []
    monkeypatch.setattr(grappler, "_is_plugged_in", True)
    monkeypatch.setattr(grappler, "_plug_in", lambda *arguments: plugged.append(arguments))
    grappler.order_sums()
    assert not plugged


def test_order_sums_beside_another_plug_in(monkeypatch, caplog):
    monkeypatch.setattr(grappler, "_is_plugged_in", False)
    monkeypatch.setattr(grappler, "_plug_in", lambda *arguments: False)
    grappler.order_sums()
    assert "Ranks may get sums with different bits" in caplog.text and "another plug-in" in caplog.text


def packets(group):
    """Returns how many messages two ranks send when they exchange a value soon after gathering rows."""
    def build():
        ends = []
        for rank in range(2):
            rows = as_rank(raw().poseidon_all_gather(value=[[1.0]], contributes=True, site="rows", **group), rank)
            later = tf.numpy_function(lambda value: time.sleep(0.002) or value, [np.float32(rank)], tf.float32)
            later.set_shape([])
            ends += [rows, as_rank(raw().poseidon_broadcast(value=later, site="value", root=0, **group), rank)]
        return ends

    with job(2) as ranks:
        rows, value = run(build)[2:]
        assert rows.tolist() == [[1.0], [1.0]] and value == 0.0
        return sum(rank.statistics()["packets"] for rank in ranks)


def test_a_group_shares_its_messages():
    """One rank's value goes with its rows.

    Of some tries: where processors are busy, what comes later may be in time by itself, or too late for the group.
    """
    assert min(packets(dict(group="both", group_size=2)) for _ in range(5)) < max(packets({}) for _ in range(5))
