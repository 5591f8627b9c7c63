"""Products of tensors that are summed over common dimensions: MatMul, BatchMatMul, Einsum.

Tests: tests/graphs/test_partition.py.
"""

from collections.abc import Sequence

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM

# A label; dimensions that are multiplied with each other share one.
Label = str | int | tuple[int, int]


def contraction(case: Case, terms: Sequence[Sequence[Label]], out: Sequence[Label]) -> Outcome | None:
    """Contracts inputs with labelled dimensions: those whose label the output does not have are summed over.

    Rows with a label of the output stay rows. With another label they give summands, as in the gradient of a layer, a
    product over rows.

    Args:
        case: The `Case`.
        terms: The labels of each input's dimensions.
        out: The labels of the output's dimensions.
    """
    if any(case.rank(i) is None for i in range(len(case.inputs))):
        return None
    if SUM in case.states:
        return case.linear_in(*range(len(case.inputs)))
    # The largest input keeps its rows; rows of others may be gathered.
    for leading in sorted(case.rows_inputs(), key=lambda i: -case.elements(case.shape(i))):
        label = terms[leading][case.dimension(leading)]
        size, takes = case.sizes(leading)[case.dimension(leading)], {}
        for i, term in enumerate(terms):
            if label in term:
                if term.count(label) > 1 or not case_lib.same_size(case.sizes(i)[term.index(label)], size):
                    return None
                takes[i] = Rows(term.index(label))
        if out.count(label) > 1:
            return None
        return case.all(takes, Rows(out.index(label)) if label in out else SUM)
    return None


def matmul(case: Case) -> Outcome | None:
    first = "km" if case.attr("transpose_a").b else "mk"
    second = "nk" if case.attr("transpose_b").b else "kn"
    return contraction(case, (first, second), "mn")


def batch_matmul(case: Case) -> Outcome | None:
    """[..., m, k] times [..., k, n]; the other dimensions are broadcast."""
    if any(case.rank(i) is None for i in (0, 1)):
        return None
    ranks = [len(case.sizes(i)) for i in (0, 1)]
    first = ("k", "m") if case.attr("adj_x").b else ("m", "k")
    second = ("n", "k") if case.attr("adj_y").b else ("k", "n")
    # A dimension of size 1 has its own label: it is repeated.
    terms = [[*(_label(case, i, d) for d in range(rank - 2)), *last]
             for i, (rank, last) in enumerate(zip(ranks, (first, second)))]
    out = [*range(2 - max(ranks), 0), "m", "n"]
    return contraction(case, terms, out)


def _label(case: Case, i: int, dimension: int) -> Label:
    """Returns a label for a dimension before the last two: its number from the end, or a unique one."""
    if case.is_one(i, dimension):
        return (i, dimension)
    return dimension + 2 - len(case.sizes(i))


def einsum(case: Case) -> Outcome | None:
    equation = case.attr("equation").s.decode().replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(case.inputs) or any(case.rank(i) is None for i in range(len(terms))):
        return None
    terms = [_with_ellipsis(term, len(case.sizes(i))) for i, term in enumerate(terms)]
    # The dimensions of "..." are broadcast.
    terms = [[(i, label) if isinstance(label, int) and case.is_one(i, d) else label
              for d, label in enumerate(term)] for i, term in enumerate(terms)]
    shape = case.out_shape()
    return None if shape is None else contraction(case, terms, _with_ellipsis(out, len(shape)))


def _with_ellipsis(term: str, rank: int) -> list[Label]:
    """Returns the labels of a term, with numbers from the end for the dimensions of "..."."""
    leading, ellipsis, after = term.partition("...")
    hidden = rank - len(leading) - len(after)
    return [*leading, *(range(-hidden, 0) if ellipsis else ()), *after]


RULES: dict[str, Rule] = {
    "MatMul": matmul,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), batch_matmul),
    "Einsum": einsum,
}
DIVIDING = frozenset(RULES)
