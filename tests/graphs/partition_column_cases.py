"""Small graphs for the rules of columns: a table as in partition_cases.

`columns(4, K)` is what a rank has of a variable that is divided by its columns, "columns(1)", and `columns(K, 4)` by
its rows. `LOGITS` are the inputs of a layer that is divided by its outputs. What is done with columns as with rows has
the cases of rows.
"""

import dataclasses

import numpy as np
import partition_cases
from partition_cases import bools
from partition_cases import ints
from partition_cases import op
from partition_table import Case
from partition_table import COLUMNS
from partition_table import columns
from partition_table import K
from partition_table import of
from partition_table import summed
import tensorflow as tf

from tf_poseidon.graph_passes.partition.rules.columns import like_rows
from tf_poseidon.graph_passes.partition.rules.columns import makers

HELD = "partial(held)"
LOGITS = [of(K, 4), columns(4, K)]
_TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "float16": 1e-2, "bfloat16": 4e-2}


def _like_rows():
    """The cases of ops that do with columns what they do with rows, with columns in place of rows."""
    for case in (*partition_cases.ELEMENTWISE, *partition_cases.CONTRACTIONS, *partition_cases.SHAPES):
        if any(spec.has_rows for spec in case.inputs) and like_rows.RULES.keys() >= set(case.ops.split()) and not any(
                spec.reduce or spec.dtype.startswith("complex") for spec in case.inputs):
            yield dataclasses.replace(
                case, fewest=0, gives=case.gives.replace("rows", "columns").replace("partial(sum)", HELD),
                inputs=[dataclasses.replace(spec, is_divided=K in spec.shape) for spec in case.inputs])


def _made():
    """The same of whole inputs, where outputs are needed in columns."""
    for case in _like_rows():
        ops = [name for name in case.ops.split() if not name.endswith(("Grad", "Gradient"))]
        if ops and makers.MAKERS.keys() >= set(ops) and case.gives != "whole":
            yield dataclasses.replace(
                case, ops=" ".join(ops), build=_needed_in_columns(case.build), gives="whole",
                inputs=[columns(K), *(dataclasses.replace(spec, is_divided=False, shape=tuple(
                    COLUMNS if size == K else size for size in spec.shape)) for spec in case.inputs)])


def _needed_in_columns(build):
    """Returns a function of columns, and other inputs, whose outputs columns select from two equal tensors."""
    def outputs(selecting, *inputs):
        found = tf.nest.flatten(build(*inputs))
        with tf.name_scope("needed/"):  # no ops of the case
            return [tf.where(tf.reshape(selecting > 0, [COLUMNS if d == list(output.shape).index(COLUMNS) else 1
                                                        for d in range(output.shape.rank)]), output, output)
                    for output in found]
    return outputs


def _minus_infinity(*places):
    """Returns numbers some columns of which are minus infinity, such as those of one rank."""
    def make(rng, shape):
        values = rng.integers(-3, 4, shape).astype(float)
        for place in places:
            values[..., place] = -np.inf
        return values
    return make


def _special(rng, shape):
    """Not a number in row 0, in rows 1 and 2 infinities."""
    values = rng.integers(-3, 4, shape).astype(float)
    values[0, 5], values[1, 3], values[2, 17], values[2, 2] = np.nan, np.inf, np.inf, -np.inf
    return values


def _only(place):
    """Returns numbers that are zero but in some columns."""
    def make(rng, shape):
        values = np.zeros(shape)
        values[..., place] = rng.uniform(0.1, 1, values[..., place].shape)
        return values
    return make


def _large(rng, shape):
    return rng.integers(-3, 4, shape) * 1e4


def _loop(x, w):
    """Iterations that hand on columns, and a sum of them."""
    return tf.while_loop(lambda t, h, total: t < 3,
                         lambda t, h, total: (t + 1, tf.tanh(h) + x @ w, total + tf.reduce_sum(h * h)),
                         (0, x @ w, tf.constant(0.0, tf.float64)))[1:]


def _reductions():
    for name, function in partition_cases._REDUCED.items():
        over = HELD if name in ("Sum", "Mean") else "whole"
        for axes, keeps, state in (([0], False, over), ([0, 2], True, over), (None, False, over), (-3, True, over),
                                   ([1], False, "columns(0)"), ([-1, 1], False, "columns(0)"),
                                   ([], False, "columns(0)")):
            yield Case(name, lambda x, f=function, a=axes, k=keeps: f(x, a, k), [columns(K, 2, 3)], state,
                       tolerance=1e-12)
        for axes, keeps, state in (([0], False, "columns(0)"), ([0], True, "columns(1)"), ([-1], False, "columns(1)"),
                                   ([0, 1], False, over)):
            yield Case(name, lambda x, f=function, a=axes, k=keeps: f(x, a, k), [columns(2, K, 3)], state,
                       tolerance=1e-12)
        # Columns of rows: what has rows is whole on all ranks.
        for axes, keeps, state in ((-1, False, "whole"), (1, True, "whole"), (0, False, "columns(0)"),
                                   ([0, 1], False, over)):
            yield Case(name, lambda x, w, f=function, a=axes, k=keeps: f(tf.tanh(x @ w), a, k), LOGITS, state,
                       fewest=int(name == "Mean"), tolerance=1e-11)


REDUCTIONS = [
    *_reductions(),
    *(Case(name, lambda x, f=f: f(x, 1), [spec], state)
      for name, f in (("All", tf.reduce_all), ("Any", tf.reduce_any))
      for spec, state in ((columns(3, K, dtype="bool", low=0, high=2), "whole"),
                          (columns(K, 3, dtype="bool", low=0, high=2), "columns(0)"))),
    Case("All", lambda x: tf.reduce_all(x > -4, 1), [columns(3, K)], "whole"),
    Case("Any", lambda x: tf.reduce_any(x > 4, 1), [columns(3, K)], "whole"),
    *(Case(name, lambda x, f=f: f(x, 1), [columns(3, K, dtype="int32", low=low, high=low + 9)], state)
      for name, f, low, state in (
          ("Max", tf.reduce_max, -20, "whole"), ("Min", tf.reduce_min, 5, "whole"), ("Sum", tf.reduce_sum, 0, HELD),
          ("Mean", tf.reduce_mean, 0, "whole"))),
    *(Case(name, lambda x, f=f: f(x, 1), [columns(3, K, low=low, high=low + 9)], "whole") for name, f, low in (
        ("Max", tf.reduce_max, -20), ("Min", tf.reduce_min, 5))),
    Case("Sum", lambda x: tf.reduce_sum(x, tf.range(tf.rank(x))), [columns(K, 3)], HELD),
    # The mean is a number of half precision, sums of it are not.
    Case("Mean", lambda x: tf.reduce_mean(x, 1), [columns(3, K, dtype="float16", low=6000, high=6001)], "whole",
         tolerance=1e-2),
    Case("L2Loss", tf.nn.l2_loss, [columns(K, 3)], HELD),
    Case("L2Loss", lambda x, w: tf.nn.l2_loss(x @ w), LOGITS, HELD),
]

EXTREMES = [
    *(Case(name, lambda x, f=f, a=axis: f(x, a), [spec], state)
      for name, f in (("ArgMax", tf.argmax), ("ArgMin", tf.argmin))
      for spec, axis, state in (
          (columns(3, K), 1, "whole"), (columns(K, 3), 0, "whole"), (columns(2, K, 3), -2, "whole"),
          (columns(K), 0, "whole"), (columns(K, 3), -1, "columns(0)"), (columns(2, 3, K), 0, "columns(1)"),
          (columns(3, K, make=_special), 1, "whole"), (columns(3, K, make=_minus_infinity(slice(None))), 1, "whole"),
          (columns(3, K, low=1, high=2), 1, "whole"), (columns(3, K, low=-1, high=0), 1, "whole"),
          *((columns(3, K, dtype=dtype, make=_minus_infinity(slice(None))), 1, "whole")
            for dtype in ("float32", "float16", "bfloat16")),
          (columns(3, K, make=lambda rng, shape: np.full(shape, np.nan)), 1, "whole"),
          (columns(3, K, make=lambda rng, shape: np.full(shape, np.inf)), 1, "whole"),
          *((columns(3, K, dtype=dtype), 1, "whole") for dtype in ("float32", "float16", "bfloat16", "int32")))),
    *(Case(name, lambda x, w, f=f: f(x @ w, -1, tf.int32), LOGITS, "whole")
      for name, f in (("ArgMax", tf.argmax), ("ArgMin", tf.argmin))),
    *(Case("TopKV2", lambda x, k=k: tf.math.top_k(x, k), [spec], state, has_gradient=False) for k, spec, state in (
        (1, columns(3, K), "whole"), (3, columns(2, 3, K), "whole"), (7, columns(K), "whole"),
        (COLUMNS, columns(3, K), "whole"), (2, columns(K, 3), "columns(0)"), (0, columns(3, K), "whole"),
        (5, columns(3, K, make=_minus_infinity(slice(0, 16))), "whole"),
        (5, columns(3, K, make=_minus_infinity(slice(16, 20))), "whole"),
        *((5, columns(3, K, dtype=dtype), "whole") for dtype in ("float32", "float16", "bfloat16", "int32")))),
    Case("TopKV2", lambda x, w: tf.math.top_k(x @ w, 18)[0], LOGITS, "whole"),
    *(Case("InTopKV2", lambda x, y, k=k: tf.math.in_top_k(y, x, k), [spec, targets], "whole")
      for k in (1, 4, 19, 25) for spec, targets in (
          (columns(3, K, dtype="float32"), ints(3, low=0, high=COLUMNS)),
          (columns(3, K, dtype="float32"), ints(3, low=-2, high=COLUMNS + 5)),
          (columns(3, K, dtype="float32", make=_special), ints(3, low=0, high=COLUMNS)),
          (columns(3, K, dtype="float32"), ints(3, low=17, high=COLUMNS, dtype="int64")))),
    Case("InTopKV2", lambda x, w, y: tf.math.in_top_k(y, tf.cast(x @ w, tf.float32), 3),
         [*LOGITS, ints(K, low=0, high=COLUMNS)], "whole"),
]


def _classes(logits, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def _shares(logits, labels):
    return tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)


NORMALISERS = [
    *(Case(name, op(name), [spec], state, tolerance=tolerance)
      for name in ("Softmax", "LogSoftmax") for spec, state, tolerance in (
          (columns(3, K), "columns(1)", None), (columns(2, 3, K), "columns(2)", None), (columns(K), "columns(0)", None),
          (columns(K, 3), "columns(0)", None), (columns(3, K, make=_large), "columns(1)", None),
          (columns(3, K, make=_minus_infinity(slice(0, 16))), "columns(1)", None),
          (columns(3, K, make=_minus_infinity(slice(16, 20), 3)), "columns(1)", None),
          *((columns(3, K, dtype=dtype), "columns(1)", tolerance) for dtype, tolerance in _TOLERANCES.items()))),
    *(Case(name, lambda x, w, f=op(name): f(x @ w), LOGITS, "columns(1)", tolerance=1e-11)
      for name in ("Softmax", "LogSoftmax")),
    *(Case("SparseSoftmaxCrossEntropyWithLogits", _classes, [spec, labels], "whole", tolerance=tolerance)
      for labels in (ints(3, low=0, high=COLUMNS), ints(3, low=16, high=COLUMNS, dtype="int64"), ints(3, low=0, high=1))
      for spec, tolerance in (
          (columns(3, K), 1e-12), (columns(3, K, make=_large), 1e-12),
          *((columns(3, K, dtype=dtype), tolerance) for dtype, tolerance in _TOLERANCES.items()))),
    Case("SparseSoftmaxCrossEntropyWithLogits", _classes,
         [columns(3, K, make=_minus_infinity(slice(0, 16))), ints(3, low=16, high=COLUMNS)], "whole"),
    Case("SparseSoftmaxCrossEntropyWithLogits", lambda x, w, y: _classes(x @ w, y),
         [*LOGITS, ints(K, low=0, high=COLUMNS)], "whole", tolerance=1e-11),
    *(Case("SoftmaxCrossEntropyWithLogits", _shares, specs, "whole", tolerance=tolerance) for specs, tolerance in (
        ([columns(3, K), of(3, COLUMNS, low=0)], 1e-12), ([columns(3, K), columns(3, K, low=0)], 1e-12),
        ([columns(3, K, make=_large), of(3, COLUMNS, low=0)], 1e-12),
        ([columns(3, K), summed(3, COLUMNS, low=0)], 1e-12), ([of(3, COLUMNS), columns(3, K)], 1e-12),
        *(([columns(3, K, dtype=dtype), of(3, COLUMNS, low=0, high=2, dtype=dtype)], tolerance)
          for dtype, tolerance in _TOLERANCES.items()))),
    # Not a number, as in one process, although these labels are zero; labels of all rows.
    Case("SoftmaxCrossEntropyWithLogits", _shares, [
        columns(3, K, make=_minus_infinity(2, slice(16, 20))), of(3, COLUMNS, make=_only(slice(5, 9)))], "whole"),
    Case("SoftmaxCrossEntropyWithLogits", op("SoftmaxCrossEntropyWithLogits"),
         [columns(3, K), of(1, COLUMNS, low=0)], "whole", has_gradient=False),
    Case("SoftmaxCrossEntropyWithLogits", lambda x, w, y: _shares(x @ w, y), [*LOGITS, of(K, COLUMNS, low=0)], "whole",
         tolerance=1e-11),
]

SHAPES = [
    *(Case("Shape Size Rank", lambda x: [
        tf.raw_ops.Shape(input=x), tf.raw_ops.Size(input=x, out_type=tf.int64), tf.raw_ops.Rank(input=x)], [spec],
           "whole") for spec in (columns(3, K), columns(K), columns(K, 2, 3))),
    Case("Shape Size", lambda x, w: [tf.shape(x @ w, tf.int64), tf.size(x @ w)], LOGITS, "whole"),
    Case("ShapeN", lambda x, y, z, w: tf.raw_ops.ShapeN(input=[x @ w, x, y, z, w]),
         [of(K, 4), of(2), summed(2), columns(4, K)], "whole"),
    *(Case("Reshape", lambda x, s=shape: tf.reshape(x, s), [spec], state) for spec, shape, state in (
        (columns(K, 2, 3), [-1, 6], "columns(0)"), (columns(K, 2, 3), [COLUMNS, 3, 2], "columns(0)"),
        (columns(K, 2, 3), [-1, 3], "whole"), (columns(2, K, 3), [2, -1], "whole"),
        (columns(2, 3, K), [6, -1], "columns(1)"), (columns(2, 3, K), [3, 2, COLUMNS], "columns(2)"),
        (columns(2, 3, K), [COLUMNS, 2, 3], "whole"),
        (columns(3, K), [COLUMNS, 3], "whole"), (columns(2, K), [1, 2, 1, -1], "columns(3)"),
        (columns(K), [1, COLUMNS, 1], "columns(1)"), (columns(1, K, 1), [-1], "columns(0)"))),
    Case("Reshape", lambda x, w: tf.reshape(x @ w, [-1, 1, COLUMNS]), LOGITS, "columns(2)"),
    Case("Reshape", lambda x, w: tf.reshape(x @ w, tf.constant([-1, 1, COLUMNS], tf.int64)), LOGITS, "columns(2)"),
    *(Case("Squeeze", lambda x, a=axes: tf.squeeze(x, a), [spec], state) for spec, axes, state in (
        (columns(K, 1, 3), [1], "columns(0)"), (columns(1, K, 1), [0, -1], "columns(0)"),
        (columns(3, 1, K), None, "columns(1)"))),
    *(Case("ExpandDims", lambda x, a=axis: tf.expand_dims(x, a), [spec], state) for spec, axis, state in (
        (columns(K, 3), 0, "columns(1)"), (columns(K, 3), 1, "columns(0)"), (columns(3, K), -1, "columns(1)"))),
    *(Case("BroadcastTo", lambda x, s=shape: tf.raw_ops.BroadcastTo(input=x, shape=s), [spec], state)
      for spec, shape, state in (
          (columns(K), [3, COLUMNS], "columns(1)"), (columns(K, 1), [2, COLUMNS, 3], "columns(1)"),
          (columns(1, K), np.array([3, COLUMNS], np.int64), "columns(1)"))),
    *(Case("Tile", lambda x, n=times: tf.tile(x, n), [spec], state) for spec, times, state in (
        (columns(K, 3), [1, 2], "columns(0)"), (columns(3, K), [2, 1], "columns(1)"),
        (columns(K, 3), [2, 1], "whole"))),
    *(Case(name, op(name), [columns(3, K)], "columns(1)") for name in ("ZerosLike", "OnesLike")),
    *(Case("BiasAdd", op("BiasAdd"), specs, state) for specs, state in (
        ([columns(3, K), columns(K)], "columns(1)"), ([columns(3, K), of(COLUMNS)], "columns(1)"),
        ([columns(K, 3), of(3)], "columns(0)"), ([of(3, COLUMNS), columns(K)], "columns(1)"),
        ([of(2, 3, COLUMNS), columns(K)], "columns(2)"))),
    Case("BiasAdd", op("BiasAdd", data_format="NCHW"), [columns(2, K, 1, 1), columns(K)], "whole"),
    Case("BiasAddGrad", op("BiasAddGrad"), [columns(3, K)], "columns(0)"),
    Case("BiasAddGrad", op("BiasAddGrad"), [columns(K, 3)], "whole"),
    Case("BiasAdd", lambda x, w, b: tf.nn.bias_add(x @ w, b), [*LOGITS, columns(K)], "columns(1)"),
    Case("BiasAdd", lambda x, w, b: tf.nn.bias_add(x @ w, b), [*LOGITS, of(COLUMNS)], "columns(1)"),
    *(Case(name, lambda x, f=f, a=axis: f(x, a), [columns(3, K)], state) for name, f in (
        ("Cumsum", tf.cumsum), ("Cumprod", tf.math.cumprod), ("CumulativeLogsumexp", tf.math.cumulative_logsumexp))
      for axis, state in ((0, "columns(1)"), (1, "whole"))),
]

COMPLEX = [
    Case("Real Imag Conj", lambda x, y: [f(tf.complex(x, y)) for f in (tf.math.real, tf.math.imag, tf.math.conj)],
         [columns(K, 3), columns(K, 3)], "columns(0)"),
]

CONTROL = [
    Case("Switch Merge", lambda x, p: tf.raw_ops.Merge(inputs=list(tf.raw_ops.Switch(data=x, pred=p)))[0],
         [columns(3, K), bools()], "columns(1)"),
    Case("Switch", lambda x, w, y: tf.cond(tf.reduce_sum(y) > 0, lambda: tf.nn.softmax(x @ w) * y, lambda: x @ w - y),
         [*LOGITS, of(COLUMNS)], "columns(1) whole rows(0)", tolerance=1e-12),
    Case("Enter Exit NextIteration", _loop, LOGITS, "rows(0) partial(held) whole columns(1)", tolerance=1e-11),
    Case("Assert", partition_cases._asserted, [columns(3, K)], "none"),
    Case("IdentityN", lambda x, y: tf.identity_n([x, y])[1:], [columns(3, K), of(K, 2)], "columns(1)"),
]

LOOKUPS = [
    Case("GatherV2", lambda x, n: tf.gather(x, n), [columns(K, 3), ints(2, 2, low=0, high=COLUMNS)], HELD),
    Case("GatherV2", lambda x, n: tf.gather(x, n), [columns(K), ints(low=0, high=COLUMNS)], HELD),
    Case("GatherV2", lambda x, n: tf.gather(x, n),
         [columns(K, 3, dtype="float32"), ints(K, low=0, high=COLUMNS, dtype="int64")], "rows(0)"),
    Case("GatherV2", lambda x, n: tf.gather(x, n), [columns(K, 3, 2), ints(K, 2, low=0, high=COLUMNS)], "rows(0)"),
    Case("GatherV2", lambda x, n: tf.gather(x, n, axis=1), [columns(3, K), ints(4, low=0, high=COLUMNS)], "whole"),
    Case("GatherV2", lambda x, n: tf.gather(x, n), [columns(3, K), ints(2, 2, low=0, high=3)], "columns(2)"),
    Case("GatherV2", lambda x, n: tf.gather(x, n, axis=1), [columns(K, 3), ints(low=0, high=3)], "columns(0)"),
    Case("GatherV2", lambda x, n: tf.gather(x, n, batch_dims=1, axis=1),
         [columns(3, 4, K), ints(3, 2, low=0, high=4)], "whole"),
    Case("Gather", op("Gather"), [columns(K, 3), ints(2, low=0, high=COLUMNS)], "whole"),
    Case("Gather", op("Gather"), [columns(3, K), ints(2, low=0, high=3)], "columns(1)"),
]
# What is needed in columns, and computed again.
MADE = [
    *_made(),
    Case("OneHot", lambda x, w, y: tf.one_hot(y, COLUMNS, 2.0, -1.0, dtype=tf.float64) * (x @ w),
         [*LOGITS, ints(K, low=-2, high=COLUMNS + 5)], "rows(0)"),
    Case("OneHot", lambda x, y: tf.one_hot(y, COLUMNS, axis=0, dtype=tf.float64) * x,
         [columns(K, 3), ints(3, low=0, high=COLUMNS, dtype="int64")], "whole"),
    *(Case("UnsortedSegmentSum", lambda x, y, n: x * tf.math.unsorted_segment_sum(y, n, COLUMNS), specs, state)
      for specs, state in (
          ([columns(K, 3), of(K, 3), ints(K, low=-2, high=COLUMNS)], "partial(sum)"),
          ([columns(K, 3), of(K, 2, 3), ints(K, 2, low=0, high=COLUMNS, dtype="int64")], "partial(sum)"),
          ([columns(K), of(9), ints(9, low=16, high=COLUMNS)], "whole"))),
    Case("Fill", lambda x, y: tf.fill([3, COLUMNS], y) * x, [columns(3, K), of()], "whole"),
    Case("Fill", lambda x, w, y: tf.fill([tf.shape(x)[0], COLUMNS], y) * (x @ w), [*LOGITS, of()], "whole"),
    *(Case("BroadcastTo", lambda x, y: tf.raw_ops.BroadcastTo(input=y, shape=[3, COLUMNS]) * x, [columns(3, K), spec],
           "whole") for spec in (of(3, 1), of(COLUMNS), of(1, COLUMNS), of())),
    Case("Reshape", lambda x, y: tf.reshape(y, [3, COLUMNS]) * x, [columns(3, K), of(3, 1, COLUMNS)], "whole"),
    Case("Transpose", lambda x, y: tf.transpose(y) * x, [columns(3, K), of(COLUMNS, 3)], "whole"),
    *(Case("Maximum", lambda x, y, z: tf.maximum(y, z) * x, [columns(3, K), *specs], "whole") for specs in (
        [of(3, COLUMNS), of(COLUMNS)], [of(3, 1), of(3, COLUMNS)])),
    Case("ExpandDims", lambda x, y: tf.expand_dims(y, 1) * x, [columns(K, 3), of(COLUMNS)], "whole"),
    Case("Squeeze", lambda x, y: tf.squeeze(y, [1]) * x, [columns(3, K), of(3, 1, COLUMNS)], "whole"),
    Case("Sum", lambda x, y: tf.reduce_sum(y, [0]) * x, [columns(3, K), of(2, 3, COLUMNS)], "whole"),
    Case("Sum", lambda x, y: tf.reduce_sum(y, [0, 2], keepdims=True)[0] * x, [columns(K, 1), of(2, COLUMNS, 3)],
         "whole"),
    Case("Mul", lambda x, w, y: (tf.one_hot(y, COLUMNS, dtype=tf.float64) * 0.5 + 0.125) * (x @ w),
         [*LOGITS, ints(K, low=0, high=COLUMNS)], "rows(0) columns(1)"),
]
# What is needed in columns, and sliced.
SLICED = [
    Case("OneHot", lambda x, y: tf.one_hot(y, 3, axis=0, dtype=tf.float64) * x,
         [columns(3, K), ints(COLUMNS, low=0, high=3)], "whole"),
    Case("UnsortedSegmentSum", lambda x, y, n: x * tf.math.unsorted_segment_sum(y, n, 3),
         [columns(3, K), of(5, COLUMNS), ints(5, low=0, high=3)], "whole"),
    Case("UnsortedSegmentSum", lambda x, y, n: x * tf.math.unsorted_segment_sum(y, n, COLUMNS),
         [columns(K, 2, dtype="int32"), ints(3, 2), ints(3, low=0, high=COLUMNS)], "whole"),
    Case("Reshape", lambda x, y: tf.reshape(y, [3, COLUMNS]) * x, [columns(3, K), of(3, 2, COLUMNS // 2)], "whole"),
]
CASES = [*_like_rows(), *REDUCTIONS, *EXTREMES, *NORMALISERS, *SHAPES, *LOOKUPS, *COMPLEX, *CONTROL, *MADE, *SLICED]
