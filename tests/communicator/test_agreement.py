"""Ranks compare texts and options: over the loopback, with all ranks in this process."""

import threading
from unittest import mock

import pytest
from test_communicator import in_parallel
from test_communicator import join_in_process

from tf_poseidon.errors import JobError
from tf_poseidon.job import agreement
from tf_poseidon.job.host import gpus
from tf_poseidon.job.host import kernel_settings


@pytest.fixture
def ranks():
    joined = join_in_process(3)
    yield joined
    for rank in joined:
        rank.leave()


@pytest.mark.parametrize("of_rank_2, difference", [
    ("a\nb", None), ("a\nc", "ranks would do different things: b on rank 0, but c on rank 2"),
    ("a\nb\nc", "ranks would do different things: nothing on rank 0, but c on rank 2"),
    ("b\na", "ranks would do different things: a on rank 0, but b on rank 2"),
    ("photo\udce9.jpg", "ranks would do different things: a on rank 0, but photo\udce9.jpg on rank 2")])
def test_the_first_difference_is_said_on_all_ranks(ranks, of_rank_2, difference):
    texts = ["a\nb", "a\nb", of_rank_2]
    assert in_parallel(ranks, lambda rank: agreement.CommunicatorComparison(rank).difference(
        "text", texts[rank.rank])) == [difference] * 3


@pytest.mark.parametrize("of_ranks, least", [((9, 5, 7), 5), ((0, 0, 0), 4), ((9, 0, 7), 4), ((3, 0, 0), 3)])
def test_ranks_know_who_has_least_memory(ranks, of_ranks, least, monkeypatch, tmp_path):
    """Of its GPU, or without one, of its host, which a container limits."""
    limit = tmp_path / "memory.max"
    limit.write_text("4\n")
    monkeypatch.setattr(agreement, "_CONTAINER_LIMIT", limit)
    own = threading.local()

    def agree(rank):
        own.bytes = of_ranks[rank.rank] or None
        return agreement.least_memory(rank)

    monkeypatch.setattr(gpus, "memory_bytes", lambda: own.bytes)
    assert in_parallel(ranks, agree) == [least] * 3


@pytest.mark.parametrize("setting, value", [
    ("policy", "sfb"), ("TensorFloat-32", "disabled"), ("the environment variable XLA_FLAGS", "--a")])
def test_options_and_settings_that_differ_are_refused(ranks, setting, value):
    own = threading.local()  # a rank's settings

    def agree(rank):
        own.settings = {"policy": "ps", "TensorFloat-32": "enabled", "the environment variable XLA_FLAGS": "--b"}
        if rank.rank == 1:
            own.settings[setting] = value
        try:
            agreement.agree_on_options(rank, policy=own.settings.pop("policy"))
        except JobError as error:
            rank.abort(str(error))  # as at the end of a program
            raise

    with mock.patch.object(kernel_settings, "settings", lambda: own.settings):
        ended = in_parallel(ranks, agree)
    assert isinstance(ended[1], JobError) and str(ended[1]).startswith(f"Ranks differ in {setting}: {value} on rank 1")
