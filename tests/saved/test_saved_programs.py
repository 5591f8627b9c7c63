"""Rewritten programs of TensorFlow 1: each call fetches the values of one process."""

import pickle

import launch
import numpy as np
import pytest
import saved_programs
import tensorflow as tf
from tensorflow.core.protobuf import control_flow_pb2
from tensorflow.core.protobuf import meta_graph_pb2

import tf_poseidon as poseidon
from tf_poseidon.saved_graphs import contexts

v1 = tf.compat.v1

RANKS = {2: "sfb", 3: "ps"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns, for each number of ranks, (reports, results) of all programs."""
    found, folder = {}, tmp_path_factory.mktemp("programs")
    originals = {}
    for name in saved_programs.PROGRAMS:
        (folder / name).mkdir()
        originals[name] = saved_programs.save(name, folder / name)
    for ranks, policy in RANKS.items():
        reports, cases = {}, []
        for name, program in saved_programs.PROGRAMS.items():
            target = folder / name / f"for_{ranks}.meta"
            reports[name] = poseidon.rewrite_meta_graph(
                originals[name], target, program.train_op, workers=ranks, batch_size=3, policy=policy,
                inputs=program.inputs)
            cases.append((name, originals[name], str(target)))
        (folder / "cases").write_bytes(pickle.dumps(cases))
        launch.run_ok(["saved_programs.py", folder / "cases", folder / "out"], ranks, timeout_s=200)
        found[ranks] = reports, pickle.loads((folder / "out").read_bytes())
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", saved_programs.PROGRAMS)
def test_fetches_what_one_process_does(trained, name, ranks):
    reports, results = trained[ranks]
    (fetched, variables), bits, (wanted, expected) = results[name]
    assert bits == 1
    for value, want in zip(fetched, wanted, strict=True):
        np.testing.assert_allclose(value, want, rtol=2e-5, atol=1e-6)
    for variable, value in variables.items():
        np.testing.assert_allclose(value, expected[variable], rtol=2e-5, atol=2e-6, err_msg=variable)
    assert _whole_ops(reports[name]) == set(saved_programs.PROGRAMS[name].whole)


def _whole_ops(report):
    step, = report.steps.values()
    return {whole.op for whole in step.exchanges.whole}


@pytest.mark.parametrize("name, is_said", [("unrolled steps", False), ("steps in a loop", True), ("ratio", False)])
def test_whether_steps_overlap_is_said(trained, name, is_said):
    text = str(trained[2][0][name])
    assert ("do not overlap: each waits for the gradients of the one before" in text) == is_said


def test_gradients_of_unrolled_steps_have_priorities(tmp_path):
    """Those of an earlier step go first, and of one step those that the next one needs first."""
    poseidon.rewrite_meta_graph(saved_programs.save("unrolled steps", tmp_path), tmp_path / "out.meta", ("train",),
                                workers=2, batch_size=3)
    graph_def = v1.MetaGraphDef.FromString((tmp_path / "out.meta").read_bytes()).graph_def
    found = {node.attr["site"].s.decode(): node.attr["priority"].i for node in graph_def.node
             if node.op == "PoseidonSend"}
    assert found == {"w": 1, "vv": 2, "w#1": 3, "vv#1": 4, "w#2": 5, "vv#2": 5}


def test_contexts_forget_what_the_graph_lacks():
    """A loop without its pivot is none, nor is one inside of another; values that are gone are removed."""
    def loop(name, pivot, values, nested=()):
        context = control_flow_pb2.WhileContextDef(context_name=name, pivot_name=pivot)
        context.values_def.values.extend(values)
        context.values_def.external_values.update({f"{name}/x": values[0], f"{name}/y": values[-1]})
        context.nested_contexts.extend(nested)
        return context

    inner = [control_flow_pb2.ControlFlowContextDef(while_ctxt=loop(pivot, pivot, ["a:0"]))
             for pivot in ("a:0", "no:0")]
    branch = control_flow_pb2.CondContextDef(context_name="branch", pred_name="a:0", pivot_name="no:0")
    meta_graph = meta_graph_pb2.MetaGraphDef()
    meta_graph.graph_def.node.add(name="a")
    loops = meta_graph.collection_def["while_context"].bytes_list.value
    loops.extend(context.SerializeToString() for context in (
        loop("kept", "a:0", ["a:0", "no:0"], [*inner, control_flow_pb2.ControlFlowContextDef()]),
        loop("gone", "no:0", ["a:0"])))
    meta_graph.collection_def["cond_context"].bytes_list.value.append(branch.SerializeToString())
    contexts.forget_removed(meta_graph)
    kept, = map(control_flow_pb2.WhileContextDef.FromString, loops)
    assert kept.context_name == "kept" and list(kept.values_def.values) == ["a:0"]
    assert dict(kept.values_def.external_values) == {"kept/x": "a:0"}
    assert [each.while_ctxt.context_name for each in kept.nested_contexts] == ["a:0"]
    assert not meta_graph.collection_def["cond_context"].bytes_list.value
    assert loops[0] == kept.SerializeToString(deterministic=True)


def _saved(folder, change=lambda meta_graph: None):
    """Saves a step with a concat, and with the initial gradient that TensorFlow 1 makes for an unknown shape."""
    with tf.Graph().as_default():
        x, w = v1.placeholder(tf.float32, (None, 6), "x"), v1.get_variable("w", (6, 3), use_resource=False)
        loss = tf.reduce_mean(tf.square(tf.concat([x @ w, tf.tanh(x)], 1)))
        seed = tf.raw_ops.Fill(dims=tf.raw_ops.Shape(input=loss), value=tf.constant(1.0))
        gradient, = tf.gradients(loss, [w], grad_ys=[seed])
        v1.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, w)], name="train")
        meta_graph = v1.train.export_meta_graph()
    change(meta_graph)
    (folder / "model.meta").write_bytes(meta_graph.SerializeToString())
    return poseidon.rewrite_meta_graph(folder / "model.meta", folder / "out.meta", ("train",), workers=2, batch_size=3)


def test_attributes_that_ops_had_not_yet_are_their_defaults(tmp_path):
    """Files of older TensorFlows lack them."""
    def without_defaults(meta_graph):
        for node in meta_graph.graph_def.node:
            for key in ("shape_type", "index_type", "incompatible_shape_error", "Tshape", "out_type"):
                if key in node.attr:
                    del node.attr[key]

    (tmp_path / "new").mkdir()
    new, old = _saved(tmp_path / "new"), _saved(tmp_path, without_defaults)
    assert [str(step.exchanges) for step in old.steps.values()] == [str(step.exchanges) for step in new.steps.values()]


def test_old_placeholders_say_nothing_of_their_shapes(tmp_path):
    """Before TensorFlow 1.3, no dimensions meant unknown ones; inferred shapes are stored elsewhere."""
    def as_before(meta_graph):
        meta_graph.graph_def.versions.producer = 21
        for node in meta_graph.graph_def.node:
            if node.op == "Placeholder":
                node.attr["_output_shapes"].list.shape.add().CopyFrom(node.attr["shape"].shape)
                node.attr["shape"].Clear()
                node.attr["shape"].shape.SetInParent()

    step, = _saved(tmp_path, as_before).steps.values()
    assert [(each.name, each.text()) for each in step.inputs] == [("x", "rows")]
    assert {exchange.site for exchange in step.exchanges.exchanges} >= {"w"}
