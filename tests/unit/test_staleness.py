"""Which version of the weights workers read: no bound is ever exceeded, and DSSP waits less."""

import dataclasses
import random
import time

import numpy as np
import pytest

from evaluation.simulation import stale_schedule
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import GraphError
from tf_poseidon.job import worker_clocks
from tf_poseidon.staleness import bounds
from tf_poseidon.staleness.bounds import DSSP
from tf_poseidon.staleness.bounds import SSP
from tf_poseidon.staleness.gate import extra_steps
from tf_poseidon.staleness.gate import VersionGate
from tf_poseidon.staleness.version_log import VersionLog

SCHEDULES = 100_000


class PublishedGate:
    """DSSP as published: what it grants has no regard for the lead."""

    def __init__(self, synchrony):
        self.synchrony, self.granted, self.pushes, self.versions = synchrony, 0, [], []

    def note_push(self, time):
        self.pushes = [*self.pushes, time][-2:]

    def note_version(self, time):
        self.versions = [*self.versions, time][-2:]

    def bound(self, clock, newest):
        lead = clock - newest
        if self.granted:
            self.granted -= 1
            return lead
        if lead > self.synchrony.lower and len(self.versions) == len(self.pushes) == 2:
            self.granted = extra_steps(self.pushes, self.versions, self.synchrony.upper - self.synchrony.lower)
        return lead if self.granted else self.synchrony.lower


def random_times(rng):
    ranks, clocks = rng.choice((2, 2, 3)), rng.choice((6, 9, 14))
    slow = [rng.choice((1, 1, 2, 4, 8)) for _ in range(ranks)]
    if rng.random() < 0.3:  # steps that take as long: many events at a time
        return [[float(pace)] * clocks for pace in slow]
    jitter = rng.choice((0.1, 1, 5))
    return [[pace * (1 + jitter * rng.random() ** 3) for _ in range(clocks)] for pace in slow]


def test_no_read_exceeds_its_bound():
    """Over random speeds, jitter, and exchanges; DSSP's controller grants again and again."""
    rng, most_stale = random.Random(0), 0
    for _ in range(SCHEDULES):
        synchrony = rng.choice((SSP(0), SSP(1), SSP(3), DSSP(0, 2), DSSP(1, 1), DSSP(1, 4), DSSP(2, 5)))
        times = random_times(rng)
        schedule = stale_schedule.simulate(times, rng.choice((0, 0.3, 2)), lambda: VersionGate(synchrony))
        for versions in schedule.versions:
            assert len(versions) == len(times[0])  # none waits for ever
            assert list(versions) == sorted(versions)
            stale = [clock - version for clock, version in enumerate(versions)]
            assert 0 <= min(stale) and max(stale) <= synchrony.upper
            most_stale = max(most_stale, max(stale))
    assert most_stale == 5  # the bounds are reached


def test_published_rule_exceeds_its_bound():
    schedule = stale_schedule.simulate([[1.0] * 60, [1.7] * 60], 0, lambda: PublishedGate(DSSP(1, 4)))
    assert max(clock - version for clock, version in enumerate(schedule.versions[0])) == 23


@pytest.mark.parametrize("own, slowest, most, expected", [
    ((0, 1), (0, 1), 5, 0),  # both push now
    ((2, 3), (0, 2), 5, 1),  # its next push, at 4, is the slowest one's
    ((9, 10), (5, 9), 12, 3),  # at 13
    ((9, 10), (5, 9), 2, 0),  # not reached: 10 is 1 away from 9, 12 is 1 away from 13, and the first counts
    ((0, 5), (0, 1), 3, 0),
], ids=str)
def test_extra_steps_end_with_a_push_of_the_slowest(own, slowest, most, expected):
    assert extra_steps(own, slowest, most) == expected


def test_nothing_is_granted_within_the_lower_bound():
    gate = VersionGate(DSSP(2, 9))
    for second in (0, 1):
        gate.note_push(second)
        gate.note_version(second * 3)
    assert [gate.bound(2, 0), gate.bound(3, 0), gate.bound(4, 0), gate.bound(5, 0)] == [2, 3, 4, 5]
    assert [gate.bound(6, 4), gate.bound(20, 4)] == [2, 2]  # what was granted is used up; 16 is more than 9


@pytest.mark.parametrize("synchrony", [SSP(3), DSSP(3, 15)], ids=str)
def test_jitter_is_absorbed_and_lasting_slowness_is_not(synchrony):
    rng = random.Random(1)
    jittery = [[1 + rng.expovariate(2) for _ in range(400)] for _ in range(4)]
    slow = [[1.0] * 200, [1.0] * 200, [1.0] * 200, [4.0] * 200]
    seconds = {bound: [stale_schedule.simulate(times, 0, lambda bound=bound: VersionGate(bound)).seconds
                       for times in (jittery, slow)] for bound in (SSP(0), synchrony)}
    assert seconds[SSP(0)][0] / seconds[synchrony][0] > 1.2
    assert seconds[SSP(0)][1] == seconds[synchrony][1] == 800


@pytest.mark.parametrize("synchrony", [SSP(0), SSP(3), DSSP(1, 4)])
def test_gradients_that_are_applied_on_arrival(synchrony):
    """Weights are the steps that they contain: a rank's own are always in, and others' as far as its bound demands."""
    rng, ranks, clocks = random.Random(7), range(4), range(50)
    times = [[rng.choice([1.0, 2.0, 2.5, 4.0]) for _ in clocks] for _ in ranks]  # many events at one time
    schedule = stale_schedule.simulate(times, 0, lambda: VersionGate(synchrony))
    most = 0

    def gradient(weights, rank, clock):
        nonlocal most
        made = [weights.count(other) for other in ranks]
        assert made[rank] == clock
        most = max(most, clock - min(made))
        return rank

    end = stale_schedule.on_arrival(schedule, (), gradient, lambda weights, rank: (*weights, rank))
    assert [end.count(rank) for rank in ranks] == [len(clocks)] * len(ranks)
    assert most == synchrony.upper and schedule.seconds == max(map(max, schedule.pushes))


def test_dynamic_bound_waits_less_than_the_lower_one():
    rng = random.Random(3)
    times = [[1 + 3 * rng.random() for _ in range(200)] for _ in range(4)]
    waiting = [sum(stale_schedule.simulate(times, 0, lambda bound=bound: VersionGate(bound)).waiting)
               for bound in (SSP(1), DSSP(1, 8), SSP(8))]
    assert waiting[0] > 2 * waiting[1] > 4 * waiting[2]


def test_waiting_for_versions_is_counted():
    """Of updates that take 50 ms: the second step waits for the first, and the end for the second."""
    class Initial:
        def present(self):
            return ["initial"]

    clocks, values, owner = worker_clocks.Clocks(SSP(0)), iter("abc"), Initial()

    def update():
        time.sleep(0.05)
        return [next(values)]

    read = []
    for _ in range(2):
        clocks.step(owner, lambda given: [read.extend(given), update][1])
    (versions,), (waited,) = clocks.log().versions, clocks.log().waiting_seconds
    assert versions == (0, 1) and read == ["initial", "a"] and 0.04 < waited < 10
    clocks.finish()
    assert waited + 0.04 < clocks.waiting_seconds < 20


class Communicator:
    """Of rank 0 of two, of which the other one's newest version and number of steps are given."""

    failure = None

    def __init__(self, *other):
        self.other = other

    def gather(self, name, row):
        return np.array([*row, self.other])


class Weights:
    def __init__(self):
        self.values = ["0"]

    def present(self):
        return self.values

    def restore(self, values, communicator):
        self.values = values


def failed_clocks():
    """Returns clocks of which the second update has failed, and the steps that were computed, of `Weights`."""
    def update(number):
        if number == 2:
            raise ValueError("no update")
        return [str(number)]

    clocks, owner, computed = worker_clocks.Clocks(SSP(0)), Weights(), []
    for number in (1, 2):
        clocks.step(owner, lambda given, number=number: [computed.extend(given), lambda: update(number)][1])
    with pytest.raises(ValueError, match="no update"):
        clocks.finish()
    return clocks, owner, computed


@pytest.mark.parametrize("steps_of_other", [2, 4])
def test_after_an_update_that_fails_all_have_sent_as_much_and_go_on_from_the_newest_version(steps_of_other):
    clocks, owner, computed = failed_clocks()
    clocks.recover(Communicator(1, steps_of_other))
    assert computed == ["0", "1", *["1"] * (steps_of_other - 2)]
    assert clocks.log().versions == ((0,),) and owner.values == ["1"]
    clocks.step(owner, lambda given: lambda: [f"{given[0]} and more"])
    clocks.finish()
    assert clocks.log().versions == ((0, 1),)


def test_ranks_whose_updates_fail_at_different_versions_are_refused():
    clocks, owner, computed = failed_clocks()
    clocks.recover(Communicator(2, 3))
    assert computed == ["0", "1", "1"]  # what others wait for
    for use in (clocks.finish, lambda: clocks.step(Weights(), None)):
        with pytest.raises(GraphError, match="version 2 has failed on rank 0, but that of version 3 on rank 1"):
            use()


@pytest.mark.parametrize("make, message", [
    (lambda: SSP(-1), r"SSP\(-1\) has staleness=-1, expected a whole number from 0 to 64."),
    (lambda: SSP(True), "has staleness=True"),
    (lambda: DSSP(3, 2), r"DSSP\(3, 2\) has upper=2, expected a whole number from 3 to 64."),
    (lambda: DSSP(0.5, 2), "has lower=0.5"),
    (lambda: bounds.of("ssp"), r"synchrony='ssp', expected 'bsp', poseidon.SSP\(staleness\) or poseidon.DSSP"),
])
def test_bounds_out_of_range_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_log_is_the_same_when_it_is_read_again(tmp_path):
    log = VersionLog("SSP(2)", ((0, 0, 1), (0, 1, 2)), (0.5, 0.25))
    log.save(tmp_path / "log.json")
    assert VersionLog.load(tmp_path / "log.json") == log
    assert log.staleness() == [{0: 1, 1: 2}, {0: 3}]
    assert "1                2       0" in str(log)
    log.check(2, 2)


@pytest.mark.parametrize("ranks, most, versions, message", [
    (3, 2, ((0,), (0,)), "those of 2 ranks, but this job has 3"),
    (1, 2, ((0, 0, 0, 0),), r"rank 0 has read version 0 at clock 3, expected 1 to 3; .* SSP\(2\)"),
    (1, 2, ((0, 2),), "rank 0 has read version 2 at clock 1, expected 0 to 1"),
])
def test_log_of_another_job_is_refused(ranks, most, versions, message):
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(VersionLog("SSP(2)", versions)).check(ranks, most)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "synchrony": "", "versions": [0]}'])
def test_file_without_a_log_is_refused(text, tmp_path):
    (tmp_path / "log.json").write_text(text)
    with pytest.raises(ConfigurationError, match="has no versions to read, since .*; give a file of VersionLog.save"):
        VersionLog.load(tmp_path / "log.json")
