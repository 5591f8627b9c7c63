"""Half factors: a server rebuilds its columns of a gradient, and all ranks get them. All ranks are in this process."""

from concurrent import futures
import contextlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tf_poseidon.job import communicator
from tf_poseidon.ops import library
from tf_poseidon.options import JobOptions


@contextlib.contextmanager
def job(size, **options):
    ranks = communicator.join_loopback(size, JobOptions(timeout_s=30, **options))
    communicator.use_ranks_for_ops(ranks)
    try:
        yield ranks
    finally:
        communicator.use_ranks_for_ops([])
        for rank in ranks:
            rank.leave()


def rebuilt(poseidon, u, v, scheme, contributes, shape=None, out_type=None, joins=True):
    """Returns the gradient, or a rank's part of it, and whether factors were complete, as tensors of one rank."""
    divided = {"divided": int(u.shape[1] < v.shape[1]), "joins": joins} if scheme == "hfb" else {}
    ticket = poseidon.poseidon_send(tensors=[u, v], contributes=contributes, site="w", scheme=scheme, form=scheme,
                                    **divided)
    (all_u, all_v), complete = poseidon.poseidon_recv(ticket=ticket, T=[u.dtype, v.dtype])
    product = poseidon.sufficient_factor_outer_product(u=all_u, v=all_v, Tout=out_type or u.dtype)
    if scheme == "hfb" and joins:
        product = poseidon.poseidon_join_columns(ticket=ticket, part=product, site="w",
                                         shape=shape or [u.shape[1], v.shape[1]])
    return product, complete


def run(ranks, factors, schemes, steps=2, contributes=lambda rank: True, **attributes):
    """Returns [(gradient, is complete)] of all ranks, of the last step."""
    def run_rank(rank):
        with tf.Graph().as_default() as graph, tf.device("CPU:0"):
            outputs = rebuilt(library.load()[0], *map(tf.constant, factors[rank]), schemes[rank], contributes(rank),
                              **attributes)
        for node in graph.get_operations():
            if node.type.startswith("Poseidon"):
                node._set_attr("_poseidon_rank", attr_value_pb2.AttrValue(i=rank))
        with tf.compat.v1.Session(graph=graph) as session:
            return [session.run(outputs) for _ in range(steps)][-1]

    with futures.ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run_rank, range(len(ranks))))


def factors_of(size, m, n, rows, dtype=np.float32):
    rng = np.random.default_rng(m + n)
    return [[rng.integers(-9, 10, (rows(rank), columns)).astype(dtype) for columns in (m, n)] for rank in range(size)]


@pytest.mark.parametrize("size, options", [
    (1, {}), (2, {}), (3, {}), (3, {"servers": (2, 0)}), (4, {"servers": (1,)}), (4, {"ranks_per_node": 2})])
@pytest.mark.parametrize("m, n", [(5, 3000), (3000, 5), (64, 64), (3, 7)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_all_ranks_get_the_sum_of_all_products(size, options, m, n, dtype):
    """With ranks that have no rows, or no columns."""
    factors = factors_of(size, m, n, lambda rank: (4, 0, 3, 1)[rank], dtype)
    expected = sum(u.astype(np.float64).T @ v for u, v in factors)
    with job(size, **options) as ranks:
        for gradient, is_complete in run(ranks, factors, ["hfb"] * size):
            assert is_complete and gradient.dtype == dtype
            np.testing.assert_array_equal(gradient, expected)


@pytest.mark.parametrize("m, n", [(70, 3001), (3001, 70)])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_bits_are_those_of_full_factors(m, n, dtype):
    rng = np.random.default_rng(0)
    factors = [[tf.cast(rng.normal(size=(9 + rank, columns)), dtype) for columns in (m, n)] for rank in range(3)]
    factors = [[tensor.numpy() for tensor in of_rank] for of_rank in factors]
    with job(3) as ranks:
        by_scheme = [run(ranks, factors, [scheme] * 3) for scheme in ("hfb", "sfb")]
    assert len({gradient.tobytes() for found in by_scheme for gradient, _ in found}) == 1


def test_a_rank_that_does_not_contribute_is_left_out():
    factors = factors_of(3, 4, 500, lambda rank: 2)
    with job(3) as ranks:
        for gradient, _ in run(ranks, factors, ["hfb"] * 3, contributes=lambda rank: rank != 1):
            np.testing.assert_array_equal(gradient, sum(factors[rank][0].T @ factors[rank][1] for rank in (0, 2)))


def test_bytes_are_those_of_the_plan_and_halves_count_as_one():
    """Of blocks of 16 columns, each server has as many."""
    m, n, k, size = 64, 16 * 3 * 20, 8, 3
    with job(size) as ranks:
        for rank in ranks:
            rank.record_events(100)
        run(ranks, factors_of(size, m, n, lambda rank: k), ["hfb"] * size, steps=2)
        for rank in ranks:
            counts = rank.statistics()["sites"]["w"]
            assert counts["count"] == 2
            each_way = 4 * (k * m * (size - 1) + (k * n + m * n) * (size - 1) / size)
            assert counts["sent_bytes"] == counts["received_bytes"] == 2 * each_way
            assert counts["short_factor_bytes"] == counts["factor_bytes"] == 2 * 4 * k * (m * size + n)
            rows = [event[0] for event in rank.events()["events"] if event[1] == "w"]
            assert rows == ["hfb"] * 2


def test_parts_that_ranks_keep_have_bytes_of_one_way():
    m, n, k, size = 64, 16 * 3 * 20, 8, 3
    factors = factors_of(size, m, n, lambda rank: k)
    with job(size) as ranks:
        for rank in ranks:
            rank.record_events(100)
        parts = run(ranks, factors, ["hfb"] * size, joins=False)
        expected = sum(u.T @ v for u, v in factors)
        for i, rank in enumerate(ranks):
            np.testing.assert_array_equal(parts[i][0], expected[:, i * n // size:(i + 1) * n // size])
            counts = rank.statistics()["sites"]["w"]
            each_way = 4 * (k * m * (size - 1) + k * n * (size - 1) / size)
            assert counts["sent_bytes"] == counts["received_bytes"] == 2 * each_way and counts["count"] == 2
            assert [event[0] for event in rank.events()["events"] if event[1] == "w"] == ["hfb"] * 2


def test_columns_cross_the_network_straight_and_other_parts_once_for_a_node():
    m, n, k, size = 32, 16 * 4 * 10, 8, 4
    with job(size, ranks_per_node=2) as ranks:
        run(ranks, factors_of(size, m, n, lambda rank: k), ["hfb"] * size, steps=1)
        sent = sum(rank.statistics()["sites"]["w"]["network_bytes"] for rank in ranks)
    assert sent == 4 * size * (k * m + k * n / 2 + m * n / size)


def test_ranks_with_other_forms_complete_nothing():
    factors = factors_of(3, 4, 500, lambda rank: 2)
    with job(3) as ranks:
        with pytest.raises(tf.errors.OpError, match="joins what was made of no factors"):
            run(ranks, factors, ["hfb", "sfb", "hfb"], steps=1)


@pytest.mark.parametrize("change, message", [
    ({"shape": [4, 501]}, r"'w' joins a part of shape .* to \[4,501\], expected 500 of 500 columns"),
    ({"shape": [4]}, "joins parts of .*, expected a matrix with elements")])
def test_a_part_that_does_not_fit_is_refused(change, message):
    with job(1) as ranks:
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            run(ranks, factors_of(1, 4, 500, lambda rank: 2), ["hfb"], steps=1, **change)


def test_a_rank_that_joins_nothing_is_named():
    """It has given its factors, and leaves the others without its columns."""
    factors = factors_of(2, 4, 500, lambda rank: 2)
    with job(2) as ranks:
        def run_rank(rank):
            poseidon = library.load()[0]
            with tf.Graph().as_default() as graph, tf.device("CPU:0"):
                product, complete = rebuilt(poseidon, *map(tf.constant, factors[rank]), "hfb", True)
            for node in graph.get_operations():
                if node.type.startswith("Poseidon"):
                    node._set_attr("_poseidon_rank", attr_value_pb2.AttrValue(i=rank))
            with tf.compat.v1.Session(graph=graph) as session:
                session.run(complete if rank else product)

        with futures.ThreadPoolExecutor(2) as pool:
            waits = [pool.submit(run_rank, rank) for rank in range(2)]
            waits[1].result(timeout=30)
            goodbye = pool.submit(ranks[1].goodbye)
            with pytest.raises(tf.errors.AbortedError, match="rank 1|Rank 1"):
                waits[0].result(timeout=30)
            with contextlib.suppress(Exception):
                goodbye.result(timeout=30)
