"""The communicator over its transports except MPI, with all ranks in this process; tests/native has more."""

import contextlib
import socket
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from tf_poseidon.errors import JobEndedError
from tf_poseidon.errors import JobError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.job.communicator import join_sockets
from tf_poseidon.options import JobOptions

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64)


def join_in_process(size, nodes=None, **options):
    return join_loopback(size, told(size, **options), nodes)


_join = join_in_process


@pytest.fixture(autouse=True, params=["loopback", "sockets"])
def transport(request):
    """The transport of the jobs of a test."""
    global _join
    before, _join = _join, {"loopback": join_in_process, "sockets": join_by_sockets}[request.param]
    yield
    _join = before


def connected(size):
    """Returns for each rank its sockets to all others, None for itself."""
    sockets = [[None] * size for _ in range(size)]
    for high in range(size):
        for low in range(high):
            sockets[low][high], sockets[high][low] = socket.socketpair()
    return sockets


def told(size, servers=(), timeout_s=60.0, **options):
    """Returns the options of each rank; `servers` may be a list with one value per rank."""
    servers = servers if isinstance(servers, list) else [servers] * size
    return [JobOptions(servers=each, timeout_s=timeout_s, startup_timeout_s=timeout_s, **options) for each in servers]


def join_by_sockets(size, **options):
    return [join_sockets(rank, to_others, own)
            for rank, (to_others, own) in enumerate(zip(connected(size), told(size, **options)))]


@contextlib.contextmanager
def job(size, goodbye=True, **options):
    """The ranks of a job; they leave it together."""
    ranks = _join(size, **options)
    try:
        yield ranks
        if goodbye:
            in_parallel(ranks, lambda rank: rank.goodbye())
    finally:
        for rank in ranks:
            rank.leave()


def in_parallel(ranks, function):
    """Runs `function(rank)` in a thread for each rank; returns what they return or raise."""
    results = [None] * len(ranks)

    def run(i):
        try:
            results[i] = function(ranks[i])
        except PoseidonError as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def all_submit(ranks, site, values, **options):
    """Returns every rank's result of one exchange."""
    waits = [rank.submit(site, value, **options) for rank, value in zip(ranks, values)]
    return [wait() for wait in waits]


@pytest.mark.parametrize("servers", ["all", "first", "last"])
@pytest.mark.parametrize("size, ranks_per_node", [(1, 1), (2, 1), (3, 1), (5, 1), (4, 2), (5, 2), (5, 3)])
def test_sum_is_exact(size, ranks_per_node, servers):
    """Integers: exact in any order of summation, while a mistake in cutting changes the result."""
    chosen = {"all": (), "first": (0,), "last": (size - 1,)}[servers]
    with job(size, kv_pair_bytes=64 << 10, servers=chosen, ranks_per_node=ranks_per_node) as ranks:
        for count in (0, 1, 7, 1000, 8192, 8193, 300001):
            for dtype in DTYPES:
                values = [((np.arange(count) + 3 * r) % 7 + r).astype(dtype) for r in range(size)]
                expected = sum(v.astype(np.float64) for v in values)
                for result in all_submit(ranks, f"{np.dtype(dtype).name}/{count}", values):
                    np.testing.assert_array_equal(result.astype(np.float64), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_adds_in_rank_order(dtype):
    """Random numbers: only the order 0, 1, 2, … gives these bits."""
    with job(5) as ranks:
        values = [np.random.default_rng(r).normal(size=100_003).astype(dtype) for r in range(5)]
        expected = values[0] + values[1] + values[2] + values[3] + values[4]
        for result in all_submit(ranks, "x", values):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("servers", [(), (0,), (4,)])
@pytest.mark.parametrize("ranks_per_node, expected", [
    (2, lambda a, b, c, d, e: (a + b) + (c + d) + e),
    (3, lambda a, b, c, d, e: (a + b + c) + (d + e)),
    (5, lambda a, b, c, d, e: a + b + c + d + e)])
def test_sum_adds_ranks_of_a_node_first(ranks_per_node, expected, servers):
    with job(5, ranks_per_node=ranks_per_node, servers=servers) as ranks:
        values = [np.random.default_rng(r).normal(size=100_003).astype(np.float32) for r in range(5)]
        total = expected(*values)
        for result in all_submit(ranks, "x", values):
            np.testing.assert_array_equal(result, total)
        waits = [rank.submit("y", value, out=value) for rank, value in zip(ranks, values)]
        for value in (wait() for wait in waits):
            np.testing.assert_array_equal(value, total)


def test_a_question_is_answered_by_another_thread():
    with job(3) as ranks:
        for size in (0, 5, 1 << 20):
            out = np.zeros(size, np.uint8)
            wait = ranks[0].ask(2, "title\nwhat?", out)
            peer, number, text = ranks[2].next_question(10.0)
            assert (peer, text) == (0, "title\nwhat?") and ranks[2].next_question(0.0) is None
            ranks[2].reply(peer, number, np.arange(size).astype(np.uint8))
            assert wait() is out
            np.testing.assert_array_equal(out, np.arange(size).astype(np.uint8))
        wait = ranks[1].ask(0, "?", np.zeros(3))
        peer, number, _ = ranks[0].next_question(10.0)
        ranks[0].refuse(peer, number, "for a reason")
        with pytest.raises(JobError, match="for a reason"):
            wait()


def test_shards_are_those_of_the_ops():
    with job(3, kv_pair_bytes=4096) as ranks:
        lines, runs = ranks[0].shards(10_000, Division("weights"))
        assert (lines, runs) == ranks[2].shards(10_000, Division("weights")) and lines == 1
        assert {rank for rank, _ in runs} == {0, 1, 2}
        assert [run.start for _, run in runs] == [0, *(run.stop for _, run in runs[:-1])] and runs[-1][1].stop == 10_000
        assert ranks[0].shards(100, Division("weights", 1)) == (1, [(1, slice(0, 100))])


# Nodes as a transport reports them: ranks in any order, in different numbers per node.
@pytest.mark.parametrize("nodes, ranks_per_node, expected", [
    ([0, 1, 0, 1], None, (0, 1, 0, 1)), ([5, 5, 2, 5, 2], None, (0, 0, 1, 0, 1)),
    ([0, 1, 1, 1], None, (0, 1, 1, 1)), ([0, 1, 1, 1], 2, (0, 1, 1, 2)), ([0, 0, 0, 0], 2, (0, 0, 1, 1)),
    ([0, 1, 0, 1], 1, (0, 1, 2, 3)), ([0, 1, 0, 1], 3, (0, 1, 0, 1))])
def test_nodes_in_any_order(nodes, ranks_per_node, expected):
    size = len(nodes)
    values = [np.random.default_rng(r).normal(size=100_003).astype(np.float32) for r in range(size)]
    sums = {}
    for value, node in zip(values, expected):
        sums[node] = sums[node] + value if node in sums else value
    total = sum(list(sums.values())[1:], list(sums.values())[0])
    ranks = join_in_process(size, nodes, ranks_per_node=ranks_per_node)
    for rank in ranks:
        first = {node: i for i, node in reversed(list(enumerate(rank.nodes)))}
        assert [sorted(first.values()).index(first[node]) for node in rank.nodes] == list(expected)
    for result in all_submit(ranks, "sum", values):
        np.testing.assert_array_equal(result, total)
    for root in range(size):
        for result in all_submit(ranks, f"from {root}", values, root=root):
            np.testing.assert_array_equal(result, values[root])
    waits = [rank.submit_factors("factors", [value[:50_000, None]]) for rank, value in zip(ranks, values)]
    for gathered, in (wait() for wait in waits):
        np.testing.assert_array_equal(gathered[:, 0], np.concatenate([value[:50_000] for value in values]))
    in_parallel(ranks, lambda rank: rank.goodbye())
    for rank in ranks:
        rank.leave()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("server", range(5))
def test_half_precision_of_nodes_is_rounded_for_each(server, dtype):
    """Whichever rank is the server: verify mode compares sums of different servers."""
    with job(5, ranks_per_node=2, servers=(server,)) as ranks:
        values = [np.random.default_rng(r).normal(size=10_001).astype(dtype) for r in range(5)]
        wide = [value.astype(np.float32) for value in values]
        nodes = [(wide[0] + wide[1]).astype(dtype), (wide[2] + wide[3]).astype(dtype), values[4]]
        a, b, c = (node.astype(np.float32) for node in nodes)
        for result in all_submit(ranks, "x", values):
            np.testing.assert_array_equal(result, (a + b + c).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_added_in_float_and_rounded_once(dtype):
    with job(3) as ranks:
        values = [np.random.default_rng(r).normal(size=10_001).astype(dtype) for r in range(3)]
        expected = (values[0].astype(np.float32) + values[1].astype(np.float32) +
                    values[2].astype(np.float32)).astype(dtype)
        for result in all_submit(ranks, "x", values):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_half_precision_number_survives(dtype):
    """Adding zero goes through float and back: all 65536 bit patterns, numbers unchanged."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with job(2) as ranks:
        for result in all_submit(ranks, "x", [every, np.zeros_like(every)]):
            np.testing.assert_array_equal(result.astype(np.float32), every.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("narrow", [(0,), (1, 2), (0, 1, 2)])
def test_parts_in_half_have_the_sum_of_their_floats(narrow, ranks_per_node, dtype):
    """Each rank decides for itself whether its part travels as it was before it was cast to float."""
    with job(3, kv_pair_bytes=64 << 10, ranks_per_node=ranks_per_node) as ranks:
        for count in (0, 1, 7, 20_001, 100_003):
            values = [np.random.default_rng(r).normal(size=count).astype(dtype) for r in range(3)]
            wide = [value.astype(np.float32) for value in values]
            expected = all_submit(ranks, f"wide/{count}", wide)
            waits = [rank.submit(f"narrow/{count}", value if r in narrow else wide[r], out=np.empty(count, np.float32))
                     for r, (rank, value) in enumerate(zip(ranks, values))]
            for result, plain in zip([wait() for wait in waits], expected):
                assert result.tobytes() == plain.tobytes()
        for rank in ranks:
            sites = rank.statistics()["sites"]
            whole, part = (sites[f"{way}/100003"] for way in ("wide", "narrow"))
            assert whole["sent_bytes"] > part["sent_bytes"] or rank.rank not in narrow


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_the_only_part_of_a_sum_in_float_may_be_half(dtype):
    """All 65536 bit patterns, which one rank of two contributes."""
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with job(2) as ranks:
        waits = [rank.submit("x", every, contributes=r == 1, out=np.empty(1 << 16, np.float32))
                 for r, rank in enumerate(ranks)]
        for result in (wait() for wait in waits):
            np.testing.assert_array_equal(result, every.astype(np.float32))


def test_other_types_are_not_mixed():
    with job(1) as (rank,):
        for value, out, root in ((np.float16, np.float64, None), (np.float64, np.float32, None),
                                 (np.int32, np.float32, None), (np.float16, np.float32, 0)):
            with pytest.raises(PoseidonError, match="expected the same, or float32 for a sum of float16 or bfloat16"):
                rank.submit("x", np.ones(3, value), out=np.ones(3, out), root=root)


@pytest.mark.parametrize("bits", [
    # around overflow, the smallest normal and subnormal numbers, and ties
    0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x38800000, 0x387FC000, 0x387FFFFF,
    0x33800000, 0x33000000, 0x33000001, 0x3F801000, 0x3F803000, 0x7F800000, 0x7FC00000])
def test_rounding_to_half_agrees_with_numpy(bits):
    """a + b in float is the given number; both sides round it to half."""
    value = np.array([bits], np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        high = value.astype(np.float16)
        low = (value - high.astype(np.float32)).astype(np.float16)
        expected = (high.astype(np.float32) + low.astype(np.float32)).astype(np.float16)
    with job(2) as ranks:
        for result in all_submit(ranks, "x", [high, low]):
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("without", [{1}, {0, 1}, {2, 3}, {0, 1, 2, 3}])
def test_rank_that_does_not_contribute_is_left_out(without, ranks_per_node):
    """Not multiplied by zero: the value may be infinite or NaN."""
    with job(4, ranks_per_node=ranks_per_node) as ranks:
        for count in (9, 50_000):
            values = [np.full(count, np.nan if r in without else float(r)) for r in range(4)]
            waits = [rank.submit(f"x/{count}", value, contributes=rank.rank not in without)
                     for rank, value in zip(ranks, values)]
            for wait in waits:
                np.testing.assert_array_equal(wait(), sum({0, 1, 2, 3} - without))


@pytest.mark.parametrize("size, ranks_per_node", [(3, 1), (5, 3)])
@pytest.mark.parametrize("servers", [(), (0,)])
@pytest.mark.parametrize("root", [0, 2])
def test_all_ranks_get_the_value_of_the_root(root, servers, size, ranks_per_node):
    with job(size, kv_pair_bytes=64 << 10, servers=servers, ranks_per_node=ranks_per_node) as ranks:
        for count in (0, 1, 300_001):
            values = [np.arange(count) * (r + 1) for r in range(size)]
            for result in all_submit(ranks, f"x/{count}", values, root=root):
                np.testing.assert_array_equal(result, values[root])


def test_broadcast_of_text():
    with job(2) as ranks:
        texts = in_parallel(ranks, lambda rank: rank.broadcast_text("t", f"Grüße {rank.rank}"))
        assert texts == ["Grüße 0", "Grüße 0"]


@pytest.mark.parametrize("size, ranks_per_node", [(3, 1), (4, 2)])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_asked_for_late_holds_nothing_up(is_late, size, ranks_per_node):
    """More bytes than may be in flight at a time, for a rank that waits for something else first."""
    large, small = (np.arange(size, dtype=np.int32) for size in (8 << 20, 1 << 18))

    def run(rank):
        if rank.rank == 0:
            waits = [rank.submit(name, value, root=0) for name, value in
                     (("large", large), ("small", small))]
            return [wait() for wait in waits]
        second = rank.submit("small", np.empty_like(small), root=0)
        second = second() if is_late else second
        first = rank.submit("large", np.empty_like(large), root=0)()
        return first, second if is_late else second()

    with job(size, servers=(0,), timeout_s=10.0, ranks_per_node=ranks_per_node) as ranks:
        for first, second in in_parallel(ranks, run):
            np.testing.assert_array_equal(first, large)
            np.testing.assert_array_equal(second, small)


@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_many_steps_of_ranks_that_run_ahead(ranks_per_node):
    """A rank may be a step ahead of another: contributions are told apart by their step."""
    def train(rank):
        return [int(rank.sum("x", np.int64(rank.rank + step))) for step in range(200)]

    with job(4, ranks_per_node=ranks_per_node) as ranks:
        for result in in_parallel(ranks, train):
            assert result == [6 + 4 * step for step in range(200)]


@pytest.mark.parametrize("ranks_per_node, size", [(1, 3), (2, 4), (2, 6), (3, 6), (4, 4)])
def test_sums_cross_the_network_once_for_a_node(ranks_per_node, size):
    """All ranks of a node together: 2 N (P - 1) / P each way for P nodes, evenly spread over its ranks."""
    with job(size, ranks_per_node=ranks_per_node) as ranks:
        num_bytes, nodes = 24 << 20, size // ranks_per_node
        all_submit(ranks, "x", [np.ones(num_bytes // 4, np.float32)] * size)
        for rank in ranks:
            assert rank.nodes == tuple(r // ranks_per_node for r in range(size))
            expected = 2 * num_bytes * (nodes - 1) // nodes // ranks_per_node
            counted = rank.statistics()["sites"]["x"]
            assert counted["network_bytes"] == pytest.approx(expected, rel=1e-3)
            if ranks_per_node == 1:
                assert counted["sent_bytes"] == pytest.approx(expected, rel=1e-3)
                assert counted["received_bytes"] == pytest.approx(expected, rel=1e-3)


def test_headers_are_small():
    with job(4) as ranks:
        all_submit(ranks, "x", [np.ones(1 << 18, np.float32)] * 4)
        statistics = ranks[0].statistics()
        assert statistics["header_bytes"] < 0.02 * statistics["sites"]["x"]["sent_bytes"]


@pytest.mark.parametrize("values, message", [
    ([np.ones(3, np.float32), np.ones(4, np.float32)],
     r"disagree about 'x': rank \d sums \d elements of float32, rank \d sums \d elements"),
    ([np.ones(3, np.float32), np.ones(3, np.int32)], r"elements of int32"),
])
def test_disagreement_ends_all_ranks(values, message):
    with job(2, goodbye=False) as ranks:
        errors = in_parallel(ranks, lambda rank: rank.sum("x", values[rank.rank]))
        for error in errors:
            assert isinstance(error, JobEndedError)
            with pytest.raises(JobEndedError, match=message):
                raise error


def test_servers_that_differ_end_all_ranks():
    with job(2, goodbye=False, servers=[(0,), (0, 1)]) as ranks:
        for error in in_parallel(ranks, lambda rank: rank.sum("x", np.ones(100_000))):
            assert "give PoseidonStrategy the same servers, dedicated_servers, kv_pair_bytes and" in str(error)


def served(rank, work):
    """Does a worker's work, or serves; returns what `work` returns."""
    result = work(rank) if rank.rank < rank.size else rank.serve()
    rank.goodbye()
    return result


@pytest.mark.parametrize("size, dedicated, options", [
    (3, 1, {"ranks_per_node": 1}), (5, 1, {"ranks_per_node": 2}), (5, 2, {"servers": (3, 4)}), (8, 4, {})])
def test_dedicated_servers_serve_workers_alone(size, dedicated, options):
    workers = size - dedicated

    def work(rank):
        for step in range(5):
            for count in (1, 1000, 100_000, 7000 * step):  # the last one has other KV pairs in each step
                values = np.arange(count, dtype=np.float32)
                np.testing.assert_array_equal(rank.sum(f"x{count if count != 7000 * step else 0}", values + rank.rank),
                                              workers * values + sum(range(workers)))
            text = "text" * 9000 * step
            assert rank.broadcast_text("t", text, root=step % workers) == text
            assert rank.gather("g", np.full((rank.rank + 1, 3), rank.rank)).shape == (workers * (workers + 1) // 2, 3)
        return sum(site["sent_bytes"] for site in rank.statistics()["sites"].values())

    with job(size, goodbye=False, kv_pair_bytes=4096, dedicated_servers=dedicated, **options) as ranks:
        assert {rank.size for rank in ranks} == {workers}
        in_parallel(ranks, lambda rank: served(rank, work))
        assert all(sum(site["sent_bytes"] for site in rank.statistics()["sites"].values()) > 100_000 for rank in ranks)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_ends_dedicated_servers_too_and_theirs_the_job(failing):
    def work(rank):
        if rank.rank == failing:
            rank.abort("it was told to")
        return served(rank, lambda rank: rank.sum("x", np.ones(100_000)))

    with job(3, goodbye=False, dedicated_servers=1, ranks_per_node=1) as ranks:
        for error in in_parallel(ranks, work):
            assert isinstance(error, JobEndedError) and "it was told to" in str(error)


def test_numbers_of_dedicated_servers_that_differ_end_all_ranks():
    options = [told(3, dedicated_servers=number, timeout_s=20.0)[0] for number in (1, 1, 0)]
    ranks = [join_sockets(rank, to_others, own) for rank, (to_others, own) in enumerate(zip(connected(3), options))]
    for error in in_parallel(ranks, lambda rank: rank.sum("x", np.ones(100_000))):
        assert "give PoseidonStrategy the same servers, dedicated_servers, kv_pair_bytes and" in str(error)


def test_a_dedicated_server_says_who_is_late():
    def work(rank):
        return rank.sum("x", np.ones(100_000)) if rank.rank == 0 else time.sleep(1.5) or rank.failure

    with job(3, goodbye=False, dedicated_servers=1, servers=(2,), ranks_per_node=1, timeout_s=0.5) as ranks:
        error, _, failure = in_parallel(ranks, work)
        assert failure in str(error)
        assert "waited 0.5 s for rank 1 to exchange 'an exchange that rank 2 serves'" in failure


def test_nothing_can_be_submitted_after_goodbye():
    with job(1) as ranks:
        ranks[0].goodbye()
        with pytest.raises(JobEndedError, match="after this rank had said goodbye"):
            ranks[0].sum("x", np.ones(1))


def test_dtype_without_sum_is_refused():
    with job(1) as ranks:
        with pytest.raises(PoseidonError, match="'x' has dtype uint8, which cannot be summed"):
            ranks[0].sum("x", np.ones(3, np.uint8))


@pytest.mark.parametrize("word", [b"", b"?" * 100])
def test_lost_connection_ends_the_rank(word):
    """A peer that is killed, or is not a rank of ours: its end of the socket closes, perhaps after garbage."""
    own, peer = socket.socketpair()
    rank = join_sockets(0, [None, own], *told(1, timeout_s=10.0))
    wait = rank.submit("x", np.ones(100_000))
    peer.sendall(word)
    peer.close()
    # Unread bytes at the close reset the connection, here as in a network.
    reasons = "it has closed|it sends what no rank|Connection reset by peer|Broken pipe"
    with pytest.raises(JobEndedError, match=f"The connection to rank 1 is lost: ({reasons})"):
        wait()
    rank.leave()


def test_last_word_of_a_rank_is_read_before_its_end_is_noticed():
    """The message of a failing rank is the reason, although nothing can be sent to it any more."""
    (_, own), (peer, _) = connected(2)
    ranks = [join_sockets(0, [None, own], *told(1, timeout_s=10.0)),
             join_sockets(1, [peer, None], *told(1, timeout_s=10.0))]
    wait = ranks[0].submit("x", np.ones(10_000_000))
    ranks[1].abort("Rank 1 failed: ValueError: boom")
    ranks[1].leave()
    with pytest.raises(JobEndedError, match="^Rank 1 failed: ValueError: boom$"):
        wait()
    ranks[0].leave()


