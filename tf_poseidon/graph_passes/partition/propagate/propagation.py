"""Finds the state of every tensor, and how every op runs.

Requires: a flat graph, and sizes. Ensures: every op gets inputs in states that its rule allows; ops without a rule run
whole.

States propagate forward through the graph. In loops they are iterated to a fixed point, at first as if nothing came
back from the previous round. A summand that one reader needs whole is whole for all readers.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py, tests/graphs/test_partition_fuzz.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import dataclasses

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import rules
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.containers import resource_stores as stores_lib
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.propagate import held_summands as held_lib
from tf_poseidon.graph_passes.partition.propagate import own_values as own_lib
from tf_poseidon.graph_passes.partition.propagate import row_inputs
from tf_poseidon.graph_passes.partition.rules import blocks
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import GATHERED
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import IDEMPOTENT
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

MERGES = ("Merge", "RefMerge")
_BACK = ("NextIteration", "RefNextIteration")
HANDS_OVER = (*_BACK, *frames_lib.ENTERS)
# Ops that are examined even if all their inputs are whole.
_SPECIAL = frozenset((*rules.ALWAYS, *MERGES, *HANDS_OVER))
# Prefixes of the names of ops that update variables.
UPDATES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter", "Apply", "SparseApply", "ScatterAdd",
           "ScatterSub", "ScatterUpdate", "ScatterMul", "ScatterDiv", "ScatterMin", "ScatterMax")
# How often a Merge or a stack may change its state before it is made whole.
_CHANGES = 3
# The number of passes over the graph in which changed states reset the summands that are needed whole.
_CLEARINGS = 20
_MOST_PASSES = 1000

# What may differ in each pass for the same node: the states, wish and stored of a `Case`.
_Given = tuple[tuple[State, ...], State | None, State | None]


@dataclasses.dataclass(frozen=True)
class Propagated:
    """The states of a graph.

    Attributes:
        ordered: The nodes in topological order.
        frames: The `frames.Frame` of each node, by name.
        states: The state in which each tensor is computed, by name, unless it is whole.
        outcomes: The `Outcome` of each node, by name.
        without_rule: Names of nodes that run whole because their op has no rule, or none for its inputs.
        rows_nodes: The PoseidonRows on which each node depends, by name; see `row_inputs.find`.
    """

    ordered: list[node_def_pb2.NodeDef]
    frames: dict[str, frames_lib.Frame]
    states: dict[str, State]
    outcomes: dict[str, Outcome]
    without_rule: tuple[str, ...]
    rows_nodes: dict[str, str | None]


class Propagation:
    """Finds the states of a graph, in which summands become whole as late as possible, or earlier."""

    def __init__(self, sizes: Sizes, summands: Iterable[str] = (), dividing: Mapping[str, Outcome] | None = None,
                 row_loops: Mapping[str, Outcome] | None = None) -> None:
        """Makes a propagation.

        Args:
            sizes: The `Sizes` of the graph.
            summands: Names of the nodes from which the resources of variables that hold summands come.
            dividing: By name of a node, how it runs if all its inputs are whole; by default all such nodes run whole.
            row_loops: By name of a node, how it runs for a loop over rows, see row_loops/.
        """
        self._sizes = sizes
        self._dividing = dividing or {}
        self._graph = sizes.graph
        self._ordered = self._graph.ordered
        self._frames = frames_lib.find_frames(self._ordered)
        self._outputs = {node.name: tensors.num_outputs(self._graph, node) for node in self._ordered}
        self._held = held_lib.outcomes(self._graph, self._ordered, frozenset(summands))
        # Such loops read no variable that holds summands.
        self._given_loops = {} if (row_loops or {}).keys() & self._held.keys() else dict(row_loops or {})
        # By node: (the last arguments of its rule, its result).
        self._ruled: dict[str, tuple[_Given, Outcome | None]] = {}
        self._inputs = {node.name: tuple(map(tensors.canonical, self._graph.inputs(node))) for node in self._ordered}
        # The outcome of a node that runs whole, as most nodes do.
        self._whole = {node.name: Outcome((WHOLE,) * len(self._inputs[node.name]),
                                          (WHOLE,) * self._outputs[node.name]) for node in self._ordered}
        self._inner = _home(poseidon_rows.find(self._graph.graph_def), self._frames)
        self._lists = lists_lib.Lists(self._graph)
        self._stores = stores_lib.Stores(self._graph)
        self._with_blocks = True
        self._begin(frozenset(), frozenset(), True)

    def run(self, whole: Set[str] = frozenset(), run_whole: Set[str] = frozenset()) -> Propagated:
        """Returns the `Propagated` states.

        Args:
            whole: Names of summands that become whole earlier.
            run_whole: Names of nodes that run whole, on inputs that are gathered.
        """
        self._begin(whole, run_whole, True)
        propagated = self._run()
        # A rank's own rows are contiguous. If blocks become own, as in a batch normalisation that is not synchronised,
        # they would be gathered where they are widest.
        if any(node.op == own_lib.BEGINS and blocks.has_blocks(propagated.states.get(tensors.canonical(tensor)))
               for node in propagated.ordered for tensor in self._graph.inputs(node)):
            self._begin(whole, run_whole, False)
            return self._run()
        return propagated

    def _begin(self, whole: Set[str], run_whole: Set[str], with_blocks: bool) -> None:
        """Forgets what was found."""
        if with_blocks != self._with_blocks:
            self._ruled.clear()
        self._with_blocks = with_blocks
        self._row_loops = self._given_loops
        self._become_whole = whole
        self._forced: set[str] = set()  # summands that some op needs whole
        self._merges: dict[str, State] = {}  # the states of Merges
        self._changes: collections.Counter[str] = collections.Counter()
        self._kept_whole = set(run_whole)  # also nodes whose outputs cannot be gathered
        self._wishes: dict[str, State] = {}  # the states of lists, by the node that makes them
        self._refused: set[str] = set()  # nodes that cannot make a list in the desired state
        self._stored: dict[stores_lib.Store, State | None] = {}  # the states of stacks and TensorArrays
        self._whole_stores = self._outer_stores()  # names of the nodes that make those that must be whole
        self._states: dict[str, State] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._without_rule: list[str] = []

    def _run(self) -> Propagated:
        self._settle()
        while True:
            rows_nodes = row_inputs.find(self._ordered, self._inputs, self.seen, self._outcomes, self._stores)
            mixing = row_inputs.mixing(self._ordered, self._inputs, self.seen, self._outcomes, rows_nodes)
            if not mixing:
                return Propagated(self._ordered, self._frames, self._states, self._outcomes, tuple(self._without_rule),
                                  rows_nodes)
            self._kept_whole |= mixing
            self._settle()

    def _settle(self) -> None:
        """Iterates to a fixed point.

        It ends after `_MOST_PASSES`, or four for each node: the graph is refused then, and its function runs as it was
        traced. Before, it ends because what is whole grows: a pass asks for another one if it has made something whole
        for good (a node, a list, a store), has changed a Merge or a store, which becomes whole after `_CHANGES`, or has
        found a summand that is needed whole, and these are kept after `_CLEARINGS`.

        Raises:
            GraphError: If there is none until then.
        """
        most = max(_MOST_PASSES, 4 * len(self._ordered))
        for number in range(most):
            forced = len(self._forced)
            if self._pass():
                # Changed states change the needs. Not forever, since in a loop they may alternate.
                if number < _CLEARINGS:
                    self._forced.clear()
            elif len(self._forced) == forced:
                return
        raise GraphError(f"The states of the graph's tensors change in each of {most} passes over it, expected to "
                         "settle; please report the program.")

    def _pass(self) -> bool:
        """Finds all states once; returns whether another pass is needed, for loops, lists, stacks or gathers."""
        states_before, stored_before = self._states, dict(self._stored)  # for loops and early reads
        self._states, self._outcomes, self._without_rule = {}, {}, []
        again, refused, concerned = False, len(self._refused), []
        for node in self._ordered:
            inputs = self._inputs[node.name]
            if node.name in self._row_loops and any(
                    takes not in (None, OWN) and self.seen(tensor) == OWN
                    for tensor, takes in zip(inputs, self._row_loops[node.name].takes)):
                self._row_loops = {}  # own rows are in no order of one process
                return True
            if node.name not in self._row_loops and node.op not in _SPECIAL and node.name not in self._held and all(
                    self.seen(tensor) == WHOLE for tensor in inputs):
                outcome = self._whole[node.name]
                if node.name in self._dividing and node.name not in self._kept_whole:
                    outcome = self._dividing[node.name]
                    self._states[node.name] = outcome.gives[0]
                self._outcomes[node.name] = outcome
                continue
            concerned.append(node)
            if node.name in self._row_loops:
                outcome = self._row_loops[node.name]
            elif node.op in MERGES:
                outcome = self._merge(node, inputs, states_before)
            elif node.op in HANDS_OVER and any(reader.op in MERGES for reader in self._graph.consumers(node.name)):
                outcome = self._hand_over(node, inputs)
            else:
                outcome = self._outcome(node, inputs)
            self._outcomes[node.name] = outcome
            for i, state in enumerate(outcome.gives):
                self._states[tensors.tensor_of(node.name, i)] = state
        for node in concerned:
            again |= self._note_needs(node)
        again |= self._find_stored(stored_before)
        return again or len(self._refused) > refused

    def seen(self, tensor: str, states: Mapping[str, State] | None = None) -> State:
        """Returns the state in which readers see a tensor."""
        if tensor in self._forced or tensor in self._become_whole:
            return WHOLE
        return (self._states if states is None else states).get(tensor, WHOLE)

    def _outcome(self, node: node_def_pb2.NodeDef, inputs: Sequence[str]) -> Outcome:
        if node.name in self._held:
            return self._held[node.name]
        states = tuple(map(self.seen, inputs))
        whole = self._whole[node.name]
        if OWN in states and node.op != own_lib.ENDS:
            return own_lib.outcome(node, states, self._outputs[node.name]) or whole
        store = self._stores.of(node.name)
        stored = WHOLE if store is None else self._stored.get(store)
        if node.name in self._kept_whole:
            if store is not None:
                self._whole_stores.add(store.origin)
            return whole
        if node.op in frames_lib.EXITS and not self._frames[node.name].within(self._inner):
            return whole  # it leaves the loop that has the rows
        wish = self._wishes.get(node.name)
        outcome = self._by_rule(node, inputs, (states, wish, stored))
        if outcome and not self._can_be_taken(inputs, states, outcome):
            outcome = None
        if wish not in (None, WHOLE) and (outcome is None or outcome.gives[0] != wish):
            self._refused.add(node.name)
            return whole
        if outcome is None:
            if store is not None and stored not in (None, WHOLE):
                self._whole_stores.add(store.origin)
            # For summands, and for updates of variables, no rule could do better.
            if any(isinstance(state, Rows) for state in states) and not node.op.startswith(UPDATES):
                self._without_rule.append(node.name)
            return whole
        if store is not None and stored is None:  # for nodes that take elements later
            self._stored[store] = stores_lib.state_put(node, outcome.takes)
        return outcome

    def _by_rule(self, node: node_def_pb2.NodeDef, inputs: Sequence[str], given: _Given) -> Outcome | None:
        """Returns the result of an op's rule; None if it has no rule, or none for this case.

        Args:
            node, inputs: The node, and the tensors that it reads.
            given: The states, wish and stored of a `Case`, which may have changed since the last pass.
        """
        last, outcome = self._ruled.get(node.name, (None, None))
        if last != given:
            states, wish, stored = given
            case = Case(node, inputs, held_lib.as_summands(states), self._outputs[node.name], self._sizes, wish, stored)
            outcome = held_lib.outcome(rules.applied(case, self._with_blocks), case, states)
            self._ruled[node.name] = given, outcome
        return outcome

    def _can_be_taken(self, inputs: Sequence[str], states: Sequence[State], outcome: Outcome) -> bool:
        """Whether each input can be converted to the state in which it is taken."""
        return all(takes is None or takes == state or self._can_become(tensor, state, takes)
                   for tensor, state, takes in zip(inputs, states, outcome.takes))

    def _can_become(self, tensor: str, state: State, target: State) -> bool:
        if self._is_list(tensor):  # a list cannot be converted, only made in another state
            return target == WHOLE or state == WHOLE and all(
                origin not in self._refused and self._wishes.get(origin, target) == target
                for origin in self._lists.origins(tensor))
        if target == WHOLE:
            return True
        if OWN in (state, target):
            return False
        if target == HELD:
            return state in (WHOLE, SUM)
        if isinstance(target, Partial):
            return state == WHOLE and (target == SUM or target.reduce in IDEMPOTENT)
        assert isinstance(target, Rows)
        shape = self._sizes.shape(tensor)
        return shape is not None and target.dimension < len(shape) and row_size.consists_of(
            shape[target.dimension], target.blocks)

    def _hand_over(self, node: node_def_pb2.NodeDef, inputs: Sequence[str]) -> Outcome:
        """Enter and NextIteration return the state of the Merge that they feed: no conversion may come in between."""
        states = {self._merges.get(merge.name) for merge in self._graph.consumers(node.name) if merge.op in MERGES}
        state = states.pop() if len(states) == 1 else WHOLE
        if state is None or not (state == self.seen(inputs[0]) or self._can_become(
                inputs[0], self.seen(inputs[0]), state)):
            state = self.seen(inputs[0])
        return Outcome((state,), (state,))

    def _can_hand(self, tensor: str, merge: node_def_pb2.NodeDef) -> bool:
        """Whether an Enter or NextIteration can return the state of the Merge that it feeds."""
        source, state = self._before_merge(tensor), self._merges[merge.name]
        return (self._hand_over(self._graph.node(tensor), [source]).gives[0] == state)

    def _merge(self, node: node_def_pb2.NodeDef, inputs: Sequence[str], states_before: Mapping[str, State]) -> Outcome:
        if node.name in self._kept_whole:
            self._merges[node.name] = WHOLE
            return self._whole[node.name]
        handed = [self._before_merge(tensor) for tensor in inputs]
        known = [(t, states_before if source != t and self._graph.node(source).op in _BACK else None)
                 for source, t in zip(inputs, handed) if self._graph.node(source).op not in _BACK or states_before]
        state = self._common([t for t, _ in known], [self.seen(t, states) for t, states in known])
        old = self._merges.get(node.name)
        if old is not None and old != state:
            self._changes[node.name] += 1
        if self._changes[node.name] > _CHANGES:
            state = WHOLE
        self._merges[node.name] = state
        return Outcome((state,) * len(inputs), (state, WHOLE))

    def _before_merge(self, tensor: str) -> str:
        """Returns the input of an Enter or NextIteration that feeds a Merge; for other ops, the tensor itself."""
        node = self._graph.node(tensor)
        return self._inputs[node.name][0] if node.op in HANDS_OVER else tensor

    def _common(self, inputs: Sequence[str], states: Sequence[State]) -> State:
        """Returns the state that all inputs of a Merge can have."""
        others = {state for state in states if state != WHOLE}
        if len(others) != 1:
            return WHOLE
        state, = others
        is_possible = all(self._can_become(tensor, s, state) for tensor, s in zip(inputs, states) if s != state)
        return state if is_possible else WHOLE

    def _note_needs(self, node: node_def_pb2.NodeDef) -> bool:
        """Notes what a node's outcome requires of its inputs; returns whether that is new."""
        outcome, inputs, again = self._outcomes[node.name], self._inputs[node.name], False
        for i, (tensor, takes) in enumerate(zip(inputs, outcome.takes)):
            state = self.seen(tensor)
            if self._is_list(tensor):
                wish = outcome.wishes.get(i, takes if takes is not None and takes != state else None)
                if takes == WHOLE and node.name not in self._row_loops and not self._is_settled(node):
                    wish = None  # it may still get the state of the other rounds
                if wish is not None and (wish != state or state == WHOLE):
                    again |= self._wish(tensor, wish)
            elif takes == WHOLE and isinstance(state, Partial):
                self._forced.add(tensor)
            elif takes is not None and takes != state and isinstance(state, Rows):
                again |= self._gather(tensor, state)
        if node.name in self._row_loops or node.name in self._kept_whole or node.op not in MERGES:
            return again
        if any(self._graph.node(tensor).op in _BACK for tensor in inputs):
            handed = [self._before_merge(tensor) for tensor in inputs]
            common_state = self._common(handed, [self.seen(tensor) for tensor in handed])
            again |= common_state != self._merges[node.name] and self._changes[node.name] <= _CHANGES
        # Its inputs must have its state.
        return again | any(self.seen(tensor) != self._merges[node.name] for tensor in inputs
                           if self._graph.node(tensor).op in HANDS_OVER and self._can_hand(tensor, node))

    def _is_settled(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a node is no Merge, and hands nothing to one, whose state may change."""
        merges = [node] if node.op in MERGES else [] if node.op not in HANDS_OVER else [
            reader for reader in self._graph.consumers(node.name) if reader.op in MERGES]
        return all(self._changes[merge.name] > _CHANGES for merge in merges)

    def _gather(self, tensor: str, state: Rows) -> bool:
        """Makes the node of a tensor run whole if the tensor cannot be gathered; returns whether that is new."""
        node = self._graph.node(tensor)
        # Gathering along another dimension than the first needs the rank.
        can_be_gathered = tensors.dtype_of(node, graph_lib.output_of(tensor)) in GATHERED and (
            state == Rows(0) or self._sizes.shape(tensor) is not None)
        if can_be_gathered or node.op == poseidon_rows.ROWS or node.name in self._kept_whole:
            return False
        self._kept_whole.add(node.name)
        return True

    def _wish(self, tensor: str, state: State) -> bool:
        """Requests a state of a list from the nodes that make it; returns whether that is new."""
        again = False
        for origin in self._lists.origins(tensor):
            old = self._wishes.get(origin)
            new = state if old in (None, state) else WHOLE
            again |= new != old
            self._wishes[origin] = new
        return again

    def _outer_stores(self) -> set[str]:
        """Returns the names of the stacks and TensorArrays that are also used outside the loop that has the rows."""
        return {origin for origin, names in self._stores.nodes.items()
                if not all(self._frames[name].within(self._inner) for name in (origin, *names) if name in self._frames)}

    def _find_stored(self, stored_before: Mapping[stores_lib.Store, State | None]) -> bool:
        """Finds the states of stacks and TensorArrays, given the previous ones; returns whether they changed."""
        self._stored = dict(self._stores.states(self.seen))
        self._changes.update({store.origin for store in stored_before
                              if stored_before[store] != self._stored.get(store)})
        for store in self._stores.all:
            if store.origin in self._whole_stores or self._changes[store.origin] > _CHANGES:
                self._stored[store] = WHOLE
        return self._stored != stored_before

    def _is_list(self, tensor: str) -> bool:
        return lists_lib.is_list(tensors.dtype_of(self._graph.node(tensor), graph_lib.output_of(tensor)))


def _home(rows_nodes: Iterable[node_def_pb2.NodeDef], frames: Mapping[str, frames_lib.Frame]) -> frames_lib.Frame:
    """Returns the frame of the inputs with rows."""
    loops = {frames[node.name]: node.name for node in rows_nodes}
    if len(loops) != 1:
        raise GraphError(
            f"The inputs with rows are in {len(loops)} loops{': ' if loops else ''}{', '.join(loops.values())}; "
            "expected all of them outside of loops, or in the same one.")
    return next(iter(loops))
