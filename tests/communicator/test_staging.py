"""The exchange ops with tensors of an emulated GPU, which are copied in pieces; tests/native has more."""

import loopback_ranks
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon.job import communicator
from tf_poseidon.options import JobOptions

GPU = "emulated_gpu"
RANKS = 3
NODES = [0, 0, 0, 0, 1, 1, 1, 1]
KV_PAIR = 64 << 10


@pytest.fixture
def ranks():
    joined = communicator.join_loopback(RANKS, JobOptions(timeout_s=30, kv_pair_bytes=KV_PAIR, staging_bytes=1))
    communicator.use_ranks_for_ops(joined)
    yield joined
    communicator.use_ranks_for_ops([])
    for rank in joined:
        rank.leave()


def exchange(kernels, tensors, dtype, contributes, steps=2, **attributes):
    """Returns what each rank receives in the last step; `kernels` and `contributes` are by rank."""
    def of_rank(poseidon, rank):
        given = [tf.constant(tensor, dtype) for tensor in tensors[rank]]
        ticket = poseidon.poseidon_send(tensors=given, contributes=contributes[rank], site="x", **attributes)
        types = [tf.float32 if attributes.get("float_sum") else dtype] * len(given)
        return poseidon.poseidon_recv(ticket=ticket, T=types)[0]

    return [values[-1] for values in loopback_ranks.run(kernels, of_rank, steps)]


KERNELS = [(GPU, GPU, GPU), ("", GPU, ""), (GPU, "", GPU)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("count", [0, 3, 9000, 40001])
@pytest.mark.parametrize("dtype, options", [
    (tf.float32, {}), (tf.float64, {}), (tf.int32, {}), (tf.bfloat16, {"float_sum": True})])
def test_sums(ranks, dtype, options, count, kernels):
    tensors = [[np.arange(count) % 11 + rank] for rank in range(RANKS)]
    found = exchange(kernels, tensors, dtype, [True, True, False], scheme="ps", **options)
    for rank, (total,) in enumerate(found):
        np.testing.assert_array_equal(total, tensors[0][0] + tensors[1][0], str(rank))
        copied, size = ranks[rank].statistics()["staging"], 2 * count * total.itemsize
        if kernels[rank]:
            sent = 0 if rank == 2 else size // total.itemsize * dtype.size
            assert (copied["down_bytes"], copied["up_bytes"]) == (sent, size)
            assert copied["pinned_bytes"] <= 2 * (2 * KV_PAIR + 256) + 4 * total.itemsize * count + 2 * KV_PAIR
        else:
            assert copied == dict.fromkeys(communicator.STAGING_COUNTERS, 0)


def gathered(parts):
    return np.concatenate(parts[:2])  # what rank 2 has is left out


# Per row: how an op is built of this rank's tensor, what it gives, and bytes of an element on its way.
WITHOUT_A_PLAN = {
    "sum": (lambda poseidon, x, contributes: poseidon.poseidon_all_reduce(value=x, contributes=contributes, site="x"),
            lambda parts: parts[0] + parts[1], 4),
    "gradient": (lambda poseidon, x, contributes: poseidon.poseidon_sync(gradient=x, contributes=contributes, site="x"),
                 lambda parts: parts[0] + parts[1], 4),
    "narrow gradient": (lambda poseidon, x, contributes: poseidon.poseidon_sync(
        gradient=x, contributes=contributes, site="x", wire_dtype="bfloat16"), lambda parts: parts[0] + parts[1], 2),
    "broadcast": (lambda poseidon, x, contributes: poseidon.poseidon_broadcast(value=x, site="x", root=1),
                  lambda parts: parts[1], 4),
    "gathering": (lambda poseidon, x, contributes: poseidon.poseidon_all_gather(
        value=x, contributes=contributes, site="x"), gathered, 4),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rows", [0, 5, 20001])
@pytest.mark.parametrize("op", WITHOUT_A_PLAN)
def test_exchanges_without_a_plan(ranks, op, rows, kernels):
    build, expected, element_bytes = WITHOUT_A_PLAN[op]
    tensors = [np.arange(2 * rows, dtype=np.float32).reshape(rows, 2) % 11 + rank for rank in range(RANKS)]
    found = loopback_ranks.run(
        kernels, lambda poseidon, rank: build(poseidon, tf.constant(tensors[rank]), rank != 2), steps=2)
    for rank, values in enumerate(found):
        np.testing.assert_array_equal(values[-1], expected(tensors), str(rank))
        copied, size = ranks[rank].statistics()["staging"], 2 * element_bytes * tensors[rank].size
        gives = rank == 1 if op == "broadcast" else rank != 2
        assert copied["down_bytes"] == (size if kernels[rank] and gives else 0)
        if op != "gathering":  # whose rows TensorFlow's stream copies up
            assert copied["up_bytes"] == (size if kernels[rank] else 0)


def test_copies_are_rows_of_a_timeline(ranks):
    count = 3 * KV_PAIR // 4
    for rank in ranks:
        rank.record_events(1000)
    exchange((GPU, GPU, ""), [[np.ones(count)]] * RANKS, tf.float32, [True] * RANKS, scheme="ps")
    for number, rank in enumerate(ranks):
        rank.ping((number + 1) % RANKS)  # whose answer the progress thread gets after it has seen that copies are done
        events = rank.events()["events"]
        for row in ("down", "up"):
            copies = [event for event in events if event[0] == row]
            assert sum(event[4] for event in copies) == (0 if number == 2 else 2 * 4 * count)  # of two steps
            assert all(before[3] <= after[2] for before, after in zip(copies, copies[1:]))  # one after the other
            assert {event[1] for event in copies} <= {"x"}
        exchanged = [event for event in events if event[0] == "ps"]
        assert len(exchanged) == 2
        for event in events:  # nothing comes down before its tensor is ready, or after it has been exchanged
            assert event[0] != "down" or any(each[2] <= event[2] <= event[3] <= each[3] for each in exchanged)


@pytest.mark.parametrize("scheme, shape, leaves, comes_up, across", [
    ("ps", [1 << 20], 1, 1, 2 * 3),  # a node's sum, and the result; between GPUs three parts and three results
    ("sfb", [300, 2000], 4, 0, 4 * 3)])  # four ranks' factors, in two pieces each; those of three others for each rank
def test_ranks_of_a_node_combine_on_their_gpus(scheme, shape, leaves, comes_up, across):
    """What crosses the hosts' memory and the link between them, in tensors: no more than the other node must have."""
    joined = communicator.join_loopback(len(NODES), JobOptions(timeout_s=30), NODES)
    communicator.use_ranks_for_ops(joined)
    try:
        # All servers have more than travels in a packet.
        tensors = [[np.arange(np.prod(shape)).reshape(shape) % 11 + rank] for rank in range(len(NODES))]
        given = [tensor for tensor, in tensors]
        expected = sum(given) if scheme == "ps" else np.concatenate(given)

        def total_bytes():
            counters = [rank.statistics() for rank in joined]
            return {key: [sum(counters[rank]["staging"][key] for rank in range(len(NODES)) if NODES[rank] == node)
                          for node in (0, 1)] for key in communicator.STAGING_COUNTERS} | {
                "network": [sum(counters[rank]["sites"]["x"]["network_bytes"] for rank in range(len(NODES))
                                if NODES[rank] == node) for node in (0, 1)]}

        everything = [GPU] * len(NODES), tensors, tf.float32, [True] * len(NODES)
        exchange(*everything, scheme=scheme)  # opens the windows
        before = total_bytes()
        for received, in exchange(*everything, steps=3, scheme=scheme):
            np.testing.assert_array_equal(received, expected)
        after = total_bytes()
        crossed = {key: [now - then for now, then in zip(after[key], before[key])] for key in after}
        size = 3 * 4 * given[0].size
        assert crossed["down_bytes"] == crossed["network"] == [leaves * size] * 2
        assert crossed["up_bytes"] == [comes_up * size] * 2
        assert crossed["across_bytes"] == [across * size] * 2
        assert scheme != "ps" or crossed["gpu_bytes"] == [0, 0]
        assert after["gpu_bytes"][0] >= 4 * 16 * (2 << 20)  # windows
    finally:
        communicator.use_ranks_for_ops([])
        for rank in joined:
            rank.leave()


@pytest.mark.parametrize("kernels", KERNELS)
def test_factors_leave_the_accelerator_in_pieces(ranks, kernels):
    tensors = [[np.arange(rows * columns).reshape(rows, columns) % 7 + rank for columns in (300, 5)]
               for rank, rows in enumerate((100, 0, 64))]
    found = exchange(kernels, tensors, tf.float32, [True] * RANKS, scheme="sfb", form="U V")
    expected = [np.concatenate(parts) for parts in zip(*tensors)]
    for rank, factors in enumerate(found):
        for got, wanted in zip(factors, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        own = sum(part.size for part in tensors[rank])
        assert ranks[rank].statistics()["staging"]["down_bytes"] == (2 * 4 * own if kernels[rank] else 0)


TABLE = (50, 3000)  # rows of some KV pairs together


def slices_of(rank, dtype):
    """Indices that occur often, on several ranks or on one; on one rank none; numbers that are rounded when added."""
    rng = np.random.default_rng(rank)
    indices = rng.integers(rank, 40, (200, 0, 60)[rank])
    values = rng.normal(size=(len(indices), TABLE[1])).astype(dtype.as_numpy_dtype)
    values[:, 0] *= 1e-40  # subnormal, which TensorFlow's threads would take for zero
    return indices, values


def added_up(indices, values):
    """Returns each index once, and the sums of its slices, added in their order and rounded once."""
    found = np.unique(indices)
    sums = np.zeros((len(found), TABLE[1]), np.promote_types(values.dtype, np.float32))
    for index, row in zip(indices, values):
        sums[np.searchsorted(found, index)] += row
    return found, sums.astype(values.dtype)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64, tf.bfloat16])
@pytest.mark.parametrize("contributes", [(True, True, True), (False, True, True)])
@pytest.mark.parametrize("dense", [None, 0, 1])
def test_slices_leave_the_accelerator_in_pieces(ranks, dtype, contributes, dense, kernels):
    """`dense` is a rank that sends its gradient dense, which all then do."""
    given = [slices_of(rank, dtype) for rank in range(RANKS)]

    def of_rank(poseidon, rank):
        indices, values = (tf.constant(each) for each in given[rank])
        if rank != dense:
            return poseidon.poseidon_sync_slices(indices=indices, values=values, contributes=contributes[rank],
                                                 site="x", shape=TABLE)
        gradient = poseidon.poseidon_dense_slices(indices=indices, values=values, shape=TABLE)
        ticket = poseidon.poseidon_send(tensors=[gradient], contributes=contributes[rank], site="x", scheme="ps")
        return [tf.range(TABLE[0]), poseidon.poseidon_recv(ticket=ticket, T=[dtype])[0][0]]

    mine = [added_up(*slices) for slices, is_counted in zip(given, contributes) if is_counted]
    expected = added_up(*(np.concatenate(each) for each in zip(*mine)))
    if dense is not None:
        indices, sums = expected
        expected = np.arange(TABLE[0]), np.zeros(TABLE, sums.dtype)
        expected[1][indices] = sums
    # In the second step, factors are not tried if they were refused.
    for rank, steps in enumerate(loopback_ranks.run(kernels, of_rank, steps=2)):
        for step, found in enumerate(steps):
            for got, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(got, wanted, f"rank {rank}, step {step}")
        if dense is None:
            sent = 2 * added_up(*given[rank])[1].nbytes if kernels[rank] and contributes[rank] else 0
            assert ranks[rank].statistics()["staging"]["down_bytes"] == sent
