"""Which rank is a straggler, and why, for tables of windows: what is measured is given, so nothing depends on speed."""

import dataclasses
import gc
import random
from unittest import mock
import weakref

import pytest

from tf_poseidon.job import row_shares
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.stragglers import judgement
from tf_poseidon.stragglers import watch
from tf_poseidon.stragglers.judgement import ARITHMETIC
from tf_poseidon.stragglers.judgement import INPUT
from tf_poseidon.stragglers.judgement import LINK

BASE_S = 0.1  # what a step of an equal rank computes


def windows(ranks, number, arithmetic=(), inputs=(), link=(), steps=5, noise=0.0, first=1, seed=1):
    """Returns windows in which ranks take longer.

    Args:
        ranks: How many ranks there are.
        number: How many windows.
        arithmetic, inputs, link: Pairs of a rank, and how many seconds longer it takes of a step.
        steps: How many steps a window has.
        noise: The standard deviation of what a rank takes for the steps of a window, to the time of a step.
        first: Number of the first step.
        seed: Of the noise.
    """
    rng, made = random.Random(seed), []
    for i in range(number):
        own = [BASE_S * max(rng.gauss(1, noise), 0.1) for _ in range(ranks)]
        read = [0.0] * ranks
        for rank, seconds in (*arithmetic, *inputs):
            own[rank] += seconds
        for rank, seconds in inputs:
            read[rank] += seconds
        sent = list(own)
        for rank, seconds in link:
            sent[rank] += seconds
        step, median = max(sent), sorted(sent)[(ranks - 1) // 2]
        made.append(judgement.Window(
            first + i * steps, steps, 1e9 + (first - 1 + (i + 1) * steps) * step, step * steps,
            tuple(steps * (step - each) for each in own), tuple(steps * each for each in read),
            tuple(steps * max(each - median, 0.0) for each in sent)))
    return made


def warnings(*series):
    """Returns the number of steps after which each warning came, its rank and its cause; and the last history."""
    history, found = judgement.History(), []
    for window in (window for each in series for window in each):
        history, news = judgement.judge(history, window)
        found += [(window.first + window.steps - 1, each.rank, each.cause) for each in news]
    return found, history


@pytest.mark.parametrize("ranks, given, expected", [
    (4, {}, []),
    (4, {"arithmetic": [(2, 0.1)]}, [(10, 2, ARITHMETIC)]),  # twice as slow
    (4, {"arithmetic": [(2, 0.3)]}, [(10, 2, ARITHMETIC)]),
    (4, {"inputs": [(0, 0.1)]}, [(10, 0, INPUT)]),
    (4, {"link": [(3, 0.1)]}, [(10, 3, LINK)]),
    (2, {"arithmetic": [(1, 0.1)]}, [(10, 1, ARITHMETIC)]),
    (2, {"inputs": [(1, 0.1)]}, [(10, 1, INPUT)]),
    (2, {"link": [(1, 0.1)]}, []),  # of two ranks, nothing says whose end it is
    (3, {"link": [(1, 0.1)]}, [(10, 1, LINK)]),
    (8, {"arithmetic": [(5, 0.1), (6, 0.1)]}, [(10, 5, ARITHMETIC), (10, 6, ARITHMETIC)]),  # two of a slow host
    (4, {"arithmetic": [(1, 0.04)], "inputs": [(1, 0.06)]}, [(10, 1, INPUT)]),  # the larger part of it
    (4, {"arithmetic": [(1, 0.06)], "inputs": [(1, 0.04)]}, [(10, 1, ARITHMETIC)]),
    (4, {"arithmetic": [(2, 0.008)]}, []),  # 7 % of a step
    (4, {"arithmetic": [(2, 0.02)]}, [(40, 2, ARITHMETIC)]),  # 17 %, so eight windows must say so
    (4, {"arithmetic": [(2, 0.1)], "steps": 2}, [(10, 2, ARITHMETIC)]),
    (4, {"arithmetic": [(2, 0.1)], "steps": 50}, [(100, 2, ARITHMETIC)]),
])
def test_who_it_is_and_why(ranks, given, expected):
    assert warnings(windows(ranks, 40, **given))[0] == expected


@pytest.mark.parametrize("seconds", [0.1, 0.3])
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
def test_a_rank_that_becomes_slow_is_named_within_20_steps(seconds, noise):
    before = windows(4, 30, noise=noise)
    after = windows(4, 10, arithmetic=[(1, seconds)], noise=noise, first=151, seed=2)
    found, history = warnings(before, after)
    (step, rank, cause), = found
    assert (rank, cause) == (1, ARITHMETIC) and 150 < step <= 150 + 20
    straggler, = history.stragglers
    assert abs(straggler.since_step - 151) <= 5
    assert straggler.share == pytest.approx(seconds / (BASE_S + seconds), abs=2 * noise + 1e-6)


@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_noise_is_no_straggler(ranks, noise):
    assert warnings(windows(ranks, 1000, noise=noise))[0] == []


def test_a_single_window_is_no_straggler():
    """One in which rank 0 writes a checkpoint, again and again."""
    series = [windows(4, 3, first=1 + 20 * i) + windows(4, 1, arithmetic=[(0, 0.5)], first=16 + 20 * i)
              for i in range(20)]
    assert warnings(*series)[0] == []


def test_a_straggler_is_one_until_it_has_recovered_for_a_while():
    slow, fast = {"arithmetic": [(1, 0.1)]}, {}
    few, many = 20, 150  # windows of 0.5 s, and more than a minute of them
    found, history = warnings(windows(4, few, **slow), windows(4, few, **fast, first=101),
                              windows(4, few, **slow, first=201))
    assert len(found) == 1 and history.stragglers[0].since_step == 1
    found, history = warnings(windows(4, few, **slow), windows(4, many, **fast, first=101))
    assert len(found) == 1 and history.stragglers == ()
    found, history = warnings(windows(4, few, **slow), windows(4, many, **fast, first=101),
                              windows(4, few, **slow, first=1001))
    assert found == [(10, 1, ARITHMETIC), (1010, 1, ARITHMETIC)] and history.stragglers[0].since_step == 1001


def test_each_cause_has_its_warning():
    found, _ = warnings(windows(4, 20, arithmetic=[(1, 0.1)]), windows(4, 80, inputs=[(1, 0.3)], first=101))
    assert [each[1:] for each in found] == [(1, ARITHMETIC), (1, INPUT)]


def test_no_more_than_two_warnings_an_hour():
    """Three ranks of eight are slow, for more than two hours: the third is named an hour later."""
    found, history = warnings(windows(8, 2000, arithmetic=[(1, 0.1), (2, 0.1), (3, 0.1)], steps=25))
    assert sorted(rank for _, rank, _ in found) == [1, 2, 3]
    seconds = [0.2 * step for step, *_ in found]
    assert seconds[1] <= 10 and 3600 <= seconds[2] - seconds[0] < 3610
    assert [straggler.rank for straggler in history.stragglers] == [1, 2, 3]  # known at once


@pytest.mark.parametrize("given, says", [
    ({"arithmetic": [(2, 0.09)]}, "its arithmetic takes 1.9 times the median (190 ms, 100 ms); look for what else"),
    ({"inputs": [(2, 0.09)]}, "it waits for its batches 90 ms a step, the median is 0 s; give its data `num_"),
    ({"link": [(2, 0.09)]}, "its part comes 90 ms after those of the others, and neither its arithmetic nor its input "
     "explains that, so it is probably its link; `tf-poseidon selftest --hosts ...` measures"),
])
def test_warnings_say_what_to_do(given, says):
    _, history = warnings(windows(4, 8, **given))
    straggler, = history.stragglers
    text = dataclasses.replace(straggler, since_step=412).sentence("b")
    assert text.startswith("Rank 2 (host b) costs the others 47 % of each step since step 412 (")
    assert says in text and text.count(". ") == 0 and "\n" not in text


def test_what_is_kept_by_communicator_is_freed_with_it():
    communicator, = join_loopback(1)
    row_shares.of(communicator, None, is_balanced=False)
    job = mock.Mock(communicator=communicator, size=1)
    watch.of(job).after(1)
    communicator.goodbye()
    communicator.leave()
    found = weakref.ref(communicator)
    del communicator, job
    gc.collect()
    assert found() is None
