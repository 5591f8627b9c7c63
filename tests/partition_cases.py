"""Small graphs for the rules of elementwise ops, reductions, contractions, shapes and control flow: a table.

A table of cases, `CASES`, is a list of `partition_table.Case`, a line each where possible:

    Case("Tanh TanhGrad", tf.tanh, [of(K, 3)], "rows(0)")

These are the ops that the case is about; a function from its inputs to its output (or outputs); its inputs; and
the state that each of these ops has to give its first output, "rows(1)", "whole", "partial(sum)", so that a rule
that falls back to whole inputs is noticed. Where ops give different states, a dict from op to state.

`of(K, 3)` is an input with rows in dimension 0, `of(3, K)` in dimension 1, `of(3)` is whole, and `summed(3)` is an
input of [K, 3] that the case gets summed over its rows, so as a summand. Values are integers from -3 to 3, of
type float64; `dtype`, `low`, `high` and `make` change that. Whatever is float is compared, and so is the gradient
of a weighted sum of the outputs for every float input, which is where the ops of gradients come in.
`fewest=1` is for what one process cannot compute without rows.
"""

import tensorflow as tf
from partition_table import Case
from partition_table import K
from partition_table import of
from partition_table import summed

raw = tf.raw_ops

CASES = [
    Case("Tanh TanhGrad", tf.tanh, [of(K, 3)], "rows(0)"),
    Case("Neg", tf.negative, [summed(3)], "partial(sum)"),
    Case("MatMul", tf.matmul, [of(K, 3), of(3, 4)], "rows(0)"),
    Case("MatMul", lambda x, y: tf.matmul(x, y, transpose_a=True), [of(K, 3), of(K, 4)], "partial(sum)"),
]
