"""What tensors are in a loop over rows, and behind it: their roles, and a table from each op to a function of roles.

A rule is a function from a `RoleCase` to the roles of the op's outputs, or to None if the op does with these roles
nothing but what any op does: compute values from values. A rule raises a `RefusedError` where an iteration would read
from others more than the sums to which it adds.

Tests: tests/graphs/test_row_loops.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import enum
import typing

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.row_loops.loop_reader import BACK
from tf_poseidon.graph_passes.partition.row_loops.loop_reader import CountedLoop
from tf_poseidon.graph_passes.partition.row_loops.loop_reader import LoopReader

# Stateful ops that change nothing.
_HARMLESS = (*variables_lib.READS, "Assert")


class RoleKind(enum.Enum):
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


class Role(typing.NamedTuple):
    """What a tensor is in a loop over rows.

    Attributes:
        kind: Its `RoleKind`.
        of: The Merge of the variable whose value it is, where an iteration hands it to the next one: a sum, a list that
            is changed, or a stack.
        element: For stacks that are filled: the role of what each iteration has put on it.
    """

    kind: RoleKind
    of: str = ""
    element: "Role | None" = None


SAME, ROW, INDEX, TURN, NEXT, COUNT, GOES_ON, LIST, FRESH, EMPTY = map(Role, (
    RoleKind.SAME, RoleKind.ROW, RoleKind.INDEX, RoleKind.TURN, RoleKind.NEXT, RoleKind.COUNT, RoleKind.GOES_ON,
    RoleKind.LIST, RoleKind.FRESH, RoleKind.EMPTY))
VALUES = (SAME, ROW)
# What a variable that iterations change must be when it comes back, by what it is when the iteration begins.
_COMES_BACK = {RoleKind.SUM: RoleKind.SUM, RoleKind.LIST: RoleKind.LIST, RoleKind.FILLING: RoleKind.FILLED,
               RoleKind.TAKING: RoleKind.USED}


class RefusedError(Exception):
    """A node makes it impossible that a loop is one over rows."""


def require(condition: bool) -> None:
    """Raises a `RefusedError` unless a condition is met."""
    if not condition:
        raise RefusedError


@dataclasses.dataclass(frozen=True)
class RoleCase:
    """One node, and what its inputs are.

    Attributes:
        node: The NodeDef.
        roles: The roles of the tensors that it reads.
        role_of: A function that returns the role of a tensor that comes before it.
        reader: The `LoopReader` of the graph.
        loop: The loop that it is in, or in a loop inside that one; None outside of loops that may be over rows.
        left: The loop that it leaves, None if it leaves none.
        is_forward: Whether `loop` takes the rows in their order.
    """

    node: node_def_pb2.NodeDef
    roles: Sequence[Role]
    role_of: Callable[[str], Role]
    reader: LoopReader
    loop: CountedLoop | None
    left: CountedLoop | None
    is_forward: bool

    @property
    def is_inner(self) -> bool:
        """Whether the node is in a loop inside its loop."""
        return self.loop is not None and self.reader.frames[self.node.name] != self.loop.frame

    @property
    def first(self) -> Role:
        """The role of the first input."""
        return self.roles[0] if self.roles else SAME


Rule = Callable[[RoleCase], Sequence[Role] | None]


def applied(case: RoleCase) -> Sequence[Role]:
    """Returns the roles of a node's outputs.

    Raises:
        RefusedError: If it cannot be in a loop over rows, or read something from one.
    """
    roles = RULES[case.node.op](case) if case.node.op in RULES else None
    if roles is None:
        require(set(case.roles) <= set(VALUES) and _is_harmless(case.node))  # also the Enter of an inner loop
        return [ROW if ROW in case.roles else SAME] * tensors.num_outputs(case.reader.graph, case.node)
    return roles


def _is_harmless(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node only computes outputs from inputs, which may be variables."""
    op = tf_compat.op_def(node.op)
    if op is None or node.op.startswith("Poseidon") or any(argument.is_ref for argument in op.input_arg):
        return False
    return not op.is_stateful or node.op in _HARMLESS


# ---- control flow -----------------------------------------------------------------------------------


def _passed_on(case: RoleCase) -> Sequence[Role]:
    return case.roles


def _switched(case: RoleCase) -> Sequence[Role]:
    data, predicate = case.roles
    require(predicate in (SAME, GOES_ON) or predicate == ROW and data in VALUES)
    return [ROW if predicate == ROW else data] * 2


def _merged(case: RoleCase) -> Sequence[Role]:
    """Merge of a condition, an inner loop, or a variable of the loop: what that is when an iteration begins."""
    name = case.node.name
    variable = None if case.loop is None or case.is_inner else case.loop.variables.get(name)
    if variable is None:
        is_of_loop = any(case.reader.graph.node(tensor).op == BACK for tensor in case.reader.inputs(case.node))
        require(set(case.roles) <= set(VALUES) and (case.is_inner or not is_of_loop))
        return [ROW, ROW]
    entered = case.role_of(variable.enter)
    if variable.increment:
        require(entered == SAME)
        return [INDEX if case.is_forward else TURN, SAME]
    if variable.is_changed:
        if entered == LIST:
            return [Role(RoleKind.LIST, name), SAME]
        if entered == EMPTY:
            return [Role(RoleKind.FILLING, name), SAME]
        if entered.kind == RoleKind.FILLED:
            return [Role(RoleKind.TAKING, name, entered.element), SAME]
    return [entered, SAME]


def _handed_back(case: RoleCase) -> Sequence[Role]:
    """NextIteration: what an iteration may hand to the next one."""
    role, merge = case.first, case.reader.merge_after(case.node.name)
    if case.loop is None or merge is None:
        raise RefusedError
    if case.is_inner:
        require(role in VALUES)
        return case.roles
    variable, begun = case.loop.variables.get(merge), case.role_of(merge)
    if variable is None:
        raise RefusedError
    if variable.increment:
        require(role == NEXT)
    elif variable.is_changed:
        require(role.of == merge and _COMES_BACK.get(begun.kind) == role.kind)
    else:
        require(role == begun)
    return case.roles


def _left(case: RoleCase) -> Sequence[Role]:
    """Exit: what a variable of a loop is when the loop has ended: that of its Merge, after the last iteration."""
    role = case.first
    if case.left is None:  # an inner loop, whose number of iterations may depend on the row
        require(role in VALUES)
        return [ROW]
    if role in (INDEX, TURN):
        return [COUNT]
    if role.kind == RoleKind.LIST:
        return [LIST]
    if role.kind == RoleKind.FILLING:
        return [Role(RoleKind.FILLED, element=case.role_of(case.left.variables[role.of].comes_back).element)]
    if role.kind == RoleKind.TAKING:
        return [Role(RoleKind.USED)]
    require(role != ROW)  # that of the last row
    return [role]


def _condition(case: RoleCase) -> Sequence[Role]:
    """LoopCond."""
    require(case.is_inner or case.first == GOES_ON)
    return case.roles


def _compared(case: RoleCase) -> Sequence[Role] | None:
    return [GOES_ON] if case.loop is not None and case.node.name in case.loop.predicate else None


# ---- sums and lists ---------------------------------------------------------------------------------


def _is_list(role: Role) -> bool:
    return role.kind in (RoleKind.LIST, RoleKind.FRESH)


def _added(case: RoleCase) -> Sequence[Role] | None:
    """Additions to counts, of lists element by element, and to sums."""
    if case.loop is not None and case.node.name in case.loop.increments:
        return [NEXT]
    if _is_list(case.first):
        lists = [role for role in case.roles if role != FRESH]
        require(all(role.kind == RoleKind.LIST for role in lists) and (case.loop is None or len(lists) < 2))
        return lists[:1] or [FRESH]
    sums = [role for role in case.roles if role.kind == RoleKind.SUM]
    return sums if len(sums) == 1 and set(case.roles) <= {*VALUES, *sums} else None


def _reserved(case: RoleCase) -> Sequence[Role] | None:
    return _made(case) if case.roles[1] == COUNT and case.first in VALUES else None


def _zeros_like(case: RoleCase) -> Sequence[Role] | None:
    return _made(case) if _is_list(case.first) else None


def _made(case: RoleCase) -> Sequence[Role]:
    return [LIST if case.loop is None else FRESH]


def _read_at(case: RoleCase) -> Sequence[Role] | None:
    return [ROW] if _is_at_row(case) else None


def _written_at(case: RoleCase) -> Sequence[Role] | None:
    return [case.first] if _is_at_row(case) else None


def _is_at_row(case: RoleCase) -> bool:
    """Whether an op reads or writes a list of rows, which it may at the iteration's row alone."""
    if _is_list(case.first):
        require(case.roles[1] == INDEX and case.roles[2] in VALUES)
    return _is_list(case.first)


def _of_list(role: Role) -> Rule:
    """Returns the rule of an op that asks a list of rows for something with a role."""
    return lambda case: [role] if _is_list(case.first) else None


# ---- stacks -----------------------------------------------------------------------------------------


def _pushed(case: RoleCase) -> Sequence[Role] | None:
    if case.first.kind != RoleKind.FILLING:
        return None
    require(case.roles[1] in (*VALUES, INDEX, COUNT))
    return [Role(RoleKind.FILLED, case.first.of, case.roles[1])]


def _popped(case: RoleCase) -> Sequence[Role] | None:
    if case.first.kind != RoleKind.TAKING or case.first.element is None:
        return None
    require(case.roles[1] in VALUES)
    return [Role(RoleKind.USED, case.first.of), case.first.element]


RULES: dict[str, Rule] = {
    "Identity": _passed_on,
    "Switch": _switched,
    "Merge": _merged,
    BACK: _handed_back,
    "Exit": _left,
    "LoopCond": _condition,
    **dict.fromkeys(("Less", "LogicalAnd"), _compared),
    **dict.fromkeys(("Add", "AddV2", "AddN"), _added),
    "TensorListReserve": _reserved,
    "ZerosLike": _zeros_like,
    "TensorListGetItem": _read_at,
    "TensorListSetItem": _written_at,
    "TensorListLength": _of_list(COUNT),
    "TensorListElementShape": _of_list(ROW),
    "TensorListPushBack": _pushed,
    "TensorListPopBack": _popped,
}
