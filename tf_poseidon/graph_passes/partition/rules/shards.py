"""Ops on shards: what a rank computes of a tensor whose elements it owns in part, as in the update of a variable.

A shard is flat, and has no rows; so all ops have their rules here, in one place. Those that work element by element
take the same elements of their other inputs, and reductions over all elements give a summand of each rank.

Where one rank owns all elements, it can run any op. The graph is the same on all ranks. What enters the owner's part of
it passes a Switch, so on other ranks its ops are dead, as those of a branch that is not taken: they do not run. What
leaves it passes a Merge, which gives an empty vector there. Variables, and the branches and loops of the program, are
outside: they get what has left, on all ranks.

Tests: tests/graphs/test_partition_shards.py.
"""

import functools
import math

import numpy as np
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import is_inexact
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules import control
from tf_poseidon.graph_passes.partition.rules import elementwise
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Owned
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import SHARDED
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_REDUCTIONS = ("Sum", "Mean", "L2Loss", "All", "Any")
# Ops whose outputs are their first input, or depend on its shape alone; others are whole.
_PASSED_ON = frozenset((*control.RULES, "Identity", "StopGradient", "PreventGradient", "Snapshot", "DeepCopy",
                        "ZerosLike", "OnesLike"))
_ELEMENTWISE = frozenset((*elementwise.UNARY, *elementwise.BINARY, "Add", "AddV2", "Sub", "AddN", "Mul", "RealDiv",
                          "Div", "DivNoNan", "Neg", "Cast", "Select", "SelectV2"))


def applied(case: Case) -> Outcome | None:
    """Applies the rule of an op of which some inputs are shards, or owned."""
    op, states = case.node.op, tuple(map(live, case.states))
    if op == "IdentityN":
        return Outcome(states, states)
    layouts = {state for state in states if isinstance(state, Shard)}
    if any(layout.owned for layout in layouts):
        return _owned(case)
    if op in _PASSED_ON:
        return _passed_on(case)
    if len(layouts) > 1:
        return None
    shard, = layouts
    if op in _ELEMENTWISE:
        return _elementwise(case, shard)
    return _reduced(case) if op in _REDUCTIONS and is_of_all(case) else None


def is_elementwise(op: str) -> bool:
    """Whether an op gives a shard of its output for shards of its inputs, if they have the output's shape."""
    return op in _ELEMENTWISE or op in _PASSED_ON


def is_of_all(case: Case) -> bool:
    """Whether an op reduces all elements of its first input."""
    rank = case.rank(0)
    if case.node.op == "L2Loss" or rank == 0:
        return case.node.op in _REDUCTIONS
    axes = case.constant(1) if case.node.op in _REDUCTIONS else None
    return axes is not None and rank is not None and {int(axis) % rank for axis in axes.flatten()} == set(range(rank))


def can_run_alone(case: Case) -> bool:
    """Whether one rank can run an op that the others do not, which nothing but its outputs says."""
    op = tf_compat.op_def(case.node.op)
    types = tensors.types_of_outputs(case.node)
    return (op is not None and not op.is_stateful and case.node.op not in frames_lib.CONTROL_FLOW
            and not case.is_waited_for and SHARDED.issuperset(types)
            and all(row_size.is_constant(case.shape_of(output)) for output in case.outputs))


def live(state: State) -> State:
    """Returns the state in which all ranks have a tensor: of one that is owned, the shard."""
    return state.shard if isinstance(state, Owned) else state


def _owned(case: Case) -> Outcome | None:
    """Any op without a state of its own runs on the owner alone."""
    layouts = {state.layout for state in case.states if isinstance(state, (Owned, Shard))}
    if len(layouts) > 1:
        return None
    owned = Owned(layouts.pop())
    if case.node.op in ("Switch", "Enter", "Exit"):
        return case.all({0: owned.shard}, owned.shard) if isinstance(case.states[0], (Owned, Shard)) else None
    if not can_run_alone(case):
        return None
    takes = (owned if isinstance(state, (Owned, Shard)) or state == SUM else WHOLE for state in case.states)
    return Outcome(tuple(takes), (owned,) * case.num_outputs)


def _passed_on(case: Case) -> Outcome | None:
    if not isinstance(case.states[0], Shard) or any(isinstance(state, Shard) for state in case.states[1:]):
        return None
    return case.all({0: case.states[0]}, case.states[0])


def _elementwise(case: Case, shard: Shard) -> Outcome | None:
    """Inputs of the output's shape are shards; others must be single elements, which are whole."""
    out = case.out_shape()
    if not row_size.is_constant(out):
        return None
    single = [i for i in range(len(case.inputs)) if case.shape(i) != out]
    for i in single:
        shape = case.shape(i)
        if not row_size.is_known(shape) or row_size.product(shape).constant != 1:
            return None
    takes = {i: shard for i in range(len(case.inputs)) if i not in single}
    has_dimensions = any(case.sizes(i) for i in single)
    return case.all(takes, shard, write=_write_with_scalars if has_dimensions else None)


def _write_with_scalars(writer: NodeWriter) -> list[str]:
    """Single elements lose their dimensions, which a flat shard does not have."""
    shape = writer.constant("no_dimensions", np.zeros(0, np.int32), writer.inputs[0])
    inputs = [tensor if isinstance(state, Shard) else writer.add(
        f"single{i}", "Reshape", [tensor, shape], T=writer.type_of_input(i), Tshape=types_pb2.DT_INT32)
        for i, (tensor, state) in enumerate(zip(writer.inputs, writer.states))]
    return [writer.same("of_shard", inputs)]


def _reduced(case: Case) -> Outcome | None:
    """Reductions of all elements: each rank has a summand, whether or not it has rows."""
    op, shape = case.node.op, case.shape(0)
    takes = {0: case.states[0]}
    if op == "L2Loss":
        return case.all(takes, HELD)
    if not row_size.is_known(shape) or op == "Mean" and not is_inexact(case.attr("T").type):
        return None
    rank = len(shape) if case.attr("keep_dims").b else 0
    if op in ("All", "Any"):
        return case.all(takes, WHOLE, write=functools.partial(_write_all_or_any, rank=rank))
    elements = math.prod(size.values[0] for size in shape) if op == "Mean" else 1
    return case.all(takes, HELD, write=functools.partial(_write_sum, rank=rank, elements=elements))


def _write_sum(writer: NodeWriter, rank: int, elements: int) -> list[str]:
    """The sum of a rank's elements, divided by the number of all of them for a mean."""
    dtype = writer.node.attr["T"].type
    total = _added(writer, writer.inputs[0], dtype)
    if writer.node.op == "Mean":
        count = writer.constant("count", np.array(elements, np.float64), total)
        divisor = writer.add("divisor", "Cast", [count], SrcT=types_pb2.DT_DOUBLE, DstT=dtype)
        total = writer.add("mean", "RealDiv", [total, divisor], T=dtype)
    return [_shaped(writer, total, dtype, rank)]


def _write_all_or_any(writer: NodeWriter, rank: int) -> list[str]:
    """Counts the elements that decide, over all ranks: false ones for All, true ones for Any."""
    is_all = writer.node.op == "All"
    deciding = writer.add("not", "LogicalNot", writer.inputs[:1]) if is_all else writer.inputs[0]
    ones = writer.add("ones", "Cast", [deciding], SrcT=types_pb2.DT_BOOL, DstT=types_pb2.DT_INT64)
    count = writer.added_up("count", _added(writer, ones, types_pb2.DT_INT64), types_pb2.DT_INT64, (), HELD)
    zero = writer.constant("zero", np.array(0, np.int64), count)
    decided = writer.add("decided", "Equal" if is_all else "NotEqual", [count, zero], T=types_pb2.DT_INT64)
    return [_shaped(writer, decided, types_pb2.DT_BOOL, rank)]


def _added(writer: NodeWriter, shard: str, dtype: int) -> str:
    """The sum of the elements of a shard, a scalar."""
    axis = writer.constant("axis", np.zeros(1, np.int32), shard)
    return writer.add("of_shard", "Sum", [shard, axis], T=dtype, Tidx=types_pb2.DT_INT32, keep_dims=False)


def _shaped(writer: NodeWriter, scalar: str, dtype: int, rank: int) -> str:
    """Gives a scalar the dimensions of the output, each of size 1."""
    shape = writer.constant("shape", np.ones(rank, np.int32), scalar)
    return writer.add("", "Reshape", [scalar, shape], T=dtype, Tshape=types_pb2.DT_INT32)
