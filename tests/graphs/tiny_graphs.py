"""Tiny training graphs for the tests of the passes: a table of builders.

A builder makes one graph and returns nothing; the sites name what it synchronises. Inputs are placeholders
that the tests feed with small integers, so that every order of summation gives the same result.
"""

import tensorflow as tf

from tf_poseidon.ops import library

K, M, N = 6, 4, 5


def data(*shape, dtype=tf.float32):
    """A tensor of this rank's rows."""
    return tf.compat.v1.placeholder(dtype, shape)


def sync(gradient, site="kernel", shape=None, wire_dtype=""):
    with tf.device("CPU:0"):  # as `ops.sync` does
        return library.load()[0].poseidon_sync(
            gradient=gradient, contributes=tf.constant(True), site=site, wire_dtype=wire_dtype,
            shape=tf.TensorShape(shape) if shape else gradient.shape, name=site)


def variable(*shape, value=2.0):
    """A variable that the graph trains, so that it is equal on all ranks."""
    return tf.compat.v1.get_variable("weights", initializer=tf.fill(shape, value), use_resource=True)


def train(weights, total):
    weights.assign_sub(total)


def product(**options):
    return tf.matmul(data(K, M), data(K, N), transpose_a=True, **options)


# ---- recognised ---------------------------------------------------------------------------------


def matmul():
    sync(product())


def verified():
    """In verify mode the sums are compared: with bounds, which the factors give."""
    x, error = data(K, M), data(K, N)
    for gradient, site in ((tf.matmul(x, error, transpose_a=True), "kernel"),
                           (tf.raw_ops.BiasAddGrad(out_backprop=error), "bias")):
        library.load()[0].poseidon_verify(
            gradient=gradient, synchronised=sync(gradient, site), contributes=tf.constant(True),
            is_due=tf.constant(True), masks=[], factors=[], site=site, name=f"verify_{site}")


def matmul_of_columns():
    """U comes as [M, K]."""
    sync(tf.matmul(data(M, K), data(K, N)))


def matmul_of_two_columns():
    sync(tf.matmul(data(M, K), data(N, K), transpose_b=True))


def matmul_transposed_twice():
    sync(tf.matmul(data(K, M), data(N, K), transpose_a=True, transpose_b=True))


def unknown_rows():
    sync(tf.matmul(data(None, M), data(None, N), transpose_a=True))


def through_reshape():
    """The kernel has three dimensions."""
    sync(tf.reshape(product(), [2, M // 2, N]))


def through_identity():
    sync(tf.identity(product()))


def through_cast():
    """Mixed precision: factors in half, the variable in single precision."""
    u, v = data(K, M, dtype=tf.float16), data(K, N, dtype=tf.float16)
    sync(tf.cast(tf.matmul(u, v, transpose_a=True), tf.float32))


def half():
    u, v = data(K, M, dtype=tf.bfloat16), data(K, N, dtype=tf.bfloat16)
    sync(tf.matmul(u, v, transpose_a=True))


def times_scalar():
    """For example, the share of the rows: it may differ between ranks."""
    sync(data() * product())


def times_constant():
    sync(product() * 4.0)


def over_scalar():
    sync(product() / data())


def negative():
    sync(-product())


def times_variable():
    weights = variable(M, N)
    train(weights, sync(weights.read_value() * product()))


def added_products():
    """A layer that is used twice."""
    sync(tf.add_n([product(), product()]))


def regularized():
    """A product and a scalar times a term of the weights, as an L2 regularizer adds."""
    weights = variable(M, N)
    share = tf.tile(tf.reshape(data(), [1, 1]), [M, N])
    train(weights, sync(tf.add_n([product(), (2.0 * weights.read_value()) * share])))


def regularized_twice():
    weights = variable(M, N)
    value = weights.read_value()
    regularizers = [tf.sign(value) * data(), tf.negative(value)]
    train(weights, sync(tf.add_n([product(), *regularizers])))


def einsum():
    sync(tf.raw_ops.Einsum(inputs=[data(2, 3, M), data(2, 3, N)], equation="abc,abd->cd"))


def einsum_of_heads():
    """The kernel of an attention's projection."""
    sync(tf.raw_ops.Einsum(inputs=[data(2, 3, M), data(2, 3, 5, 2)], equation="abc,abde->cde"))


def einsum_in_other_orders():
    sync(tf.raw_ops.Einsum(inputs=[data(N, 3, 2), data(2, M, 3)], equation="dba,acb->cd"))


def batch_matmul():
    """Keras' EinsumDense on inputs with three dimensions."""
    x, error = data(2, 3, M), data(2, 3, N)
    sync(tf.reduce_sum(tf.matmul(x, error, transpose_a=True), 0))


def added_batch_products():
    """A layer for inputs with three dimensions that is used twice, and regularized."""
    weights = variable(M, N)
    products = [tf.reduce_sum(tf.matmul(data(2, 3, M), data(2, 3, N), transpose_a=True), 0) for _ in range(2)]
    train(weights, sync(tf.add_n([*products, tf.sign(weights.read_value())])))


def batch_matmul_by_broadcast():
    """The axes of the sum as gradients compute them."""
    x, error = data(2, 3, M), data(2, 3, N)
    axes = tf.raw_ops.BroadcastGradientArgs(s0=tf.constant([2]), s1=tf.constant([1]))[1]
    total = tf.raw_ops.Sum(input=tf.matmul(x, error, transpose_a=True), axis=axes)
    sync(tf.reshape(total, [M, N]))


def bias():
    u, v = data(K, M), data(K, N)
    sync(tf.matmul(u, v, transpose_a=True))
    sync(tf.raw_ops.BiasAddGrad(out_backprop=v), "bias")


def bias_by_sum():
    u, v = data(K, M), data(K, N)
    sync(tf.matmul(u, v, transpose_a=True))
    sync(tf.reduce_sum(v, 0), "bias")


def bias_of_sequences():
    """The layer's inputs have three dimensions; its bias' gradient sums over two of them."""
    x, error = data(2, 3, M), data(2, 3, N)
    u, v = tf.reshape(x, [-1, M]), tf.reshape(error, [-1, N])
    sync(tf.matmul(u, v, transpose_a=True))
    sync(tf.raw_ops.BiasAddGrad(out_backprop=error), "bias")


def bias_of_shared_layer():
    (u, v), (w, x) = [(data(K, M), data(K, N)) for _ in range(2)]
    sync(tf.add_n([tf.matmul(u, v, transpose_a=True), tf.matmul(w, x, transpose_a=True)]))
    sync(tf.add_n([tf.reduce_sum(v, 0), tf.reduce_sum(x, 0)]), "bias")


def scaled_bias():
    u, v, share = data(K, M), data(K, N), data()
    sync(share * tf.matmul(u, v, transpose_a=True))
    sync(share * tf.raw_ops.BiasAddGrad(out_backprop=v), "bias")


def bias_of_transposed_layer():
    """The errors are U: the layer multiplies with its transposed kernel."""
    u, v = data(K, M), data(K, N)
    sync(tf.matmul(u, v, transpose_a=True))
    sync(tf.raw_ops.BiasAddGrad(out_backprop=u), "bias")


def mixed_bias():
    u, v = data(K, M, dtype=tf.bfloat16), data(K, N, dtype=tf.bfloat16)
    sync(tf.cast(tf.matmul(u, v, transpose_a=True), tf.float32))
    sync(tf.cast(tf.raw_ops.BiasAddGrad(out_backprop=v), tf.float32), "bias")


def gradient_with_other_reader():
    """Something else reads this rank's gradient, so it has to be computed in any case."""
    gradient = product()
    sync(gradient)
    tf.identity(tf.norm(gradient), name="norm")


RECOGNISED = (
    matmul, verified, matmul_of_columns, matmul_of_two_columns, matmul_transposed_twice, unknown_rows,
    through_reshape, through_identity, through_cast, half, times_scalar, times_constant,
    over_scalar, negative, times_variable, added_products, regularized, regularized_twice, einsum,
    einsum_of_heads, einsum_in_other_orders, batch_matmul, added_batch_products, batch_matmul_by_broadcast, bias,
    bias_by_sum, bias_of_sequences, bias_of_shared_layer, scaled_bias, bias_of_transposed_layer,
    mixed_bias, gradient_with_other_reader)


# ---- refused ------------------------------------------------------------------------------------


def vector():
    sync(tf.reduce_sum(data(K, N), 0))


def convolution():
    sync(tf.raw_ops.Conv2DBackpropFilter(
        input=data(2, 6, 6, 1), filter_sizes=[3, 3, 1, 4], out_backprop=data(2, 4, 4, 4),
        strides=[1, 1, 1, 1], padding="VALID"))


def times_data():
    sync(product() * data(M, N))


def plus_data():
    sync(tf.add_n([product(), data(M, N)]))


def times_variable_of_this_rank():
    """The graph assigns the variable a value that differs between ranks."""
    weights = variable(M, N)
    weights.assign(data(M, N))
    sync(weights.read_value() * product())


def times_variable_of_nobody():
    """The graph does not assign the variable; something unknown may."""
    weights = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[M, N])
    sync(tf.raw_ops.ReadVariableOp(resource=weights, dtype=tf.float32) * product())


def narrowing_cast():
    sync(tf.cast(product(), tf.float16))


def scaled_after_cast():
    u, v = data(K, M, dtype=tf.float16), data(K, N, dtype=tf.float16)
    sync(tf.cast(tf.matmul(u, v, transpose_a=True), tf.float32) * data())


def reduced_further():
    sync(tf.reduce_sum(tf.reshape(product(), [M, N, 1]), 0))


def different_products():
    v = data(K, M * N // 2)
    sync(tf.add_n([product(), tf.reshape(tf.matmul(data(K, 2), v, transpose_a=True), [M, N])]))


def scaled_bias_of_transposed_layer():
    """V is scaled before it is sent, but it is U whose rows the bias would need."""
    u, v, share = data(K, M), data(K, N), data()
    sync(share * tf.matmul(u, v, transpose_a=True))
    sync(share * tf.raw_ops.BiasAddGrad(out_backprop=u), "bias")


def times_variable_given_away():
    """It is unknown what the function does with the variable."""
    weights = variable(M, N)
    train(weights, sync(weights.read_value() * product()))
    tf.raw_ops.StatefulPartitionedCall(args=[weights.handle], Tout=[tf.float32], f=_function(weights))


def _function(weights):
    @tf.function
    def function(handle):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    concrete = function.get_concrete_function(weights.handle)
    concrete.add_to_graph(tf.compat.v1.get_default_graph())
    return concrete


def times_random():
    """Stateless, but each rank has its own seed."""
    sync(tf.random.stateless_normal([M, N], seed=[1, 2]) * product())


def mask_before_cast():
    weights = variable(M, N)
    half = tf.cast(weights.read_value(), tf.float16)
    u, v = data(K, M, dtype=tf.float16), data(K, N, dtype=tf.float16)
    train(weights, sync(tf.cast(half * tf.matmul(u, v, transpose_a=True), tf.float32)))


def term_before_cast():
    weights = variable(M, N)
    half = tf.cast(weights.read_value(), tf.float16)
    u, v = data(K, M, dtype=tf.float16), data(K, N, dtype=tf.float16)
    total = tf.add_n([half, tf.matmul(u, v, transpose_a=True)])
    train(weights, sync(tf.cast(total, tf.float32)))


def _by_broadcast(axes):
    x, error = data(2, 3, M), data(2, 3, N)
    total = tf.raw_ops.BroadcastGradientArgs(s0=tf.constant(axes[0]), s1=tf.constant(axes[1]))[1]
    return tf.raw_ops.Sum(input=tf.matmul(x, error, transpose_a=True), axis=total, keep_dims=True)


def summed_to_a_column():
    """Summed over the columns too, and then made a matrix again by a mask."""
    weights = variable(M, N)
    column = tf.reshape(_by_broadcast(([2, M, N], [1, M, 1])), [M, 1])
    train(weights, sync(weights.read_value() * column))


def broadcast_by_scalar():
    """A scalar that was made a matrix makes one of a column."""
    column = tf.reshape(_by_broadcast(([2, M, N], [1, M, 1])), [M, 1])
    sync(tf.tile(tf.reshape(data(), [1, 1]), [M, N]) * column)


def doubled_again_and_again():
    value = product()
    for _ in range(40):
        value += value
    sync(value)


def bias_of_part_of_the_columns():
    """The factor's columns are two dimensions of the errors; the bias has only one of them."""
    x, error = data(2, 3, M), data(2, 3, 5, 2)
    sync(tf.raw_ops.Einsum(inputs=[x, error], equation="abc,abde->cde"))
    sync(tf.raw_ops.BiasAddGrad(out_backprop=error), "bias")


def scalar_einsum():
    value = tf.raw_ops.Einsum(inputs=[data(K, N), data(K, N)], equation="ab,ab->")
    sync(tf.reshape(value, [1, 1]))


def unknown_columns():
    sync(tf.matmul(data(K, None), data(K, N), transpose_a=True), shape=(M, N))


def integers():
    u, v = data(K, M, dtype=tf.int32), data(K, N, dtype=tf.int32)
    sync(tf.matmul(u, v, transpose_a=True))


def einsum_with_batch():
    sync(tf.raw_ops.Einsum(inputs=[data(2, 3, M), data(2, 3, N)], equation="abc,abd->acd"))


def einsum_that_mixes():
    sync(tf.raw_ops.Einsum(inputs=[data(K, 2, 2), data(K, N)], equation="abc,ad->bdc"))


def batch_matmul_of_rows():
    """The rows are the last dimension of the second factor."""
    x, error = data(2, 3, M), data(2, N, 3)
    sync(tf.reduce_sum(tf.matmul(x, error, transpose_a=True, transpose_b=True), 0))


def batch_matmul_not_summed():
    x, error = data(2, 3, M), data(2, 3, N)
    sync(tf.reduce_sum(tf.matmul(x, error, transpose_a=True), 1))


def accumulated_in_a_loop():
    u, v = data(K, M), data(K, N)
    with tf.compat.v1.variable_scope("loop"):
        total = tf.compat.v1.while_loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, t + tf.matmul(u, v, transpose_a=True)),
            (tf.constant(0), tf.zeros((M, N))))[1]
    sync(total)


# ---- slices -------------------------------------------------------------------------------------


def sync_slices(rows, slices, columns=3):
    """The gradient of a table with so many rows, made of so many slices."""
    sync_these_slices(data(slices, dtype=tf.int32), data(slices, columns), rows)


def sync_these_slices(indices, values, rows):
    with tf.device("CPU:0"):  # as `ops.sync_slices` does
        return library.load()[0].poseidon_sync_slices(
            indices=indices, values=values, contributes=tf.constant(True), site="table",
            shape=tf.TensorShape((rows, values.shape[1])), name="table")


def slices_of_large_table():
    sync_slices(100, K)


def slices_of_small_table():
    sync_slices(4, K)


def slices_of_unknown_number():
    sync_slices(100, None)


SLICES = (slices_of_large_table, slices_of_small_table, slices_of_unknown_number)

REFUSED = (
    vector, convolution, times_data, plus_data, times_variable_of_this_rank,
    times_variable_of_nobody, narrowing_cast, scaled_after_cast, reduced_further,
    different_products, scaled_bias_of_transposed_layer, times_variable_given_away, times_random,
    mask_before_cast, term_before_cast, summed_to_a_column, broadcast_by_scalar,
    doubled_again_and_again, bias_of_part_of_the_columns, scalar_einsum, unknown_columns, integers,
    einsum_with_batch, einsum_that_mixes, batch_matmul_of_rows, batch_matmul_not_summed,
    accumulated_in_a_loop)


def build(builder):
    """Returns the tf.Graph of a builder, with loops of version 1 as TensorFlow hands them to passes."""
    graph = tf.Graph()
    with graph.as_default():
        control_flow = tf.compat.v1.control_flow_v2_enabled()
        tf.compat.v1.disable_control_flow_v2()
        try:
            builder()
        finally:
            if control_flow:
                tf.compat.v1.enable_control_flow_v2()
    return graph
