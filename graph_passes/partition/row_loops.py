"""Loops with an iteration for each row, as `map_fn` and its gradient have them: each rank runs those of its rows.

Requires: a flat graph, and sizes. Ensures: an iteration of these loops reads nothing from others except the sums to
which it adds, so their nodes run unchanged on each rank's own rows. All other loops are left alone.

A loop over rows counts iterations from 0, and goes on while the count is less than the number of rows. What a tensor is
in it, its `_Role`, follows from where it comes from. A list with an element for each row is read and written at the
count alone. What is put on a stack for the gradient is taken from it in the opposite order, by a loop over the same
rows. A sum is only added to. A loop with anything else, such as a state that it carries from row to row, is none over
rows, and neither are those that share lists or stacks with it.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import typing

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import lists as lists_lib
from tf_poseidon.graph_passes.partition import propagate as propagate_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.frames import Frame
from tf_poseidon.graph_passes.partition.rules.case import Outcome
from tf_poseidon.graph_passes.partition.sizes import Sizes
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_ADDS = ("AddV2", "Add", "AddN")
# Stateful ops that change nothing.
_HARMLESS = (*variables_lib.READS, "Assert")
_BACK = "NextIteration"


class _Role(typing.NamedTuple):
    """What a tensor is in a loop over rows.

    Attributes:
        name: Its name.
        of: For sums and stacks: the name of the Merge that is theirs in the loop that fills them.
    """

    name: str
    of: str = ""


_SAME = _Role("the same on all ranks, and in all iterations")
_ROW = _Role("what follows from the iteration's row")
_LAST = _Role("the last row's value")
_INDEX = _Role("the number of the iteration's row")
_TURN = _Role("the number of the iteration, where rows come in the opposite order")
_NEXT = _Role("the number of the next iteration")
_COUNT = _Role("the number of rows")
_GOES_ON = _Role("whether there is another iteration")
_LIST = _Role("a list with an element for each row")
_EMPTY = _Role("an empty stack")
_USED = _Role("a stack from which everything has been taken")


def _total(of: str) -> _Role:
    return _Role("a sum over iterations", of)


def _filling(of: str) -> _Role:
    return _Role("a stack on which the iteration will put an element", of)


def _filled(of: str) -> _Role:
    return _Role("a stack with an element of each iteration", of)


class _RefusedError(Exception):
    """A node makes it impossible that a loop is one over rows."""


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A loop that counts from 0 while the count is below limits.

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
    if not any(node.op == "LoopCond" for node in graph.graph_def.node):
        return {}
    reader = _LoopReader(graph)
    loops = {frame: loop for frame in reader.frames_of_loops() if (loop := reader.read(frame)) is not None}
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
        ordered = graph_lib.in_order(graph.graph_def)
        self.frames = frames_lib.find_frames(ordered)
        self._nodes: dict[Frame, list[node_def_pb2.NodeDef]] = {}
        for node in ordered:
            self._nodes.setdefault(self.frames[node.name], []).append(node)
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

    def frames_of_loops(self) -> list[Frame]:
        """Returns the `Frame`s of all loops."""
        return [frame for frame in self._nodes if frame.outer is not None]

    def inputs(self, node: node_def_pb2.NodeDef) -> list[str]:
        """Returns the names of the tensors that a node reads, without ":0"."""
        return list(map(propagate_lib.canonical, self.graph.inputs(node)))

    def origin(self, tensor: str) -> str:
        """Returns the name of the node from which a tensor comes unchanged."""
        node = self.graph.node(tensor)
        while node.op in ("Identity", "Switch"):
            node = self.graph.node(node.input[0])
        return node.name

    def merge_after(self, name: str) -> str | None:
        """Returns the name of the Merge that an Enter or NextIteration feeds, None for a constant Enter."""
        merges = [reader.name for reader in self.graph.consumers(name) if reader.op == "Merge"]
        return merges[0] if len(merges) == 1 else None

    def read(self, frame: Frame) -> _Loop | None:
        """Returns the `_Loop` of a frame, None if it does not count iterations."""
        nodes = self._nodes[frame]
        conditions = [node for node in nodes if node.op == "LoopCond"]
        variables = {}
        for node in nodes:
            if node.op == "Merge" and (handed := self._handed(node)):
                variables[node.name] = handed
        increments = {name: increment for name, (entered, back) in variables.items()
                      if (increment := self._increment(name, entered, back))}
        if len(conditions) != 1 or not increments:
            return None
        limits, predicate, queue = set(), set(), [conditions[0].input[0]]
        while queue:
            node = self.graph.node(queue.pop())
            predicate.add(node.name)
            inputs = self.graph.inputs(node)
            if node.op in ("Identity", "LogicalAnd"):
                queue += inputs
            elif node.op == "Less" and self.origin(inputs[0]) in increments and self._is_limit(inputs[1], variables):
                limits.add(self.origin(inputs[1]))
            else:
                return None
        predicate = {name for name in predicate if self.graph.nodes[name].op != "Identity"}
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
        if begin is None or begin.size != 1 or begin.any() or added.op not in ("AddV2", "Add"):
            return None
        count, one = self.graph.inputs(added)
        step = self.graph.constant(one)
        return added.name if self.origin(count) == merge and step is not None and step.size == 1 and (
            step == 1).all() else None

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
        self._elements: dict[str, _Role] = {}  # of stacks, by their Merge
        self._sources: dict[str, frozenset[Frame]] = {}  # the loops with which a node outside shares something
        self._is_forward = {frame: self._goes_forward(loop, frozenset()) for frame, loop in loops.items()}

    def run(self) -> set[Frame]:
        """Finds all roles; returns the frames of the loops that are none over rows."""
        refused = {frame for frame, forward in self._is_forward.items() if forward is None}
        for node in self._reader.ordered:
            loop = self._loop_of(self._frames[node.name])
            roles = [self._roles.get(tensor, _SAME) for tensor in self._reader.inputs(node)]
            leaves = node.op == "Exit" and self._left(node) is not None
            if loop is None and not leaves and node.op not in lists_lib.MAKES and all(role == _SAME for role in roles):
                continue
            concerned = frozenset((loop.frame,)) if loop else self._sources_of(node)
            if loop and loop.frame in refused:
                continue
            self._sources[node.name] = concerned
            try:
                self._note(node, loop, roles)
                _require(loop is not None or node.name not in self._fetched or not self._has_own_outputs(node))
            except _RefusedError:
                refused |= concerned or frozenset(self._loops)
        return refused

    def _goes_forward(self, loop: _Loop, seen: frozenset[Frame]) -> bool | None:
        """Whether a loop takes the rows in their order; None if it is no loop over rows.

        One that takes from stacks takes them in the opposite order of the loop that has filled these.
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
        """Returns the loop over rows that has filled a stack, None if there is none."""
        node = self._graph.nodes[self._reader.origin(stack)]
        while node.op == "Exit" and (loop := self._left(node)):
            merge = self._reader.origin(node.input[0])
            if merge not in loop.variables or self._is_changed(merge, loop):
                return loop
            node = self._graph.nodes[self._reader.origin(loop.variables[merge][0])]
        return None

    # ---- where nodes are ------------------------------------------------------------------------

    def _loop_of(self, frame: Frame | None) -> _Loop | None:
        """Returns the outermost of the loops that a frame is in."""
        found = None
        while frame is not None:
            found = self._loops.get(frame, found)
            frame = frame.outer
        return found

    def _left(self, node: node_def_pb2.NodeDef) -> _Loop | None:
        """Returns the loop that an Exit leaves; None if that is none over rows, or within one."""
        loop = self._loops.get(self._frames[graph_lib.node_of(node.input[0])])
        return loop if loop and self._loop_of(loop.frame.outer) is None else None

    def _entered(self, node: node_def_pb2.NodeDef) -> _Loop | None:
        """Returns the loop into which an Enter leads, in the same way."""
        loop = self._loops.get(self._frames[node.name])
        return loop if loop and self._loop_of(loop.frame.outer) is None else None

    def _sources_of(self, node: node_def_pb2.NodeDef) -> frozenset[Frame]:
        """Returns the frames of the loops with which a node outside of them shares something."""
        if node.op == "Exit" and (left := self._left(node)):
            return frozenset((left.frame,))
        if node.op in lists_lib.MAKES:
            return frozenset(loop.frame for loop in self._loops_that_read(node.name))
        return frozenset().union(*(self._sources.get(graph_lib.node_of(tensor), ()) for tensor in node.input))

    def _loops_that_read(self, name: str) -> list[_Loop]:
        """Returns the loops into which the outputs of a node lead unchanged."""
        found, queue = [], [name]
        while queue:
            for node in self._graph.consumers(queue.pop()):
                if node.op in ("Identity", "ZerosLike"):
                    queue.append(node.name)
                elif node.op == "Enter" and (loop := self._entered(node)):
                    found.append(loop)
        return found

    # ---- what tensors are -----------------------------------------------------------------------

    def _note(self, node: node_def_pb2.NodeDef, loop: _Loop | None, roles: Sequence[_Role]) -> None:
        """Notes the roles of a node's outputs, and how it runs.

        Raises:
            _RefusedError: If it cannot be in a loop over rows, or read something from one.
        """
        if loop is None and node.op in lists_lib.MAKES and all(role == _SAME for role in roles):
            self._note_list(node)
            return
        if node.op == "TensorListStack" and roles[0] == _LIST and loop is None:
            _require(roles[1] in (_SAME, _ROW))
            self.outcomes[node.name] = Outcome(tuple(map(_state, roles)), (Rows(0),))
            return
        if node.op == "Enter" and (entered := self._entered(node)):
            self._note_entered(node, entered, roles[0])
            return
        found = self._found(node, loop, roles)
        # What comes back to a Merge is only known at the end of the iteration.
        takes = tuple(None if node.op == "Merge" else _state(role) for role in roles)
        if node.op == "Exit" and self._left(node) and roles[0] == _total(roles[0].of):
            self.outcomes[node.name] = Outcome(takes, (SUM,))
            return
        self._set(node, takes, found)

    def _set(self, node: node_def_pb2.NodeDef, takes: tuple[State | None, ...], roles: Sequence[_Role],
             local: dict[int, int] | None = None) -> None:
        """Notes the roles of a node's outputs, and how it runs; `local` is that of an `Outcome`."""
        self.outcomes[node.name] = Outcome(takes, tuple(map(_state, roles)), local=local or {})
        self._roles.update({propagate_lib.tensor_of(node.name, i): role for i, role in enumerate(roles)
                            if role != _SAME})

    def _has_own_outputs(self, node: node_def_pb2.NodeDef) -> bool:
        """Whether a node has outputs, other than lists, that differ between ranks."""
        return any(propagate_lib.tensor_of(node.name, i) in self._roles and not lists_lib.is_list(dtype)
                   for i, dtype in enumerate(propagate_lib.types_of_outputs(node)))

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
        size = self._sizes.size_at(tensor)
        return size is not None and size.per_row == 1

    def _note_entered(self, node: node_def_pb2.NodeDef, loop: _Loop, role: _Role) -> None:
        """Notes what a tensor is behind the Enter of a loop."""
        tensor, merge = self._reader.inputs(node)[0], self._reader.merge_after(node.name)
        if node.name in loop.limits or merge in loop.limits:
            if role == _COUNT:
                self._set(node, (OWN,), [_COUNT])
                return
            _require(role == _SAME and self._is_number_of_rows(tensor))
            self._set(node, (WHOLE,), [_COUNT], local={0: 0})
            return
        _require(role in (_SAME, _COUNT, _LIST, _EMPTY) or role == _filled(role.of))
        if role == _SAME and merge and merge not in loop.counters and self._is_changed(merge, loop):
            _require(node.attr["T"].type in propagate_lib.GATHERED)  # a number
            self._set(node, (SUM,), [_total(merge)])
            return
        self._set(node, (_state(role),), [role])

    def _is_changed(self, merge: str, loop: _Loop) -> bool:
        """Whether iterations change a variable of a loop."""
        return merge not in loop.variables or self._reader.origin(loop.variables[merge][1]) != merge

    def _found(self, node: node_def_pb2.NodeDef, loop: _Loop | None, roles: Sequence[_Role]) -> list[_Role]:
        """Returns the roles of a node's outputs.

        Raises:
            _RefusedError: As in `_note`.
        """
        op, is_inner = node.op, loop is not None and self._frames[node.name] != loop.frame
        if op == "Merge":
            return self._merged(node, loop, roles, is_inner)
        if op in ("Identity", "Switch"):
            is_passed = op == "Identity" or roles[1] in (_SAME, _GOES_ON) or roles[0] in (_SAME, _ROW)
            _require(is_passed)
            role = _ROW if op == "Switch" and roles[1] == _ROW else roles[0]
            return [role] * (2 if op == "Switch" else 1)
        if op == "Exit":
            return [_ROW if loop is not None else self._leaving(roles[0])]
        if op == "Enter":  # of an inner loop
            _require(set(roles) <= {_SAME, _ROW})
            return list(roles)
        if op == _BACK:
            _require(self._comes_back(node, loop, roles[0], is_inner))
            return list(roles)
        if op == "LoopCond":
            _require(roles[0] == _GOES_ON or is_inner)
            return list(roles)
        if loop is not None and node.name in loop.predicate and not is_inner:
            return [_GOES_ON]
        if loop is not None and node.name in loop.increments:
            return [_NEXT]
        special = self._of_lists(node, roles) or self._of_sums(node, roles)
        if special is not None:
            return special
        _require(set(roles) <= {_SAME, _ROW} and _is_harmless(node))
        role = _ROW if _ROW in roles else _SAME
        return [role] * propagate_lib.num_outputs(self._graph, node)

    def _merged(self, node: node_def_pb2.NodeDef, loop: _Loop | None, roles: Sequence[_Role],
                is_inner: bool) -> list[_Role]:
        if loop is None or is_inner or node.name not in loop.variables:
            is_of_loop = any(self._graph.node(tensor).op == _BACK for tensor in self._reader.inputs(node))
            _require(set(roles) <= {_SAME, _ROW} and (is_inner or not is_of_loop))
            return [_ROW, _ROW]
        entered = next(role for role, tensor in zip(roles, self._reader.inputs(node))
                       if self._graph.node(tensor).op == "Enter")
        if node.name in loop.counters:
            _require(entered == _SAME)
            return [_INDEX if self._is_forward[loop.frame] else _TURN, _SAME]
        if entered == _EMPTY and self._is_changed(node.name, loop):
            return [_filling(node.name), _SAME]
        return [entered, _SAME]

    def _comes_back(self, node: node_def_pb2.NodeDef, loop: _Loop | None, role: _Role, is_inner: bool) -> bool:
        """Whether what an iteration hands to the next one is what it must be."""
        merge = self._reader.merge_after(node.name)
        if loop is None or merge is None:
            return False
        if is_inner or merge not in loop.variables:
            return role in (_SAME, _ROW)
        if merge in loop.counters:
            return role == _NEXT
        if not self._is_changed(merge, loop):
            return role == self._roles.get(merge, _SAME)
        begun = self._roles.get(merge, _SAME)
        expected = {_filling(merge): _filled(merge), _filled(begun.of): _USED}.get(begun, begun)
        return begun in (_LIST, _total(merge), _filling(merge), _filled(begun.of)) and role == expected

    def _leaving(self, role: _Role) -> _Role:
        """Returns what a variable of a loop is when the loop has ended: that of its Merge, after the last iteration."""
        if role in (_INDEX, _TURN):
            return _COUNT
        if role == _filling(role.of):
            return _filled(role.of)
        if role == _filled(role.of):
            return _USED
        return _LAST if role == _ROW else role

    def _of_lists(self, node: node_def_pb2.NodeDef, roles: Sequence[_Role]) -> list[_Role] | None:
        """Returns the roles of the outputs of an op on lists; None if it is another op, or on other lists."""
        op, first = node.op, roles[0] if roles else _SAME
        if op == "TensorListReserve" and roles[1] == _COUNT and roles[0] in (_SAME, _ROW):
            return [_LIST]
        if first == _LIST:
            if op == "TensorListGetItem" and roles[1] == _INDEX and roles[2] in (_SAME, _ROW):
                return [_ROW]
            if op == "TensorListSetItem" and roles[1] == _INDEX and roles[2] in (_SAME, _ROW):
                return [_LIST]
            if op in (*_ADDS, "ZerosLike") and set(roles) == {_LIST}:
                return [_LIST]
            return {"TensorListLength": [_COUNT], "TensorListElementShape": [_ROW]}.get(op)
        if op == "TensorListPushBack" and first == _filling(first.of):
            _require(roles[1] in (_SAME, _ROW, _INDEX, _COUNT) and first.of not in self._elements)
            self._elements[first.of] = roles[1]
            return [_filled(first.of)]
        if op == "TensorListPopBack" and first == _filled(first.of):
            _require(roles[1] in (_SAME, _ROW) and first.of in self._elements)
            return [_USED, self._elements[first.of]]
        return None

    def _of_sums(self, node: node_def_pb2.NodeDef, roles: Sequence[_Role]) -> list[_Role] | None:
        """Returns the role of the output of an addition to a sum; None for other ops."""
        totals = [role for role in roles if role == _total(role.of)]
        if node.op not in _ADDS or len(totals) != 1 or not set(roles) <= {_SAME, _ROW, totals[0]}:
            return None
        return totals


def _require(condition: bool) -> None:
    if not condition:
        raise _RefusedError


def _state(role: _Role) -> State:
    return WHOLE if role == _SAME else OWN


def _is_harmless(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node only computes outputs from inputs."""
    op = tf_compat.op_def(node.op)
    return op is not None and (not op.is_stateful or node.op in _HARMLESS) and not node.op.startswith("Poseidon")
