"""What becomes of saved graphs that are damaged, or no training graphs: a sentence, and never half a file."""

import os
import random
import re
import shutil

import damage
import hypothesis
from hypothesis import strategies as st
import pytest
import saved_zoo
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import saved_model_pb2

import tf_poseidon as poseidon
from tf_poseidon import grappler
from tf_poseidon import planning
from tf_poseidon.graph_passes import saved as saved_lib
from tf_poseidon.graph_passes import strip as strip_lib
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import rewriting

# Functions, a condition, loops of both kinds, slices, and both kinds of variables.
NAMES = ("nested_functions", "accumulated_over_calls", "accumulated_in_call", "embedding_by_scatter",
         "v1_embedding", "v1_control_flow_of_references", "v1_momentum", "graph_def", "graph_def_as_text")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Paths of saved graphs by name."""
    directory = str(tmp_path_factory.mktemp("zoo"))
    paths = {name: saved_zoo.CASES[name](directory).path for name in NAMES}
    paths["inference"], module = os.path.join(directory, "inference"), tf.Module()
    module.variable = tf.Variable(tf.ones((8, 2)))
    module.run = tf.function(lambda x: {"y": x @ module.variable}, [tf.TensorSpec((None, 8))])
    tf.saved_model.save(module, paths["inference"], signatures={"serve": module.run, "train": module.run})
    for name, kind in (("nested_functions", ""), ("v1_momentum", ".meta")):
        paths[f"rewritten_{name}"] = os.path.join(directory, f"rewritten{kind}")
        rewriting.rewrite(paths[name], paths[f"rewritten_{name}"], workers=2)
    paths["plan"] = os.path.join(directory, "plan.json")
    report = rewriting.rewrite(paths["v1_embedding"], os.path.join(directory, "other.meta"), workers=2)
    report.plan.save(paths["plan"])
    return paths


def refuses(expected, folder, call):
    """Asserts that a call raises one line that says what is wrong, and leaves a folder as it is."""
    before = sorted(os.listdir(folder))
    with pytest.raises(poseidon.PoseidonError) as caught:
        call()
    text = str(caught.value)
    assert re.search(expected, text), text
    assert "\n" not in text and text.endswith("."), text
    assert sorted(os.listdir(folder)) == before


# ---- what is no saved graph ---------------------------------------------------------------------

_RANDOM = random.Random(1).randbytes(3000)
_FILES = {  # by name of the file: (content, or what is made of that of a whole file), what is said of it
    "empty.pb": (b"", r"empty.pb' holds a graph without nodes; it is damaged"),
    "empty.pbtxt": (b"", r"empty.pbtxt' holds a graph without nodes; it is damaged"),
    "empty.meta": (b"", r"empty.meta' holds a graph without nodes; it is damaged"),
    "random.pb": (_RANDOM, r"random.pb' cannot be read as a GraphDef: .*; it is damaged, or another kind"),
    "random.pbtxt": (_RANDOM, r"random.pbtxt' cannot be read as a GraphDef: .*; it is damaged"),
    "random.meta": (_RANDOM, r"random.meta' cannot be read as a MetaGraphDef: .*; it is damaged"),
    "text.pbtxt": (b"node { name: 3 }", r"text.pbtxt' cannot be read as a GraphDef: .*; it is damaged"),
    "deep.pbtxt": (b"library { function { node_def { attr { " * 3000, r"deep.pbtxt' cannot be read"),
    "binary_as_text.pbtxt": ("graph_def", r"binary_as_text.pbtxt' cannot be read as a GraphDef"),
    "text_as_binary.pb": ("graph_def_as_text", r"text_as_binary.pb' cannot be read as a GraphDef"),
    "meta_graph_as_graph.pb": ("v1_momentum", r"meta_graph_as_graph.pb' (cannot be read|holds a graph)"),
    "graph_as_meta_graph.meta": ("graph_def", r"graph_as_meta_graph.meta' (cannot be read|holds a)"),
    "graph.h5": (b"", r"graph.h5' ends in none of .meta \(MetaGraph\), .pb and .pbtxt \(GraphDef\)"),
    "graph": (b"", r"graph' ends in none of .meta"),
}


@pytest.mark.parametrize("name", _FILES)
def test_no_saved_graph(name, zoo, tmp_path):
    content, expected = _FILES[name]
    if isinstance(content, str):
        with open(zoo[content], "rb") as file:
            content = file.read()
    (tmp_path / name).write_bytes(content)
    suffix = os.path.splitext(name)[1]
    refuses(expected, tmp_path, lambda: rewriting.rewrite(
        tmp_path / name, tmp_path / f"target{suffix}", train_op="train", workers=2))
    if "empty" not in name:
        refuses(rf"{name}' ", tmp_path, lambda: poseidon.strip(tmp_path / name, tmp_path / f"target{suffix}"))


@pytest.mark.parametrize("name", ["graph_def", "graph_def_as_text", "v1_momentum", "nested_functions"])
def test_truncated(name, zoo, tmp_path):
    """Whatever is left of a file: most of that is no message, and what is one is no training graph."""
    source, suffix = zoo[name], os.path.splitext(zoo[name])[1]
    with open(os.path.join(source, "" if suffix else "saved_model.pb").rstrip("/"), "rb") as file:
        content = file.read()
    path = tmp_path / f"source{suffix}"
    damaged = path if suffix else path / "saved_model.pb"
    damaged.parent.mkdir(exist_ok=True)
    for size in (1, 2, 100, len(content) // 3, len(content) // 2, int(0.9 * len(content)), len(content) - 3):
        damaged.write_bytes(content[:size])
        # Text may end between two nodes, of which it says nothing then.
        refuses(r"source|The graph reads '.*', which does not exist|has no signature", tmp_path,
                lambda: rewriting.rewrite(path, tmp_path / f"target{suffix}", workers=2,
                                          train_op="train" if name.startswith("graph") else ()))


def _missing(zoo, tmp_path):
    return rewriting.rewrite(tmp_path / "nothing.pb", tmp_path / "target.pb", train_op="train", workers=2)


def _folder_without_model(zoo, tmp_path):
    return poseidon.rewrite_saved_model(tmp_path, tmp_path / "target", workers=2)


def _two_graphs(zoo, tmp_path):
    proto = saved_model_pb2.SavedModel()
    with open(os.path.join(zoo["nested_functions"], "saved_model.pb"), "rb") as file:
        proto.ParseFromString(file.read())
    proto.meta_graphs.add()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "saved_model.pb").write_bytes(proto.SerializeToString())
    return poseidon.rewrite_saved_model(tmp_path / "source", tmp_path / "target", workers=2)


def _file_as_saved_model(zoo, tmp_path):
    return poseidon.rewrite_saved_model(zoo["graph_def"], tmp_path / "target", workers=2)


def _folder_as_meta_graph(zoo, tmp_path):
    return poseidon.rewrite_meta_graph(zoo["nested_functions"], tmp_path / "target.meta", workers=2)


def _meta_graph_as_graph(zoo, tmp_path):
    return poseidon.rewrite_graph_def(zoo["v1_momentum"], tmp_path / "target.pb", "train", workers=2)


def _rewritten_twice(zoo, tmp_path):
    return poseidon.rewrite_saved_model(zoo["rewritten_nested_functions"], tmp_path / "target", workers=2)


def _strip_what_was_not_rewritten(zoo, tmp_path):
    return poseidon.strip(zoo["v1_momentum"], tmp_path / "target.meta")


def _strip_nothing(zoo, tmp_path):
    return poseidon.strip(tmp_path / "nothing", tmp_path / "target")


def _strip_to_what_exists(zoo, tmp_path):
    return poseidon.strip(zoo["rewritten_nested_functions"], tmp_path)


_SOURCES = {
    _missing: r"no file '.*nothing.pb'; give a SavedModel's folder, a MetaGraph",
    _folder_without_model: r"The folder '.*' has no saved_model.pb, so it is no SavedModel",
    _two_graphs: r"source' holds 2 graphs, expected one",
    _file_as_saved_model: r"graph.pb' is a GraphDef, expected a SavedModel",
    _folder_as_meta_graph: r"nested_functions' is a SavedModel, expected a MetaGraph",
    _meta_graph_as_graph: r"model.meta' is a MetaGraph, expected a GraphDef",
    _rewritten_twice: r"was rewritten before; undo that with `tf-poseidon strip`",
    _strip_what_was_not_rewritten: r"model.meta' was not rewritten, so there is nothing to strip",
    _strip_nothing: r"no file '.*nothing'",
    _strip_to_what_exists: r"' exists already; remove it, or name another",
}


@pytest.mark.parametrize("call", _SOURCES)
def test_wrong_source(call, zoo, tmp_path):
    if call is _two_graphs:
        (tmp_path / "inner").mkdir()
        refuses(_SOURCES[call], tmp_path / "inner", lambda: call(zoo, tmp_path))
    else:
        refuses(_SOURCES[call], tmp_path, lambda: call(zoo, tmp_path))


# ---- what is no training step, and options ------------------------------------------------------

_OPTIONS = [  # (name of a graph, options, what is said)
    ("inference", {}, r"The graph updates no variable, .* name what makes a training step"),
    ("inference", {"signature": "serve"}, r"The graph updates no variable"),
    ("nested_functions", {"signature": "other"}, r"has no signature 'other': it has train; name one with"),
    ("nested_functions", {"train_op": "nothing"}, r"The graph reads 'nothing', which does not exist"),
    ("nested_functions", {"train_op": "a:b:c"}, r"The graph reads 'a:b:c', which is no tensor"),
    ("nested_functions", {"train_op": [3]}, r"train_op=\[3\], expected names of ops"),
    ("nested_functions", {"train_op": 3}, r"train_op=3, expected names of ops"),
    ("v1_momentum", {"signature": "train"}, r"has no signature 'train': it has none; .* --train_op"),
    ("v1_momentum", {"train_op": "loss"}, r"The graph updates no variable"),
    ("v1_momentum", {"train_op": ["train", "nothing"]}, r"reads 'nothing', which does not exist"),
    ("v1_momentum", {"train_op": "train\nx"}, r"which does not exist"),
    ("graph_def", {}, r"graph.pb' does not say what makes a training step; name its update ops"),
    ("graph_def", {"train_op": "init"}, r"no variable"),
    ("graph_def", {"train_op": "train", "workers": None}, r"Neither a number of workers nor a plan is given"),
    *(("v1_momentum", options, expected) for options, expected in (
        ({"workers": 0}, r"workers=0, expected a whole number, at least 1"),
        ({"workers": "4"}, r"workers='4', expected a whole number"),
        ({"workers": 2.5}, r"workers=2.5, expected a whole number"),
        ({"servers": 3}, r"servers=3 with workers=2"),
        ({"bandwidth_gbps": -1}, r"bandwidth_gbps=-1, expected a positive number"),
        ({"latency_us": "a"}, r"latency_us='a', expected 0 or more"),
        ({"gflops": None}, r"gflops=None, expected a positive number"),
        ({"policy": "fast"}, r"policy='fast'"),
        ({"policy": ["auto"]}, r"policy=\['auto'\]"),
        ({"pins": {"first/kernel": "fast"}}, r"fast"),
        ({"pins": "first/kernel=ps"}, r"pins='first/kernel=ps', expected a dictionary"),
        ({"pins": 3}, r"pins=3, expected a dictionary"),
        ({"rule": "max"}, r"rule='max', expected 'mean' or 'sum'"),
        ({"rule": ["mean"]}, r"rule=\['mean'\], expected 'mean' or 'sum'"),
        ({"batch_size": 0}, r"batch_size=0, expected at least one row"),
        ({"batch_size": "32"}, r"batch_size='32', expected at least one row"),
        ({"batch_size": True}, r"batch_size=True, expected at least one row"),
        ({"batch_size": 1 << 70}, r"batch_size=\d+, expected at least one row"),
        ({"wire_dtype": "int8"}, r"wire_dtype='int8', expected 'bfloat16' or None"),
        ({"wire_dtype": []}, r"wire_dtype=\[\], expected 'bfloat16' or None"),
        ({"gradients": "nothing.json"}, r"The file of gradients 'nothing.json' cannot be read"),
        ({"gradients": 3.5}, r"gradients=3.5, expected a dictionary or the name of a file"),
        ({"gradients": {"first/kernel": 3}}, r"of 'first/kernel' is given as 3, expected a tensor's name"),
        ({"gradients": {"first/kernel": {"tensor": 3}}}, r"of 'first/kernel' is given as .*, expected a"),
        ({"gradients": {"first/kernel": {"tensor": "x", "rule": "max"}}}, r"is given as .*'mean' or 'sum'"),
        ({"gradients": {"first/kernel": {"tensor": "x", "rule": []}}}, r"is given as .*'mean' or 'sum'"),
        ({"gradients": {"first/kernel": "nothing"}}, r"is given as 'nothing', which the training step does"),
        ({"gradients": {"first/kernel": "loss:7"}}, r"'first/kernel' is given as 'loss:7', which"),
        ({"gradients": {"first/kernel": "^loss"}}, r"'first/kernel' is given as '\^loss', which"),
        ({"gradients": {"first/kernel": "MatMul"}}, r"of shape \(.*\), but the variable has \(8, 16\)"),
        ({"gradients": {"first/kernel": "loss:x"}}, r"'first/kernel' is given as 'loss:x', which"),
        ({"gradients": {"nothing": "loss"}}, r"is given for 'nothing', but the training step has"),
        ({"gradients": {3: "loss"}}, r"gradient of 3 is given as 'loss', expected"),
        ({"plan": "nothing.json"}, r"The plan 'nothing.json' cannot be read"),
        ({"plan": 3}, r"plan"),
        ({"workers": None, "plan": "PLAN"}, r"The plan was made for another training graph: "),
    )),
]


@pytest.mark.parametrize("name, options, expected", _OPTIONS,
                         ids=lambda value: str(value).partition(" ")[0])
def test_wrong_options(name, options, expected, zoo, tmp_path):
    target = tmp_path / f"target{os.path.splitext(zoo[name])[1]}"
    options = {"workers": 2} | options
    if options.get("plan") == "PLAN":
        options["plan"] = zoo["plan"]
    refuses(expected, tmp_path, lambda: rewriting.rewrite(zoo[name], target, **options))


@pytest.mark.parametrize("text, expected", [
    ("", r"cannot be read: .*; it is JSON"),
    ("{", r"cannot be read"),
    ("[]", r"gradient"),
    ("3", r"gradient"),
    ('{"first/kernel": null}', r"'first/kernel' is given as None"),
    ('{"first/kernel": "x", "first/bias": {}}', r"'first/bias' is given as {}"),
    (b"\xff", r"cannot be read"),
    ("[" * 100_000, r"cannot be read"),
], ids=range(8))
def test_wrong_file_of_gradients(text, expected, zoo, tmp_path):
    path = tmp_path / "gradients.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refuses(expected, tmp_path, lambda: rewriting.rewrite(
        zoo["v1_momentum"], tmp_path / "target.meta", workers=2, gradients=path))


@pytest.mark.parametrize("name, target, expected", [
    ("nested_functions", "there", r"there' exists already; remove it, or name another"),
    ("v1_momentum", "there.meta", r"there.meta' exists already"),
    ("v1_momentum", "link.meta", r"link.meta' exists already"),
    ("v1_momentum", "data.meta", r"data.index' exists already"),
    ("nested_functions", "nowhere/target", r"target' cannot be written: there is no folder '.*nowhere'"),
    ("v1_momentum", "nowhere/target.meta", r"there is no folder '.*nowhere'"),
    ("graph_def", "nowhere/target.pb", r"there is no folder '.*nowhere'"),
    ("graph_def", "there.meta/target.pb", r"there is no folder '.*there.meta'"),
    ("v1_momentum", "target.pb", r"target.pb' does not end in .meta"),
    ("graph_def", "target", r"target' ends neither in .pb nor in .pbtxt"),
    ("graph_def", "target.meta", r"target.meta' ends neither in .pb nor in .pbtxt"),
    ("graph_def", f"{'x' * 300}.pb", r"x.pb' cannot be written: File name too long"),
    ("nested_functions", "", r"exists already|cannot be written"),
], ids=lambda value: value[:30])
def test_wrong_target(name, target, expected, zoo, tmp_path):
    (tmp_path / "there").mkdir()
    for file in ("there.meta", "data.index"):
        (tmp_path / file).write_bytes(b"")
    (tmp_path / "link.meta").symlink_to("nothing")
    refuses(expected, tmp_path, lambda: rewriting.rewrite(
        zoo[name], tmp_path / target, workers=2, train_op="train" if name == "graph_def" else ()))


def test_target_cannot_be_written(zoo, tmp_path):
    """The disk is full, say: a file of the checkpoint is gone when it is copied."""
    shutil.copytree(os.path.dirname(zoo["v1_momentum"]), tmp_path / "source")
    os.remove(tmp_path / "source" / "model.index")
    (tmp_path / "source" / "model.index").symlink_to("model.index")
    (tmp_path / "out").mkdir()
    refuses(r"cannot be written|cannot be read", tmp_path / "out", lambda: poseidon.rewrite_meta_graph(
        tmp_path / "source" / "model.meta", tmp_path / "out" / "target.meta", workers=2))
    shutil.copytree(zoo["nested_functions"], tmp_path / "folder")
    (tmp_path / "folder" / "variables" / "more").symlink_to("nothing")
    refuses(r"cannot be written", tmp_path / "out", lambda: poseidon.rewrite_saved_model(
        tmp_path / "folder", tmp_path / "out" / "target", workers=2))


# ---- graphs that are not valid ------------------------------------------------------------------


def _nodes(graph):
    return {node.name: node for node in graph.node}


def _needed_function(graph):
    """Returns the function that the signature calls, which calls the others."""
    name = next(name for node in graph.node if "signature_wrapper" in (name := node.attr["f"].func.name))
    calls = (node for node in _function(graph, name).node_def if "f" in node.attr)
    return _function(graph, next(calls).attr["f"].func.name)


def _function(graph, name):
    return next(function for function in graph.library.function if function.signature.name == name)


def _callee(graph):
    """Returns (a node that calls a function, that function)."""
    node = next(node for node in _needed_function(graph).node_def if "Call" in node.op)
    return node, _function(graph, node.attr["f"].func.name)


def _missing_input(graph):
    _nodes(graph)["MatMul"].input[0] = "nothing"


def _missing_control(graph):
    _nodes(graph)["train"].input.append("^nothing")


def _missing_output(graph):
    _nodes(graph)["MatMul"].input[0] = "x:1"


def _input_too_many(graph):
    _nodes(graph)["MatMul"].input.append("x")


def _input_too_few(graph):
    del _nodes(graph)["MatMul"].input[1]


def _wrong_type(graph):
    _nodes(graph)["MatMul"].input[0] = "y"


def _attribute_missing(graph):
    del _nodes(graph)["MatMul"].attr["T"]


def _attribute_of_another_kind(graph):
    _nodes(graph)["MatMul"].attr["T"].s = b"float"


def _type_that_the_op_does_not_take(graph):
    _nodes(graph)["MatMul"].attr["T"].type = types_pb2.DT_STRING


def _shape_of_negative_size(graph):
    _nodes(graph)["first/kernel"].attr["shape"].shape.dim[0].size = -5


def _constant_of_another_type(graph):
    for node in graph.node:
        if node.op == "Const":
            node.attr["value"].tensor.dtype = types_pb2.DT_STRING


def _cycle(graph):
    _nodes(graph)["MatMul"].input.append("^train")


def _self_cycle(graph):
    _nodes(graph)["MatMul"].input[0] = "MatMul"


def _unknown_op(graph):
    _nodes(graph)["MatMul"].op = "MyMatMul"


def _two_nodes_of_a_name(graph):
    graph.node.add().CopyFrom(_nodes(graph)["MatMul"])


def _taken_name(graph):
    graph.node.add(name="poseidon/all/agree", op="NoOp")


def _odd_name(graph):
    graph.node.add(name="a b", op="NoOp")


def _no_optimizer(graph):
    train = _nodes(graph)["train"]
    train.Clear()
    train.name, train.op = "train", "NoOp"


def _function_missing(graph):
    graph.library.function.remove(_callee(graph)[1])


def _function_twice(graph):
    graph.library.function.add().CopyFrom(_callee(graph)[1])


def _function_recursive(graph):
    _callee(graph)[0].attr["f"].func.name = _needed_function(graph).signature.name


def _function_without_name(graph):
    _callee(graph)[0].attr["f"].func.name = ""


def _argument_missing(graph):
    del _callee(graph)[1].signature.input_arg[0]


def _return_missing(graph):
    _callee(graph)[1].ret.clear()


def _return_of_nothing(graph):
    function = _callee(graph)[1]
    function.ret[sorted(function.ret)[0]] = "nothing:output:0"


def _control_return_of_nothing(graph):
    _callee(graph)[1].control_ret["x"] = "nothing"


def _output_missing(graph):
    function = _callee(graph)[1]
    function.ret[sorted(function.ret)[0]] = function.node_def[-1].name + ":nothing:0"


def _two_nodes_of_a_name_in_a_function(graph):
    function = _callee(graph)[1]
    function.node_def.add().CopyFrom(function.node_def[0])


_GRAPHS = {
    _missing_input: r"The graph reads 'nothing', which does not exist",
    _missing_control: r"The graph reads 'nothing', which does not exist",
    _missing_output: r"Node 'MatMul' reads 'x:1', but that node has 1 outputs",
    _input_too_many: r"Node 'MatMul', a MatMul, reads 3 tensors, expected 2",
    _input_too_few: r"Node 'MatMul', a MatMul, reads 1 tensors, expected 2",
    _wrong_type: r"Node 'MatMul', a MatMul, reads 'y', which is int32, expected float32",
    _attribute_missing: r"Node 'MatMul', a 'MatMul', lacks its attribute 'T'",
    _attribute_of_another_kind: r"Attribute 'T' of node 'MatMul', a MatMul, is no type",
    _type_that_the_op_does_not_take: r"Attribute 'T' of node 'MatMul', a MatMul, is string, which is none of",
    _shape_of_negative_size: r"Attribute 'shape' of node 'first/kernel', a \w+, is no valid shape",
    _constant_of_another_type: r"The value of constant '.*' is string, expected \w+",
    _cycle: r"The graph is not valid: node '.*' depends on itself",
    _self_cycle: r"The graph is not valid: node '.*' depends on itself",
    _unknown_op: r"Node 'MatMul' is a 'MyMatMul', an op that TensorFlow does not know; load the library",
    _two_nodes_of_a_name: r"The graph has two nodes of the same name",
    _taken_name: r"a node named 'poseidon/all/agree' already, .*; rename it",
    _odd_name: r"The graph has a node named 'a b', which is no name of a node",
    _no_optimizer: r"The graph updates no variable, so there is nothing to train",
    _function_missing: r"calls a function '__\w+', which it does not have",
    _function_twice: r"two functions of the same name",
    _function_recursive: r"Function '.*' (is called through more than 100 others|takes \d+ arguments)",
    _function_without_name: r"Node '.*' calls a function without a name",
    _argument_missing: r"Function '.*' takes \d+ arguments, but is called by '.*' with \d+",
    _return_missing: r"Function '.*' does not say what its output '.*' is",
    _return_of_nothing: r"Function '.*' reads 'nothing', which does not exist",
    _control_return_of_nothing: r"Function '.*' waits for 'nothing', which does not exist",
    _output_missing: r"Function '.*' reads '.*', but the outputs of that node are",
    _two_nodes_of_a_name_in_a_function: r"Function '.*' has two nodes of the same name",
}
_OF_FUNCTIONS = ("function", "argument", "return", "output_missing")


@pytest.mark.parametrize("change", _GRAPHS, ids=lambda change: change.__name__.strip("_"))
def test_invalid_graph(change, zoo, tmp_path):
    of_functions = any(text in change.__name__ for text in _OF_FUNCTIONS)
    name = "nested_functions" if of_functions else "v1_momentum"
    graph = formats.read(zoo[name])
    change(graph.graph_def)
    suffix = "" if of_functions else ".meta"
    graph.write(tmp_path / f"source{suffix}")
    refuses(_GRAPHS[change], tmp_path, lambda: rewriting.rewrite(
        tmp_path / f"source{suffix}", tmp_path / f"target{suffix}", workers=2))


@pytest.mark.parametrize("name", ["nested_functions", "v1_momentum"])
@pytest.mark.parametrize("change, expected", [
    (lambda attr: attr.Clear(), "is damaged"),
    (lambda attr: attr.list.s.__delitem__(slice(None)), r"What node '.*' says about .* is damaged"),
    (lambda attr: attr.list.s.append(b"a"), r"What node '.*' says about .* is damaged"),
    (lambda attr: attr.list.s.append(b"\xff \xff"), r"What node '.*' says about .* is damaged"),
], ids=["cleared", "emptied", "one word", "no text"])
def test_strip_of_damaged_notes(name, change, expected, zoo, tmp_path):
    graph = formats.read(zoo[f"rewritten_{name}"])
    nodes = [*graph.graph_def.node, *(n for f in graph.graph_def.library.function for n in f.node_def)]
    for node in nodes:
        if "_poseidon_replaces" in node.attr:
            change(node.attr["_poseidon_replaces"])
    suffix = os.path.splitext(graph.path)[1]
    graph.write(tmp_path / f"source{suffix}")
    refuses(expected, tmp_path, lambda: poseidon.strip(
        tmp_path / f"source{suffix}", tmp_path / f"target{suffix}"))


# ---- random damage ------------------------------------------------------------------------------

_number = st.integers(0, damage.NUMBERS - 1)
_change = st.tuples(st.sampled_from(list(damage.CHANGES)), _number, _number, _number)
_changes = st.lists(_change, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def graphs(zoo):
    """(GraphDef, targets) of the graphs of the zoo."""
    found = {}
    for name in NAMES:
        graph = formats.read(zoo[name])
        train_op = ("train", "loss") if graph.kind == "GraphDef" else ()
        found[name] = graph.graph_def, graph.targets(None, train_op)
    return found


def test_random_damage(graphs, request):
    """A damaged graph is refused in a line, or rewritten so that nothing of it is lost."""
    full = request.config.getoption("--full")

    @hypothesis.settings(max_examples=6000 if full else 300, derandomize=True, deadline=10_000, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(NAMES), _changes, st.sampled_from([None, 8]),
                      st.sampled_from(["auto", "sfb"]))
    def check(name, changes, rows, policy):
        graph, targets = graphs[name]
        graph = damage.damaged(graph, changes)
        before = _bytes(graph)
        planner = planning.Planner(planning.Cluster(4), policy)
        try:
            once, again = (saved_lib.rewrite(graph, targets, planner, grappler.add_shapes, rows).graph_def
                           for _ in range(2))
        except poseidon.PoseidonError as error:
            assert "\n" not in str(error)
        else:
            assert _bytes(once) == _bytes(again)
            assert _bytes(strip_lib.strip(once)) == before
        assert _bytes(graph) == before

    check()


def test_random_damage_of_rewritten_graphs(zoo, request):
    """Stripping refuses what it cannot undo."""
    full = request.config.getoption("--full")
    rewritten = {name: formats.read(zoo[f"rewritten_{name}"]).graph_def
                 for name in ("nested_functions", "v1_momentum")}

    @hypothesis.settings(max_examples=6000 if full else 300, derandomize=True, deadline=10_000, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(sorted(rewritten)), _changes)
    def check(name, changes):
        graph = damage.damaged(rewritten[name], changes)
        try:
            strip_lib.strip(graph)
        except poseidon.PoseidonError as error:
            assert "\n" not in str(error)

    check()


def _bytes(graph):
    return graph.SerializeToString(deterministic=True)
