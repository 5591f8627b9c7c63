"""What passes over a graph have found about its states. It only grows, so there is a last pass.

A pass finds the state of each tensor from the facts of earlier passes, and adds facts. There are two kinds of them:

* A set gets another element: a node runs whole, since what it returns cannot be gathered; a summand is whole for all
  its readers, since one needs it whole, or a shard for all of them, since that is all they take. Which need that is
  only noted when all other facts are known: as long as states change, so do needs.
* Tensors that must have the same state get one: what enters a loop, comes back and leaves as one variable; lists with
  one origin; the elements of one stack or TensorArray. Such a state rises from unknown, which counts as whole, to the
  state that is found, and in the end to whole for good. In between, that of a loop or store may be replaced
  `MOST_CHANGES` times, each one level higher: it may have been found when another variable was still unknown.

So a graph of n nodes, s summands and v variables of loops, lists and stores has at most n + 2 s + (MOST_CHANGES + 2) v
facts, and there are no more passes than facts, and one. A pass that finds no new fact has used the same ones as the
next pass would, so its states are those of all later passes, and all that the facts require holds in them.

Tests: tests/graphs/test_partition_families.py, tests/graphs/test_partition_fuzz.py.
"""

from collections.abc import Hashable
import dataclasses
from typing import Generic
from typing import TypeVar

from tf_poseidon.graph_passes.partition.containers.resource_stores import Store
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

_Key = TypeVar("_Key", bound=Hashable)

# Of the state of a loop's variable or a store; chains of variables that wait for each other are rarely longer.
MOST_CHANGES = 3


class AgreedStates(Generic[_Key]):
    """The states of tensors that must have the same one, by what they have in common."""

    def __init__(self, changes: int = 0) -> None:
        """Makes states that may be replaced so often by others before they are whole for good."""
        self._most = changes + 2  # the level of what is whole for good
        self._levels: dict[_Key, tuple[int, State]] = {}

    def get(self, key: _Key) -> State | None:
        """Returns a state, None if it is unknown."""
        return self._levels.get(key, (0, None))[1]

    def agree(self, key: _Key, state: State) -> None:
        """Lets tensors have a state, if they may still change to it; whole is for good."""
        level, old = self._levels.get(key, (0, None))
        if old not in (state, WHOLE):
            level = self._most if state == WHOLE else level + 1
            self._levels[key] = level, state if level < self._most else WHOLE

    def see(self, key: _Key, state: State | None) -> None:
        """Notes in which state tensors are, None if all are whole: as long as none is known, they may have any."""
        if state is not None or key in self._levels:
            self.agree(key, WHOLE if state is None else state)

    @property
    def height(self) -> int:
        """The number of levels by which all states have risen."""
        return sum(level for level, _ in self._levels.values())


@dataclasses.dataclass
class Facts:
    """What is known about the states of a graph.

    Attributes:
        whole_nodes: Names of the nodes that run whole, on inputs that are made whole.
        whole_summands: Names of the summands that all their readers see whole, or as a shard.
        shards: The shards that readers see of them, by name.
        loops: The states of loops' variables, by name of the Merge.
        lists: The states of lists, by name of the node that makes one.
        stores: The states of the elements of stacks and TensorArrays.
    """

    whole_nodes: set[str]
    whole_summands: set[str]
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)
    loops: AgreedStates[str] = dataclasses.field(default_factory=lambda: AgreedStates(MOST_CHANGES))
    lists: AgreedStates[str] = dataclasses.field(default_factory=AgreedStates)
    stores: AgreedStates[Store] = dataclasses.field(default_factory=lambda: AgreedStates(MOST_CHANGES))

    @property
    def number(self) -> int:
        """The number of facts."""
        return (len(self.whole_nodes) + len(self.whole_summands) + len(self.shards) + self.loops.height
                + self.lists.height + self.stores.height)
