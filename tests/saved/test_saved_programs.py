"""Rewritten programs of TensorFlow 1: each call fetches the values of one process."""

import os
import pickle
import time

import launch
import numpy as np
import pytest
import saved_programs
import tensorflow as tf
from tensorflow.core.protobuf import control_flow_pb2
from tensorflow.core.protobuf import meta_graph_pb2

import tf_poseidon as poseidon
from tf_poseidon.saved_graphs import contexts
from tf_poseidon.saved_graphs import formats

v1 = tf.compat.v1

RANKS = {2: "sfb", **({3: "ps"} if "POSEIDON_ALL_CELLS" in os.environ else {})}


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
            assert not poseidon.diff(originals[name], target).others, name
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


def _as_before_1_3(meta_graph):
    """Makes placeholders those of old files: no dimensions meant unknown ones; inferred shapes are stored elsewhere."""
    meta_graph.graph_def.versions.producer = 21
    for node in meta_graph.graph_def.node:
        if node.op == "Placeholder":
            node.attr["_output_shapes"].list.shape.add().CopyFrom(node.attr["shape"].shape)
            node.attr["shape"].Clear()
            node.attr["shape"].shape.SetInParent()


def test_old_placeholders_say_nothing_of_their_shapes(tmp_path):
    step, = _saved(tmp_path, _as_before_1_3).steps.values()
    assert [(each.name, each.text()) for each in step.inputs] == [("x", "rows")]
    assert {exchange.site for exchange in step.exchanges.exchanges} >= {"w"}


@pytest.mark.parametrize("name", ["model", "out"])
def test_what_does_not_fit_an_old_placeholder_cannot_be_fed(name, tmp_path):
    """Kernels would read it, and may end the process."""
    _saved(tmp_path, _as_before_1_3)
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(str(tmp_path / f"{name}.meta"))
        with pytest.raises(ValueError, match=r"shape \(4, 3\) for Tensor x:0, which has shape \(None, 6\)"):
            session.run("train", {"x:0": np.ones((4, 3))})


def _ctc(h):
    rows = tf.shape(h)[0]
    return tf.nn.ctc_loss(tf.ones((rows, 2), tf.int32), tf.tile(h[:, None], (1, 4, 1)), tf.fill([rows], 2),
                          tf.fill([rows], 4), logits_time_major=False, blank_index=0)


@pytest.mark.parametrize("in_loop", [tf.shape, lambda h: tf.identity_n([h]), _ctc])
@pytest.mark.parametrize("is_used", [False, True])
def test_what_a_loop_does_not_use_is_no_difference(in_loop, is_used, tmp_path):
    """Nodes that nothing reads are not written where they would have to be read."""
    def build():
        x, w = v1.placeholder(tf.float32, (None, 6), "x"), v1.get_variable("w", (6, 6))

        def body(i, h):
            found = in_loop(h)
            return i + 1, tf.tanh((h + tf.reduce_mean(tf.cast(found, tf.float32)) if is_used else h) @ w)

        _, h = v1.while_loop(lambda i, h: i < 3, body, (0, x))
        v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h), name="train")

    original = saved_programs.save_graph(build, tmp_path)
    poseidon.rewrite_meta_graph(original, tmp_path / "out.meta", ("train",), workers=2)
    assert not poseidon.diff(original, tmp_path / "out.meta").others


def test_what_reads_the_step_may_not_differ(tmp_path):
    original = saved_programs.save("fed rate", tmp_path)
    poseidon.rewrite_meta_graph(original, tmp_path / "out.meta", ("train",), workers=2)
    graph = formats.read(tmp_path / "out.meta")
    next(node for node in graph.graph_def.node if node.name == "accuracy").attr["keep_dims"].b = True
    graph.write(tmp_path / "changed.meta")
    sentence, = poseidon.diff(original, tmp_path / "changed.meta").others
    assert sentence.startswith("the main graph: 1 nodes, the first is 'accuracy', Mean(")


def test_differences_take_linear_time(tmp_path):
    def seconds(layers):
        def build():
            x = h = v1.placeholder(tf.float32, (None, 4), "x")
            for i in range(layers):
                h = tf.tanh(h @ v1.get_variable(f"w{i}", (4, 4), use_resource=False))
            v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h - x), name="train")

        folder = tmp_path / str(layers)
        folder.mkdir()
        original = saved_programs.save_graph(build, folder)
        poseidon.rewrite_meta_graph(original, folder / "out.meta", ("train",), workers=2)
        taken = []
        for _ in range(3):
            begin = time.process_time()
            assert not poseidon.diff(original, folder / "out.meta").others
            taken.append(time.process_time() - begin)
        return min(taken)

    # 4 times if linear, 16 times if quadratic: a ratio, since machines differ.
    assert seconds(48) < 9 * seconds(12)
