"""Small graphs for the rules of elementwise ops, reductions, contractions, shapes and control flow: a table.

A table of cases, `CASES`, is a list of `partition_table.Case`, a line each where possible:

    Case("Tanh TanhGrad", tf.tanh, [of(K, 3)], "rows(0)")

These are the ops that the case is about; a function from its inputs to its output (or outputs); its inputs; and
the state that each of these ops must give its first output, "rows(1)", "whole", "partial(sum)", so that a rule
that falls back to whole inputs is noticed. Where ops give different states, a dict from op to state; where several
nodes of an op do, all of the states. An op is looked up in the case itself and, if it is not there, in its gradient.

`of(K, 3)` is an input with rows in dimension 0, `of(3, K)` in dimension 1, `of(3)` is whole, T is a size that is
unknown when graphs are built, and `summed(3)` is an input of [K, 3] that is summed over its rows, so the case gets a
summand. Values are integers from -3 to 3, of type float64; `dtype`, `low`, `high` and `make` change that. All float
outputs are compared, and so is the gradient of a weighted sum of the outputs, or of their squares, for every float
input; these gradients test the gradient ops. `fewest=1` marks cases that one process cannot compute without rows. In
"rows(0)x2", two blocks of rows follow each other.
"""

import inspect

import numpy as np
from partition_table import Case
from partition_table import K
from partition_table import of
from partition_table import summed
from partition_table import T
import tensorflow as tf

SUM = "partial(sum)"


def op(name, **attributes):
    """Returns a function that applies an op to its inputs."""
    function = getattr(tf.raw_ops, name)
    names = list(inspect.signature(function).parameters)
    return lambda *inputs: function(**dict(zip(names, inputs)), **attributes)


def _fractions(rng, shape):
    return rng.uniform(-0.9, 0.9, shape)


def _shares(rng, shape):
    return rng.uniform(0.1, 0.9, shape)


def _positive(rng, shape):
    return rng.uniform(0.1, 3, shape)


def _above_one(rng, shape):
    return rng.uniform(1.1, 3, shape)


def _matrices(rng, shape):
    """Symmetric matrices, far from singular."""
    values = rng.uniform(-1, 1, shape)
    return values + np.swapaxes(values, -1, -2) + 4 * np.eye(shape[-1])


def _triangles(rng, shape):
    return np.tril(rng.uniform(-1, 1, shape)) + 3 * np.eye(shape[-1])


def _complex(rng, shape):
    return rng.integers(-3, 4, shape) + 1j * rng.integers(-3, 4, shape)


def _probabilities(rng, shape):
    values = rng.uniform(0.1, 1, shape)
    return values / values.sum(-1, keepdims=True)


def _spread(rng, shape):
    """Different values."""
    return rng.permutation(int(np.prod(shape))).reshape(shape)


def bools(*shape):
    return of(*shape, dtype="bool", low=0, high=2)


def ints(*shape, dtype="int32", **options):
    return of(*shape, dtype=dtype, **options)


def texts(*shape):
    return of(*shape, dtype="object", low=0)


def _hash(x):
    """Numbers, which can be gathered, in place of strings."""
    return tf.strings.to_hash_bucket_fast(x, 997)


def _unary():
    """One case for each op of one input, with rows in dimension 0 or 1."""
    domains = {_fractions: "Acos Asin Atanh Erfinv".split(), _shares: ["Ndtri"], _above_one: ["Acosh"],
               _positive: "Digamma Inv Reciprocal Lgamma Log Log1p Rsqrt Sqrt".split()}
    gradients = {"Elu": "EluGrad", "LeakyRelu": "LeakyReluGrad", "Relu": "ReluGrad", "Relu6": "Relu6Grad",
                 "Rsqrt": "RsqrtGrad", "Selu": "SeluGrad", "Sigmoid": "SigmoidGrad",
                 "Softsign": "SoftsignGrad", "Sqrt": "SqrtGrad", "Tanh": "TanhGrad", "Inv": "ReciprocalGrad",
                 "Reciprocal": "ReciprocalGrad"}
    names = """
        Abs Acos Acosh Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e Ceil Cos Cosh Digamma Elu Erf Erfc
        Erfinv Exp Expm1 Floor Inv IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p Ndtri Reciprocal Relu Relu6
        Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square Tan Tanh Neg Identity StopGradient
        PreventGradient Snapshot DeepCopy ZerosLike OnesLike
        """.split()
    for i, name in enumerate(names):
        make = next((make for make, of_it in domains.items() if name in of_it), None)
        shape, state = ((K, 3), "rows(0)") if i % 2 else ((3, K, 2), "rows(1)")
        yield Case(f"{name} {gradients.get(name, '')}", op(name), [of(*shape, make=make)], state)


def _loop(x, w):
    """Three iterations of a layer that reads x again, with its sum of squares."""
    return tf.while_loop(lambda t, h, total: t < 3,
                         lambda t, h, total: (t + 1, h @ w - x, total + tf.reduce_sum(h * h)),
                         (0, x, tf.constant(0.0, tf.float64)))[1:]


def _loop_of_version_1(x, w):
    """The same, without passing loop invariants from one iteration to the next."""
    tf.compat.v1.disable_control_flow_v2()
    try:
        return _loop(x, w)
    finally:
        tf.compat.v1.enable_control_flow_v2()


def _asserted(x):
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(tf.abs(x) < 9), [x])]):
        return tf.identity(x)


def _drawn(x):
    """Random numbers of the shape of x, which all ranks draw whole."""
    return tf.cast(tf.random.stateless_uniform(tf.shape(x), (1, 2), -3, 4, tf.int32), x.dtype)


def _in_a_loop_of_its_own(x, w):
    """Three products of reversed rows, which are not gathered in each iteration."""
    return tf.while_loop(lambda t, h: t < 3, lambda t, h: (t + 1, tf.reverse(h @ w, [0])),
                         (0, tf.reverse(x, [0])))[1]


def _recurrent(x, w):
    """Three steps of a recurrent layer over noise."""
    noise = tf.stack([_drawn(x), _drawn(2 * x), _drawn(-x)])
    return tf.while_loop(lambda t, h, total: t < 3,
                         lambda t, h, total: (t + 1, tf.tanh((h + noise[t]) @ w), total + tf.reduce_sum(h * h)),
                         (0, tf.zeros_like(noise[0]), tf.constant(0.0, tf.float64)))[1:]


ELEMENTWISE = [
    *_unary(),
    Case("ComplexAbs Complex", lambda x, y: tf.abs(tf.complex(x, y)), [of(K, 3, low=1), of(K, 3, low=1)], "rows(0)"),
    Case("Angle", lambda x, y: tf.math.angle(tf.complex(x, y)), [of(K, 3, low=1), of(K, 3, low=1)], "rows(0)"),
    Case("Real Imag Conj", lambda x: [tf.math.real(x), tf.math.imag(x), tf.math.conj(x)],
         [of(K, 3, dtype="complex128", make=_complex)], "rows(0)"),
    Case("Real Imag Conj", lambda x: [tf.math.real(x), tf.math.imag(x), tf.math.conj(x)],
         [summed(3, dtype="complex128", make=_complex)], SUM),
    Case("Bitcast", lambda x: tf.bitcast(x, tf.int64), [of(K, 3)], "rows(0)"),
    Case("Bitcast", lambda x: tf.bitcast(x, tf.uint8), [ints(2, K)], "rows(1)"),
    Case("Bitcast", lambda x: tf.bitcast(x, tf.int32), [ints(K, 4, dtype="uint8", low=0)], "rows(0)"),
    Case("ClipByValue", op("ClipByValue"), [of(K, 3), of(low=-1, high=0), of(low=1, high=2)], "rows(0)"),
    Case("ClipByValue", op("ClipByValue"), [of(2, K), of(2, K, low=-2, high=0), of(2, K, low=0)], "rows(1)"),
    Case("ClipByValue", op("ClipByValue"), [summed(3), of(low=-1, high=0), of(low=1, high=2)], "whole"),
    Case("Invert PopulationCount", lambda x: tf.raw_ops.PopulationCount(x=tf.bitwise.invert(x)), [ints(K, 3)],
         "rows(0)"),
    Case("LogicalNot", tf.logical_not, [bools(K, 3)], "rows(0)"),
    Case("CheckNumerics", op("CheckNumerics", message="numbers"), [of(2, K)], "rows(1)"),
    Case("FakeQuantWithMinMaxArgs FakeQuantWithMinMaxArgsGradient", op("FakeQuantWithMinMaxArgs"),
         [of(K, 3, dtype="float32")], "rows(0)", tolerance=1e-6),
    Case("FakeQuantWithMinMaxVars", op("FakeQuantWithMinMaxVars"),
         [of(K, 3, dtype="float32"), of(dtype="float32", low=-2, high=-1), of(dtype="float32", low=2, high=3)],
         "rows(0)", tolerance=1e-6),
    Case("QuantizeAndDequantizeV4", op("QuantizeAndDequantizeV4", range_given=True),
         [of(K, 3), of(low=-2, high=-1), of(low=2, high=3)], "rows(0)"),
    Case("QuantizeAndDequantizeV4", op("QuantizeAndDequantizeV4", range_given=False),
         [of(K, 3), of(low=-2, high=-1), of(low=2, high=3)], "whole", fewest=1),
    Case("Bucketize", op("Bucketize", boundaries=[-1.0, 2.0]), [of(K, 3)], "rows(0)"),
    Case("AsString StringToNumber StringLength StringLower StringUpper StringStrip StringToHashBucketFast",
         lambda x: [tf.strings.to_number(tf.as_string(x)), tf.strings.length(tf.as_string(x)),
                    *(tf.strings.to_hash_bucket_fast(f(tf.as_string(x) + "Aa "), 97)
                      for f in (tf.strings.lower, tf.strings.upper, tf.strings.strip))], [ints(K, 3)], "rows(0)"),
    Case("StringLower", lambda x: tf.strings.length(tf.strings.lower(x)), [texts(K)], "rows(0)"),
    Case("StringToHashBucketStrong StringToHashBucket", lambda x: [
        tf.strings.to_hash_bucket_strong(x, 97, [1, 2]),
        tf.raw_ops.StringToHashBucket(string_tensor=x, num_buckets=97)], [texts(2, K)], "rows(1)"),
    Case("StaticRegexFullMatch RegexFullMatch StaticRegexReplace RegexReplace", lambda x: [
        tf.strings.regex_full_match(x, "[1-3]"),
        tf.raw_ops.RegexFullMatch(input=x, pattern=tf.strings.join(["[1-", "2]"])),
        _hash(tf.strings.regex_replace(x, "1", "aa")),
        _hash(tf.raw_ops.RegexReplace(input=x, pattern="2", rewrite="bb"))], [texts(K, 2)], "rows(0)"),
    Case("UnicodeTranscode EncodeBase64 DecodeBase64", lambda x: [
        _hash(tf.strings.unicode_transcode(x, "UTF-8", "UTF-16-BE")), _hash(tf.io.encode_base64(x)),
        _hash(tf.io.decode_base64(x + "abc"))], [texts(K)], "rows(0)"),
    Case("UnicodeScript", lambda x: tf.strings.unicode_script(x + 70), [ints(K, 3)], "rows(0)"),
    Case("StringJoin", lambda x, y: _hash(tf.strings.join([x, "b", y, x], "-")), [texts(K, 2), texts(K, 2)], "rows(0)"),
    Case("Substr", lambda x, at: _hash(tf.strings.substr(x + "abc", at, at)), [texts(K, 2), ints(K, 2, low=0)],
         "rows(0)"),
    Case("Substr", lambda x: _hash(tf.strings.substr(x + "abc", 1, 2)), [texts(K)], "rows(0)"),
    # Two inputs: the same rows; broadcast in either; whole; rows of whole ones.
    *(Case(name, op(name), [of(K, 3), of(K, 3)], "rows(0)") for name in (
        "ApproximateEqual", "Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "Maximum", "Minimum", "NotEqual",
        "SquaredDifference", "NextAfter", "Atan2", "Add", "AddV2", "Sub", "Mul", "MulNoNan", "DivNoNan")),
    *(Case(name, op(name), [of(K, 3), of(K, 1)], "rows(0)") for name in (
        "Equal", "Maximum", "Minimum", "SquaredDifference", "Add", "AddV2", "Sub", "Mul")),
    *(Case(name, op(name), [of(1, 3), of(K, 3)], "rows(0)") for name in (
        "Maximum", "SquaredDifference", "AddV2", "Sub", "Mul")),
    *(Case(name, op(name), [of(K), of(3, 2, 1)], "rows(2)") for name in ("Maximum", "AddV2", "Sub", "Mul")),
    *(Case(name, op(name), [of(K, 3, low=1), of(K, 3, make=_positive)], "rows(0)") for name in (
        "Div", "RealDiv", "Pow", "Mod", "FloorMod", "FloorDiv", "TruncateMod", "Xdivy", "Xlog1py", "Xlogy", "Igamma",
        "Igammac", "IgammaGradA", "DivNoNan")),
    *(Case(name, op(name), [of(3), of(K, 3, make=_positive)], "rows(0)") for name in (
        "RealDiv", "Xdivy", "Xlogy", "DivNoNan")),
    *(Case(name, op(name), [ints(3, K), ints(K, low=1)], "rows(1)") for name in (
        "Div", "FloorDiv", "FloorMod", "TruncateDiv", "TruncateMod", "BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    *(Case(name, op(name), [ints(K, 3, low=0), ints(K, 1, low=0)], "rows(0)") for name in ("LeftShift", "RightShift")),
    *(Case(name, op(name), [bools(K, 3), bools(3)], "rows(0)") for name in ("LogicalAnd", "LogicalOr")),
    Case("Polygamma", op("Polygamma"), [of(K, low=1), of(K, make=_positive)], "rows(0)"),
    Case("Zeta", op("Zeta"), [of(K, make=_above_one), of(K, make=_positive)], "rows(0)"),
    Case("Betainc", op("Betainc"), [of(K, 2, make=_positive), of(K, 2, make=_positive),
                                    of(K, 2, make=_shares)], "rows(0)"),
    *(Case(name, op(name), [of(K, 2), of(K, 2)], "rows(0)") for name in ("InvGrad", "SoftplusGrad")),
    Case("Mul Reshape", lambda x, y: tf.reshape(x, [-1]) * tf.reshape(y, [-1]), [of(K, 3), of(K, 3)], "rows(0)"),
    Case("Mul", lambda x, y: x * tf.transpose(y), [of(K, 1), of(K, 1)], "rows(0)", fewest=1),
    Case("Mul", lambda x, y: tf.tile(y, tf.concat([tf.shape(x)[:1], [1]], 0)) * x, [of(K, 3), of(1, 3)], "rows(0)"),
    Case("AddV2", lambda x, y: tf.raw_ops.AddV2(x=x, y=y), [of(K, 3), summed(3)], "rows(0)"),
    # Summands.
    *(Case(name, op(name), [summed(3), summed(3)], SUM) for name in ("Add", "AddV2", "Sub")),
    *(Case(name, op(name), [summed(2, 3), summed(3)], SUM) for name in ("AddV2", "Sub")),
    *(Case(name, op(name), [summed(3), summed(2, 1)], SUM) for name in ("AddV2", "Sub")),
    *(Case(name, op(name), [summed(3), of(3)], "whole") for name in ("AddV2", "Sub")),
    *(Case(name, op(name), [of(3), summed(3)], "whole") for name in ("AddV2", "Sub")),
    Case("AddN", lambda *xs: tf.add_n(xs), [summed(3), summed(3), summed(3)], SUM),
    Case("AddN", lambda *xs: tf.add_n(xs), [summed(3), of(3), summed(3)], "whole"),
    Case("AddN", lambda *xs: tf.add_n(xs), [of(K, 2), of(K, 2), of(K, 2)], "rows(0)"),
    Case("AddV2", op("AddV2"), [summed(3, reduce="max"), summed(3, reduce="max")], "whole"),
    Case("Neg", tf.negative, [summed(3)], SUM),
    Case("Neg", tf.negative, [summed(3, reduce="max")], "whole"),
    Case("Mul", op("Mul"), [summed(3), of(3)], SUM),
    Case("Mul", op("Mul"), [of(), summed(2, 3)], SUM),
    Case("Mul", op("Mul"), [summed(), of(3)], SUM),
    Case("Mul", op("Mul"), [summed(3), summed(3)], "whole"),
    Case("Mul", lambda x: x * x, [summed(3)], "whole"),
    Case("Mul", op("Mul"), [ints(K, 3), summed(dtype="int32")], "rows(0)"),
    Case("Mul", op("Mul"), [summed(3, reduce="max"), of(3)], "whole"),
    Case("Square", tf.square, [summed(3)], "whole"),
    *(Case(name, op(name), [summed(3), of(3, low=1)], SUM) for name in ("RealDiv", "Div", "DivNoNan")),
    *(Case(name, op(name), [of(3), summed(3, low=1)], "whole") for name in ("RealDiv", "Div", "DivNoNan")),
    *(Case(name, op(name), [summed(3, dtype="int32"), ints(3, low=2)], "whole") for name in (
        "Div", "FloorDiv", "TruncateDiv", "FloorMod")),
    Case("RealDiv", op("RealDiv"), [summed(3, low=1), summed(3, low=1)], "whole", fewest=1),
    *(Case(name, op(name), [summed(3), of(3)], "whole") for name in ("Maximum", "Less", "SquaredDifference")),
    Case("Cast", lambda x: tf.cast(x, tf.float32), [of(K, 3)], "rows(0)"),
    Case("Cast", lambda x: tf.cast(x, tf.int32), [of(2, K, make=_positive)], "rows(1)"),
    Case("Cast", lambda x: tf.cast(x, tf.float64), [summed(3, dtype="float32")], SUM, tolerance=1e-6),
    Case("Cast", lambda x: tf.cast(x, tf.complex128), [summed(3)], SUM),
    Case("Cast", lambda x: tf.cast(x, tf.float32), [summed(3, dtype="bfloat16")], SUM, tolerance=1e-2),
    Case("Cast", lambda x: tf.cast(x, tf.float32), [summed(3, dtype="float16")], "whole", tolerance=1e-3),
    # The sum overflows, the summands of several ranks do not.
    Case("Cast", lambda x: tf.cast(tf.math.is_inf(tf.cast(x, tf.float32)), tf.float32),
         [summed(3, dtype="float16", low=30000, high=30016)], "whole"),
    Case("Cast", lambda x: tf.cast(x, tf.float32), [summed(3, make=_fractions)], "whole", tolerance=1e-6),
    Case("Cast", lambda x: tf.cast(x, tf.int32), [summed(3, make=_fractions)], "whole"),
    Case("Cast", lambda x: tf.cast(x, tf.float64), [summed(3, dtype="int8", low=100, high=120)], "whole"),
    Case("Cast", lambda x: tf.cast(x, tf.bool), [summed(3, dtype="int32")], "whole"),
    Case("Cast", lambda x: tf.cast(x, tf.half), [summed(3, dtype="float32")], "whole", tolerance=1e-2),
    Case("Identity", tf.identity, [summed(3)], SUM),
    Case("Identity", tf.identity, [summed(3, reduce="min")], "partial(min)", has_gradient=False),
    Case("IdentityN", lambda x, y, z: tf.identity_n([x, y, z])[1:], [of(K, 2), summed(3), of(2)], "rows(0)"),
    *(Case(name, op(name), [summed(3)], "whole") for name in ("ZerosLike", "OnesLike")),
    # Select.
    Case("SelectV2", tf.where, [bools(K, 3), of(K, 3), of(K, 3)], "rows(0)"),
    Case("SelectV2", tf.where, [bools(K, 1), of(K, 3), of()], "rows(0)"),
    Case("SelectV2", tf.where, [bools(3), of(K, 1), of(2, 1, 1)], "rows(1)"),
    Case("SelectV2", tf.where, [bools(3), summed(3), of(3)], SUM),
    Case("SelectV2", tf.where, [bools(2, 3), summed(3), of(3)], "whole"),
    Case("SelectV2", tf.where, [bools(K, 3), summed(3), of(3)], "rows(0)"),
    Case("SelectV2", lambda x: tf.where(x > 0, x, -x), [summed(3)], "whole"),
    Case("Select", tf.compat.v1.where, [bools(K), of(K, 3), of(K, 3)], "rows(0)"),
    Case("Select", tf.compat.v1.where, [bools(2, K), of(2, K), of(2, K)], "rows(1)"),
    Case("Select", tf.compat.v1.where, [bools(2), of(2, K), of(2, K)], "whole"),
    Case("Select", tf.compat.v1.where, [bools(), of(K, 3), of(K, 3)], "rows(0)"),
    Case("Select", tf.compat.v1.where, [bools(), summed(3), summed(3)], SUM),
    # Losses.
    Case("SparseSoftmaxCrossEntropyWithLogits",
         lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x),
         [of(K, 4), ints(K, low=0)], "rows(0)"),
    Case("SparseSoftmaxCrossEntropyWithLogits",
         lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x),
         [of(K, 3, 4), ints(K, 3, low=0)], "rows(0)"),
    Case("InTopK", op("InTopK", k=2), [of(K, 4, dtype="float32", make=_fractions), ints(K, low=0)], "rows(0)"),
    Case("InTopKV2", op("InTopKV2"), [of(K, 4, dtype="float32", make=_fractions), ints(K, low=0),
                                      ints(low=1, high=3)], "rows(0)"),
]

_REDUCED = {"Sum": tf.reduce_sum, "Max": tf.reduce_max, "Min": tf.reduce_min, "Prod": tf.reduce_prod,
            "Mean": tf.reduce_mean, "EuclideanNorm": tf.math.reduce_euclidean_norm}


def _reductions():
    """Every reduction: over the rows, others, all, none; dimensions kept or not, counted from the end or not."""
    for name, function in _REDUCED.items():
        over = {"Mean": SUM, "EuclideanNorm": "whole"}.get(name, f"partial({name.lower()})")
        fewest = int(name == "Mean")
        # A mean can be an integer in one process, and rounded on ranks.
        tolerance = 1e-12 if name == "Mean" else None
        for axes, keeps, state in (([0], False, over), ([0, 2], True, over), (None, False, over), (-3, True, over),
                                   ([1], False, "rows(0)"), ([-1, 1], False, "rows(0)"), ([], False, "rows(0)")):
            yield Case(name, lambda x, f=function, a=axes, k=keeps: f(x, a, k), [of(K, 2, 3)], state, fewest,
                       tolerance=tolerance)
        for axes, keeps, state in (([0], False, "rows(0)"), ([0], True, "rows(1)"), ([-1], False, "rows(1)"),
                                   ([0, 1], False, over)):
            yield Case(name, lambda x, f=function, a=axes, k=keeps: f(x, a, k), [of(2, K, 3)], state, fewest,
                       tolerance=tolerance)
        yield Case(name, lambda x, f=function: f(tf.reshape(x, [-1, 2]), 0), [of(K, 3, 2)], over, fewest,
                   tolerance=tolerance)
    for name in ("Sum", "Mean"):
        yield Case(name, lambda x, f=_REDUCED[name]: f(x, 1), [summed(2, 3)], SUM, tolerance=1e-12)
        yield Case(name, lambda x, f=_REDUCED[name]: f(x), [summed(2, 3)], SUM, tolerance=1e-12)
    for name in ("Max", "Prod"):
        yield Case(name, lambda x, f=_REDUCED[name]: f(x, 1), [summed(2, 3)], "whole")
        yield Case(name, lambda x, f=_REDUCED[name]: f(x, 1), [summed(2, 3, reduce=name.lower())], "whole")


REDUCTIONS = [
    *_reductions(),
    *(Case(name, lambda x, f=f: f(x, 0), [bools(K, 3)], f"partial({name.lower()})")
      for name, f in (("All", tf.reduce_all), ("Any", tf.reduce_any))),
    *(Case(name, lambda x, f=f: f(x, 0), [bools(2, K)], "rows(0)")
      for name, f in (("All", tf.reduce_all), ("Any", tf.reduce_any))),
    Case("Sum", lambda x: tf.reduce_sum(x, 0), [of(K, 3, dtype="int8", low=50, high=100)], SUM),
    Case("Sum", lambda x: tf.reduce_sum(x, 0), [of(K, 3, dtype="complex128", make=_complex)], SUM),
    Case("Sum", lambda x: tf.reduce_sum(x, tf.range(tf.rank(x))), [of(K, 3)], SUM),
    Case("Max", lambda x: tf.reduce_max(x, 0), [ints(K, 3, low=-9, high=-1)], "partial(max)"),
    Case("Mean", lambda x: tf.reduce_mean(x, 0), [ints(K, 3, low=0, high=9)], "whole", fewest=1),
    Case("Mean", lambda x: tf.reduce_mean(x, 0), [summed(3, dtype="int32")], "whole"),
    Case("Mean", lambda x: tf.reduce_mean(x, 0), [of(K, 3, dtype="half")], "whole", fewest=1, tolerance=1e-2),
    Case("Mean", lambda x: tf.reduce_mean(x, 0), [of(K, 3, dtype="complex128", make=_complex)], SUM, fewest=1,
         tolerance=1e-12),
    Case("L2Loss", tf.nn.l2_loss, [of(K, 3)], SUM),
    Case("L2Loss", tf.nn.l2_loss, [of(2, K)], SUM),
    Case("L2Loss", tf.nn.l2_loss, [summed(3)], "whole"),
    *(Case(name, op(name), [of(K, 3)], "rows(0)") for name in ("Softmax", "LogSoftmax")),
    *(Case(name, op(name), [of(2, K, 3)], "rows(1)") for name in ("Softmax", "LogSoftmax")),
    *(Case(name, op(name), [of(2, K)], "whole") for name in ("Softmax", "LogSoftmax")),
    Case("Softmax", tf.nn.softmax, [summed(3)], "whole"),
    *(Case(name, lambda x, f=f: f(x, -1), [of(K, 3)], "rows(0)") for name, f in (
        ("Cumsum", tf.cumsum), ("Cumprod", tf.math.cumprod), ("CumulativeLogsumexp", tf.math.cumulative_logsumexp))),
    *(Case(name, lambda x, f=f: f(x, 0), [of(K, 3)], "whole") for name, f in (
        ("Cumsum", tf.cumsum), ("Cumprod", tf.math.cumprod), ("CumulativeLogsumexp", tf.math.cumulative_logsumexp))),
    Case("Cumsum", lambda x: tf.cumsum(x, 0, exclusive=True, reverse=True), [summed(3)], SUM),
    Case("Cumprod", lambda x: tf.math.cumprod(x, 0), [summed(3)], "whole"),
    *(Case(name, lambda x, f=f: f(x, 1), [of(K, 3, 2)], "rows(0)") for name, f in (
        ("ArgMax", tf.argmax), ("ArgMin", tf.argmin))),
    *(Case(name, lambda x, f=f: f(x, 0), [of(3, K, 2)], "rows(0)") for name, f in (
        ("ArgMax", tf.argmax), ("ArgMin", tf.argmin))),
    Case("ArgMax", lambda x: tf.argmax(x, -2), [of(K, 3)], "whole", fewest=1),
    Case("ArgMax", lambda x: tf.argmax(x, 0), [summed(3)], "whole"),
    Case("TopKV2", lambda x: tf.math.top_k(x, 2), [of(K, 4, make=_spread)], "rows(0)"),
    Case("TopKV2", lambda x: tf.math.top_k(x, 1), [of(4, K, make=_spread)], "whole", fewest=1),
    Case("SoftmaxCrossEntropyWithLogits", lambda x, y: tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=x),
         [of(K, 4), of(K, 4, make=_probabilities)], "rows(0)"),
    Case("SoftmaxCrossEntropyWithLogits", op("SoftmaxCrossEntropyWithLogits"),
         [of(K, 4), of(1, 4, make=_probabilities)], "whole"),
    *(Case(name, op(name), [of(K, 3, 3, make=_matrices)], "rows(0)", tolerance=1e-9) for name in (
        "Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant", "MatrixSquareRoot",
        "MatrixDiagPart")),
    Case("MatrixInverse", op("MatrixInverse"), [of(2, K, 3, 3, make=_matrices)], "rows(1)", tolerance=1e-9),
    Case("CholeskyGrad", op("CholeskyGrad"), [of(K, 3, 3, make=_triangles), of(K, 3, 3)], "rows(0)", tolerance=1e-9),
    Case("SelfAdjointEigV2", lambda x: tf.linalg.eigvalsh(x), [of(K, 3, 3, make=_matrices)], "rows(0)",
         tolerance=1e-9),
    Case("Svd", lambda x: tf.linalg.svd(x, compute_uv=False), [of(K, 3, 3, make=_matrices)], "rows(0)",
         tolerance=1e-9),
    Case("Qr", lambda x: tf.abs(tf.linalg.qr(x)[1]), [of(K, 3, 3, make=_matrices)], "rows(0)", tolerance=1e-9),
    Case("MatrixSolve", op("MatrixSolve"), [of(K, 3, 3, make=_matrices), of(K, 3, 2)], "rows(0)", tolerance=1e-9),
    Case("MatrixTriangularSolve", op("MatrixTriangularSolve"), [of(K, 3, 3, make=_triangles), of(K, 3, 2)], "rows(0)",
         tolerance=1e-9),
    Case("MatrixTriangularSolve", op("MatrixTriangularSolve"), [of(3, 3, make=_triangles), of(2, K, 3, 2)], "rows(1)",
         tolerance=1e-9),
    Case("MatrixTriangularSolve", op("MatrixTriangularSolve"), [of(K, 3, 3, make=_triangles), of(2, 1, 3, 2)],
         "rows(1)", tolerance=1e-9),
    Case("MatrixTriangularSolve", op("MatrixTriangularSolve"), [of(3, 3, make=_triangles), of(3, K)], "whole",
         tolerance=1e-9),
    Case("MatrixBandPart", lambda x: tf.linalg.band_part(x, 1, 0), [of(K, 3, 3)], "rows(0)"),
    Case("MatrixBandPart", lambda x: tf.linalg.band_part(x, 1, 0), [of(3, K)], "whole"),
    Case("MatrixDiag", op("MatrixDiag"), [of(K, 3)], "rows(0)"),
    Case("MatrixDiagV3", tf.linalg.diag, [of(K, 3)], "rows(0)"),
    Case("MatrixDiagV3", tf.linalg.diag, [of(K)], "whole"),
    Case("MatrixDiagV3", lambda x: tf.linalg.diag(x, k=(0, 1)), [of(K, 2, 3)], "rows(0)"),
    Case("MatrixDiagV3", lambda x: tf.linalg.diag(x, k=(0, 1)), [of(2, K)], "whole", fewest=2),
    # TensorFlow cannot infer the shapes of their gradients without all sizes.
    Case("MatrixDiagPartV3", tf.linalg.diag_part, [of(2, K, 3, 3)], "rows(1)", has_gradient=False),
    Case("MatrixDiagPartV3", lambda x: tf.linalg.diag_part(x, k=(-1, 0)), [of(K, 3, 3)], "rows(0)",
         has_gradient=False),
    Case("MatrixSetDiagV3", tf.linalg.set_diag, [of(K, 3, 3), of(K, 3)], "rows(0)"),
    Case("Cross", tf.linalg.cross, [of(K, 3), of(K, 3)], "rows(0)"),
    *(Case(name, lambda x, y, f=f: tf.abs(f(tf.complex(x, y))), [of(K, 4), of(K, 4)], "rows(0)", tolerance=1e-9)
      for name, f in (("FFT", tf.signal.fft), ("IFFT", tf.signal.ifft))),
    Case("RFFT IRFFT", lambda x: tf.signal.irfft(tf.signal.rfft(x, [4]), [4]), [of(K, 4)], "rows(0)",
         tolerance=1e-9),
    Case("RFFT2D IRFFT2D", lambda x: tf.signal.irfft2d(tf.signal.rfft2d(x, [4, 4]), [4, 4]), [of(K, 4, 4)],
         "rows(0)", tolerance=1e-9),
    Case("FFT2D IFFT2D", lambda x: tf.math.real(tf.signal.ifft2d(tf.signal.fft2d(tf.complex(x, x)))), [of(K, 2, 4)],
         "rows(0)", tolerance=1e-9),
    Case("FFT", lambda x: tf.math.real(tf.signal.fft(tf.complex(x, x))), [of(4, K)], "whole", tolerance=1e-9,
         fewest=1),
]

CONTRACTIONS = [
    Case("MatMul", tf.matmul, [of(K, 3), of(3, 4)], "rows(0)"),
    Case("MatMul", tf.matmul, [of(4, 3), of(3, K)], "rows(1)"),
    Case("MatMul", tf.matmul, [of(4, K), of(K, 3)], SUM),
    Case("MatMul", lambda x, y: tf.matmul(x, y, transpose_a=True), [of(K, 3), of(K, 4)], SUM),
    Case("MatMul", lambda x, y: tf.matmul(x, y, transpose_b=True), [of(3, K), of(2, K)], SUM),
    Case("MatMul", lambda x, y: tf.matmul(x, y, transpose_b=True), [of(K, 3), of(K, 3)], "rows(0)", fewest=1),
    Case("MatMul", lambda x, y: tf.matmul(x, y, transpose_a=True, transpose_b=True), [of(3, K), of(4, 3)],
         "rows(0)"),
    Case("MatMul Reshape", lambda x, y: tf.matmul(tf.reshape(x, [-1, 3]), y), [of(K, 2, 3), of(3, 4)], "rows(0)"),
    Case("MatMul", tf.matmul, [summed(2, 3), of(3, 2)], SUM),
    Case("MatMul", tf.matmul, [of(2, 3), summed(3, 2)], SUM),
    Case("MatMul", tf.matmul, [summed(2, 3), of(3, 4)], SUM),
    Case("MatMul", tf.matmul, [summed(2, 3), summed(3, 2)], "whole"),
    Case("MatMul", tf.matmul, [of(K, 3), summed(3, 2)], "rows(0)"),
    Case("MatMul", tf.matmul, [summed(2, 3, reduce="max"), of(3, 2)], "whole"),
    Case("BatchMatMulV2", tf.matmul, [of(K, 2, 3), of(3, 4)], "rows(0)"),
    Case("BatchMatMulV2", tf.matmul, [of(K, 2, 3), of(K, 3, 4)], "rows(0)"),
    Case("BatchMatMulV2", tf.matmul, [of(2, K, 3), of(3, 4)], "rows(1)"),
    Case("BatchMatMulV2", tf.matmul, [of(2, 3, K), of(2, K, 3)], SUM),
    Case("BatchMatMulV2", lambda x, y: tf.matmul(x, y, transpose_a=True), [of(2, K, 3), of(2, K, 3)], SUM),
    Case("BatchMatMulV2", tf.matmul, [of(1, 2, 3), of(K, 3, 2)], "rows(0)"),
    Case("BatchMatMulV2", tf.matmul, [of(K, 1, 2, 3), of(4, 3, 2)], "rows(0)"),
    Case("BatchMatMulV2", tf.matmul, [of(K, 2, 3), of(2, 1, 3, 2)], "rows(1)"),
    Case("BatchMatMulV2", tf.matmul, [summed(2, 3, 2), of(2, 1)], SUM),
    Case("BatchMatMul", op("BatchMatMul", adj_y=True), [of(K, 2, 3), of(K, 4, 3)], "rows(0)"),
    Case("BatchMatMulV3", op("BatchMatMulV3", Tout=tf.float64), [of(K, 2, 3), of(K, 3, 4)], "rows(0)"),
    *(Case("Einsum", lambda *xs, e=equation: tf.raw_ops.Einsum(inputs=xs, equation=e), inputs, state)
      for equation, inputs, state in (
          ("bti,io->bto", [of(K, 2, 3), of(3, 4)], "rows(0)"),
          ("bti,bto->io", [of(K, 2, 3), of(K, 2, 4)], SUM),
          ("abc,bd->acd", [of(2, K, 3), of(K, 2)], SUM),
          ("...i,io->...o", [of(2, K, 3), of(3, 4)], "rows(1)"),
          ("...ij,...jk->...ik", [of(K, 2, 3), of(1, 3, 2)], "rows(0)"),
          ("bij->b", [of(K, 2, 3)], "rows(0)"),
          ("bij->ij", [of(K, 2, 3)], SUM),
          ("bij->jib", [of(K, 2, 3)], "rows(2)"),
          ("bii->bi", [of(K, 3, 3)], "rows(0)"),
          ("ij->ji", [summed(2, 3)], SUM),
          ("ij,jk->ik", [summed(2, 3), of(3, 2)], SUM),
          ("b...i->b...", [of(K, 2, 3)], "rows(0)"))),
    # Two dimensions have the rows.
    Case("Einsum", lambda x, y: tf.raw_ops.Einsum(inputs=[x, y], equation="ij,kj->ik"), [of(K, 2), of(K, 2)],
         "rows(0)", fewest=1),
    Case("Einsum", lambda x: tf.raw_ops.Einsum(inputs=[x], equation="i->ii"), [of(K)], "whole", fewest=1),
    Case("Einsum", lambda x: tf.raw_ops.Einsum(inputs=[tf.matmul(x, x, transpose_b=True)], equation="ii->i"),
         [of(K, 2)], "whole", fewest=1),
]

# Whole inputs with a size for each row, since there is no rule for reversing rows; appended rows are blocks.
DIVIDED = [
    Case("MatMul", lambda x, w: tf.matmul(tf.reverse(x, [0]), w), [of(K, 3), of(3, 4)], "rows(0)"),
    Case("MatMul", lambda x, y, w: tf.matmul(tf.concat([x, y], 0), w), [of(K, 3), of(K, 3), of(3, 4)], "rows(0)x2"),
    Case("MatMul", lambda x, w: tf.matmul(_drawn(x), w), [of(K, 3), of(3, 4)], "rows(0)"),
    Case("MatMul", lambda x: tf.reduce_sum(tf.matmul(_drawn(x), _drawn(x), transpose_b=True)), [of(K, 3)], "rows(0)"),
    Case("MatMul", lambda x: tf.matmul(_drawn(x), _drawn(x), transpose_a=True), [of(K, 3)], "whole"),
    Case("BatchMatMulV2", lambda x, w: tf.matmul(tf.reverse(x, [0]), w), [of(K, 2, 3), of(3, 4)], "rows(0)"),
    Case("BatchMatMulV2", lambda x, w: tf.matmul(tf.transpose(_drawn(x), [1, 0, 2]), w), [of(K, 2, 3), of(3, 4)],
         "rows(1)"),
    Case("BatchMatMul", lambda x, w: op("BatchMatMul")(tf.reverse(x, [0]), w), [of(K, 2, 3), of(K, 3, 4)], "rows(0)"),
    Case("BatchMatMulV3", lambda x, w: op("BatchMatMulV3", Tout=tf.float64)(tf.reverse(x, [0]), w),
         [of(K, 2, 3), of(K, 3, 4)], "rows(0)", has_gradient=False),
    Case("Einsum", lambda x, w: tf.einsum("abc,cd->dab", tf.reverse(x, [0]), w), [of(K, 2, 3), of(3, 4)], "rows(1)"),
    Case("Conv2D Conv2DBackpropInput Conv2DBackpropFilter", lambda x, w: tf.nn.conv2d(
        tf.concat([x, -x], 0), w, 1, "SAME"), [of(K, 4, 4, 1), of(2, 2, 1, 2)],
         {"Conv2D": "rows(0)x2", "Conv2DBackpropInput": "rows(0)x2", "Conv2DBackpropFilter": SUM}),
    Case("Conv2DBackpropInput", lambda x, w: tf.nn.conv2d_transpose(
        tf.reverse(x, [0]), w, (tf.shape(x)[0], 4, 4, 1), 1, "SAME"), [of(K, 4, 4, 2), of(2, 2, 1, 2)], "rows(0)"),
    Case("Conv3D", lambda x, w: tf.nn.conv3d(tf.reverse(x, [0]), w, [1, 1, 1, 1, 1], "SAME"),
         [of(K, 2, 3, 3, 1), of(2, 2, 2, 1, 2)], "rows(0)"),
    Case("Conv3DBackpropInputV2", lambda x, w: tf.nn.conv3d_transpose(
        tf.reverse(x, [0]), w, (tf.shape(x)[0], 2, 3, 3, 1), 1, "SAME"), [of(K, 2, 3, 3, 2), of(2, 2, 2, 1, 2)],
         "rows(0)"),
    Case("DepthwiseConv2dNative", lambda x, w: tf.nn.depthwise_conv2d(tf.reverse(x, [0]), w, [1, 1, 1, 1], "SAME"),
         [of(K, 3, 3, 2), of(2, 2, 2, 2)], "rows(0)", fewest=1),
    Case("DepthwiseConv2dNativeBackpropInput", lambda x, w: tf.nn.depthwise_conv2d_backprop_input(
        (tf.shape(x)[0], 3, 3, 2), w, tf.reverse(x, [0]), [1, 1, 1, 1], "SAME"), [of(K, 3, 3, 4), of(2, 2, 2, 2)],
         "rows(0)", fewest=1),
    Case("MatMul", _recurrent, [of(K, 3), of(3, 3)], "rows(0)"),
    Case("MatMul", _in_a_loop_of_its_own, [of(K, 3), of(3, 3)], "whole"),
]

SHAPES = [
    Case("Shape Size Rank", lambda x: [tf.raw_ops.Shape(input=x), tf.raw_ops.Size(input=x), tf.raw_ops.Rank(input=x)],
         [of(3, K)], "whole"),
    Case("Shape Size", lambda x: [tf.shape(tf.reshape(x, [-1, 2])), tf.size(x, tf.int64)], [of(K, 3, 2)], "whole"),
    Case("Shape Size Rank", lambda x: [tf.raw_ops.Shape(input=x), tf.raw_ops.Size(input=x), tf.raw_ops.Rank(input=x)],
         [summed(3, 2)], "whole"),
    Case("ShapeN", lambda x, y, z: tf.raw_ops.ShapeN(input=[x, y, z]), [of(3, K), of(2), summed(2)], "whole"),
    *(Case("Reshape", lambda x, s=shape: tf.reshape(x, s), [spec], state) for spec, shape, state in (
        (of(K, 2, 3), [-1, 6], "rows(0)"), (of(K, 2, 3), [-1, 3], "rows(0)"), (of(K, 2, 3), [-1], "rows(0)"),
        (of(2, K, 3), [2, -1], "rows(1)"), (of(2, K, 3), [-1, 3], "rows(0)x2"), (of(K, 3), [3, -1], "whole"),
        (of(2, K), [1, 2, 1, -1], "rows(3)"), (of(K), [-1, 1], "rows(0)"), (summed(2, 3), [3, -1], SUM),
        (summed(2, 3, reduce="max"), [6], "partial(max)"))),
    Case("Reshape", lambda x: tf.reshape(x, [tf.shape(x)[0], -1]), [of(K, 2, 3)], "rows(0)", fewest=1),
    Case("Reshape", lambda x: tf.reshape(x, [tf.shape(x)[0], 2, 3]), [of(K, 6)], "rows(0)"),
    Case("Reshape", lambda x: tf.reshape(x, [tf.size(x) // 2, 2]), [of(K, 6)], "rows(0)"),
    Case("Reshape", lambda x: tf.reshape(x, tf.reverse(tf.shape(x), [0])), [of(K, 6)], "whole"),
    *(Case("Squeeze", lambda x, a=axes: tf.squeeze(x, a), [spec], state) for spec, axes, state in (
        (of(K, 1, 3), [1], "rows(0)"), (of(1, K, 1), [0, -1], "rows(0)"), (of(K, 1, 3), None, "whole"),
        (summed(1, 3), [0], SUM), (summed(1, 3), None, SUM))),
    *(Case("ExpandDims", lambda x, a=axis: tf.expand_dims(x, a), [spec], state) for spec, axis, state in (
        (of(K, 3), 0, "rows(1)"), (of(K, 3), 1, "rows(0)"), (of(3, K), -1, "rows(1)"), (of(3, K), -2, "rows(2)"),
        (summed(3), 0, SUM))),
    *(Case("Transpose", lambda x, p=order: tf.transpose(x, p), [spec], state) for spec, order, state in (
        (of(K, 2, 3), [1, 0, 2], "rows(1)"), (of(2, K, 3), [2, 0, 1], "rows(2)"), (of(K, 2, 3), None, "rows(2)"),
        (summed(2, 3), [1, 0], SUM))),
    Case("ConjugateTranspose", op("ConjugateTranspose", perm=[1, 0]), [of(K, 2, dtype="complex128", make=_complex)],
         "rows(1)"),
    *(Case("Pack", lambda *xs, a=axis: tf.stack(xs, a), specs, state) for specs, axis, state in (
        ([of(K, 3), of(K, 3)], 0, "rows(1)"), ([of(K, 3), of(K, 3)], 1, "rows(0)"),
        ([of(3, K), of(3, K)], -1, "rows(1)"),
        ([summed(3), summed(3)], 0, SUM), ([of(3), summed(3), of(3)], 1, SUM),
        ([summed(3), summed(3, reduce="max")], 0, "whole"))),
    *(Case("Unpack", lambda x, a=axis: [y * (i + 1) for i, y in enumerate(tf.unstack(x, axis=a))], [spec], state)
      for spec, axis, state in (
          (of(K, 3), 1, "rows(0)"), (of(3, K), 0, "rows(0)"), (of(2, K, 3), -1, "rows(1)"), (summed(3, 2), 0, SUM))),
    *(Case("ConcatV2", lambda *xs, a=axis: tf.concat(xs, a), specs, state) for specs, axis, state in (
        ([of(K, 3), of(K, 2)], 1, "rows(0)"), ([of(K, 3), of(K, 3)], 0, "rows(0)x2"),
        ([of(2, K), of(3, K)], -2, "rows(1)"),
        ([of(K, 3), of(2, 3)], 0, "whole"), ([summed(3), summed(2)], 0, SUM), ([summed(3), of(2)], 0, SUM))),
    Case("ConcatV2", lambda x, y: tf.concat([x, tf.tile(y, [tf.shape(x)[0], 1])], 1), [of(K, 3), of(1, 2)],
         "rows(0)"),
    *(Case("Split", lambda x, a=axis: tf.split(x, 2, a)[1], [spec], state) for spec, axis, state in (
        (of(K, 4), 1, "rows(0)"), (of(4, K), -2, "rows(1)"), (summed(4), 0, SUM))),
    Case("Split", lambda x: tf.split(tf.concat([x, x], 0), 2)[1], [of(K, 4)], "rows(0)"),
    *(Case("SplitV", lambda x, a=axis: tf.split(x, [1, 3], a)[1], [spec], state) for spec, axis, state in (
        (of(K, 4), 1, "rows(0)"), (of(4, K), -2, "rows(1)"), (summed(4), 0, SUM))),
    *(Case("Tile", lambda x, n=times: tf.tile(x, n), [spec], state) for spec, times, state in (
        (of(K, 3), [1, 2], "rows(0)"), (of(K, 3), [2, 1], "rows(0)x2"), (summed(3), [1], SUM),
        (summed(3), [2], SUM))),
    *(Case("Pad", lambda x, p=paddings: tf.pad(x, p), [spec], state) for spec, paddings, state in (
        (of(K, 3), [[0, 0], [1, 2]], "rows(0)"), (of(K, 3), [[1, 0], [0, 0]], "whole"),
        (summed(3), [[1, 0]], SUM))),
    *(Case("PadV2", lambda x, p=paddings: tf.pad(x, p, constant_values=7), [spec], state)
      for spec, paddings, state in (
          (of(2, K), [[0, 2], [0, 0]], "rows(1)"), (of(K, 3), [[0, 0], [1, 0]], "rows(0)"),
          (of(K, 3), [[1, 0], [0, 0]], "whole"), (summed(3), [[0, 0]], "whole"), (summed(3), [[1, 0]], "whole"))),
    *(Case("MirrorPad MirrorPadGrad", lambda x, p=paddings, m=mode: tf.pad(x, p, m), [spec], state, fewest=1)
      for mode in ("REFLECT", "SYMMETRIC") for spec, paddings, state in (
          (of(2, K), [[1, 1], [0, 0]], "rows(1)"), (of(K, 3), [[0, 0], [1, 2]], "rows(0)"))),
    Case("MirrorPad", lambda x: tf.pad(x, [[1, 1]], "REFLECT"), [summed(3)], "whole"),
    *(Case("Slice", lambda x, b=begin, s=size: tf.slice(x, b, s), [spec], state) for spec, begin, size, state in (
        (of(K, 3), [0, 1], [-1, 2], "rows(0)"), (of(2, K), [1, 0], [1, -1], "rows(1)"), (summed(3), [1], [2], SUM))),
    Case("Slice", lambda x: tf.slice(x, [0, 1], [tf.shape(x)[0], 2]), [of(K, 3)], "rows(0)"),
    Case("Slice", lambda x: tf.slice(x, [1, 0], [-1, 2]), [of(K, 3)], "whole", fewest=1),
    Case("EnsureShape", lambda x: tf.ensure_shape(x, [None, 3]), [of(K, 3)], "rows(0)"),
    Case("EnsureShape", lambda x: tf.ensure_shape(x, [2, None]), [of(2, K)], "rows(1)"),
    Case("EnsureShape", lambda x: tf.ensure_shape(x, [3]), [summed(3)], SUM),
    Case("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, seq_axis=1, batch_axis=0),
         [of(K, 4), ints(K, low=0)], "rows(0)"),
    Case("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, seq_axis=0, batch_axis=1),
         [of(4, K, 2), ints(K, low=0)], "rows(1)"),
    Case("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, seq_axis=0, batch_axis=1),
         [of(4, 2, K), ints(2, low=0)], "rows(2)"),
    Case("ReverseSequence", lambda x, n: tf.reverse_sequence(x, tf.minimum(n, tf.shape(x)[0]), seq_axis=0,
                                                             batch_axis=1), [of(K, 2), ints(2, low=0)], "whole"),
    *(Case("BroadcastTo", lambda x, s=shape: tf.raw_ops.BroadcastTo(input=x, shape=s(x)), [spec], state)
      for spec, shape, state in (
          (of(K, 1), lambda x: [tf.shape(x)[0], 3], "rows(0)"), (of(K), lambda x: [3, tf.size(x)], "rows(1)"),
          (summed(3), lambda x: [2, 3], SUM), (of(K, 1), lambda x: [2, tf.shape(x)[0], 3], "rows(1)"))),
    *(Case("ReverseV2", lambda x, a=axes: tf.reverse(x, a), [spec], state) for spec, axes, state in (
        (of(K, 3), [1], "rows(0)"), (of(K, 3), [-2], "whole"), (of(2, K, 3), [0, -1], "rows(1)"),
        (summed(3), [0], SUM))),
    *(Case("Roll", lambda x, a=axes: tf.roll(x, [1] * len(a), a), [spec], state) for spec, axes, state in (
        (of(K, 3), [1], "rows(0)"), (of(K, 3), [0], "whole"), (of(2, K, 3), [0, -1], "rows(1)"),
        (summed(3), [0], SUM))),
    *(Case("StridedSlice StridedSliceGrad", lambda x, f=cut: f(x), [spec], state) for spec, cut, state in (
        (of(K, 4), lambda x: x[:, 1:3], "rows(0)"), (of(K, 4), lambda x: x[:, 1], "rows(0)"),
        (of(K, 4), lambda x: x[0:, ::2], "rows(0)"), (of(K, 4), lambda x: x[:, ::-1], "rows(0)"),
        (of(K, 4, 3), lambda x: x[..., 0], "rows(0)"))),
    *(Case("StridedSlice", lambda x, f=cut: f(x), [spec], state, fewest=fewest)
      for spec, cut, state, fewest in (
          (of(K, 4), lambda x: x[::-1], "whole", 0), (of(K, 4), lambda x: x[1:], "whole", 0),
          (of(K, 4), lambda x: x[:-1], "whole", 0), (of(K, 4), lambda x: x[::2], "whole", 0),
          (of(K, 4), lambda x: x[0], "whole", 1), (of(K, 4), lambda x: x[:, None, :2], "rows(0)", 0),
          (of(K, 4), lambda x: x[None, :, 1], "rows(1)", 0), (of(2, K, 4), lambda x: x[1, ..., None], "rows(0)", 0),
          (of(2, 3, K), lambda x: x[1:, ...], "rows(2)", 0), (of(2, 3, K), lambda x: x[None, 1, ..., :], "rows(2)", 0),
          (of(2, 3, K), lambda x: x[..., None, 0:1, :], "rows(3)", 0),
          (summed(4), lambda x: x[1:3], SUM, 0), (summed(4), lambda x: x[2], SUM, 0))),
    Case("StridedSliceGrad", lambda x: tf.raw_ops.StridedSliceGrad(
        shape=[4], begin=[1], end=[3], strides=[1], dy=x), [summed(2)], SUM),
    Case("StridedSliceGrad", lambda x: tf.raw_ops.StridedSliceGrad(
        shape=[2], begin=[0], end=[2], strides=[1], dy=x), [summed(2)], SUM),
]

# Sequences, of unknown length.
UNKNOWN = [
    Case("Mul", op("Mul"), [of(K, T, 2), of(K, T, 1)], "rows(0)"),
    Case("Mul", op("Mul"), [of(T, K), of(1, K)], "rows(1)"),
    Case("AddV2", op("AddV2"), [of(K, T, 2), of(T, 2)], "rows(0)"),
    Case("AddV2", op("AddV2"), [of(T, K), of(T, 1)], "rows(1)"),
    Case("SelectV2", lambda x, m: tf.where(m[:, :, None], x, 0), [of(K, T, 2), bools(K, T)], "rows(0)"),
    Case("Sum", lambda x: tf.reduce_sum(x, [0, 1]), [of(K, T, 2)], SUM),
    Case("Sum", lambda x: tf.reduce_sum(x, 0), [of(K, T, 2)], SUM),
    Case("Mean", lambda x: tf.reduce_mean(x, [0, 1]), [of(T, K, 2)], SUM, fewest=1, tolerance=1e-12),
    Case("Max", lambda x: tf.reduce_max(x, 1), [of(K, T, 2)], "rows(0)"),
    Case("Cumsum", lambda x: tf.cumsum(x, 0), [of(T, K)], "rows(1)"),
    Case("Reshape", lambda x: tf.reshape(x, [-1, 2]), [of(K, T, 2)], "rows(0)"),
    Case("Reshape", lambda x: tf.reshape(x, [-1, 2]), [of(T, K, 2)], "whole"),
    Case("Reshape", lambda x: tf.reshape(tf.reshape(x, [-1, 2]) * 2, tf.shape(x)), [of(K, T, 2)], "rows(0)"),
    Case("Reshape", lambda x: tf.reshape(x, [tf.shape(x)[0], -1]), [of(K, T, 2)], "rows(0)", fewest=1),
    Case("MatMul", lambda x, w: tf.matmul(tf.reshape(x, [-1, 2]), w), [of(K, T, 2), of(2, 3)], "rows(0)"),
    Case("BatchMatMulV2", lambda x: tf.matmul(x, x, transpose_b=True), [of(K, T, 2)], "rows(0)"),
    Case("Einsum", lambda x, w: tf.einsum("bti,io->bto", x, w), [of(K, T, 2), of(2, 3)], "rows(0)"),
    Case("Transpose", lambda x: tf.transpose(x, [1, 0, 2]), [of(K, T, 2)], "rows(1)"),
    Case("ConcatV2", lambda x, y: tf.concat([x, y], 1), [of(K, T, 2), of(K, 1, 2)], "rows(0)"),
    Case("StridedSlice", lambda x: x[:, 1:], [of(K, T, 2)], "rows(0)"),
    Case("StridedSlice", lambda x: x[:, -1], [of(K, T, 2)], "rows(0)"),
    Case("StridedSlice", lambda x: x[-1], [of(T, K)], "rows(0)"),
    Case("Tile", lambda x: tf.tile(x[:, None], tf.stack([1, tf.shape(x)[1], 1])), [of(K, T)], "rows(0)"),
    Case("Pad", lambda x: tf.pad(x, [[0, 0], [0, tf.shape(x)[1]]]), [of(K, T)], "rows(0)"),
    Case("ReverseSequence", lambda x, n: tf.reverse_sequence(x, n, seq_axis=1, batch_axis=0),
         [of(K, T), ints(K, low=0)], "rows(0)"),
    Case("Softmax", tf.nn.softmax, [of(K, T)], "rows(0)"),
    Case("ReverseV2", lambda x: tf.reverse(x, [0]), [of(T, K)], "rows(1)"),
    Case("BroadcastTo", lambda x: tf.broadcast_to(x[:, None], [tf.shape(x)[0], tf.shape(x)[1], tf.shape(x)[1]]),
         [of(K, T)], "rows(0)"),
]



def _joined(*tensors):
    return tf.concat(tensors, 0)


def _loop_of_blocks(x, y, w):
    """A recurrence over time, whose rows are two batches."""
    z = tf.transpose(_joined(x, y), [1, 0, 2])
    return tf.scan(lambda h, each: tf.tanh(h @ w + each), z, tf.zeros_like(z[0]))


def _between(x):
    """Values between those of x, as many, from a part of it that another op than a product leaves whole."""
    return tf.reverse(tf.reverse(x, [0]) * 2, [0])


# Several blocks of rows, one after the other.
BLOCKS = [
    Case("ConcatV2", _joined, [of(K, 3), of(K, 3), of(K, 3)], "rows(0)x3"),
    Case("ConcatV2", lambda x, y: tf.concat([x, y], 1), [of(2, K), of(2, K)], "rows(1)x2"),
    Case("ConcatV2", lambda x, y: tf.concat([tf.concat([x, y], 0), x], 0), [of(K, 3), of(K, 3)],
         "rows(0)x2 rows(0)x3"),
    Case("ConcatV2", lambda x: _joined(x, tf.ones_like(_between(x))), [of(K, 3)], "rows(0)x2"),
    Case("ConcatV2", lambda x, y: _joined(x, tf.reshape(y, [-1, 3])), [of(K, 3), of(K, 6)], "whole"),
    Case("ConcatV2", lambda x, y: _joined(tf.reshape(x, [-1, 3]), tf.reshape(y, [-1, 3])), [of(K, 6), of(K, 2, 3)],
         "rows(0)x2"),
    Case("ConcatV2", lambda x, y: _joined(x, y), [of(K, 3), summed(2, 3)], "whole"),
    Case("Tanh Square", lambda x, y: tf.square(tf.tanh(_joined(x, y))), [of(K, 3), of(K, 3)], "rows(0)x2"),
    Case("Mul", lambda x, y, z: _joined(x, y) * tf.reshape(z, [-1, 3]), [of(K, 3), of(K, 3), of(K, 6)], "rows(0)x2"),
    Case("Mul", lambda x, y: _joined(x, y) * _joined(y, x)[:, :1], [of(K, 3), of(K, 3)], "rows(0)x2"),
    Case("AddV2", lambda x, y: _joined(x, y, x, y) + tf.reshape(
        _joined(x[:, None], y[:, None]) * [[1.], [2.]], [-1, 3]), [of(K, 3), of(K, 3)], "rows(0)x4"),
    Case("MatMul", lambda x, y, w: _joined(x, y) @ w, [of(K, 3), of(K, 3), of(3, 2)], "rows(0)x2"),
    Case("MatMul", lambda x, y: tf.matmul(_joined(x, y), _joined(y, x), transpose_a=True), [of(K, 3), of(K, 3)], SUM),
    Case("MatMul", lambda x, y: tf.matmul(_joined(x, y), _joined(y, x), transpose_b=True), [of(K, 3), of(K, 3)],
         "rows(0)x2", fewest=1),
    Case("Sum", lambda x, y: tf.reduce_sum(_joined(x, y), 0), [of(K, 3), of(K, 3)], SUM),
    Case("Max", lambda x, y: tf.reduce_max(_joined(x, y), 1), [of(K, 3), of(K, 3)], "rows(0)x2"),
    Case("Max", lambda x, y: tf.reduce_max(_joined(x, y)), [of(K, 3), of(K, 3)], "partial(max)", fewest=1),
    Case("Mean", lambda x, y: tf.reduce_mean(_joined(x, y), 0), [of(K, 3), of(K, 3)], SUM, fewest=1, tolerance=1e-12),
    Case("Softmax", lambda x, y: tf.nn.softmax(_joined(x, y)), [of(K, 3), of(K, 3)], "rows(0)x2"),
    Case("Cumsum", lambda x, y: tf.cumsum(_joined(x, y)), [of(K, 3), of(K, 3)], "whole"),
    Case("ReverseV2", lambda x, y: tf.reverse(_joined(x, y), [0]), [of(K, 3), of(K, 3)], "whole"),
    Case("Transpose", lambda x, y: tf.transpose(_joined(x, y)) * 2, [of(K, 3), of(K, 3)], "rows(1)x2"),
    Case("Shape", lambda x, y: tf.shape(_joined(x, y)), [of(K, 3), of(K, 3)], "whole"),
    Case("GatherV2", lambda x, i, j: tf.gather(x, _joined(i, j)), [of(4, 3), ints(K, low=0), ints(K, low=0)],
         "rows(0)x2"),
    Case("GatherV2", lambda x, y: tf.gather(_joined(x, y), [0, 1, 1]), [of(K, 3), of(K, 3)], "whole", fewest=1),
    Case("Reshape", lambda x, y: tf.reshape(_joined(x, y), [-1]), [of(K, 3), of(K, 3)], "rows(0)x2"),
    Case("Reshape", lambda x, y: tf.reshape(_joined(x, y), [tf.shape(x)[0], 6]), [of(K, 3), of(K, 3)], "whole"),
    Case("Reshape", lambda x, y: tf.reshape(_joined(x, y), [2, -1, 3]), [of(K, 3), of(K, 3)], "rows(1)"),
    Case("Reshape", lambda x, y: tf.reshape(_joined(x, y), [2, tf.shape(x)[0], 3]), [of(K, 3), of(K, 3)], "rows(1)"),
    Case("Reshape", lambda x: tf.reshape(x, [2, -1, 3]), [of(4, K, 3)], "rows(1)x2"),
    Case("Reshape", lambda x: tf.reshape(tf.reshape(x, [-1, 3]) * 2, [4, -1, 3]), [of(4, K, 3)],
         "rows(0)x4 rows(1)"),
    Case("Tile", lambda x: tf.tile(x, [1, 3]), [of(2, K)], "rows(1)x3"),
    Case("Tile", lambda x, y: tf.tile(_joined(x, y), [2, 2]), [of(K, 3), of(K, 3)], "rows(0)x4"),
    *(Case("Split", lambda *xs, n=number: tf.split(_joined(*xs), n)[0], [of(K, 3)] * 4, state)
      for number, state in ((4, "rows(0)"), (2, "rows(0)x2"))),
    Case("Split", lambda x, y: [part * (i + 1.) for i, part in enumerate(tf.split(
        tf.reshape(_joined(x, y), [-1, 1]), 4))], [of(K, 2), of(K, 2)], "whole"),
    Case("SplitV", lambda x, y, z: [part * (i + 1.) for i, part in enumerate(tf.split(
        _joined(x, y, z), [tf.shape(x)[0], 2 * tf.shape(x)[0]]))], [of(K, 3)] * 3, "rows(0)"),
    Case("Slice Pad", lambda x, y: tf.slice(_joined(x, y), [tf.shape(x)[0], 1], [tf.shape(x)[0], 2]),
         [of(K, 3), of(K, 3)], {"Slice": "rows(0)", "Pad": "rows(0)x2"}),
    Case("Slice", lambda x, y, z: tf.slice(_joined(x, y, z), [tf.shape(x)[0], 0], [-1, 2]), [of(K, 3)] * 3,
         "rows(0)x2"),
    *(Case("StridedSlice StridedSliceGrad", lambda x, y, z, f=cut: f(_joined(x, y, z), tf.shape(x)[0]), [of(K, 3)] * 3,
           {"StridedSlice": f"{state} whole", "StridedSliceGrad": "rows(0)x3"}) for cut, state in (
               (lambda x, k: x[:k], "rows(0)"), (lambda x, k: x[k:], "rows(0)x2"), (lambda x, k: x[k:2 * k], "rows(0)"),
               (lambda x, k: x[k:3 * k, 1:], "rows(0)x2"), (lambda x, k: x[2 * k:, None, 0], "rows(0)"))),
    Case("StridedSliceGrad", lambda x, y: (x[:, ::2] * 1.)[:], [of(K, 3), of(K, 3)], "rows(0)"),
    *(Case("StridedSlice", lambda x, y, f=cut: f(_joined(x, y), tf.shape(x)[0]), [of(K, 3), of(K, 3)], "whole",
           fewest=1) for cut in (
               lambda x, k: x[k // 2:k], lambda x, k: x[:k:2], lambda x, k: x[:k - 1], lambda x, k: x[-k:])),
    Case("StridedSliceGrad", lambda x: tf.reshape(x, [-1, 3])[:tf.shape(x)[0]], [of(K, 6)], "whole"),
    Case("Switch", lambda x, y, z: tf.cond(tf.reduce_sum(z) > 0, lambda: _joined(x, y) * 2, lambda: _joined(y, x)),
         [of(K, 3), of(K, 3), of(3)], "rows(0) whole"),
    Case("Merge", lambda x, y, p: tf.raw_ops.Merge(inputs=list(tf.raw_ops.Switch(data=_joined(x, y), pred=p)))[0],
         [of(K, 3), of(K, 3), bools()], "rows(0)x2"),
    Case("TensorListStack", _loop_of_blocks, [of(K, 4, 2), of(K, 4, 2), of(2, 2)], "rows(1)x2", tolerance=1e-11),
    Case("Conv2D", lambda x, y, w: tf.nn.conv2d(_joined(x, y), w, 1, "SAME"), [
        of(K, 4, 4, 2), of(K, 4, 4, 2), of(3, 3, 2, 3)], "rows(0)x2"),
]

CONTROL = [
    Case("Switch Merge", lambda x, p: tf.raw_ops.Merge(inputs=list(tf.raw_ops.Switch(data=x, pred=p)))[0],
         [of(K, 3), bools()], "rows(0)"),
    Case("Switch Merge", lambda x: tf.raw_ops.Merge(inputs=[
        s * (i + 2.0) for i, s in enumerate(tf.raw_ops.Switch(data=x, pred=tf.reduce_sum(x) > 0))])[0],
         [summed(3)], SUM),
    Case("Switch", lambda x, y: tf.cond(tf.reduce_sum(x) > 0, lambda: x * y, lambda: x - y), [of(K, 3), of(3)],
         "rows(0) whole"),
    Case("Enter Exit NextIteration", _loop, [of(K, 3), of(3, 3)],
         "rows(0) partial(sum) whole"),
    Case("Enter Exit", _loop_of_version_1, [of(K, 3), of(3, 3)], "rows(0) partial(sum) whole", has_gradient=False),
    Case("Assert", _asserted, [of(K, 3)], "none"),
]
CASES = [*ELEMENTWISE, *REDUCTIONS, *CONTRACTIONS, *DIVIDED, *SHAPES, *BLOCKS, *UNKNOWN, *CONTROL]
