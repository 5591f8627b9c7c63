"""Ops that do with columns what they do with rows: element by element, along other dimensions, and in products.

A sum over columns, as in the gradient of a layer's input, is a summand of each rank. Of one with rows, each rank needs
its own rows alone.

Tests: tests/graphs/test_partition_columns.py.
"""

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules import contractions
from tf_poseidon.graph_passes.partition.rules import control
from tf_poseidon.graph_passes.partition.rules import elementwise
from tf_poseidon.graph_passes.partition.rules import reductions
from tf_poseidon.graph_passes.partition.rules import shapes
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import HELD
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM


def like_rows(rule: Rule) -> Rule:
    """Returns the rule for columns of an op, given its rule for rows; none where that depends on their number."""
    def rule_of_columns(case: Case) -> Outcome | None:
        outcome = rule(case.with_states([
            Rows(state.dimension) if isinstance(state, Columns) else state for state in case.states], None, None))
        if outcome is None or outcome.local or outcome.checks or outcome.wishes or outcome.write:
            return None
        takes = tuple(None if state is None else _of_columns(state) for state in outcome.takes)
        if SUM not in outcome.gives:
            return Outcome(takes, tuple(map(_of_columns, outcome.gives)))
        return summed(case, takes)

    return rule_of_columns


def _of_columns(state: State) -> State:
    return Columns(state.dimension) if isinstance(state, Rows) else state


def summed(case: Case, takes: tuple[State | None, ...]) -> Outcome:
    """Returns how an op runs whose output is a sum over the columns that it takes."""
    out = case.out_shape()
    if out and case_lib.of_rows(out[0]):
        return Outcome(takes, (Rows(0),), write=_write_sum_of_rows)
    return Outcome(takes, (HELD,))


def _write_sum_of_rows(writer: NodeWriter) -> list[str]:
    return [writer.own_rows_of_sum(writer.same("summand"))]


RULES: dict[str, Rule] = {
    op: like_rows(rule) for op, rule in {
        **elementwise.RULES, **control.RULES, **contractions.RULES,
        **{op: reductions.RULES[op] for op in (
            "Softmax", "LogSoftmax", "Cumsum", "Cumprod", "CumulativeLogsumexp", "ArgMax", "ArgMin", "TopKV2")},
        **{op: shapes.RULES[op] for op in ("Transpose", "Pack", "Unpack")},
    }.items() if op not in ("IdentityN", "SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2", "ZerosLike",
                            "OnesLike")}
