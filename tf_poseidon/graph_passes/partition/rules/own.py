"""PoseidonOwn and PoseidonJoin, between which a rank computes from its own rows alone; see `propagate/own_values.py`.

Tests: tests/graphs/test_partition_own.py.
"""

from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.states import OWN
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE


def begun(case: Case) -> Outcome | None:
    """PoseidonOwn: makes rows own; a value that all ranks have is unchanged."""
    if case.attr("joins").s != b"rows":
        return case.all({}, WHOLE, write=_write_same)
    shape = case.shape(0)
    if shape is None or shape and shape[0] is None:
        raise GraphError(f"'{case.node.input[0]}' must be cut into the rows of each rank, but its number of rows is "
                         "unknown, expected a multiple of the batch's; give it a shape that follows from its "
                         "inputs, for example with tf.reshape(x, tf.shape(inputs)).")
    if shape and case_lib.of_rows(shape[0]):
        return case.all({0: Rows(0)}, OWN, write=_write_same)
    return None


def ended(case: Case) -> Outcome | None:
    """PoseidonJoin."""
    if case.states[0] != OWN:
        return None
    by = case.attr("by").s
    if by == b"mean":
        return case.all({0: OWN}, WHOLE, write=_write_mean)
    return case.all({0: OWN}, Rows(0) if by == b"rows" else SUM, write=_write_same)


def _write_same(writer: NodeWriter) -> list[str]:
    return [writer.add("", "Identity", writer.inputs, T=writer.node.attr["T"].type)]


def _write_mean(writer: NodeWriter) -> list[str]:
    """sum(rows of the rank * value) / rows, in double precision, which preserves values that are equal on all ranks."""
    dtype, double = writer.node.attr["T"].type, types_pb2.DT_DOUBLE
    rows, own_rows = writer.numbers_of_rows(double)
    wide = writer.add("wide", "Cast", writer.inputs, SrcT=dtype, DstT=double)
    weighted = writer.add("weighted", "Mul", [wide, own_rows], T=double)
    total = writer.made_whole(weighted, SUM, double)
    mean = writer.add("mean", "RealDiv", [total, rows], T=double)
    return [writer.add("", "Cast", [mean], SrcT=double, DstT=dtype)]


RULES: dict[str, Rule] = {"PoseidonOwn": begun, "PoseidonJoin": ended}
# Ops whose rules also apply to whole inputs.
ALWAYS = frozenset(("PoseidonOwn",))
