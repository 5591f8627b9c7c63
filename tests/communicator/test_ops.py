"""The exchange ops: their shapes and errors here, their values in jobs of several ranks."""

import re

import launch
import numpy as np
import pytest
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.job import communicator
from tf_poseidon.ops import library


@pytest.mark.parametrize("ranks, largest", [(2, 2**29 + 3), (3, 10**6)])  # more than 2^31 bytes
def test_values(ranks, largest):
    outcome = launch.run_ok(["small_programs.py", "use_ops", largest], ranks, timeout_s=180)
    assert outcome.output.count("all right") == ranks


def test_syncs_of_one_function_do_not_wait_for_each_other():
    """Stateful ops usually run in program order; gradients must not."""
    outcome = launch.run_ok(["small_programs.py", "overlap"], ranks=2, timeout_s=60)
    late, early = map(float, re.search(r"late ([\d.]+) early ([\d.]+)", outcome.output).groups())
    assert late < 0.5 and early < 0.5


@pytest.mark.parametrize("shape", [(), (0,), (3, None), (2, 3)])
def test_static_shapes_are_inferred(shape):
    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def function(x):
        return ops.sync(x, "s"), ops.all_reduce(x, "a"), ops.broadcast(x, "b")

    for output in function.get_concrete_function().outputs:
        assert output.shape.as_list() == list(shape)


@pytest.mark.parametrize("op", [ops.sync, ops.all_reduce])
def test_contributes_is_a_scalar(op):
    with pytest.raises(ValueError, match="must be rank 0"):
        with tf.Graph().as_default():
            op(tf.ones(3), "x", contributes=[True, False])


@pytest.mark.parametrize("own, dtype, has_kernels, expected", [
    ("", tf.float32, False, "/device:CPU:0"), ("/device:GPU:1", tf.float32, False, "/device:CPU:0"),
    ("", tf.float32, True, "/device:GPU:7"), ("/device:GPU:1", tf.float32, True, "/device:GPU:1"),
    ("/device:CPU:1", tf.float32, True, "/device:CPU:0"), ("/device:GPU:1", tf.int32, True, "/device:CPU:0")])
def test_tensors_are_exchanged_where_they_are(own, dtype, has_kernels, expected, monkeypatch):
    """Outside of the scope in which they are exchanged; only GPUs have kernels of their own, not for integers."""
    monkeypatch.setattr(ops, "_has_gpu_kernel", lambda _, given: has_kernels and given.is_floating)
    with tf.Graph().as_default() as graph:
        with tf.device(own):
            value = tf.ones(3, dtype)
        with tf.device("/device:GPU:7"):
            for op in (ops.sync, ops.all_reduce, ops.all_gather, ops.broadcast):
                op(value, op.__name__)
            if dtype.is_floating:
                slices = tf.IndexedSlices(value, tf.range(3))
                ops.sync_slices(slices, [3], "slices")
                ops.dense_slices(slices, [3])
    assert {op.device for op in graph.get_operations() if op.type.startswith("Poseidon")} == {expected}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_slices_of_one_index_are_added_in_their_order(dtype):
    """Of more rows than are sorted by insertion, which keeps their order."""
    rng = np.random.default_rng(0)
    indices, values = rng.integers(0, 3, 500), rng.normal(size=(500, 2)).astype(dtype)
    expected = np.zeros((4, 2), np.float32)
    for index, row in zip(indices, values):
        expected[index] += row
    got = ops.dense_slices(tf.IndexedSlices(values, indices), tf.TensorShape([4, 2]))
    np.testing.assert_array_equal(got, expected.astype(dtype))


def test_op_outside_a_job_says_what_to_do():
    with pytest.raises(tf.errors.FailedPreconditionError,
                       match="PoseidonSync 'x' runs outside a job; create a tf_poseidon"):
        ops.sync(tf.ones(3), "x")


def test_graph_optimizations_keep_every_exchange():
    """Equal inputs, constant inputs, unused results: the other ranks still wait for the message."""
    @tf.function
    def function():
        x = tf.constant(1.0)
        ops.sync(x, "unused")
        return ops.sync(x, "one") + ops.sync(x, "two")

    graph = function.get_concrete_function().graph.as_graph_def()
    assert sum(node.op == "PoseidonSync" for node in graph.node) == 3
    with pytest.raises(tf.errors.FailedPreconditionError):
        function()  # had they been folded away, this would succeed


DTYPES = [("float32", None), ("float64", None), ("float16", None), ("bfloat16", None),
          ("float16", "float32"), ("bfloat16", "float32")]
# (K, M, N): no rows, single rows, full and partial tiles, more rows than a block, work for one thread
# and for many, shared by columns or by rows.
SIZES = [(0, 3, 5), (1, 1, 1), (5, 1, 8), (7, 13, 33), (3, 7, 1100), (32, 100, 600), (300, 25, 70),
         (600, 65, 129), (40, 700, 30)]


@pytest.mark.parametrize("dtype, out", DTYPES)
@pytest.mark.parametrize("k, m, n", SIZES)
def test_outer_product_and_sum_of_rows(k, m, n, dtype, out):
    """Small integers are exact in double; the result is the exact one, rounded once."""
    rng = np.random.default_rng(k + m + n)
    u, v = (rng.integers(-3, 4, shape).astype("float64") for shape in ((k, m), (k, n)))
    got = ops.outer_product(tf.cast(u, dtype), tf.cast(v, dtype), out)
    assert got.dtype.name == (out or dtype)
    np.testing.assert_array_equal(got, tf.cast(u.T @ v, got.dtype))
    got = ops.sum_of_rows(tf.cast(v, dtype), out)
    np.testing.assert_array_equal(got, tf.cast(v.sum(0), got.dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outer_product_of_halves_adds_in_float(dtype):
    """A sum in half precision would lose 1 beside 4096."""
    u = tf.cast([[64.0]] + [[1.0]] * 64, dtype)
    assert float(ops.outer_product(u, u)[0, 0]) == 4096 + 64


def test_small_halves_are_not_taken_for_zero():
    """TensorFlow's threads flush subnormal floats to zero, but not subnormal halves."""
    v = tf.constant([[2.0**-24, -3 * 2.0**-24, 2.0**-15, 2.0**-14]], tf.float16)
    np.testing.assert_array_equal(ops.outer_product(tf.ones((1, 1), tf.float16), v, tf.float32), v)
    np.testing.assert_array_equal(ops.outer_product(tf.ones((1, 1), tf.float16), v), v)
    np.testing.assert_array_equal(ops.sum_of_rows(v, tf.float32), v[0])


def test_outer_product_adds_in_the_order_of_rows_on_any_number_of_threads():
    """The bits of a large product equal those of its single columns on one thread."""
    rng = np.random.default_rng(3)
    u, v = (tf.constant(rng.normal(size=(700, size)), tf.float32) for size in (50, 2000))
    whole = ops.outer_product(u, v).numpy()
    for begin in (0, 3, 1024):
        part = ops.outer_product(u, v[:, begin:begin + 5]).numpy()
        assert part.tobytes() == whole[:, begin:begin + 5].tobytes()
    by_rows = ops.outer_product(v, u).numpy()
    assert by_rows.T.tobytes() == whole.tobytes()


@pytest.mark.parametrize("u, v", [((2, 3), (4, 5)), ((2, 3, 4), (2, 5)), ((2,), (2, 3))])
def test_outer_product_refuses_other_shapes(u, v):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        ops.outer_product(tf.ones(u), tf.ones(v))


def test_outer_product_refuses_to_narrow():
    with pytest.raises(tf.errors.InvalidArgumentError, match="cannot make half of float"):
        ops.outer_product(tf.ones((2, 3)), tf.ones((2, 4)), tf.float16)


def test_shapes_of_factors():
    @tf.function(input_signature=[tf.TensorSpec((None, 3)), tf.TensorSpec((None, 5))])
    def function(u, v):
        return ops.outer_product(u, v), ops.sum_of_rows(v)

    assert [o.shape.as_list() for o in function.get_concrete_function().outputs] == [[3, 5], [5]]


@pytest.mark.parametrize("dtype, u, v, difference, is_fine", [
    ("float32", 1.0, 1.0, 2.0**-23, True),  # a rounding
    ("float32", 1.0, 1.0, 2.0**-16, False),
    ("float32", 0.0, 0.0, 2.0**-100, False),
    ("float32", 2.0**-70, 2.0**-60, 2.0**-130, True),  # flushed to zero on one of two ways
    ("float16", 2.0**-10, 2.0**-10, 2.0**-24, True),  # the smallest half
    ("float16", 2.0**-10, 2.0**-10, 2.0**-14, False),
])
def test_verify_knows_rounding_and_underflow(dtype, u, v, difference, is_fine):
    rank, = communicator.join_loopback(1)
    rank.use_for_ops()
    plain = tf.constant([[u * v]], dtype)

    def verify():
        library.load()[0].poseidon_verify(
            gradient=plain, synchronised=tf.constant([[u * v + difference]], dtype),
            contributes=True, is_due=True, masks=[], site="kernel",
            factors=[tf.constant([[u]], dtype), tf.constant([[v]], dtype)])

    try:
        if is_fine:
            verify()
        else:
            with pytest.raises(tf.errors.DataLossError, match="gradient of 'kernel' on rank 0"):
                verify()
    finally:
        rank.leave()


def test_verify_knows_tf32():
    """A GPU reads only 10 fraction bits of floats, where TensorFlow allows that."""
    rank, = communicator.join_loopback(1)
    rank.use_for_ops()
    u, v = (tf.constant([[1 + 2.0**-11 - 2.0**-23]]) for _ in "uv")

    def verify():
        library.load()[0].poseidon_verify(
            gradient=u * v, synchronised=[[1.0]], contributes=True, is_due=True, masks=[], factors=[u, v],
            site="kernel", may_use_tf32=True)

    try:
        verify()
        tf.config.experimental.enable_tensor_float_32_execution(False)
        with pytest.raises(tf.errors.DataLossError):
            verify()
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)
        rank.leave()


@pytest.mark.parametrize("tf32, expected", [(True, "; on NVIDIA H200 9.0 with TF32"), (False, "; on NVIDIA H200 9.0")])
def test_rounding_names_the_gpu_that_multiplies(tf32, expected, monkeypatch):
    on_cpu = ops.rounding()
    monkeypatch.setattr(tf.config, "get_visible_devices",
                        lambda kind: [tf.config.PhysicalDevice(f"/physical_device:{kind}:0", kind)])
    monkeypatch.setattr(tf.config.experimental, "get_device_details",
                        lambda gpu: {"device_name": "NVIDIA H200", "compute_capability": (9, 0)})
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: tf32)
    monkeypatch.setattr(devices, "can_multiply", lambda device: False)
    assert ops.rounding() == on_cpu
    monkeypatch.setattr(devices, "can_multiply", lambda device: device == "/device:GPU:0")
    assert ops.rounding() == on_cpu + expected


def test_a_group_that_stays_incomplete_leaves_without_the_others():
    """Messages wait for each other for speed only: nothing depends on it."""
    outcome = launch.run_ok(["small_programs.py", "incomplete_group"], ranks=2, timeout_s=60)
    assert outcome.output.count("all right") == 2


def test_many_pairs_over_tcp():
    """MPI over TCP stops reading when it has too many unexpected messages, even headers."""
    outcome = launch.run(["small_programs.py", "sum_many_pairs"], ranks=3, timeout_s=60, environment={
        "MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "lo", "FI_TCP_MAX_SAVED": "4"})
    assert outcome.status == 0, outcome.output
