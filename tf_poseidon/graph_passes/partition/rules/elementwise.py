"""Ops that work element by element, with broadcasting; sums and products of summands among them.

Tests: tests/graphs/test_partition.py.
"""

from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition import case as case_lib
from tf_poseidon.graph_passes.partition.case import Case
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.case import Rule
from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.rules import lists
from tf_poseidon.graph_passes.partition.states import Partial
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

# The types to which sums can be cast before they are complete: without rounding, and without overflow.
# Without half: a sum beyond 65504 is infinite in one process, which decides whether a loss scale is lowered.
_WIDER = {types_pb2.DT_BFLOAT16: (types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE),
          types_pb2.DT_FLOAT: (types_pb2.DT_DOUBLE, types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128),
          types_pb2.DT_DOUBLE: (types_pb2.DT_COMPLEX128,),
          types_pb2.DT_COMPLEX64: (types_pb2.DT_COMPLEX128,)}


def elementwise(case: Case) -> Outcome | None:
    """An input with rows gives rows; other inputs have the same rows, or one element in that dimension."""
    leading = next(iter(sorted(case.rows_inputs(), key=lambda i: -case.elements(case.shape(i)))), None)
    out = case.out_shape()
    if leading is None or out is None or any(case.rank(i) is None for i in range(len(case.inputs))):
        return None
    # Dimensions are aligned at the last one.
    position = case.dimension(leading) - len(case.sizes(leading))
    size = case.sizes(leading)[position]
    if not case_lib.same_size(size, out[position]):
        return None
    takes = {}
    for i in range(len(case.inputs)):
        rank = len(case.sizes(i))
        if rank >= -position and not case.is_one(i, position):
            if not case_lib.same_size(case.sizes(i)[position], size):
                return None
            takes[i] = Rows(rank + position)
    return case.all(takes, Rows(len(out) + position))


def total(case: Case) -> Outcome | None:
    """a + b + ...: a summand if all terms are, or if the others are accumulated by a loop, or zeros.

    Otherwise summands are summed over the ranks before whole terms, such as a regularizer's, are added.
    """
    if case.attr("T").type == types_pb2.DT_VARIANT:
        return lists.added(case)
    partials = [i for i, state in enumerate(case.states) if state == SUM]
    others = [i for i, state in enumerate(case.states) if state == WHOLE]
    if not partials or len(partials) + len(others) < len(case.states):
        return elementwise(case)
    if all(case.accumulates(i) or case.is_zero(i) for i in others):
        return case.all(dict.fromkeys(range(len(case.inputs)), SUM), SUM)
    if len(partials) > 1 and case.node.op == "AddN":
        return case.all(dict.fromkeys(partials, SUM), WHOLE, write=_write_total)
    return None


def _write_total(writer: NodeWriter) -> list[str]:
    """Sums the summands over the ranks, and then adds the others."""
    parts = [t for t, state in zip(writer.inputs, writer.states) if state == SUM]
    whole = [t for t, state in zip(writer.inputs, writer.states) if state == WHOLE]
    dtype = writer.node.attr["T"].type
    summand = writer.add("summand", "AddN", parts, T=dtype, N=len(parts))
    total = writer.made_whole(summand, SUM)
    for i, term in enumerate(whole):
        is_last = i == len(whole) - 1
        total = writer.add("" if is_last else f"sum{i}", "AddV2", [total, term], T=dtype)
    return [total]


def product(case: Case) -> Outcome | None:
    """a * b: a summand if one of them is a summand and the other is whole."""
    return case.linear_in(0, 1) or elementwise(case)


def quotient(case: Case) -> Outcome | None:
    """a / b: a summand if a is, except that quotients of integers are rounded."""
    linear = case.linear_in(0) if case_lib.is_inexact(case.attr("T").type) else None
    return linear or elementwise(case)


def select(case: Case) -> Outcome | None:
    """A condition selects from two tensors; in the first version of the op, it may select whole rows."""
    condition, *values = case.states
    if SUM in values and condition == WHOLE and all(v in (SUM, WHOLE) for v in values):
        shape = case.out_shape()
        if shape is not None and case.shape(1) == case.shape(2) == shape:
            return case.all({1: SUM, 2: SUM}, SUM)
    if case.node.op == "Select" and case.rank(0) == 1 and case.rank(1) != 1:
        out = case.out_shape()
        if Rows(0) in case.states and out and all(
                case.rank(i) and case_lib.same_size(case.sizes(i)[0], out[0]) for i in range(3)):
            return case.all({i: Rows(0) for i in range(3)}, Rows(0))
        return None
    return elementwise(case)


def linear(case: Case) -> Outcome | None:
    """A linear op of one input: a summand if that is."""
    return case.linear_in(0) or elementwise(case)


def passed_on(case: Case) -> Outcome:
    """Outputs are input 0, whatever its state; other inputs are whole."""
    return case.all({0: case.states[0]}, case.states[0])


def each_passed_on(case: Case) -> Outcome:
    """IdentityN."""
    return Outcome(case.states, case.states)


def cast(case: Case) -> Outcome | None:
    """A Cast that rounds is not linear, nor is one from half: sums in half overflow."""
    source, target = case.attr("SrcT").type, case.attr("DstT").type
    if case.states[0] == SUM and target != source and target not in _WIDER.get(source, ()):
        return None
    return linear(case)


def bitcast(case: Case) -> Outcome | None:
    """A Bitcast to a smaller type adds a dimension at the end; to a larger type, it removes one."""
    state, shape, out = case.states[0], case.shape(0), case.out_shape()
    if not isinstance(state, Rows) or shape is None or out is None or state.dimension >= len(out):
        return None
    if not case_lib.same_size(shape[state.dimension], out[state.dimension]):
        return None
    return case.all({0: state}, state)


def quantize_and_dequantize(case: Case) -> Outcome | None:
    """Elementwise if the range is given; otherwise it depends on all values."""
    return elementwise(case) if case.attr("range_given").b and case.attr("axis").i == -1 else None


def own_value(case: Case) -> Outcome:
    """ZerosLike, OnesLike depend on the shape alone: for a summand, the output is whole."""
    if isinstance(case.states[0], Partial):
        return Outcome((None,), (WHOLE,))
    return passed_on(case)


def matching_rows(case: Case) -> Outcome | None:
    """Two inputs and all outputs have their rows first, as in losses per row."""
    if Rows(0) not in case.states[:2]:
        return None
    size = (case.shape(case.states.index(Rows(0))) or (None,))[0]
    for i in (0, 1):
        if not case.rank(i) or not case_lib.same_size(case.sizes(i)[0], size):
            return None
    return case.all({0: Rows(0), 1: Rows(0)}, Rows(0))


UNARY = """
Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e Ceil ClipByValue ComplexAbs
Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor Inv Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log
Log1p LogicalNot Ndtri Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square
Tan Tanh CheckNumerics FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars Bucketize AsString StringToNumber
StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringLower StringUpper StringStrip StringLength
StaticRegexFullMatch StaticRegexReplace RegexFullMatch RegexReplace UnicodeScript UnicodeTranscode EncodeBase64
DecodeBase64 PopulationCount
""".split()
BINARY = """
ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Equal FloorDiv FloorMod Greater GreaterEqual
Igamma Igammac IgammaGradA LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod MulNoNan NextAfter
NotEqual Polygamma Pow RightShift SquaredDifference TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta Betainc
EluGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad
SqrtGrad TanhGrad InvGrad FakeQuantWithMinMaxArgsGradient StringJoin Substr
""".split()

RULES: dict[str, Rule] = {
    **dict.fromkeys(UNARY, elementwise),
    **dict.fromkeys(BINARY, elementwise),
    **dict.fromkeys(("Add", "AddV2", "Sub", "AddN"), total),
    **dict.fromkeys(("Mul",), product),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan"), quotient),
    **dict.fromkeys(("Neg", "Real", "Imag", "Conj"), linear),
    **dict.fromkeys(("Identity", "StopGradient", "PreventGradient", "Snapshot", "DeepCopy"), passed_on),
    **dict.fromkeys(("Select", "SelectV2"), select),
    "IdentityN": each_passed_on,
    "Cast": cast,
    "Bitcast": bitcast,
    "QuantizeAndDequantizeV4": quantize_and_dequantize,
    **dict.fromkeys(("ZerosLike", "OnesLike"), own_value),
    **dict.fromkeys(("SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2"), matching_rows),
}
