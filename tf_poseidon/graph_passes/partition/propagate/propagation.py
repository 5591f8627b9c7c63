"""Finds the state of every tensor, and how every op runs.

Requires: a flat graph, and sizes. Ensures: every op gets inputs in states that its rule allows; ops without a rule run
whole.

States propagate forward through the graph, in passes: each finds all states anew, from the facts of those before it,
and finds new facts, until there are none (facts.py). Loops are what needs several passes, and lists and stores.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py, tests/graphs/test_partition_fuzz.py.
"""

from collections.abc import Mapping
from collections.abc import Set
import dataclasses

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import rules
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.propagate import held_summands as held_lib
from tf_poseidon.graph_passes.partition.propagate import own_values as own_lib
from tf_poseidon.graph_passes.partition.propagate import row_inputs
from tf_poseidon.graph_passes.partition.propagate import shard_summands
from tf_poseidon.graph_passes.partition.propagate.convertible_states import ConvertibleStates
from tf_poseidon.graph_passes.partition.propagate.facts import Facts
from tf_poseidon.graph_passes.partition.propagate.loop_merges import HANDS_OVER
from tf_poseidon.graph_passes.partition.propagate.loop_merges import LoopMerges
from tf_poseidon.graph_passes.partition.propagate.loop_merges import MERGES
from tf_poseidon.graph_passes.partition.propagate.prepared_graph import PreparedGraph
from tf_poseidon.graph_passes.partition.rules import blocks
from tf_poseidon.graph_passes.partition.rules import columns
from tf_poseidon.graph_passes.partition.rules import shards
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

# Ops that are examined even if all their inputs are whole.
_SPECIAL = frozenset((*rules.ALWAYS, *MERGES, *HANDS_OVER))
# Prefixes of the names of ops that update variables.
UPDATES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter", "Apply", "SparseApply", "ScatterAdd",
           "ScatterSub", "ScatterUpdate", "ScatterMul", "ScatterDiv", "ScatterMin", "ScatterMax")


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

    def __init__(self, sizes: Sizes, held: Mapping[str, State] | None = None,
                 dividing: Mapping[str, Outcome] | None = None,
                 row_loops: Mapping[str, Outcome] | None = None) -> None:
        """Makes a propagation.

        Args:
            sizes: The `Sizes` of the graph.
            held: What variables hold that hold summands or shards, see `held_summands.outcomes`.
            dividing: By name of a node, how it runs if all its inputs are whole; by default all such nodes run whole.
            row_loops: By name of a node, how it runs for a loop over rows, see row_loops/.
        """
        self._prepared = PreparedGraph(sizes)
        held_outcomes = held_lib.outcomes(self._prepared.graph, self._prepared.ordered, held or {})
        # Loops over rows read no variable that holds summands.
        row_loops = {} if (row_loops or {}).keys() & held_outcomes.keys() else row_loops or {}
        self._fixed = _FixedOutcomes(held_outcomes, row_loops, dividing or {})
        self._rules = _CachedRules(self._prepared)

    def run(self, whole: Set[str] = frozenset(), run_whole: Set[str] = frozenset()) -> Propagated:
        """Returns the `Propagated` states.

        Args:
            whole: Names of summands that become whole earlier.
            run_whole: Names of nodes that run whole, on inputs that are gathered.
        """
        fixed, with_blocks = self._fixed, True
        while True:
            search = _Search(self._prepared, self._rules, fixed, Facts(set(run_whole), set(whole)), with_blocks)
            propagated = search.run()
            # A rank's own rows are in no order of one process, and contiguous: if blocks became own, as in a batch
            # normalisation that is not synchronised, they would be gathered where they are widest.
            if fixed.row_loops and search.has_own_rows_in_loops():
                fixed = dataclasses.replace(fixed, row_loops={})
            elif with_blocks and search.has_own_blocks():
                with_blocks = False
            else:
                return propagated


@dataclasses.dataclass(frozen=True)
class _FixedOutcomes:
    """How nodes run whatever the states of their inputs are, by name.

    Attributes:
        held: Those that read or assign a variable that holds summands or a shard.
        row_loops: Those of loops over rows.
        dividing: Those that may divide inputs, if all of these are whole.
    """

    held: Mapping[str, Outcome]
    row_loops: Mapping[str, Outcome]
    dividing: Mapping[str, Outcome]


@dataclasses.dataclass(frozen=True)
class _RuleArguments:
    """What may differ in each pass for the same node: see `Case`, and `rules.applied`."""

    states: tuple[State, ...]
    wish: State | None
    stored: State | None
    with_blocks: bool


class _CachedRules:
    """The rules, applied once for the same arguments."""

    def __init__(self, prepared: PreparedGraph) -> None:
        self._prepared = prepared
        self._last: dict[str, tuple[_RuleArguments, Outcome | None]] = {}

    def applied(self, node: node_def_pb2.NodeDef, given: _RuleArguments) -> Outcome | None:
        """Returns the result of an op's rule; None if it has no rule, or none for this case."""
        last, outcome = self._last.get(node.name, (None, None))
        if last != given:
            case = Case(node, self._prepared.inputs[node.name], held_lib.as_summands(given.states),
                        self._prepared.num_outputs(node.name), self._prepared.sizes, given.wish, given.stored)
            outcome = held_lib.added(node.op, given.states)
            if outcome is None and any(isinstance(state, (Shard, Owned, Columns)) for state in given.states):
                outcome = self._of_divided(case)
            if outcome is None and not any(isinstance(state, Shard) and state.divided < 0 or isinstance(state, Owned)
                                           for state in given.states):
                whole = tuple(WHOLE if columns.is_divided(state) else state for state in given.states)
                case = case.with_states(held_lib.as_summands(whole), given.wish, given.stored)
                outcome = held_lib.outcome(rules.applied(case, given.with_blocks), case, whole)
            self._last[node.name] = given, outcome
        return outcome

    def _of_divided(self, case: Case) -> Outcome | None:
        """Applies the rule of an op of which some inputs are shards, owned or columns."""
        outcome = shards.applied(case) if any(isinstance(state, (Shard, Owned)) for state in case.states) else None
        return columns.applied(case) if outcome is None and any(map(columns.is_divided, case.states)) else outcome


class _Search:
    """Passes over a graph until its states are those that its facts require."""

    def __init__(self, prepared: PreparedGraph, cached_rules: _CachedRules, fixed: _FixedOutcomes, facts: Facts,
                 with_blocks: bool) -> None:
        self._prepared, self._rules, self._fixed, self._facts = prepared, cached_rules, fixed, facts
        self._with_blocks = with_blocks
        self._convertible = ConvertibleStates(prepared, facts.lists)
        self._merges = LoopMerges(prepared, self._convertible, facts.loops)
        for origin in prepared.outer_stores():
            self._make_store_whole(origin)
        # Those of the last pass.
        self._states: dict[str, State] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._without_rule: list[str] = []

    def run(self) -> Propagated:
        """Returns the states of the last pass."""
        prepared = self._prepared
        while True:
            self._settle()
            rows_nodes = row_inputs.find(prepared.ordered, prepared.inputs, self._seen, self._outcomes, prepared.stores)
            mixing = row_inputs.mixing(prepared.ordered, prepared.inputs, self._seen, self._outcomes, rows_nodes)
            if not mixing:
                return Propagated(prepared.ordered, prepared.frames, self._states, self._outcomes,
                                  tuple(self._without_rule), rows_nodes)
            self._facts.whole_nodes |= mixing

    def has_own_rows_in_loops(self) -> bool:
        """Whether loops over rows read what a rank has computed from its own rows."""
        return any(takes not in (None, OWN) and self._seen(tensor) == OWN
                   for name, outcome in self._fixed.row_loops.items()
                   for tensor, takes in zip(self._prepared.inputs[name], outcome.takes))

    def has_own_blocks(self) -> bool:
        """Whether blocks become a rank's own rows."""
        return any(node.op == own_lib.BEGINS and blocks.has_blocks(self._states.get(tensor))
                   for node in self._prepared.ordered for tensor in self._prepared.inputs[node.name])

    def _settle(self) -> None:
        """Passes over the graph until that finds no new fact."""
        number = None
        while number != self._facts.number:
            number = self._facts.number
            needed = self._pass()
            if number == self._facts.number:  # as long as states change, so does what is needed whole
                self._facts.whole_summands |= needed
            if number == self._facts.number:
                self._facts.shards |= shard_summands.find(self._prepared, self._facts, self._outcomes, self._states)

    def _pass(self) -> set[str]:
        """Finds all states once, and new facts; returns the summands that some op needs whole."""
        self._states, self._outcomes, self._without_rule = {}, {}, []
        concerned = []
        for node in self._prepared.ordered:
            if self._is_whole(node):
                outcome = self._prepared.whole[node.name]
                if node.name in self._fixed.dividing and node.name not in self._facts.whole_nodes:
                    outcome = self._fixed.dividing[node.name]
                    self._states[node.name] = outcome.gives[0]
                self._outcomes[node.name] = outcome
                continue
            concerned.append(node)
            outcome = self._outcome(node)
            self._outcomes[node.name] = outcome
            for i, state in enumerate(outcome.gives):
                self._states[tensors.tensor_of(node.name, i)] = state
        needed = set[str]()
        for node in concerned:
            needed |= self._note_needs(node)
        stored = self._prepared.stores.states(self._seen)
        for store in self._prepared.stores.all:
            self._facts.stores.see(store, stored.get(store))
        return needed

    def _seen(self, tensor: str) -> State:
        """Returns the state in which readers see a tensor."""
        if tensor in self._facts.whole_summands:
            return self._facts.shards.get(tensor, WHOLE)
        return self._states.get(tensor, WHOLE)

    def _live(self, tensor: str) -> State:
        """Returns the state in which branches and loops see a tensor."""
        return shards.live(self._seen(tensor))

    def _is_whole(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a node runs whole because all its inputs are."""
        return (node.op not in _SPECIAL and node.name not in self._fixed.row_loops and node.name not in self._fixed.held
                and all(self._seen(tensor) == WHOLE for tensor in self._prepared.inputs[node.name]))

    def _outcome(self, node: node_def_pb2.NodeDef) -> Outcome:
        """Returns how a node runs in this pass."""
        if node.name in self._fixed.row_loops:
            return self._fixed.row_loops[node.name]
        if node.op in MERGES:
            if node.name in self._facts.whole_nodes:
                self._facts.loops.agree(node.name, WHOLE)
            return self._merges.merged(node, self._live)
        if self._merges.fed_by(node):
            return self._merges.handed_over(node, self._live)
        if node.name in self._fixed.held:
            return self._fixed.held[node.name]
        states = tuple(map(self._seen, self._prepared.inputs[node.name]))
        if OWN in states and node.op != own_lib.ENDS:
            return (own_lib.outcome(node, states, self._prepared.num_outputs(node.name))
                    or self._prepared.whole[node.name])
        return self._by_rule(node, states) or self._prepared.whole[node.name]

    def _by_rule(self, node: node_def_pb2.NodeDef, states: tuple[State, ...]) -> Outcome | None:
        """Returns how a node runs on inputs with some states; None if it runs whole."""
        store = self._prepared.stores.of(node.name)
        if node.name in self._facts.whole_nodes:
            if store is not None:
                self._make_store_whole(store.origin)
            return None
        if node.op in frames_lib.EXITS and not self._prepared.is_at_home(node.name):
            return None  # it leaves the loop that has the rows
        wish = self._facts.lists.get(node.name)
        stored = WHOLE if store is None else self._facts.stores.get(store)
        outcome = self._rules.applied(node, _RuleArguments(states, wish, stored, self._with_blocks))
        if outcome and not self._convertible.can_be_taken(self._prepared.inputs[node.name], states, outcome):
            outcome = None
        if wish not in (None, WHOLE) and (outcome is None or outcome.gives[0] != wish):
            self._facts.lists.agree(node.name, WHOLE)
            return None
        if outcome is None:
            if store is not None and stored not in (None, WHOLE):
                self._make_store_whole(store.origin)
            # For summands, and for updates of variables, no rule could do better.
            if any(isinstance(state, Rows) for state in states) and not node.op.startswith(UPDATES):
                self._without_rule.append(node.name)
        return outcome

    def _make_store_whole(self, origin: str) -> None:
        """Makes a stack or TensorArray whole, and its gradients."""
        for store in self._prepared.stores.all:
            if store.origin == origin:
                self._facts.stores.agree(store, WHOLE)

    def _note_needs(self, node: node_def_pb2.NodeDef) -> set[str]:
        """Notes what a node's outcome requires of its inputs; returns the summands that it needs whole."""
        outcome, needed = self._outcomes[node.name], set()
        for i, (tensor, takes) in enumerate(zip(self._prepared.inputs[node.name], outcome.takes)):
            state = self._seen(tensor)
            if self._prepared.is_list(tensor):
                wish = outcome.wishes.get(i, takes if takes != state else None)
                if takes == WHOLE and node.name not in self._fixed.row_loops and self._merges.may_change(node):
                    wish = None  # it may still get the state of the other rounds
                if wish is not None and (wish != state or state == WHOLE):
                    for origin in self._prepared.lists.origins(tensor):
                        self._facts.lists.agree(origin, wish)
            elif (takes == WHOLE or isinstance(takes, (Shard, Owned, Columns))) and isinstance(state, Partial):
                needed.add(tensor)
            elif (takes not in (None, state) and isinstance(state, (Rows, Columns))
                  and not self._convertible.can_be_gathered(tensor, state)):
                self._facts.whole_nodes.add(graph_lib.node_of(tensor))
        if node.op in MERGES and node.name not in self._fixed.row_loops:
            self._merges.note(node, self._live)
        return needed
