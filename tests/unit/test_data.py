"""How global batches are split by rows."""

import contextlib
import fractions
import time

from keras.src.trainers.data_adapters import array_data_adapter
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.data import array_rows
from tf_poseidon.data import datasets
from tf_poseidon.data import fingerprints
from tf_poseidon.data import parts as parts_lib
from tf_poseidon.data import row_selection
from tf_poseidon.errors import GraphError
from tf_poseidon.job import row_shares
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.loops import step as step_lib
from tf_poseidon.one_process import calls


@contextlib.contextmanager
def job_of_one():
    """A job of one process: its first batch is compared with itself."""
    communicator, = join_loopback(1)
    communicator.use_for_ops()
    try:
        yield communicator
        communicator.goodbye()
    finally:
        communicator.leave()


def split(dataset, size):
    """Returns, for each rank, the list of its batches."""
    with job_of_one() as communicator:
        return [list(datasets.split_dataset(dataset, row_selection.Ranks(rank, (1,) * size, "data"), communicator))
                for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("total", [0, 1, 2, 6, 7, 100])
def test_parts_are_contiguous_and_even(total, size):
    for rows in (total, tf.constant(total)):
        parts = [tuple(map(int, parts_lib.of_rank(rows, rank, [1] * size))) for rank in range(size)]
        end = 0
        for begin, count in parts:
            assert begin == end
            end += count
        assert end == total
        counts = [count for _, count in parts]
        assert counts == sorted(counts, reverse=True) and max(counts) - min(counts) <= 1


@pytest.mark.parametrize("shares", [(1, 1), (3, 1, 1), (1, 2, 3), (1, 100), (7, 7, 5, 1), (1000, 1, 999, 500, 3)],
                         ids=str)
def test_parts_follow_shares(shares):
    before = [0] * len(shares)
    for total in range(130):
        counts = parts_lib.counts_of(total, shares)
        assert sum(counts) == total
        assert [after - former for after, former in zip(counts, before)].count(1) == min(total, 1)  # one gets a row
        assert min(after - former for after, former in zip(counts, before)) == 0
        # No other division makes the slowest rank faster: moving a row to another rank makes that one the slowest.
        slowest = max(fractions.Fraction(count, share) for count, share in zip(counts, shares))
        assert all(fractions.Fraction(count + 1, share) >= slowest for count, share in zip(counts, shares))
        for rank in range(len(shares)):
            begin, count = parts_lib.of_rank(tf.constant(total), rank, shares)
            assert (int(begin), int(count)) == (sum(counts[:rank]), counts[rank])
        assert int(parts_lib.contributors(tf.constant(total, tf.int64), shares)) == sum(map(bool, counts))
        before = counts


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("drop_remainder", [True, False])  # static and unknown numbers of rows
def test_ranks_together_hold_every_row_once(batch, size, drop_remainder):
    dataset = tf.data.Dataset.range(11).batch(batch, drop_remainder)
    ranks = split(dataset, size)
    for step, whole in enumerate(dataset):
        together = []
        for batches in ranks:
            rows = batches[step]
            assert rows.total == len(whole)
            assert rows.never_empty == (drop_remainder and batch >= size)
            if rows.count == 0:
                np.testing.assert_array_equal(rows.value, whole[:1])  # a padding row
            together.extend(rows.value[:rows.count].numpy())
        np.testing.assert_array_equal(together, whole)


def test_structures_keep_their_form():
    dense = np.arange(12).reshape(6, 2)
    ragged = tf.ragged.constant([[1], [2, 2], [], [4], [5, 5, 5], [6]])
    sparse = tf.sparse.from_dense(dense % 3)
    dataset = tf.data.Dataset.from_tensor_slices(({"a": dense, "b": (ragged, sparse)}, dense))
    first, second = (batches[0] for batches in split(dataset.batch(5), 2))
    for (x, y), begin, end in ((first, 0, 3), (second, 3, 5)):
        np.testing.assert_array_equal(x["a"].value, dense[begin:end])
        np.testing.assert_array_equal(y.value, dense[begin:end])
        assert x["b"][0].value.to_list() == ragged[begin:end].to_list()
        np.testing.assert_array_equal(tf.sparse.to_dense(x["b"][1].value),
                                      (dense % 3)[begin:end])


@pytest.mark.parametrize("shuffle", [True, "batch", False])
@pytest.mark.parametrize("shares", [(1, 1), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("count", [23, 18])  # with a last batch of 5 rows, and none
def test_ranks_gather_their_rows_of_arrays(count, shares, shuffle, monkeypatch):
    monkeypatch.setattr(array_rows, "LEAST_BYTES", 0)
    arrays = {"a": np.arange(count, dtype=np.float32), "b": np.arange(3 * count).reshape(count, 3)}, np.arange(count)

    def dataset():
        tf.random.set_seed(3)
        return array_data_adapter.ArrayDataAdapter(*arrays, batch_size=6, shuffle=shuffle).get_tf_dataset()

    batches = dataset()
    expected = [list(batches) for _ in range(2)]
    for rank in range(len(shares)):
        selected, report = array_rows.select(dataset(), 6, row_selection.Ranks(rank, shares, "data"))
        assert report.is_divided and (len(set(shares)) > 1 or count % 6 or selected.dataset.element_spec[1][1].shape[0])
        for epoch in expected:
            for number, (whole, (tag, batch)) in enumerate(zip(epoch, selected.dataset, strict=True)):
                total = len(whole[1])
                begin, rows = parts_lib.of_rank(total, rank, shares)
                begin = begin if rows else 0
                assert tag[:3].numpy().tolist() == [total, begin, rows] and np.any(tag[3:]) == (number == 0)
                for one, other in zip(tf.nest.flatten(whole), tf.nest.flatten(batch), strict=True):
                    np.testing.assert_array_equal(one[begin:begin + max(rows, 1)], other)


@pytest.mark.parametrize("arrays, least, reason", [
    (np.zeros((6, 2)), 1 << 20, "its batches are small"),
    (tf.sparse.from_dense(np.ones((6, 2))), 0, "a part of its elements is a SparseTensor; make it a dense tensor")])
def test_all_ranks_gather_all_rows_of_other_arrays(arrays, least, reason, monkeypatch):
    monkeypatch.setattr(array_rows, "LEAST_BYTES", least)
    dataset = array_data_adapter.ArrayDataAdapter(arrays, batch_size=4).get_tf_dataset()
    selected, report = array_rows.select(dataset, 4, row_selection.Ranks(0, (1, 1), "data"))
    assert selected is None and not report.is_divided and report.transformations[0].obstacle == reason


def test_rows_can_be_used_like_their_tensor():
    rows = split(tf.data.Dataset.range(4).batch(4), 2)[1][0]
    assert rows.shape == (2,) and rows.dtype == tf.int64
    assert int(tf.reduce_sum(rows)) == 2 + 3


@pytest.mark.parametrize("values", [np.arange(6.0).reshape(2, 3), np.arange(6, dtype=np.int8), np.arange(6) > 2,
                                    np.array(list("abcdef"))], ids=str)
def test_digests_depend_on_type_shape_and_all_bits(values):
    other = ~values if values.dtype == bool else np.roll(values, 1)
    changed = [np.where(np.arange(6).reshape(values.shape) == i, other, values) for i in range(6)]
    several = [values, *changed, values.reshape(6, 1), values[:1]]
    if values.dtype.kind in "fb":
        several.append(values.view(f"i{values.itemsize}"))
    digests = ops.digests(map(tf.constant, several)).numpy()
    assert digests.shape == (len(several),) and len(set(digests)) == len(several)
    of_any_shape = tf.function(lambda value: ops.digests([value]), [tf.TensorSpec(None, tf.as_dtype(values.dtype))])
    np.testing.assert_array_equal(of_any_shape(tf.constant(values)), digests[:1])


@pytest.mark.parametrize("size, expected", [
    (0, 0x0856b875086040a1), (3, 0xe7ba4fcc14e3bba7), (4, 0x76fcde38b4c11b63), (8, 0x03ac5f3acfb127cc),
    (31, 0x413f00b25f2f5b30), (32, 0x9f12810ddcc46fd8), (100, 0x208fbb9c3d76d45a)])
def test_digests_are_those_of_xxh64(size, expected):
    # Of the package xxhash 4.1.0: xxh64(bytes, seed=xxh64(struct.pack("<2q", DT_UINT8, size))).
    value = tf.constant(np.arange(size) * 7 % 256, tf.uint8)
    assert int(ops.digests([value]).numpy().view(np.uint64)[0]) == expected


def test_digests_of_texts_depend_on_where_each_ends():
    assert len(set(ops.digests([tf.constant(["ab", "c"]), tf.constant(["a", "bc"])]).numpy())) == 2
    assert ops.digests([]).shape == (0,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Value 1 has type resource, expected numbers"):
        ops.digests([tf.constant(1), tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])])


def test_parallel_augmentation_with_seeds_of_elements_repeats():
    """The recipe of docs/semantics.md."""
    images = np.arange(64 * 2 * 8 * 1.0).reshape(64, 2, 8, 1)

    def read():
        seeds = tf.data.Dataset.random(seed=7, rerandomize_each_iteration=True).batch(2, drop_remainder=True)

        def augment(image, seed):
            return tf.image.stateless_random_flip_left_right(image, seed)

        return tf.data.Dataset.zip(tf.data.Dataset.from_tensor_slices(images), seeds).map(
            augment, num_parallel_calls=8).batch(64)

    mine, of_another_rank = ([next(iter(each)).numpy() for _ in range(2)] for each in (read(), read()))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(mine, of_another_rank))
    assert mine[0].tobytes() != mine[1].tobytes()  # each epoch has numbers of its own
    assert 0 < sum(not np.array_equal(*pair) for pair in zip(mine[0], images)) < 64


@pytest.mark.parametrize("build", [
    lambda read: tf.data.Dataset.range(6).apply(read).batch(2),
    lambda read: tf.data.Dataset.range(6).batch(2).apply(read).map(lambda x: x).prefetch(1),
    lambda read: tf.data.Dataset.range(2).flat_map(lambda x: tf.data.Dataset.range(x).apply(read)).batch(2)],
    ids=["elements", "batches", "in a function"])
@pytest.mark.parametrize("job_name", [None, "shared by readers"])
@pytest.mark.parametrize("read", [datasets.split_dataset, datasets.global_dataset])
def test_data_of_workers_in_any_order_are_refused(build, job_name, read):
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    dataset = build(service.distribute(service.ShardingPolicy.DYNAMIC, dispatcher.target, job_name))
    with pytest.raises(GraphError, match=r"reads tf\.data\.service, .*: leave distribute"):
        read(dataset, row_selection.Ranks(0, (1, 1), "data"), None)


def _divided(rows, size=2, rank=1):
    """Returns a rank's rows of a batch."""
    return split(tf.data.Dataset.range(rows).batch(rows), size)[rank][0]


MEAN = tf.Variable(1.0)


def _averaged(*batches):
    """The end of a step of two ranks that has changed a moving average."""
    taken = step_lib.Step(step_lib.Share.of(batches, 2))
    taken.note_state("mean", MEAN)
    taken.average_state()
    return taken.share


@pytest.mark.parametrize("step, rows, text", [
    (lambda *batches: step_lib.Share.of(batches, 2), (8, 1), "got rows of one batch and none of another"),
    (lambda *batches: step_lib.Share.of(batches, 2), (1, 8), "got rows of one batch and none of another"),
    (_averaged, (8, 5), "by one of which .*mean.* must be averaged"),
    (_averaged, (8, 4), ""), (_averaged, (1, 1), ""),
    (lambda *batches: step_lib.Share.of(batches, 2), (7, 5), "")])
@pytest.mark.parametrize("is_traced", [False, True])
def test_batches_of_a_step_are_divided_alike_as_far_as_it_depends_on_that(step, rows, text, is_traced):
    batches = [_divided(number) for number in rows]

    def taken(*batches):
        return step(*batches).count

    run = tf.function(taken, autograph=False) if is_traced else taken
    error = tf.errors.InvalidArgumentError if is_traced else GraphError
    with job_of_one(), pytest.raises(error, match=text) if text else contextlib.nullcontext():
        run(*batches)


PARTS = {"x": np.ones((3, 2)), "y": None}


@pytest.mark.parametrize("other, text", [
    (PARTS, ""),
    ({"x": np.ones((3, 2))}, "has other parts"),
    ({"x": np.ones((3, 2)), "y": np.ones(3)}, "has other parts"),
    ({"x": np.ones((3, 2), np.float32), "y": None}, "has other parts"),
    ({"x": np.ones((4, 2)), "y": None}, "has 4 rows, rank 0's has 3"),
    ({"x": np.ones((3, 1)), "y": None}, "has parts of other shapes"),
    ({"x": np.nextafter(np.ones((3, 2)), 2), "y": None}, "has other values")])
def test_what_differs_between_batches_is_said(other, text):
    prints = [fingerprints.fingerprint(batch) for batch in (other, PARTS)]
    said = fingerprints.difference("the batch", *(print.numpy() for print in prints))
    assert said.startswith(f"the batch {text}") if text else said == ""


@pytest.mark.parametrize("make", [tf.ragged.constant, lambda rows: tf.sparse.from_dense(np.ones((len(rows), 2)))])
def test_rows_of_other_tensors_are_counted(make):
    prints = [fingerprints.fingerprint(make([[1, 2]] * rows)).numpy() for rows in (5, 2)]
    assert "a$1b has 5 rows, rank 0's has 2" in fingerprints.difference("a$1b", *prints)


def test_what_has_no_digest_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="Value 0 has type variant, expected numbers"):
        fingerprints.fingerprint(tf.io.serialize_sparse(tf.sparse.eye(2), out_type=tf.variant))


@pytest.mark.parametrize("read", [
    next, tf.function(lambda batches: batches.get_next(), autograph=False),
    tf.function(lambda batches: batches.get_next_as_optional().get_value(), autograph=False)],
    ids=["eagerly", "in a graph", "in a graph, if there is one"])
def test_waits_for_batches_are_counted_and_recorded(read):
    """Each of three batches takes 20 ms, and begins when its reader, who is as slow, asks for it."""
    def late(x):
        return tf.numpy_function(lambda v: time.sleep(0.02) or v, [x], x.dtype)

    found, seconds = [], 0.0
    with job_of_one() as communicator:
        timed = ops.timed(tf.data.Dataset.range(6).batch(2).map(late))
        assert timed.cardinality() == 3
        communicator.record_events(10)
        batches = iter(timed)
        for _ in range(3):
            begin = time.monotonic()
            found.append(read(batches).numpy().tolist())
            seconds += time.monotonic() - begin
            time.sleep(0.02)
        assert found == [[0, 1], [2, 3], [4, 5]]
        waited = communicator.statistics()["input_seconds"]
        assert 3 * 0.02 <= waited <= seconds
        events = communicator.events()["events"]
        assert [event[0] for event in events] == ["data"] * 3
        assert sum(end - begin for _, _, begin, end, *_ in events) == pytest.approx(1e9 * waited, rel=1e-6)


@pytest.mark.parametrize("distribute", [datasets.split_dataset, datasets.global_dataset])
def test_what_has_workers_of_its_own_is_not_read_ahead(distribute):
    read = []

    def batches():  # as Keras makes those of a PyDataset with workers
        for number in range(9):
            read.append(number)
            yield np.full(4, number)

    options = tf.data.Options()
    options.autotune.enabled = False
    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([None], tf.int64))
    with job_of_one() as communicator:
        iterator = iter(distribute(dataset.with_options(options), row_selection.Ranks(0, (1, 1), "data"), communicator))
        for number in range(3):
            next(iterator)
            time.sleep(0.05)
            assert read == list(range(number + 1))


def test_readers_of_timed_datasets_continue_where_they_were(tmp_path):
    with job_of_one():
        iterator = iter(ops.timed(tf.data.Dataset.range(4)))
        next(iterator)
        saved = tf.train.Checkpoint(iterator=iterator).save(tmp_path / "iterator")
        assert [int(next(iterator)) for _ in range(3)] == [1, 2, 3]
        tf.train.Checkpoint(iterator=iterator).restore(saved)
        assert int(next(iterator)) == 1


def test_ranks_compare_what_all_of_them_have_of_a_call_with_own_rows():
    rows = datasets.OwnRows(tf.zeros([2, 3]), tf.constant([5, 3, 2], tf.int64), tf.constant(2), True, 5)
    call = calls.Call(lambda batch, rate, flag: None, {}, ((rows, rows), tf.constant(0.5), True), {})
    assert call.has_own_rows and call.rows() == 5 and len(call.tensors) == 4
    assert [float(tensor) for tensor in call.common_tensors()] == [0.5]
    whole = calls.Call(lambda x: None, {}, (tf.zeros([2, 3]),), {})
    assert not whole.has_own_rows and whole.common_tensors() == whole.tensors


def test_strategies_of_a_job_share_rows_alike():
    communicators = join_loopback(2)
    try:
        first = row_shares.of(communicators[0], (3, 1), False)
        assert row_shares.of(communicators[0], None, False) is first and first.current == (3, 1)
        assert row_shares.of(communicators[0], (1, 2), False) is first and first.current == (1, 2)
        assert row_shares.of(communicators[0], None, True) is first and first.is_balanced
    finally:
        for communicator in communicators:
            communicator.leave()
