"""Ops that parse strings, each of which is a row.

Tests: tests/graphs/test_partition_families.py.
"""

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.states import Rows

_SERIALIZED, _NAMES = 0, 1


def of_strings(case: Case) -> Outcome | None:
    """Makes values of each string of input 0, whose dimensions come first; other inputs are whole."""
    state = case.states[0]
    return case.all({0: state}, state) if isinstance(state, Rows) else None


def examples(case: Case) -> Outcome | None:
    """ParseExampleV2, if all features have a shape: sparse and ragged ones, and sequences, depend on all rows."""
    has_shapes = all(dimension.size >= 0 for shape in case.attr("dense_shapes").list.shape for dimension in shape.dim)
    if case.states[_SERIALIZED] != Rows(0) or case.rank(_NAMES) != 1 or not has_shapes or (
            case.attr("num_sparse").i or case.attr("ragged_value_types").list.type):
        return None
    takes = {_SERIALIZED: Rows(0)}
    names, = case.sizes(_NAMES)
    if case_lib.same_size(names, case.sizes(_SERIALIZED)[0]):
        takes[_NAMES] = Rows(0)
    elif names is None or names.constant != 0:
        return None
    return case.all(takes, Rows(0))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("DecodeCSV", "DecodePaddedRaw"), of_strings),
    "ParseExampleV2": examples,
}
