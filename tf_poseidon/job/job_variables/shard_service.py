"""How ranks read and assign variables of which each of them holds a shard: together, or all for one of them.

Usually every rank runs the same program, so all of them read a variable at the same place, and its shards are gathered
there. Where rank 0 runs something alone, such as a callback that writes files, the others serve it meanwhile: it says
which variable it reads or assigns, and they take part.

Tests: tests/training/test_saving.py, tests/unit/test_shard_service.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import typing
import weakref

import numpy as np

from tf_poseidon.errors import GraphError
from tf_poseidon.job.communicator import Communicator

READ, ASSIGN = "read", "assign"
_DONE = "done"
_SITE = "shards/request"


class VariableOfShards(typing.Protocol):
    """A variable of which each rank holds a shard, as the others see it."""

    path: str
    assignments: int  # how often the program has assigned it outside of steps

    def take_part(self, request: str) -> None:
        """Does what rank 0 does for READ or ASSIGN."""


class ShardService:
    """The variables of this process of which it holds shards."""

    def __init__(self, communicator: Communicator, servers: Iterable[int] = ()) -> None:
        """Makes a service without variables; `servers` are the ranks that may own variables, by default all."""
        self._communicator = communicator
        ranks = range(communicator.size)
        self._loads = dict.fromkeys([rank for rank in servers if rank in ranks] or ranks, 0)
        self._variables: list[weakref.ref[VariableOfShards]] = []
        self._is_alone = False

    def add(self, variable: VariableOfShards) -> int:
        """Adds a variable; returns its number, the same on all ranks."""
        self._variables.append(weakref.ref(variable))
        return len(self._variables) - 1

    @property
    def loads(self) -> dict[int, int]:
        """The bytes of variables that each rank has come to own that may own some; the same on all ranks."""
        return dict(self._loads)

    def add_bytes(self, owner: int, number: int) -> None:
        """Adds the bytes of a variable to those of its owner; -1 is none."""
        if owner >= 0:
            self._loads[owner] += number

    @property
    def is_alone(self) -> bool:
        """Whether the others serve this rank."""
        return self._is_alone

    def request(self, what: str, number: int) -> None:
        """Asks the ranks that serve this one to take part in READ or ASSIGN of a variable."""
        if self._is_alone:
            self._communicator.broadcast_text(_SITE, f"{what} {number}")

    def begin(self) -> None:
        """Begins what rank 0 does alone, while each other rank is in `serve`; nothing if there are no variables."""
        self._is_alone = bool(self._variables)

    def end(self) -> None:
        """Ends it, and what the others do in `serve`."""
        if self._is_alone:
            self._is_alone = False
            self._communicator.broadcast_text(_SITE, _DONE)

    def serve(self) -> None:
        """Takes part in what rank 0 does, until it ends that."""
        while self._variables:
            request = self._communicator.broadcast_text(_SITE, "")
            if request == _DONE:
                return
            what, _, number = request.partition(" ")
            variable = self._variables[int(number)]()
            assert variable is not None, "rank 0 uses a variable that this rank has dropped"
            variable.take_part(what)

    def check_assigned(self, variables: Sequence[VariableOfShards]) -> None:
        """Refuses variables that only some ranks have assigned: the others would keep shards of former values.

        Args:
            variables: Those in use, in the same order on all ranks; of others, some ranks may have dropped their own.

        Raises:
            GraphError: On all ranks.
        """
        numbers = np.array([variable.assignments for variable in variables], np.int64)
        if not numbers.size:
            return
        communicator = self._communicator
        of_rank_0 = communicator.broadcast("shards/assigned", numbers)
        differ = communicator.sum("shards/assigned/differ", (numbers != of_rank_0).astype(np.int64))
        if differ.any():
            path = variables[int(np.flatnonzero(differ)[0])].path
            raise GraphError(
                f"'{path}', of which each rank holds a shard, was assigned on some ranks only, expected all of them; "
                "load weights and optimizers on all ranks, not on rank 0 alone.")
