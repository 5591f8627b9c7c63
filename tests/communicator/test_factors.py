"""Sufficient factor broadcasting over the loopback transport and sockets: all ranks in this process."""

import random
import time

import numpy as np
import pytest
from test_communicator import connected
from test_communicator import in_parallel
from test_communicator import job
from test_communicator import transport  # noqa: F401  # a fixture: each test runs over each transport

from tf_poseidon.errors import JobEndedError
from tf_poseidon.job.communicator import join_sockets
from tf_poseidon.options import JobOptions


def parts_of(rank, step=0, rows=None, columns=(3, 5000)):
    """This rank's matrices: the second is too long to travel inside a packet."""
    rows = rank + 1 if rows is None else rows
    return [np.full((rows, c), 10 * step + rank, np.float32) for c in columns]


def parts_of_all(size, step=0, rows=lambda rank: None):
    """The matrices of all ranks, concatenated."""
    return [np.concatenate(parts) for parts in zip(
        *(parts_of(rank, step, rows(rank)) for rank in range(size)))]


# With several ranks on a node, the factors of another node arrive through another rank of this one.
NODES = pytest.mark.parametrize("ranks_per_node", [1, 3])


@pytest.mark.parametrize("size, ranks_per_node", [(1, 1), (3, 1), (5, 3)])
@pytest.mark.parametrize("rows", [
    lambda rank: rank + 1, lambda rank: 0, lambda rank: 3 * (rank % 2), lambda rank: 7])
def test_all_ranks_get_all_rows_in_rank_order(size, ranks_per_node, rows):
    with job(size, ranks_per_node=ranks_per_node) as ranks:
        for step in range(3):
            waits = [rank.submit_factors("w", parts_of(rank.rank, step, rows(rank.rank)))
                     for rank in ranks]
            for wait in waits:
                for got, part in zip(wait(), parts_of_all(size, step, rows), strict=True):
                    np.testing.assert_array_equal(got, part)


@NODES
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("leaving_out", [(0,), (1, 3), (0, 1, 2, 3)])
def test_factors_without_their_zeros_arrive_with_the_same_bits(leaving_out, dtype, ranks_per_node):
    """Also negative zeros; every rank sees the same share, and matrices that are dense travel as they are."""
    parts = []
    for r in range(4):
        rng = np.random.default_rng(r)
        sparse, dense = (rng.normal(size=(5 + r, c)).astype(dtype) for c in (3000, 7))
        sparse[rng.random(sparse.shape) < 0.6] = 0
        sparse[:, :50] *= np.sign(sparse[:, :50]) - 0.5  # negative zeros among them
        parts.append([sparse, dense])
    with job(4, ranks_per_node=ranks_per_node) as ranks:
        waits = [rank.submit_factors("w", parts[rank.rank], leave_out_zeros=rank.rank in leaving_out)
                 for rank in ranks]
        for wait in waits:
            for got, expected in zip(wait(), map(np.concatenate, zip(*parts)), strict=True):
                assert got.tobytes() == expected.tobytes()
        counts = [rank.statistics()["sites"]["w"] for rank in ranks]
        (whole, short), = {(count["factor_bytes"], count["short_factor_bytes"]) for count in counts}
        assert whole == sum(part.nbytes for each in parts for part in each)
        assert 0.3 < short / whole < 1 - 0.1 * len(leaving_out)
        assert sum(count["received_bytes"] for count in counts) == sum(count["sent_bytes"] for count in counts)


@NODES
@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_find_alike_that_one_has_refused(seed, ranks_per_node):
    """Ranks stop giving factors at random steps: the others fall back in the same step.

    Rewritten graphs try factors and then go dense; plain graphs go dense at once.
    """
    size, steps = 4, 12
    generator = random.Random(seed)
    refuses_from = [generator.choice([0, 5, 9, steps]) for _ in range(size)]
    first = min(refuses_from)

    def run(rank):
        own = random.Random(seed * size + rank.rank)
        forms = []
        for step in range(steps):
            time.sleep(own.random() / 500)
            got = None
            if step < refuses_from[rank.rank]:
                got = rank.submit_factors("w", parts_of(rank.rank, step))()
            forms.append("factors" if got else "dense")
            if got:
                assert [len(part) for part in got] == [1 + 2 + 3 + 4] * 2
            else:
                total = rank.submit("w", np.ones(50_000), is_gradient=True)()
                np.testing.assert_array_equal(total, np.full(50_000, size))
        return forms

    with job(size, ranks_per_node=ranks_per_node) as ranks:
        expected = ["factors"] * first + ["dense"] * (steps - first)
        assert in_parallel(ranks, run) == [expected] * size


def synchronize(rank, step, has_factors=True, form="", parts=2):
    """Acts like a rewritten graph or, without factors, like a plain one; returns the outcome."""
    if has_factors and rank.submit_factors("w", parts_of(rank.rank, step)[:parts], form)():
        return "factors"
    np.testing.assert_array_equal(rank.submit("w", np.ones(9), is_gradient=True)(), np.full(9, 4))
    return "dense"


@NODES
def test_factors_are_tried_again_when_all_ranks_have_them(ranks_per_node):
    """One dense step in which all ranks could have sent factors is enough."""
    def run(rank):
        return "".join(synchronize(rank, step, not (rank.rank in (1, 2) and 2 <= step < 5))[0]
                       for step in range(9))

    with job(4, ranks_per_node=ranks_per_node) as ranks:
        assert in_parallel(ranks, run) == ["ffdddd" + "fff"] * 4


def test_plain_steps_of_all_ranks_cost_no_message_but_one():
    def run(rank):
        for step in range(50):
            synchronize(rank, step, has_factors=False)
        return rank.statistics()["header_bytes"]

    with job(4) as ranks:
        headers = in_parallel(ranks, run)
    # A refusal to each of 3 others; of the one KV pair, one server sends to 3 and 3 send to it.
    assert sum(headers) == 64 * (4 * 3 + 50 * 6)


@NODES
@pytest.mark.parametrize("parts", [1, 2])
def test_ranks_of_other_forms_fall_back(parts, ranks_per_node):
    def run(rank):
        other = rank.rank == 3
        steps = [synchronize(rank, step, form=f"form {other}", parts=parts if other else 2)
                 for step in range(4)]
        return steps, rank.statistics()["sites"]["w"]["sent_bytes"]

    with job(4, ranks_per_node=ranks_per_node) as ranks:
        for (steps, sent), rank in zip(in_parallel(ranks, run), range(4)):
            assert steps == ["dense"] * 4
            # Found out in the first step, and not tried again.
            mine = parts_of(rank)[:parts if rank == 3 else 2]
            assert sent - 3 * sum(part.nbytes for part in mine) <= 4 * 3 * 72


def test_one_site_refused_leaves_the_others():
    with job(2) as ranks:
        in_parallel(ranks, lambda rank: rank.submit("a", np.ones(3), is_gradient=True)())
        for site, expected in (("a", False), ("b", True)):
            waits = [rank.submit_factors(site, parts_of(rank.rank)) for rank in ranks]
            assert [wait() is not None for wait in waits] == [expected] * 2


def test_other_columns_end_the_job():
    with job(2, goodbye=False) as ranks:
        outcomes = in_parallel(ranks, lambda rank: rank.submit_factors(
            "w", parts_of(rank.rank, columns=(3, 4 + rank.rank)))())
        for outcome in outcomes:
            assert isinstance(outcome, JobEndedError)
            assert "Ranks disagree about the rows of 'w'" in str(outcome)


def test_rank_that_hangs_is_named_and_not_those_whose_factors_it_passes_on():
    """On 2 nodes with 2 ranks each, rank 2 is connected and does nothing."""
    sockets = connected(4)
    options = JobOptions(timeout_s=0.3, startup_timeout_s=5.0, ranks_per_node=2)
    ranks = [join_sockets(rank, sockets[rank], options) for rank in (0, 1, 3)]
    for outcome in in_parallel(ranks, lambda rank: rank.submit_factors("w", parts_of(rank.rank))()):
        assert "waited 0.3 s for rank 2 to exchange 'w' (gather)" in str(outcome)
    for rank in ranks:
        rank.leave()


def test_bytes_are_counted():
    with job(3) as ranks:
        waits = [rank.submit_factors("w", parts_of(rank.rank)) for rank in ranks]
        for wait in waits:
            wait()
        sizes = [sum(part.nbytes for part in parts_of(rank)) for rank in range(3)]
        for rank in ranks:
            site = rank.statistics()["sites"]["w"]
            assert site["count"] == 1
            assert site["sent_bytes"] == 2 * sizes[rank.rank]
            assert site["received_bytes"] == sum(sizes) - sizes[rank.rank]


@pytest.mark.parametrize("size, ranks_per_node", [(4, 2), (6, 2), (6, 3), (3, 3)])
def test_factors_cross_the_network_once_for_a_node(size, ranks_per_node):
    with job(size, ranks_per_node=ranks_per_node) as ranks:
        waits = [rank.submit_factors("w", parts_of(rank.rank)) for rank in ranks]
        for wait in waits:
            wait()
        nodes = size // ranks_per_node
        sizes = [sum(part.nbytes for part in parts_of(rank)) for rank in range(size)]
        for rank in ranks:
            site = rank.statistics()["sites"]["w"]
            mine, index = sizes[rank.rank], rank.rank % ranks_per_node
            passed_on = sum(sizes[index::ranks_per_node]) - mine
            assert site["network_bytes"] == (nodes - 1) * mine
            assert site["sent_bytes"] == (nodes - 1) * mine + (ranks_per_node - 1) * (mine + passed_on)
            assert site["received_bytes"] == sum(sizes) - mine


def test_waiting_is_what_comes_after_the_last_submission():
    """One rank is 0.3 s late; the other waits for its last exchange, not for its first."""
    def run(rank):
        for _ in range(2):  # the second step closes the first
            first = rank.submit_factors("first", parts_of(0))
            if rank.rank == 1:
                time.sleep(0.3)
            second = rank.submit("second", np.ones(3))
            first(), second()
        return rank.statistics()["waiting_seconds"]

    with job(2) as ranks:
        early, late = in_parallel(ranks, run)
    assert 0.25 < early < 0.6 and late < 0.1


@pytest.mark.parametrize("exchange", ["sum", "factors"])
def test_statistics_say_who_was_waited_for(exchange):
    """Rank 1 is 0.3 s late: the others wait for it, and it waits for nobody as long."""
    def run(rank):
        if rank.rank == 1:
            time.sleep(0.3)
        rank.sum("sum", np.ones(60000)) if exchange == "sum" else rank.submit_factors("factors", parts_of(0))()
        return rank.statistics()["waited_for"]

    with job(3) as ranks:
        for waited_for in in_parallel(ranks, run):
            late = waited_for.pop(1, 0)
            assert late == 0 or 0.25 < late < 2
            assert sum(waited_for.values()) < 0.2
            assert late or exchange == "sum"  # only servers of a sum wait for its parts


def test_statistics_say_how_late_parts_were():
    """Rank 1 is 0.3 s late in two steps, in which several exchanges are in flight: each step counts once."""
    def run(rank):
        for _ in range(2):
            if rank.rank == 1:
                time.sleep(0.3)
            rank.submit_factors("factors", parts_of(0))()
            rank.sum("sum", np.ones(3))
        return rank.statistics(has_sites=False)

    with job(3) as ranks:
        for statistics in in_parallel(ranks, run):
            late = statistics["late_seconds"]
            assert 0.5 < late.pop(1) < 1.5 and sum(late.values()) < 0.2
            assert statistics["sites"] == {} and set(statistics) == set(ranks[0].statistics())
