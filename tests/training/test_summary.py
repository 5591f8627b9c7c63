"""The summary after `fit`: its numbers are those of the steps, and it costs no exchange."""

import re

import launch
from printed_durations import DURATION
from printed_durations import seconds_of
import pytest

from tf_poseidon import planning
from tf_poseidon.keras_hook.coordination import communication
from tf_poseidon.keras_hook.coordination import coordinated_callbacks
from tf_poseidon.keras_hook.coordination import summary


def plan(steps=1):
    """Returns a plan whose step takes 10 ms on each of 4 ranks, and next to nothing for exchanges."""
    return planning.Plan("ps", planning.Cluster(4, gflops=1.0), operations=1e7, steps=steps)


@pytest.mark.parametrize("arguments, says, says_not", [
    ((1, 10, 0.5, 0.0, 0.0, {}, None), "10 steps of 50 ms in one process, after the first", "wait"),
    ((4, 10, 0.5, 0.0, 0.05, {0: 0.0, 2: 0.04, 3: 0.01}, None), "of a step 5 ms (10 %) wait for other ranks, longest "
     "for rank 2\nabout 3.6 times as fast as one process, if that has", "expects"),
    ((4, 10, 0.5, 0.0, 0.0, {1: 0.0}, None), "of a step 0 s (0 %) wait for other ranks\nabout 4 times", "longest"),
    ((4, 10, 0.5, 0.0, 0.05, {}, plan()), "about 3.6 times as fast as one process, if that has the work of 4 ranks; "
     "the plan expects 4 at 10 Gbit/s", "overlap"),
    ((4, 16, 0.5, 0.0, 0.05, {2: 0.1}, plan(8)), "8 steps overlap, of which strategy.timeline shows who waits for "
     "whom; the plan expects 4 times the speed of one process at 10 Gbit/s", "wait for other"),
    ((4, 10, 0.5, 0.004, 0.05, {}, None), "after the first\nof a step 5 ms (10 %) wait for other", "data"),
    ((4, 10, 0.5, 0.01, 0.05, {}, None), "\nof a step 1 ms (2 %) wait for data\nof a step 5 ms (10 %) wait for other "
     "ranks\nabout 3.52 times", "cache"),
    ((4, 10, 0.5, 0.12, 0.0, {}, None), "\nof a step 12 ms (24 %) wait for data; read it with "
     "num_parallel_calls=tf.data.AUTOTUNE, or cache it\nof a step 0 s (0 %) wait for other ranks\nabout 3.04", "plan"),
    ((4, 16, 0.5, 0.4, 0.05, {}, plan(8)), "wait for data; read it with num_parallel_calls=tf.data.AUTOTUNE, or cache "
     "it\n8 steps overlap", "wait for other"),
    ((4, 10, 0.5, 0.45, 0.0, {}, None), "about 1 times as fast", "-"),  # one process would wait as long
    ((4, 10, 0.5, 0.0, 0.45, {}, None), "about 0.4 times as fast as one process, if that has the work of 4 ranks\n"
     "that is slower than one process: larger batches", "emulated"),
    ((4, 10, 0.5, 0.0, 0.45, {}, None, True), "hosts are emulated, and share this machine's processors", "larger"),
    ((2, 10, 0.5, 0.0, 0.6, {}, None), "(1e+02 %)", "-"),  # clocks of two threads may differ
])
def test_text(arguments, says, says_not):
    text = summary.summary(*arguments)
    assert says in text and says_not not in text


def test_it_is_no_callback_for_which_ranks_agree_after_each_batch():
    for callback in (summary.Summary(), communication.Communication()):
        assert not coordinated_callbacks._acts_on_batches(callback, "train", coordinated_callbacks._PASSIVE)

    class Other(summary.Summary):
        pass

    assert coordinated_callbacks._acts_on_batches(Other(), "train", coordinated_callbacks._PASSIVE)


@pytest.mark.parametrize("ranks", [0, 2])
def test_after_fit(ranks):
    """Two epochs of 6 steps, of which the first is left out; rank 1 is slow."""
    output = launch.run_ok(["train_with_summary.py"], ranks, timeout_s=60).output
    steps, duration = re.search(rf"^(\d+) steps of {DURATION} (?:on 2 ranks|in one process)", output, re.M).groups()
    assert int(steps) == 11 and output.count("after the first") == 1
    seconds = float(re.search(r"^fit took ([\d.]+) s", output, re.M)[1])
    assert 0 < 11 * seconds_of(duration) < seconds
    if ranks:
        share = float(re.search(r"\((\S+) %\) wait for other ranks, longest for rank 1$", output, re.M)[1])
        gain = float(re.search(r"^about ([\d.]+) times as fast as one process", output, re.M)[1])
        # Rank 1 sleeps for 50 ms in each step, except that it reads the first batch of an epoch ahead.
        data = re.search(r"\((\S+) %\) wait for data", output)  # where other programs run, too
        least, of_data = (1, float(data[1])) if data else (0, 0)
        expected = max(2 * (1 - (share + of_data) / 100), least)
        assert 20 < share <= 100 and gain == pytest.approx(expected, abs=0.03)
        assert seconds_of(duration) >= 0.04
