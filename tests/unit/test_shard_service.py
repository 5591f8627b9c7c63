"""Two ranks in this process: each reads shards of the other, which answers when it has come as far."""

import functools
import gc
import threading
import time
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.errors import GraphError
from tf_poseidon.errors import JobError
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.job.job_variables.holdings import Extent
from tf_poseidon.job.job_variables.holdings import Holding
from tf_poseidon.job.job_variables.holdings import Initial
from tf_poseidon.job.job_variables.shard_service import ShardService
from tf_poseidon.keras_hook.keras_objects import sharded_slots
from tf_poseidon.one_process.sharding import master_weights
from tf_poseidon.one_process.sharding.sharded_variables import ShardedVariable
from tf_poseidon.options import JobOptions

SHAPE = (40, 50)  # in several KV pairs
VALUE = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


class Rank:
    """A rank with a variable, whose program assigns and reads it."""

    def __init__(self, communicator):
        self.communicator = communicator
        self.service = ShardService(communicator)
        self.variable, self.whole = (tf.Variable(0.0, shape=tf.TensorShape(None)) for _ in range(2))
        initial = Initial(lambda: tf.zeros(SHAPE), lambda size: tf.zeros(size))
        self.holding = Holding("m", tf.TensorShape(SHAPE), tf.float32, initial, self.variable.handle,
                               self.whole.handle, "weights")
        self.number = self.service.add(self.variable, self.holding)

    def assign(self, value):
        lines, runs = self.communicator.shards(value.size, self.holding.division)
        shard = np.concatenate([value.reshape(lines, -1)[:, run] for rank, run in runs
                                if rank == self.communicator.rank], 1).reshape(-1)
        self.service.assign(self.number, tf.constant(value), tf.constant(shard))

    def read(self):
        return self.service.whole(self.number)


@pytest.fixture(params=[Division("weights"), Division("weights", divided=1, columns=SHAPE[1])],
                ids=["KV pairs", "columns"])
def ranks(request):
    """Two ranks, which leave when the threads that answer have ended."""
    communicators = join_loopback(2, JobOptions(kv_pair_bytes=4096, timeout_s=10.0))
    ranks = [Rank(communicator) for communicator in communicators]
    for rank in ranks:
        rank.holding.division = request.param
    yield ranks
    communicators[0].abort("the test is over")
    for thread in threading.enumerate():
        if thread.name == "tf_poseidon shards":
            thread.join(10)
            assert not thread.is_alive()
    for communicator in communicators:
        communicator.leave()


def in_threads(*functions):
    """Runs functions, each in a thread of its own; returns what they return."""
    results = [None] * len(functions)

    def run(i):
        results[i] = functions[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_one_rank_reads_or_all_do(ranks):
    for rank in ranks:
        rank.assign(VALUE)
    np.testing.assert_array_equal(ranks[1].read(), VALUE)
    for value in in_threads(*(rank.read for rank in ranks)):
        np.testing.assert_array_equal(value, VALUE)


@pytest.mark.parametrize("most_bytes, rows", [(1, 1), (1000, 5), (1 << 20, 40)])
def test_a_rank_reads_some_rows_at_a_time(ranks, most_bytes, rows):
    """Of a variable that the other assigns again meanwhile."""
    for rank in ranks:
        rank.assign(VALUE)
    parts = ranks[0].service.parts(ranks[0].number, most_bytes)
    found = [next(parts)]
    ranks[1].assign(2 * VALUE)
    found += parts
    assert [len(part) for part in found] == 40 // rows * [rows]
    np.testing.assert_array_equal(np.concatenate(found), VALUE)


def test_a_rank_that_is_behind_answers_when_it_has_come_as_far(ranks):
    def assign_later():
        time.sleep(0.2)
        ranks[1].assign(VALUE)

    ranks[0].assign(VALUE)
    value, _ = in_threads(ranks[0].read, assign_later)
    np.testing.assert_array_equal(value, VALUE)


def test_a_run_that_is_not_over_is_waited_for(ranks):
    for rank in ranks:
        rank.assign(VALUE)
    ranks[0].service.count_update()
    ranks[0].holding.set(2 * ranks[0].holding.read(), Extent.SHARD)

    def run_later():
        time.sleep(0.2)
        ranks[1].holding.set(2 * ranks[1].holding.read(), Extent.SHARD)
        ranks[1].service.count_update()

    value, _ = in_threads(ranks[0].read, run_later)
    np.testing.assert_array_equal(value, 2 * VALUE)


def test_a_rank_that_is_ahead_answers_with_what_it_held_before(ranks):
    for rank in ranks:
        rank.assign(VALUE)
    ranks[1].assign(2 * VALUE)
    np.testing.assert_array_equal(ranks[0].read(), VALUE)
    ranks[0].assign(2 * VALUE)
    ranks[1].assign(3 * VALUE)  # it waits for the other to have come as far
    np.testing.assert_array_equal(ranks[0].read(), 2 * VALUE)


def test_ranks_answer_after_their_program_has_dropped_a_variable(ranks):
    for rank in ranks:
        rank.assign(VALUE)
    ranks[1].variable = None
    np.testing.assert_array_equal(ranks[0].read(), VALUE)
    ranks[1].service.forget()
    with pytest.raises(JobError, match="Rank 1 has dropped a variable that rank 0 reads"):
        ranks[0].read()


def test_a_rank_at_its_end_refuses_what_it_never_does(ranks):
    ranks[0].assign(VALUE)
    ranks[1].communicator.has_reached_end = True
    with pytest.raises(JobError, match="Rank 0 asks for the shard of m, but rank 1 has reached the end of its program "
                                       "without the same steps and assignments"):
        ranks[0].read()


def test_rank_0_restores_for_all_ranks(ranks):
    with ranks[0].service.restoring():
        ranks[0].assign(VALUE)
    in_threads(*(functools.partial(rank.service.check_assigned, [rank.number]) for rank in ranks))
    np.testing.assert_array_equal(ranks[1].read(), VALUE)


def test_what_rank_0_restores_is_in_working_copies(ranks):
    for rank in ranks:
        rank.holding.copy = tf.Variable(tf.zeros(SHAPE, tf.float16))
    with ranks[0].service.restoring():
        ranks[0].assign(VALUE)
    for rank in ranks:
        np.testing.assert_array_equal(rank.holding.copy, VALUE.astype(np.float16))
        np.testing.assert_array_equal(rank.read(), VALUE)


def _weight(job):
    return master_weights.MasterWeight("kernel", "kernel", tf.TensorShape(SHAPE), tf.float32,
                                       Initial(lambda: tf.zeros(SHAPE), None), job)


def test_a_weight_is_freed_with_its_model(ranks):
    job = types.SimpleNamespace(shards=ranks[0].service)
    weight = _weight(job)
    is_alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert is_alive() is None


def test_a_slot_is_freed_with_its_optimizer(ranks, monkeypatch):
    job = types.SimpleNamespace(shards=ranks[0].service, shard_update=True)
    monkeypatch.setattr(sharded_slots, "_job", lambda: job)
    slots = [keras.Variable("zeros", SHAPE)]

    def initialize(variable, initializer):  # as Keras does
        variable._value = sharded_slots.variable_for(variable, lambda: initializer(variable.shape))

    sharded_slots.add_variable(lambda *_: sharded_slots.initialize_with_initializer(
        initialize, slots[0], keras.initializers.Zeros()), None, SHAPE)
    assert isinstance(slots[0].value, ShardedVariable)
    is_alive = weakref.ref(slots[0].value)
    slots.clear()
    gc.collect()
    assert is_alive() is None


def test_a_weight_is_wanted_by_graphs_that_run(ranks):
    weight = _weight(types.SimpleNamespace(shards=ranks[0].service))
    keras.layers.Lambda(lambda x: x @ weight.read_value())(keras.Input((SHAPE[0],)))
    assert not weight.is_wanted
    tf.function(weight.read_value).get_concrete_function()
    assert weight.is_wanted


@pytest.mark.parametrize("options, is_master", [({}, True), ({"trainable": False}, False), ({"dtype": "int32"}, False),
                                                ({"aggregation": "mean"}, False)])
def test_masters_are_trained_in_float(ranks, monkeypatch, options, is_master):
    job = types.SimpleNamespace(shards=ranks[0].service, new_variables=types.SimpleNamespace(add=lambda weight: None),
                                shard_update=True, is_to_divide=lambda path: False)
    monkeypatch.setattr(sharded_slots, "_job", lambda: job)
    variable = keras.Variable("zeros", SHAPE, **{"dtype": "float32"} | options)
    value = sharded_slots.variable_for(variable, lambda: tf.zeros(SHAPE))
    assert isinstance(value, master_weights.MasterWeight) == is_master


@pytest.mark.parametrize("values, message", [
    ((VALUE, None), "on some ranks only"), ((None, VALUE), "on some ranks only"),
    ((VALUE, 2 * VALUE), "another value on some ranks than on rank 0")], ids=["rank 0", "rank 1", "others"])
def test_all_ranks_refuse_a_variable_that_some_have_not_assigned_alike(ranks, values, message):
    """What all assign then is right again."""
    for rank, value in zip(ranks, values):
        if value is not None:
            rank.assign(value)

    def check(rank):
        with pytest.raises(GraphError, match=f"'m', of which each rank holds a shard, was assigned {message}"):
            rank.service.check_assigned([rank.number])
        return True

    assert in_threads(*(lambda rank=rank: check(rank) for rank in ranks)) == [True, True]
    for rank, value in zip(ranks, values):
        if value is None:
            rank.assign(2 * VALUE)
        rank.assign(VALUE)
    in_threads(*(functools.partial(rank.service.check_assigned, [rank.number]) for rank in ranks))
    for value in in_threads(*(rank.read for rank in ranks)):
        np.testing.assert_array_equal(value, VALUE)


def test_initial_values_that_differ_are_those_of_rank_0(ranks):
    for rank, value in zip(ranks, (1.0, 2.0)):
        rank.holding.initial = Initial(lambda value=value: tf.fill(SHAPE, value), None)
    for rank in ranks:
        np.testing.assert_array_equal(rank.service.initial(rank.number), np.ones(SHAPE))
