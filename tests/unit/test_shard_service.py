"""Ranks refuse variables that only some of them have assigned."""

import dataclasses

import numpy as np
import pytest

from tf_poseidon.errors import GraphError
from tf_poseidon.job.job_variables.shard_service import ShardService


class OfTwoRanks:
    """A communicator of this rank and another one."""

    size = 2

    def __init__(self, of_rank_0, differences_of_other):
        self._of_rank_0, self._others = np.array(of_rank_0), np.array(differences_of_other)

    def broadcast(self, site, numbers):
        return self._of_rank_0

    def sum(self, site, numbers):
        return numbers + self._others


@dataclasses.dataclass(eq=False)
class Variable:
    path: str
    assignments: int


def check(own, of_rank_0, differences_of_other):
    service = ShardService(OfTwoRanks(of_rank_0, differences_of_other))
    variables = [Variable(name, number) for name, number in zip("ab", own)]
    service.check_assigned(variables)


def test_variables_that_all_ranks_have_assigned_as_often_are_right():
    check([2, 1], [2, 1], [0, 0])


@pytest.mark.parametrize("own, of_rank_0, differences_of_other, name", [
    ([0, 1], [0, 2], [0, 0], "b"),  # rank 0 alone has assigned it
    ([1, 1], [1, 1], [1, 0], "a")], ids=["this rank", "another rank"])
def test_all_ranks_refuse_one_that_only_some_have_assigned(own, of_rank_0, differences_of_other, name):
    with pytest.raises(GraphError, match=f"'{name}', of which each rank holds a shard, was assigned on some"):
        check(own, of_rank_0, differences_of_other)
