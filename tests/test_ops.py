"""The exchange ops: their shapes and errors here, their values in jobs of several ranks."""

import re

import launch
import pytest
import tensorflow as tf

from tf_poseidon import ops


@pytest.mark.parametrize("ranks, largest", [(2, 2**29 + 3), (3, 10**6)])  # more than 2^31 bytes
def test_values(ranks, largest):
    outcome = launch.run_ok(["programs.py", "use_ops", largest], ranks, timeout_s=180)
    assert outcome.output.count("all right") == ranks


def test_syncs_of_one_function_do_not_wait_for_each_other():
    """Stateful ops usually run in program order; gradients must not."""
    outcome = launch.run_ok(["programs.py", "overlap"], ranks=2, timeout_s=60)
    late, early = map(float, re.search(r"late ([\d.]+) early ([\d.]+)", outcome.output).groups())
    assert late < 0.5 and early < 0.5


@pytest.mark.parametrize("shape", [(), (0,), (3, None), (2, 3)])
def test_shapes(shape):
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


def test_op_outside_a_job_says_what_to_do():
    with pytest.raises(tf.errors.FailedPreconditionError,
                       match="PoseidonSync 'x' runs outside a job; create a tf_poseidon"):
        ops.sync(tf.ones(3), "x")


def test_graph_optimizations_keep_every_exchange():
    """Equal inputs, constant inputs, unused results: still a message the other ranks wait for."""
    @tf.function
    def function():
        x = tf.constant(1.0)
        ops.sync(x, "unused")
        return ops.sync(x, "one") + ops.sync(x, "two")

    graph = function.get_concrete_function().graph.as_graph_def()
    assert sum(node.op == "PoseidonSync" for node in graph.node) == 3
    with pytest.raises(tf.errors.FailedPreconditionError):
        function()  # had they been folded away, this would succeed
