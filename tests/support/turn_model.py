"""A model of the turns that several jobs take on the same accelerators, for tests to explore.

A rank goes through each step like this, and may take as long as it likes for each arrow:

    waiting for the step -> ready -> in its turn -> waiting for the next step

It is ready when it has handed over its gradients, and, unless steps overlap, all ranks of its job have. When all are
ready, the rank on the first accelerator takes the next number, together with the last numbers of the other jobs. With
these a rank begins its turn on its own host, as soon as each other job has passed its number there. It can hand over
when all ranks of the job have begun: they exchange something in the middle of the step, such as moments.
"""

from collections.abc import Iterator
import dataclasses
import random

# The place of a rank: 0, or for its step s one of these + 3 s; a fault ends it by making it negative.
NOT_STARTED, WAITING, READY, TURN = range(4)
# A flat tuple: places of ranks (those of the first job, by host, then of the second, ...), the numbers that they have
# passed, of each job its last number, the step for which it was given, and the numbers of all jobs that came with it;
# then the next number, the job that has had a fault or -1, and whether it may start again.
State = tuple[int, ...]


class Breach(Exception):
    """Two jobs are in their turns on one host."""


@dataclasses.dataclass(frozen=True)
class TurnModel:
    """Jobs that have a rank on each host, and make the same number of steps.

    Attributes:
        jobs, hosts, steps: How many.
        is_numbered: Whether ranks begin in the order of numbers; otherwise each host serves who asks there first.
        sees_passed: Whether ranks wait until other jobs have passed their numbers.
        sees_ends: Whether ranks wait for no job that has no process on their host.
        overlaps: Whether ranks are ready for a step before the others have handed over the last one.
        fault: What happens to one rank, at any moment. "death": the others of its job end too, each when it sees it;
            "restart": likewise, and then the job starts again; "hang": the rank does nothing any more, and a deadline
            lets the other jobs go on. None for nothing.
        is_same_again: Whether a job that starts again is to others still the one that they wait for.
    """

    jobs: int = 2
    hosts: int = 3
    steps: int = 4
    is_numbered: bool = True
    sees_passed: bool = True
    sees_ends: bool = True
    overlaps: bool = False
    fault: str | None = None
    is_same_again: bool = False

    # Where the parts of a state begin.
    passed = property(lambda self: self.jobs * self.hosts)
    number = property(lambda self: 2 * self.passed)
    given = property(lambda self: self.number + self.jobs)
    waited = property(lambda self: self.given + self.jobs)
    end = property(lambda self: WAITING + 3 * self.steps)  # of a rank that has made all its steps

    def initial(self) -> State:
        return (*[NOT_STARTED] * self.passed, *[0] * self.passed, *[0] * self.jobs, *[-1] * self.jobs,
                *[0] * self.jobs**2, 1, -1, self.fault == "restart")

    def _ranks(self, job: int) -> slice:
        return slice(job * self.hosts, (job + 1) * self.hosts)

    def is_final(self, state: State) -> bool:
        """Returns whether all jobs have made all their steps, but for the one that has had a fault."""
        faulty = state[-2]
        if self.fault != "hang" and faulty >= 0 and not self._has_ended(state[self._ranks(faulty)]):
            return False
        if state[-1] and faulty >= 0:
            return False
        return all(set(state[self._ranks(job)]) == {self.end} for job in range(self.jobs) if job != faulty)

    def _has_ended(self, places: State) -> bool:
        return all(place < 0 or place == self.end for place in places)

    def check(self, state: State) -> None:
        """Raises Breach if two jobs have an accelerator; one that hangs may still hold it beyond the deadline."""
        for host in range(self.hosts):
            holders = [job for job in range(self.jobs) if _in_turn(state[job * self.hosts + host])
                       and not (self.fault == "hang" and job == state[-2])]
            if len(holders) > 1:
                raise Breach(state)

    def successors(self, state: State) -> Iterator[tuple[int, State]]:
        """Yields (rank, state that an action of this rank leads to)."""
        for rank, place in enumerate(state[:self.passed]):
            job, host = divmod(rank, self.hosts)
            places = state[self._ranks(job)]
            # What ranks have said before their end may have arrived, or not: then theirs is the next action.
            all_are_here = min(map(abs, places)) >= place
            is_alive = 0 < place < self.end
            if place == NOT_STARTED:
                yield rank, _with(state, rank, WAITING)
            elif is_alive and place % 3 == WAITING % 3:
                if all_are_here or self.overlaps:
                    yield rank, _with(state, rank, place + 1)
            elif is_alive and place % 3 == READY % 3:
                step = (place - READY) // 3
                if state[self.given + job] == step:
                    if self._may_begin(state, job, host):
                        yield rank, _with(state, rank, place + 1)
                elif host == 0 and all_are_here:
                    yield rank, self._granted(state, job, step)
            elif is_alive and all_are_here:
                yield rank, _with(_with(state, rank, place + 1), self.passed + rank, state[self.number + job])
            if self.fault and is_alive and state[-2] < 0:
                yield rank, _with(_with(state, rank, -place), -2, job)
            elif is_alive and job == state[-2] and self.fault != "hang" and min(places) < 0:
                yield rank, _with(state, rank, -place)  # it has seen that another one is dead
            elif host == 0 and state[-1] and job == state[-2] and self._has_ended(places):
                yield rank, self._restarted(state, job)

    def _granted(self, state: State, job: int, step: int) -> State:
        new, waited = list(state), self.waited + job * self.jobs
        new[self.number + job], new[self.given + job] = state[-3], step
        new[waited:waited + self.jobs] = state[self.number:self.given]
        new[waited + job] = 0
        new[-3] += 1
        return tuple(new)

    def _may_begin(self, state: State, job: int, host: int) -> bool:
        for other in range(self.jobs):
            rank = other * self.hosts + host
            if other == job:
                continue
            if not self.is_numbered:
                if _in_turn(state[rank]):
                    return False
            elif self.sees_passed and state[self.passed + rank] < state[self.waited + job * self.jobs + other]:
                has_process = 0 < state[rank] < self.end
                if self.fault == "hang" and other == state[-2]:
                    continue  # after the deadline
                if has_process or not self.sees_ends:
                    return False
        return True

    def _restarted(self, state: State, job: int) -> State:
        new = list(state)
        new[self._ranks(job)] = [NOT_STARTED] * self.hosts
        new[self.given + job], new[-1] = -1, 0
        if not self.is_same_again:  # whoever waits for the dead one does not wait for this one
            new[self.passed + job * self.hosts:self.passed + (job + 1) * self.hosts] = [0] * self.hosts
            new[self.number + job] = 0
            new[self.waited + job:-3:self.jobs] = [0] * self.jobs
        return tuple(new)

    def canonical(self, state: State) -> State:
        """Returns the state with its hosts in an order of their own, which stands for all orders.

        Only the first host differs from others: its ranks take numbers. All other conditions are about a host's own
        ranks, or about all ranks of a job alike. So with two other hosts exchanged, a state has the successors that it
        has otherwise, with these hosts exchanged, and is final or a breach if it is otherwise.
        """
        columns = sorted(state[host:self.number:self.hosts] for host in range(1, self.hosts))
        columns.insert(0, state[0:self.number:self.hosts])
        return (*[n for row in zip(*columns) for n in row], *state[self.number:])


def _in_turn(place: int) -> bool:
    return place >= TURN and place % 3 == TURN % 3


def _with(state: State, index: int, value: int) -> State:
    new = list(state)
    new[index] = value
    return tuple(new)


def explore(model: TurnModel) -> int:
    """Visits all states that can be; returns how many.

    Every action leads on, to a later place, number or end, so no schedule is infinite; and if no state but final ones
    is stuck, every schedule ends in one of these. A job that hangs need not act: others must go on without it.

    Raises:
        Breach: Two jobs can have an accelerator.
        AssertionError: In a state that is not final, nobody can go on.
    """
    start = model.canonical(model.initial())
    seen, layer = {start}, [start]
    while layer:
        following = []
        for state in layer:
            is_stuck = not model.is_final(state)
            for rank, successor in model.successors(state):
                if model.fault != "hang" or rank // model.hosts != state[-2]:
                    is_stuck = False
                successor = model.canonical(successor)
                if successor not in seen:
                    model.check(successor)
                    seen.add(successor)
                    following.append(successor)
            assert not is_stuck, f"nobody can go on: {state}"
        layer = following
    return len(seen)


def walk(model: TurnModel, seed: int) -> int:
    """Takes one of all schedules, with ranks of random speeds; returns how many actions it has. Raises as `explore`."""
    choice, state, actions = random.Random(seed), model.initial(), 0
    speeds = [10 ** choice.uniform(-2, 0) for _ in range(model.passed)]
    while following := list(model.successors(state)):
        weights = [speeds[rank] * (0.001 if new[rank] < 0 and state[-2] < 0 else 1) for rank, new in following]
        _, state = choice.choices(following, weights)[0]
        model.check(state)
        actions += 1
    assert model.is_final(state), f"nobody can go on: {state}"
    return actions
