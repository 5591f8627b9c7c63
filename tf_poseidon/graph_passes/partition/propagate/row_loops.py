"""Loops with an iteration for each row, as `map_fn` and its gradient have them: each rank runs those of its rows.

Requires: a flat graph, and sizes. Ensures: an iteration of these loops reads nothing from others except the sums to
which it adds, so their nodes run unchanged on each rank's own rows. All other loops are left alone.

A loop over rows counts iterations from 0, and goes on while the count is less than the number of rows. What a tensor is
in it, its `_Role`, follows from where it comes from. A list with an element for each row is read and written at the
count alone. What is put on a stack for the gradient is taken from it in the opposite order, by a loop over the same
rows. A sum is only added to. A loop with anything else, such as a state that it carries from row to row, is none over
rows, and neither are those that share lists or stacks with it.

Tests: tests/graphs/test_row_loops.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import enum
import typing

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.frames import Frame
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_ADDS = ("AddV2", "Add", "AddN")
# Stateful ops that change nothing.
_HARMLESS = (*variables_lib.READS, "Assert")
# Ops that pass on the number of rows, or take it from a shape; others may limit it.
_SELECTS = ("Identity", "StridedSlice", "Cast", "Squeeze", "Unpack")
_BACK = "NextIteration"


class _Kind(enum.Enum):
    """What a tensor can be in a loop over rows."""

    SAME = "the same on all ranks, and in all iterations"
    ROW = "what follows from the iteration's row"
    INDEX = "the number of the iteration's row"
    TURN = "the number of the iteration, in a loop that takes rows in the opposite order"
    NEXT = "the number of the next iteration"
    COUNT = "the number of rows"
    GOES_ON = "whether there is another iteration"
    SUM = "a sum over iterations"
    LIST = "a list with an element for each row"
    FRESH = "such a list that is zero except at the iteration's row"
    EMPTY = "a stack with nothing on it"
    FILLING = "a stack on which the iteration puts an element"
    FILLED = "a stack with an element of each iteration"
    TAKING = "a stack from which the iteration takes its element"
    USED = "a stack from which the iteration has taken its element"


class _Role(typing.NamedTuple):
    """What a tensor is in a loop over rows.

    Attributes:
        kind: Its `_Kind`.
        of: The Merge of the variable whose value it is, where an iteration hands it to the next one: a sum, a list that
            is changed, or a stack.
        stack: For stacks that are filled: the Merge of the variable of the loop that has filled it.
    """

    kind: _Kind
    of: str = ""
    stack: str = ""


_SAME, _ROW, _INDEX, _TURN, _NEXT, _COUNT, _GOES_ON, _LIST, _FRESH, _EMPTY = map(_Role, (
    _Kind.SAME, _Kind.ROW, _Kind.INDEX, _Kind.TURN, _Kind.NEXT, _Kind.COUNT, _Kind.GOES_ON, _Kind.LIST, _Kind.FRESH,
    _Kind.EMPTY))
_VALUES = (_SAME, _ROW)


class _RefusedError(Exception):
    """A node makes it impossible that a loop is one over rows."""


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop, outside of others, that counts from 0 while the count is below limits.

    Attributes:
        frame: Its `Frame`.
        variables: By name of a Merge: (the tensor that enters, the tensor that comes back).
        counters: Names of the Merges of counts.
        limits: Names of the Merges, or constant Enters, of the limits.
        predicate: Names of the nodes that compare counts with limits.
        increments: Names of the nodes that add 1 to counts.
    """

    frame: Frame
    variables: Mapping[str, tuple[str, str]]
    counters: frozenset[str]
    limits: frozenset[str]
    predicate: frozenset[str]
    increments: frozenset[str]


def outcomes(sizes: Sizes, fetches: Iterable[str]) -> dict[str, Outcome]:
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
    reader = _LoopReader(graph)
    if reader.frames[rows_nodes[0].name] != frames_lib.ROOT:
        return {}
    loops = reader.loops()
    while loops:  # ends, since there are fewer each time
        attempt = _Attempt(sizes, reader, loops, set(map(graph_lib.node_of, fetches)))
        refused = attempt.run()
        if not refused:
            return attempt.outcomes
        loops = {frame: loop for frame, loop in loops.items() if frame not in refused}
    return {}


class _LoopReader:
    """Reads the loops of a graph.

    Attributes:
        graph: The `Graph`.
        frames: The `Frame` of each node, by name.
        ordered: Its nodes in topological order; all nodes of a loop come before what leaves it.
    """

    def __init__(self, graph: graph_lib.Graph) -> None:
        self.graph = graph
        ordered = graph.ordered
        self.frames = frames_lib.find_frames(ordered)
        self.ordered = self._loop_by_loop(ordered)

    def _loop_by_loop(self, ordered: Iterable[node_def_pb2.NodeDef]) -> list[node_def_pb2.NodeDef]:
        backs: dict[Frame, list[str]] = {}
        for node in ordered:
            if node.op == _BACK:
                backs.setdefault(self.frames[node.name], []).append(f"^{node.name}")
        waiting = graph_pb2.GraphDef()
        for node in ordered:
            waits_for = backs.get(self.frames[graph_lib.node_of(node.input[0])], ()) if node.op == "Exit" else ()
            waiting.node.add(name=node.name, op=node.op, input=[*node.input, *waits_for])
        return [self.graph.nodes[node.name] for node in graph_lib.in_order(waiting)]

    def inputs(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the names of the tensors that a node reads, without ":0"."""
        return list(map(tensors.canonical, self.graph.inputs(node)))

    def origin(self, tensor: str) -> str:
        """Returns the name of the node from which a tensor comes unchanged, whichever output of it that is."""
        node = self.graph.node(tensor)
        while node.op in ("Identity", "Switch"):
            node = self.graph.node(node.input[0])
        return node.name

    def merge_after(self, name: str) -> str | None:
        """Returns the name of the Merge that an Enter or NextIteration feeds, None for a constant Enter."""
        merges = [reader.name for reader in self.graph.consumers(name) if reader.op == "Merge"]
        return merges[0] if len(merges) == 1 else None

    def loops(self) -> dict[Frame, _Loop]:
        """Returns the loops that count iterations, and are outside of other loops, by frame."""
        nodes: dict[Frame, list[node_def_pb2.NodeDef]] = {}
        for node in self.ordered:
            nodes.setdefault(self.frames[node.name], []).append(node)
        loops_of_frames = {frame: self._read(frame, nodes[frame]) for frame in nodes if frame.outer == frames_lib.ROOT}
        return {frame: loop for frame, loop in loops_of_frames.items() if loop is not None}

    def _read(self, frame: Frame, nodes: Iterable[node_def_pb2.NodeDef]) -> _Loop | None:
        variables = {node.name: handed for node in nodes if node.op == "Merge" and (handed := self._handed(node))}
        increments = {name: increment for name, (entered, back) in variables.items()
                      if (increment := self._increment(name, entered, back))}
        conditions = [node for node in nodes if node.op == "LoopCond"]
        if len(conditions) != 1 or not increments:
            return None
        limits, predicate, queue = set(), set(), [conditions[0].input[0]]
        while queue:
            node = self.graph.node(queue.pop())
            inputs = self.graph.inputs(node)
            if node.op == "Less" and self.origin(inputs[0]) in increments and self._is_limit(inputs[1], variables):
                limits.add(self.origin(inputs[1]))
            elif node.op in ("Identity", "LogicalAnd"):
                queue += inputs
            else:
                return None
            if node.op != "Identity":
                predicate.add(node.name)
        return _Loop(frame, variables, frozenset(increments), frozenset(limits), frozenset(predicate),
                     frozenset(increments.values()))

    def _handed(self, merge: node_def_pb2.NodeDef) -> tuple[str, str] | None:
        """Returns what enters a loop at a Merge and what comes back, None if it is none of a loop."""
        by_op = {self.graph.node(tensor).op: self.graph.node(tensor) for tensor in self.graph.inputs(merge)}
        if by_op.keys() != {"Enter", _BACK}:
            return None
        return self.inputs(by_op["Enter"])[0], self.inputs(by_op[_BACK])[0]

    def _increment(self, merge: str, entered: str, back: str) -> str | None:
        """Returns the name of the node that adds 1 to a count that begins at 0; None for other variables."""
        begin, added = self.graph.constant(self.origin(entered)), self.graph.nodes[self.origin(back)]
        if begin is None or begin.shape or begin.dtype.kind != "i" or begin or added.op not in ("AddV2", "Add"):
            return None
        count, increment = self.graph.inputs(added)
        step = self.graph.constant(increment)
        return added.name if self.origin(count) == merge and step is not None and not step.shape and (
            step == 1) else None

    def _is_limit(self, tensor: str, variables: Mapping[str, tuple[str, str]]) -> bool:
        """Whether a tensor is the same in each iteration."""
        origin = self.origin(tensor)
        return self.graph.nodes[origin].op == "Enter" or (
            origin in variables and self.origin(variables[origin][1]) == origin)


class _Attempt:
    """Finds the roles of all tensors, given the loops that may be loops over rows.

    Attributes:
        outcomes: The result of `outcomes`, if no loop is refused.
    """

    def __init__(self, sizes: Sizes, reader: _LoopReader, loops: Mapping[Frame, _Loop],
                 fetched: Collection[str]) -> None:
        self._sizes, self._reader, self._loops, self._fetched = sizes, reader, loops, fetched
        self._graph, self._frames = reader.graph, reader.frames
        self.outcomes: dict[str, Outcome] = {}
        self._roles: dict[str, _Role] = {}  # of tensors that are not _SAME
        self._elements: dict[str, _Role] = {}  # of stacks, by the Merge of the loop that fills them
        # By node outside of loops: the loops from which its values come, or into which its list leads.
        self._sources: dict[str, frozenset[Frame]] = {}
        self._is_forward = {frame: self._goes_forward(loop, frozenset()) for frame, loop in loops.items()}

    def run(self) -> set[Frame]:
        """Finds all roles; returns the frames of the loops that are none over rows."""
        refused = {frame for frame, forward in self._is_forward.items() if forward is None}
        for node in self._reader.ordered:
            loop, roles = self._loop_of(self._frames[node.name]), self._roles_of(node)
            if loop is None and self._left(node) is None and node.op not in lists_lib.MAKES and set(roles) <= {_SAME}:
                continue
            if loop is not None and loop.frame in refused:
                continue
            concerned = frozenset((loop.frame,)) if loop else self._sources_of(node)
            self._sources[node.name] = concerned
            try:
                self._note(node, loop, roles)
                _require(loop is not None or node.name not in self._fetched or not self._has_own_outputs(node))
            except _RefusedError:
                refused |= concerned or frozenset(self._loops)
        return refused

    def _goes_forward(self, loop: _Loop, seen: frozenset[Frame]) -> bool | None:
        """Whether a loop takes the rows in their order; None if it is no loop over rows.

        One that takes from stacks takes rows in the opposite order of the loop that has filled these.
        """
        directions = set()
        for entered, back in loop.variables.values():
            if self._graph.nodes[self._reader.origin(back)].op == "TensorListPopBack":
                filler = self._filler(entered)
                directions.add(None if filler is None or filler.frame in seen else
                               self._goes_forward(filler, seen | {loop.frame}))
        if None in directions or len(directions) > 1:
            return None
        return not directions.pop() if directions else True

    def _filler(self, stack: str) -> _Loop | None:
        """Returns the loop that has filled a stack, None if there is none; others may pass it on unchanged."""
        node = self._graph.nodes[self._reader.origin(stack)]
        while loop := self._left(node):  # ends, since loops come one after the other
            merge = self._reader.origin(node.input[0])
            if self._is_changed(merge, loop):
                return loop
            node = self._graph.nodes[self._reader.origin(loop.variables[merge][0])]
        return None

    # ---- where nodes are ------------------------------------------------------------------------

    def _roles_of(self, node: node_def_pb2.NodeDef) -> list[_Role]:
        return [self._roles.get(tensor, _SAME) for tensor in self._reader.inputs(node)]

    def _loop_of(self, frame: Frame) -> _Loop | None:
        """Returns the loop that a frame is, or is in."""
        while frame.outer is not None and frame.outer != frames_lib.ROOT:
            frame = frame.outer
        return self._loops.get(frame)

    def _left(self, node: node_def_pb2.NodeDef) -> _Loop | None:
        """Returns the loop that a node leaves."""
        return self._loops.get(self._frames[graph_lib.node_of(node.input[0])]) if node.op == "Exit" else None

    def _entered(self, node: node_def_pb2.NodeDef) -> _Loop | None:
        """Returns the loop into which a node leads."""
        return self._loops.get(self._frames[node.name]) if node.op == "Enter" else None

    def _sources_of(self, node: node_def_pb2.NodeDef) -> frozenset[Frame]:
        """Returns the frames of the loops from which a node outside has its values, or into which its list leads."""
        if left := self._left(node):
            return frozenset((left.frame,))
        read = self._loops_that_read(node.name) if node.op in lists_lib.MAKES else []
        return frozenset(loop.frame for loop in read).union(
            *(self._sources.get(graph_lib.node_of(tensor), ()) for tensor in node.input))

    def _loops_that_read(self, name: str) -> list[_Loop]:
        """Returns the loops into which a list leads unchanged, or one like it."""
        loops, queue = [], [name]
        while queue:
            for node in self._graph.consumers(queue.pop()):
                if node.op in ("Identity", "ZerosLike"):
                    queue.append(node.name)
                elif loop := self._entered(node):
                    loops.append(loop)
        return loops

    # ---- what tensors are -----------------------------------------------------------------------

    def _note(self, node: node_def_pb2.NodeDef, loop: _Loop | None, roles: Sequence[_Role]) -> None:
        """Notes the roles of a node's outputs, and how it runs.

        Raises:
            _RefusedError: If it cannot be in a loop over rows, or read something from one.
        """
        if entered := self._entered(node):
            self._note_entered(node, entered, roles[0])
        elif loop is None and node.op in lists_lib.MAKES and set(roles) <= {_SAME}:
            self._note_list(node)
        elif loop is None and node.op == "TensorListStack" and roles[0] == _LIST:
            _require(roles[1] in _VALUES and node.attr["element_dtype"].type in propagate_lib.GATHERED)
            self.outcomes[node.name] = Outcome(tuple(map(_state, roles)), (Rows(0),))
        elif self._left(node) and roles[0].kind == _Kind.SUM:
            self.outcomes[node.name] = Outcome((OWN,), (SUM,))
        else:
            outcome = self._found(node, loop, roles)
            # What comes back to a Merge is only known at the end of the iteration.
            self._set(node, tuple(None if node.op == "Merge" else _state(role) for role in roles), outcome)

    def _set(self, node: node_def_pb2.NodeDef, takes: tuple[State | None, ...], roles: Sequence[_Role],
             local: dict[int, int] | None = None) -> None:
        """Notes the roles of a node's outputs, and how it runs; `local` is that of an `Outcome`."""
        self.outcomes[node.name] = Outcome(takes, tuple(map(_state, roles)), local=local or {})
        self._roles.update({tensors.tensor_of(node.name, i): role for i, role in enumerate(roles)
                            if role != _SAME})

    def _has_own_outputs(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a node has outputs, other than lists, that differ between ranks."""
        return any(tensors.tensor_of(node.name, i) in self._roles and not lists_lib.is_list(dtype)
                   for i, dtype in enumerate(tensors.types_of_outputs(node)))

    def _note_list(self, node: node_def_pb2.NodeDef) -> None:
        """Makes a list outside of loops one of rows if a loop reads it, and if it has an element for each row."""
        if not self._loops_that_read(node.name):
            return
        inputs = self._reader.inputs(node)
        if node.op == "EmptyTensorList":
            self._set(node, (WHOLE, WHOLE), [_EMPTY])
        elif lists_lib.holds_lists(node):
            return
        elif node.op == "TensorListReserve" and self._is_number_of_rows(inputs[1]):
            self._set(node, (WHOLE, WHOLE), [_LIST], local={1: 0})
        elif node.op == "TensorListFromTensor":
            shape = self._sizes.shape(inputs[0])
            if shape and shape[0] is not None and shape[0].per_row == 1:
                self._set(node, (Rows(0), WHOLE), [_LIST])

    def _is_number_of_rows(self, tensor: str) -> bool:
        """Whether an integer outside of loops is the number of rows: for all that are tried, and taken from a shape."""
        size, node = self._sizes.size_at(tensor), self._graph.node(tensor)
        while node.op in _SELECTS:
            node = self._graph.node(node.input[0])
        return size is not None and size.per_row == 1 and node.op in ("Shape", "Size")

    def _note_entered(self, node: node_def_pb2.NodeDef, loop: _Loop, role: _Role) -> None:
        """Notes what a tensor is behind the Enter of a loop."""
        tensor, merge = self._reader.inputs(node)[0], self._reader.merge_after(node.name)
        if not loop.limits.isdisjoint((node.name, merge)):
            _require(role == _COUNT or role == _SAME and self._is_number_of_rows(tensor))
            self._set(node, (_state(role),), [_COUNT], local={0: 0} if role == _SAME else None)
            return
        _require(role in (_SAME, _COUNT, _LIST, _EMPTY) or role.kind == _Kind.FILLED)
        if role == _SAME and merge and merge not in loop.counters and self._is_changed(merge, loop):
            _require(node.attr["T"].type in propagate_lib.GATHERED)  # a number
            self._set(node, (SUM,), [_Role(_Kind.SUM, merge)])
            return
        self._set(node, (_state(role),), [role])

    def _is_changed(self, merge: str, loop: _Loop) -> bool:
        """Whether iterations change a variable of a loop, or may."""
        return merge not in loop.variables or self._reader.origin(loop.variables[merge][1]) != merge

    def _found(self, node: node_def_pb2.NodeDef, loop: _Loop | None, roles: Sequence[_Role]) -> list[_Role]:
        """Returns the roles of a node's outputs.

        Raises:
            _RefusedError: As in `_note`.
        """
        op, is_inner = node.op, loop is not None and self._frames[node.name] != loop.frame
        if op == "Identity":
            return list(roles)
        if op == "Exit":
            return [self._leaving(roles[0]) if self._left(node) else _value(roles[0])]
        if op == "Switch":
            data, predicate = roles
            _require(predicate in (_SAME, _GOES_ON) or predicate == _ROW and data in _VALUES)
            return [_ROW if predicate == _ROW else data] * 2
        if op == "Merge":
            return self._merged(node, loop, roles, is_inner)
        if op == _BACK:
            _require(self._may_come_back(node, loop, roles[0], is_inner))
            return list(roles)
        if op == "LoopCond":
            _require(is_inner or roles[0] == _GOES_ON)
            return list(roles)
        if loop is not None and node.name in loop.predicate:
            return [_GOES_ON]
        if loop is not None and node.name in loop.increments:
            return [_NEXT]
        outcome = self._of_list(node, loop, roles) or self._of_stack(node, roles) or self._of_sum(node, roles)
        if outcome is not None:
            return outcome
        _require(set(roles) <= set(_VALUES) and _is_harmless(node))  # also the Enter of an inner loop
        return [_ROW if _ROW in roles else _SAME] * tensors.num_outputs(self._graph, node)

    def _merged(self, node: node_def_pb2.NodeDef, loop: _Loop | None, roles: Sequence[_Role],
                is_inner: bool) -> list[_Role]:
        if loop is None or is_inner or node.name not in loop.variables:
            is_of_loop = any(self._graph.node(tensor).op == _BACK for tensor in self._reader.inputs(node))
            _require(set(roles) <= set(_VALUES) and (is_inner or not is_of_loop))
            return [_ROW, _ROW]
        entered = next(role for role, tensor in zip(roles, self._reader.inputs(node))
                       if self._graph.node(tensor).op == "Enter")
        if node.name in loop.counters:
            _require(entered == _SAME)
            return [_INDEX if self._is_forward[loop.frame] else _TURN, _SAME]
        if self._is_changed(node.name, loop):
            if entered == _LIST:
                return [_Role(_Kind.LIST, node.name), _SAME]
            if entered == _EMPTY:
                return [_Role(_Kind.FILLING, node.name), _SAME]
            if entered.kind == _Kind.FILLED:
                return [_Role(_Kind.TAKING, node.name, entered.stack), _SAME]
        return [entered, _SAME]

    def _may_come_back(self, node: node_def_pb2.NodeDef, loop: _Loop | None, role: _Role, is_inner: bool) -> bool:
        """Whether an iteration may hand a tensor with a role to the next one."""
        merge = self._reader.merge_after(node.name)
        if loop is None or merge is None:
            return False
        if is_inner:
            return role in _VALUES
        begun = self._roles.get(merge, _SAME)
        if merge in loop.counters:
            return role == _NEXT
        if not self._is_changed(merge, loop):
            return role == begun
        after = {_Kind.SUM: _Kind.SUM, _Kind.LIST: _Kind.LIST, _Kind.FILLING: _Kind.FILLED, _Kind.TAKING: _Kind.USED}
        return role.of == merge and after.get(begun.kind) == role.kind

    def _leaving(self, role: _Role) -> _Role:
        """Returns what a variable of a loop is when the loop has ended: that of its Merge, after the last iteration."""
        if role in (_INDEX, _TURN):
            return _COUNT
        if role.kind == _Kind.LIST:
            return _LIST
        if role.kind == _Kind.FILLING:
            return _Role(_Kind.FILLED, stack=role.of)
        if role.kind == _Kind.TAKING:
            return _Role(_Kind.USED)
        _require(role != _ROW)  # that of the last row
        return role

    def _of_list(self, node: node_def_pb2.NodeDef, loop: _Loop | None, roles: Sequence[_Role]) -> list[_Role] | None:
        """Returns the roles of the outputs of an op on lists of rows; None if it is another op, or on other lists."""
        op, first = node.op, roles[0] if roles else _SAME
        if op == "TensorListReserve" and roles[1] == _COUNT and first in _VALUES:
            return [_LIST if loop is None else _FRESH]
        if first.kind not in (_Kind.LIST, _Kind.FRESH):
            return None
        if op in ("TensorListGetItem", "TensorListSetItem"):
            _require(roles[1] == _INDEX and roles[2] in _VALUES)
            return [_ROW if op == "TensorListGetItem" else first]
        if op == "ZerosLike":
            return [_LIST if loop is None else _FRESH]
        if op in _ADDS:
            others = [role for role in roles if role != _FRESH]
            _require(all(role.kind == _Kind.LIST for role in others) and (loop is None or len(others) < 2))
            return [others[0] if others else _FRESH]
        return {"TensorListLength": [_COUNT], "TensorListElementShape": [_ROW]}.get(op)

    def _of_stack(self, node: node_def_pb2.NodeDef, roles: Sequence[_Role]) -> list[_Role] | None:
        """Returns the roles of the outputs of an op on stacks; None if it is another op, or not possible."""
        first = roles[0] if roles else _SAME
        if node.op == "TensorListPushBack" and first.kind == _Kind.FILLING and first.of not in self._elements:
            _require(roles[1] in (*_VALUES, _INDEX, _COUNT))
            self._elements[first.of] = roles[1]
            return [_Role(_Kind.FILLED, first.of)]
        if node.op == "TensorListPopBack" and first.kind == _Kind.TAKING and first.stack in self._elements:
            _require(roles[1] in _VALUES)
            return [_Role(_Kind.USED, first.of), self._elements[first.stack]]
        return None

    def _of_sum(self, node: node_def_pb2.NodeDef, roles: Sequence[_Role]) -> list[_Role] | None:
        """Returns the role of the output of an addition to a sum; None for other ops."""
        sums = [role for role in roles if role.kind == _Kind.SUM]
        if node.op not in _ADDS or len(sums) != 1 or not set(roles) <= {*_VALUES, *sums}:
            return None
        return sums


def _require(condition: bool) -> None:
    if not condition:
        raise _RefusedError


def _value(role: _Role) -> _Role:
    """Returns what leaves an inner loop, whose number of iterations may depend on the row."""
    _require(role in _VALUES)
    return _ROW


def _state(role: _Role) -> State:
    return WHOLE if role == _SAME else OWN


def _is_harmless(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node only computes outputs from inputs, which may be variables."""
    op = tf_compat.op_def(node.op)
    if op is None or node.op.startswith("Poseidon") or any(argument.is_ref for argument in op.input_arg):
        return False
    return not op.is_stateful or node.op in _HARMLESS
