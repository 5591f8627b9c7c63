"""Shares that follow measured speeds: tables, and simulated ranks whose shares are decided again and again."""

import numpy as np
import pytest

from tf_poseidon.data import parts
from tf_poseidon.stragglers import balancing
from tf_poseidon.stragglers.judgement import Window

ROWS = 96


def windows(busy, inputs=None, number=4, steps=10, noise=0.0, rng=None, is_late=False):
    """Returns windows of ranks that are busy for so many seconds a step, of which they wait for input in some.

    With `is_late`, they wait in the forward pass, which shows in how late their parts come alone.
    """
    rng = rng or np.random.default_rng(0)
    result = []
    for i in range(number):
        now = [each * (1 + noise * rng.normal()) for each in busy]
        slowest = max(now)
        result.append(Window(1 + i * steps, steps, float(i), steps * slowest,
                             tuple(0.0 if is_late else steps * (slowest - each) for each in now),
                             tuple(steps * each for each in inputs or [0.0] * len(busy)),
                             tuple(steps * (each - min(now)) if is_late else 0.0 for each in now)))
    return result


def divided(shares):
    return parts.counts_of(ROWS, shares)


@pytest.mark.parametrize("busy, counts, expected", [
    ([1, 1, 1, 1], [24] * 4, None),
    ([1, 1.04, 1, 1], [24] * 4, None),  # gains too little
    ([1, 2, 1, 1], [24] * 4, [28, 14, 27, 27]),
    ([1, 4, 1, 1], [24] * 4, [30, 7, 30, 29]),
    ([1, 1, 1, 1], [28, 14, 27, 27], None),  # as fast as can be
    ([0.5, 1], [72, 24], [83, 13]),
], ids=str)
@pytest.mark.parametrize("is_late", [False, True])
def test_decisions(busy, counts, expected, is_late):
    shares = balancing.balanced(windows(busy, is_late=is_late), counts, divided, {})
    assert (shares and divided(shares)) == expected


@pytest.mark.parametrize("given", [windows([1, 2], number=1, steps=20), windows([1, 2], steps=2), []], ids=len)
def test_a_few_steps_decide_nothing(given):
    before = balancing.Balance(((1, 3), 0.1))
    assert balancing.decide(before, given, (1, 1), divided) == (before, None)


def test_a_decision_that_does_not_help_is_taken_back_and_none_follows():
    """Ranks seem to be unequal, but steps last as long whatever their shares."""
    first, shares = balancing.decide(balancing.Balance(), windows([1, 4]), (1, 1), divided)
    assert shares == (1000, 250) and first.former == ((1, 1), 4)
    second, shares = balancing.decide(first, windows([3.95, 1]), shares, divided)
    assert shares == (1, 1)
    for busy in ([1, 4], [1, 4.7]):
        third, shares = balancing.decide(second, windows(busy), (1, 1), divided)
        assert (third, shares) == (second, None)
    assert balancing.decide(third, windows([1, 5]), (1, 1), divided)[1] == (1000, 200)  # something has changed


def test_noise_decides_nothing():
    rng = np.random.default_rng(5)
    for _ in range(200):
        assert balancing.balanced(windows([1, 1, 1, 1], number=30, noise=0.05, rng=rng), [24] * 4, divided, {}) is None


@pytest.mark.parametrize("slower", [2, 4])
@pytest.mark.parametrize("fixed", [0.0, 0.3])  # of the first step, what a step costs besides its rows
@pytest.mark.parametrize("is_input", [False, True])  # made ahead, so that only the slowest rank waits for it
def test_ranks_become_equally_fast(slower, fixed, is_input):
    balance, costs, shares = balancing.Balance(), [1 / 24, slower / 24, 1 / 24, 1 / 24], (1, 1, 1, 1)
    decisions = 0
    for _ in range(8):
        counts = divided(shares)
        needed = [fixed + count * cost for count, cost in zip(counts, costs)]
        busy = [0.01 if is_input and each < max(needed) else each for each in needed]
        waits = [each if is_input and each == max(needed) else 0.0 for each in busy]
        balance, decided = balancing.decide(balance, windows(busy, waits), shares, divided)
        shares, decisions = decided or shares, decisions + (decided is not None)
    best = min(max(fixed + (ROWS - slow) / 3 / 24, fixed + slow * slower / 24) for slow in range(1, ROWS))
    assert max(needed) <= 1.1 * best and decisions <= 5
