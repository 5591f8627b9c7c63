"""Loops with an iteration for each row, as `map_fn` and its gradient have them: each rank runs those of its rows.

Requires: a flat graph, and sizes. Ensures: an iteration of these loops reads nothing from others except the sums to
which it adds, so their nodes run unchanged on each rank's own rows. All other loops are left alone.

A loop over rows counts iterations from 0, and goes on while the count is less than the number of rows. What a tensor is
in it, its `Role`, follows from where it comes from. A list with an element for each row is read and written at the
count alone. What is put on a stack for the gradient is taken from it in the opposite order, by a loop over the same
rows. A sum is only added to. A loop with anything else, such as a state that it carries from row to row, is none over
rows, and neither are those that share lists or stacks with it.

So loops are tried: all of them together, then without those in which something else was found, until nothing is. One
pass over the graph is enough for a try, since what comes back to a Merge must be what the Merge says.

Tests: tests/graphs/test_row_loops.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.frames import Frame
from tf_poseidon.graph_passes.partition.row_loops import roles as roles_lib
from tf_poseidon.graph_passes.partition.row_loops.candidate_loops import CandidateLoops
from tf_poseidon.graph_passes.partition.row_loops.loop_reader import CountedLoop
from tf_poseidon.graph_passes.partition.row_loops.loop_reader import LoopReader
from tf_poseidon.graph_passes.partition.row_loops.roles import COUNT
from tf_poseidon.graph_passes.partition.row_loops.roles import EMPTY
from tf_poseidon.graph_passes.partition.row_loops.roles import LIST
from tf_poseidon.graph_passes.partition.row_loops.roles import require
from tf_poseidon.graph_passes.partition.row_loops.roles import Role
from tf_poseidon.graph_passes.partition.row_loops.roles import RoleCase
from tf_poseidon.graph_passes.partition.row_loops.roles import RoleKind
from tf_poseidon.graph_passes.partition.row_loops.roles import SAME
from tf_poseidon.graph_passes.partition.row_loops.roles import VALUES
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import GATHERED
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

# Ops that pass on the number of rows, or take it from a shape; others may limit it.
_SELECTS = ("Identity", "StridedSlice", "Cast", "Squeeze", "Unpack")

# How a node runs, and the roles of its outputs.
_Found = tuple[Outcome, Sequence[Role]]


def find(sizes: Sizes, fetches: Iterable[str]) -> dict[str, Outcome]:
    """Returns how the nodes of loops over rows run, and those that bring rows into them and out of them, by name.

    Args:
        sizes: The `Sizes` of the graph.
        fetches: Names of the tensors or nodes that may be read outside of the graph.
    """
    graph = sizes.graph
    rows_nodes = poseidon_rows.find(graph.graph_def)
    # Of several PoseidonRows, each has its own number of rows.
    if len(rows_nodes) != 1 or not any(node.op == "LoopCond" for node in graph.graph_def.node):
        return {}
    reader = LoopReader(graph)
    if reader.frames[rows_nodes[0].name] != frames_lib.ROOT:
        return {}
    loops = reader.loops()
    while loops:  # ends, since there are fewer each time
        attempt = _Attempt(sizes, CandidateLoops(reader, loops), set(map(graph_lib.node_of, fetches)))
        refused = attempt.run()
        if not refused:
            return attempt.outcomes
        loops = {frame: loop for frame, loop in loops.items() if frame not in refused}
    return {}


class _Attempt:
    """Finds the roles of all tensors, given the loops that may be loops over rows.

    Attributes:
        outcomes: The result of `find`, if no loop is refused.
    """

    def __init__(self, sizes: Sizes, loops: CandidateLoops, fetched: Collection[str]) -> None:
        self._sizes, self._loops, self._fetched = sizes, loops, fetched
        self._reader, self._graph = loops.reader, sizes.graph
        self.outcomes: dict[str, Outcome] = {}
        self._roles: dict[str, Role] = {}  # of tensors that are not SAME
        # By node outside of loops: the loops from which its values come, or into which its list leads.
        self._sources: dict[str, frozenset[Frame]] = {}

    def run(self) -> set[Frame]:
        """Finds all roles; returns the frames of the loops that are none over rows."""
        refused = {frame for frame, forward in self._loops.is_forward.items() if forward is None}
        for node in self._reader.ordered:
            case = self._case(node)
            if case.loop is None and case.left is None and node.op not in lists_lib.MAKES and set(case.roles) <= {SAME}:
                continue
            if case.loop is not None and case.loop.frame in refused:
                continue
            concerned = frozenset((case.loop.frame,)) if case.loop else self._sources_of(case)
            self._sources[node.name] = concerned
            try:
                self._note(node, self._found(case))
                require(case.loop is not None or node.name not in self._fetched or not self._has_own_outputs(node))
            except roles_lib.RefusedError:
                refused |= concerned or frozenset(self._loops.is_forward)
        return refused

    def _case(self, node: node_def_pb2.NodeDef) -> RoleCase:
        loop = self._loops.around(node)
        is_forward = loop is not None and bool(self._loops.is_forward[loop.frame])
        return RoleCase(node, list(map(self._role_of, self._reader.inputs(node))), self._role_of, self._reader, loop,
                        self._loops.left_by(node), is_forward)

    def _role_of(self, tensor: str) -> Role:
        return self._roles.get(tensor, SAME)

    def _sources_of(self, case: RoleCase) -> frozenset[Frame]:
        """Returns the frames of the loops from which a node outside has its values, or into which its list leads."""
        if case.left is not None:
            return frozenset((case.left.frame,))
        read = self._loops.that_read(case.node.name) if case.node.op in lists_lib.MAKES else []
        return frozenset(loop.frame for loop in read).union(
            *(self._sources.get(graph_lib.node_of(tensor), ()) for tensor in case.node.input))

    def _note(self, node: node_def_pb2.NodeDef, found: _Found | None) -> None:
        if found is not None:
            self.outcomes[node.name], roles = found
            self._roles.update({tensors.tensor_of(node.name, i): role for i, role in enumerate(roles) if role != SAME})

    def _has_own_outputs(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a node has outputs, other than lists, that differ between ranks."""
        return any(tensors.tensor_of(node.name, i) in self._roles and not lists_lib.is_list(dtype)
                   for i, dtype in enumerate(tensors.types_of_outputs(node)))

    def _found(self, case: RoleCase) -> _Found | None:
        """Returns how a node runs, and the roles of its outputs; None if it has nothing to do with loops over rows.

        Raises:
            RefusedError: If it cannot be in a loop over rows, or read something from one.
        """
        node, is_outside = case.node, case.loop is None
        if entered := self._loops.entered_by(node):
            return self._entering(node, entered, case.first)
        if is_outside and node.op in lists_lib.MAKES and set(case.roles) <= {SAME}:
            return self._list(node)
        if is_outside and node.op == "TensorListStack" and case.first == LIST:
            require(case.roles[1] in VALUES and node.attr["element_dtype"].type in GATHERED)
            return Outcome(tuple(map(_state, case.roles)), (Rows(0),)), [SAME]
        if case.left is not None and case.first.kind == RoleKind.SUM:
            return Outcome((OWN,), (SUM,)), [SAME]
        # What comes back to a Merge is only known at the end of the iteration.
        takes = (None,) * len(case.roles) if node.op == "Merge" else tuple(map(_state, case.roles))
        return _given(takes, roles_lib.applied(case))

    def _entering(self, node: node_def_pb2.NodeDef, loop: CountedLoop, role: Role) -> _Found:
        """Returns how the Enter of a loop runs, and what its tensor is behind it."""
        tensor, merge = self._reader.inputs(node)[0], self._reader.merge_after(node.name)
        if not loop.limits.isdisjoint((node.name, merge)):
            require(role == COUNT or role == SAME and self._is_number_of_rows(tensor))
            return _given((_state(role),), [COUNT], {0: 0} if role == SAME else {})
        require(role in (SAME, COUNT, LIST, EMPTY) or role.kind == RoleKind.FILLED)
        variable = loop.variables.get(merge) if merge else None
        if role == SAME and merge and (variable is None or variable.is_changed and not variable.increment):
            require(node.attr["T"].type in GATHERED)  # a number
            return _given((SUM,), [Role(RoleKind.SUM, merge)])
        return _given((_state(role),), [role])

    def _list(self, node: node_def_pb2.NodeDef) -> _Found | None:
        """Makes a list outside of loops one of rows if a loop reads it, and if it has an element for each row."""
        inputs = self._reader.inputs(node)
        if not self._loops.that_read(node.name):
            return None
        if node.op == "EmptyTensorList":
            return _given((WHOLE, WHOLE), [EMPTY])
        if lists_lib.holds_lists(node):
            return None
        if node.op == "TensorListReserve" and self._is_number_of_rows(inputs[1]):
            return _given((WHOLE, WHOLE), [LIST], {1: 0})
        shape = self._sizes.shape(inputs[0]) if node.op == "TensorListFromTensor" else None
        if shape and shape[0] is not None and shape[0].per_row == 1:
            return _given((Rows(0), WHOLE), [LIST])
        return None

    def _is_number_of_rows(self, tensor: str) -> bool:
        """Whether an integer outside of loops is the number of rows: for all that are tried, and taken from a shape."""
        size, node = self._sizes.size_at(tensor), self._graph.node(tensor)
        while node.op in _SELECTS:
            node = self._graph.node(node.input[0])
        return size is not None and size.per_row == 1 and node.op in ("Shape", "Size")


def _given(takes: tuple[State | None, ...], roles: Sequence[Role], local: dict[int, int] | None = None) -> _Found:
    """Returns how a node runs whose outputs have some roles; `local` is that of an `Outcome`."""
    return Outcome(takes, tuple(map(_state, roles)), local=local or {}), roles


def _state(role: Role) -> State:
    return WHOLE if role == SAME else OWN
