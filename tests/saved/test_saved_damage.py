"""Saved graphs that are damaged, or without rows, give an error message, and never half a file."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import stat
import zlib

import damage_graphs
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
from tf_poseidon.base import files
from tf_poseidon.graph_passes.saved import rewritten_steps
from tf_poseidon.graph_passes.saved import strip
from tf_poseidon.ops import library
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
    paths["scalars"], module = os.path.join(directory, "scalars"), tf.Module()
    module.variable = tf.Variable(1.0)
    module.train = tf.function(lambda rate: {"y": module.variable.assign_add(rate)}, [tf.TensorSpec(())])
    module.read = tf.function(lambda: {"y": module.variable.read_value()}, [])
    tf.saved_model.save(module, paths["scalars"], signatures={"train": module.train, "read": module.read})
    for name, kind in (("nested_functions", ""), ("v1_momentum", ".meta")):
        paths[f"rewritten_{name}"] = os.path.join(directory, f"rewritten{kind}")
        rewriting.rewrite(paths[name], paths[f"rewritten_{name}"], workers=2)
    paths["plan"] = os.path.join(directory, "plan.json")
    report = rewriting.rewrite(paths["v1_embedding"], os.path.join(directory, "other.meta"), workers=2)
    report.plan.save(paths["plan"])
    return paths


@contextlib.contextmanager
def ends_soon():
    """Fails tests that take longer than 60 s."""
    def fail(*_):
        raise TimeoutError("this takes longer than 60 s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refuses(expected, folder, call):
    """Asserts that a call raises a message of one line, and leaves a directory unchanged."""
    before = sorted(os.listdir(folder))
    with pytest.raises(poseidon.PoseidonError) as caught, ends_soon():
        call()
    text = str(caught.value)
    assert re.search(expected, text), text
    assert "\n" not in text and text.endswith("."), text
    assert sorted(os.listdir(folder)) == before


# ---- files that are not saved graphs ------------------------------------------------------------

_RANDOM = random.Random(1).randbytes(3000)
_FILES = {  # by name of the file: (content, or a function of the content of a valid file), the message
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
    "graph.h5": (b"", r"graph.h5' does not end in .meta \(MetaGraph\), .pb or .pbtxt \(GraphDef\)"),
    "graph": (b"", r"graph' does not end in .meta"),
}


@pytest.mark.parametrize("name", _FILES)
def test_files_that_hold_no_graph_are_refused(name, zoo, tmp_path):
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
    """Truncated files: most are not messages, and those that are do not have a training graph."""
    source, suffix = zoo[name], os.path.splitext(zoo[name])[1]
    with open(os.path.join(source, "" if suffix else "saved_model.pb").rstrip("/"), "rb") as file:
        content = file.read()
    path = tmp_path / f"source{suffix}"
    damaged = path if suffix else path / "saved_model.pb"
    damaged.parent.mkdir(exist_ok=True)
    for size in (1, 2, 100, len(content) // 3, len(content) // 2, int(0.9 * len(content)), len(content) - 3):
        damaged.write_bytes(content[:size])
        # Text may end between two nodes, which then cannot be noticed.
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
    _missing: r"no file '.*nothing.pb'; give a SavedModel's directory, a MetaGraph",
    _folder_without_model: r"The directory '.*' has no saved_model.pb, so it is not a SavedModel",
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


# ---- graphs without a training step, and options ------------------------------------------------

DIVIDED = planning.Plan("ps", planning.Cluster(2), divided=(
    planning.DividedWeight("head/kernel", "float32", (8, 64), 1),))
_OPTIONS = [  # (name of a graph, options, the message)
    ("scalars", {}, r"No input of the step is known to have rows \(it has .*rate \[\]\); say which have, as in --in"),
    ("scalars", {"signature": "read"}, r"No input of the step is known to have rows \(it has no inputs\)"),
    ("scalars", {"signature": ["train", "read"]}, r"No input of the step is known to have rows"),
    ("scalars", {"inputs": {"rate": "rows"}}, r"Input '.*rate' has 0 dimensions, but is declared to have rows in dim"),
    ("nested_functions", {"signature": "other"}, r"has no signature 'other': it has train; name one with"),
    ("nested_functions", {"signature": ["train", "other"]}, r"has no signature 'other': it has train; name one with"),
    ("nested_functions", {"train_op": "nothing"}, r"The graph reads 'nothing', which does not exist|is not the result"),
    ("nested_functions", {"train_op": "a:b:c"}, r"The graph reads 'a:b:c', which is not a tensor|is not the result"),
    ("nested_functions", {"train_op": [3]}, r"train_op=\[3\], expected names of ops"),
    ("nested_functions", {"train_op": 3}, r"train_op=3, expected names of ops"),
    ("v1_momentum", {"signature": "train"}, r"has no signature 'train': it has none; .* --train_op"),
    ("v1_momentum", {"train_op": ["train", "nothing"]}, r"reads 'nothing', which does not exist"),
    ("v1_momentum", {"train_op": "train\nx"}, r"which does not exist"),
    ("graph_def", {}, r"graph.pb' does not say what makes a training step; name its update ops"),
    ("graph_def", {"train_op": "init"}, r"No input of the step is known to have rows \(it has no inputs\)"),
    ("graph_def", {"train_op": "train", "workers": None}, r"Neither a number of workers nor a plan is given"),
    *(("v1_momentum", options, expected) for options, expected in (
        ({"workers": 0}, r"workers=0, expected a whole number, at least 1"),
        ({"workers": "4"}, r"workers='4', expected a whole number"),
        ({"workers": 2.5}, r"workers=2.5, expected a whole number"),
        ({"servers": 3}, r"servers=3 with workers=2"),
        ({"bandwidth_gbps": -1}, r"bandwidth_gbps=-1, expected a positive number"),
        ({"latency_us": "a"}, r"latency_us='a', expected 0 or more"),
        ({"gpus_per_node": 3}, r"gpus_per_node=3 with workers=2 and ranks_per_node=1, expected 1 or 2"),
        ({"gpu_link_gbps": 5}, r"gpu_link_gbps=5 with gpus_per_node=1, expected 0"),
        ({"gflops": "fast"}, r"gflops='fast', expected a positive number"),
        ({"policy": "fast"}, r"policy='fast'"),
        ({"policy": ["auto"]}, r"policy=\['auto'\]"),
        ({"pins": {"first/kernel": "fast"}}, r"fast"),
        ({"pins": "first/kernel=ps"}, r"pins='first/kernel=ps', expected a dictionary"),
        ({"pins": 3}, r"pins=3, expected a dictionary"),
        ({"inputs": "x=rows"}, r"inputs='x=rows', expected a dictionary"),
        ({"inputs": 3}, r"inputs=3, expected a dictionary"),
        ({"inputs": {"z": "rows"}}, r"inputs= names 'z', but the steps have the inputs x, y"),
        ({"inputs": {"x:1": "rows"}}, r"inputs= names 'x:1', but the steps have the inputs"),
        ({"inputs": {3: "rows"}}, r"inputs= names '3', but the steps have the inputs x, y"),
        ({"inputs": {"x": "columns"}}, r"Input 'x' is declared as 'columns', expected 'rows', 'same', or the number"),
        ({"inputs": {"x": 1.0}}, r"Input 'x' is declared as 1.0, expected 'rows', 'same', or the number of a dim"),
        ({"inputs": {"x": True}}, r"Input 'x' is declared as True, expected 'rows', 'same', or the number of a dim"),
        ({"inputs": {"x": ["rows"]}}, r"Input 'x' is declared as \['rows'\], expected 'rows', 'same'"),
        ({"inputs": {"x": 2}}, r"Input 'x' has 2 dimensions, but is declared to have rows in dimension 2"),
        ({"inputs": {"x": -1}}, r"Input 'x' has 2 dimensions, but is declared to have rows in dimension -1"),
        ({"inputs": {"x": "same", "y": "same"}}, r"No input of the step is known to have rows \(it has x \["),
        ({"batch_size": 0}, r"batch_size=0, expected a whole number, at least one row"),
        ({"batch_size": "32"}, r"batch_size='32', expected a whole number, at least one row"),
        ({"batch_size": True}, r"batch_size=True, expected a whole number, at least one row"),
        ({"batch_size": 1 << 70}, r"batch_size=\d+, expected a whole number, at least one row"),
        ({"wire_dtype": "int8"}, r"wire_dtype='int8', expected 'bfloat16' or None"),
        ({"wire_dtype": []}, r"wire_dtype=\[\], expected 'bfloat16' or None"),
        ({"pins": {"*/kernel": "columns"}}, r"'\*/kernel' is to be divided by 'columns', but only PoseidonStr"),
        ({"workers": None, "plan": DIVIDED}, r"'head/kernel' is to be divided by 'columns', but only PoseidonStrategy"),
        ({"engine": "other"}, r"engine='other', expected one of .*mpi"),
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


@pytest.mark.parametrize("name, target, expected", [
    ("nested_functions", "there", r"there' exists already; remove it, or name another"),
    ("v1_momentum", "there.meta", r"there.meta' exists already"),
    ("v1_momentum", "link.meta", r"link.meta' exists already"),
    ("v1_momentum", "data.meta", r"data.index' exists already"),
    ("nested_functions", "nowhere/target", r"target' cannot be written: there is no directory '.*nowhere'"),
    ("v1_momentum", "nowhere/target.meta", r"there is no directory '.*nowhere'"),
    ("graph_def", "nowhere/target.pb", r"there is no directory '.*nowhere'"),
    ("graph_def", "there.meta/target.pb", r"there is no directory '.*there.meta'"),
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


@pytest.fixture
def source(zoo, tmp_path):
    """The directory of a SavedModel that a test may change, beside others that it may refer to."""
    shutil.copytree(zoo["nested_functions"], tmp_path / "beside" / "source")
    (tmp_path / "beside" / "shared" / "deeper").mkdir(parents=True)
    (tmp_path / "beside" / "shared" / "words").write_text("words")
    (tmp_path / "beside" / "shared" / "deeper" / "more").write_text("more")
    (tmp_path / "out").mkdir()
    return tmp_path / "beside" / "source"


def rewrite_beside(source, name="target", **options):
    return rewriting.rewrite(source, source.parents[1] / "out" / name, workers=2, **options)


def test_links_are_followed(source):
    """A SavedModel of links, as some caches keep them, gives one that can be moved."""
    for path in [path for path in source.rglob("*") if path.is_file()]:
        moved = source.parent / f"blob-{path.name}"
        path.rename(moved)
        path.symlink_to(os.path.relpath(moved, path.parent))
    shutil.rmtree(source / "assets", ignore_errors=True)
    (source / "assets").symlink_to("../shared")
    (source / "assets.extra").mkdir()
    (source / "assets.extra" / "saved_model.pb").write_text("another")
    (source / "variables").chmod(0o500)
    rewrite_beside(source)
    target = source.parents[1] / "out" / "target"
    shutil.rmtree(source.parent)
    assert not [path for path in target.rglob("*") if path.is_symlink()]
    assert (target / "assets" / "deeper" / "more").read_text() == "more"
    assert (target / "assets.extra" / "saved_model.pb").read_text() == "another"
    loaded = tf.saved_model.load(str(target))
    assert loaded.signatures["train"] is not None
    assert os.listdir(target.parent) == ["target"]


def _link(to):
    return lambda path: path.symlink_to(to)


def _socket(path):
    os.mknod(path, stat.S_IFSOCK | 0o600)


_UNCOPIED = {  # what is in the directory of a SavedModel, by the message
    r"more' is a link to 'nothing', which does not exist; it cannot be copied: remove it": _link("nothing"),
    r"more' is a link to 'more', which does not exist": _link("more"),
    r"more' is a link to the directory '\.', which holds it; it cannot be copied: remove it": _link("."),
    r"more' is a link to the directory '\.\./\.\.', which holds it": _link("../.."),
    r"more' is a link to the directory '/', which holds it": _link("/"),
    r"back' is a link to the directory '.*source', (which holds it|from inside of such a link)": lambda path: (
        path.symlink_to("../../shared"),
        (path.parents[2] / "shared" / "deeper" / "back").symlink_to(path.parents[1].absolute())),
    r"more' is neither a file nor a directory": os.mkfifo,
    r"more' is neither a file nor a directory \(but": _socket,
    r"more' is neither a file nor a directory \(but a pipe, a socket or a device\)": _link("/dev/zero"),
}


@pytest.mark.parametrize("expected", _UNCOPIED)
def test_what_cannot_be_copied_is_named(expected, source):
    _UNCOPIED[expected](source / "variables" / "more")
    steps = []
    refuses(expected, source.parents[1] / "out", lambda: rewrite_beside(source, progress=steps.append))
    assert not steps, "it was noticed late"


@pytest.mark.parametrize("name, expected", [
    ("../beside/source/variables/target", r"target' is inside of '.*source', which is copied; name a path outside"),
    ("../beside/source/target", r"is inside of"), ("../beside/link/target", r"is inside of"),
    ("../beside/source", r"exists already"), ("../beside/source/", r"exists already"),
    ("a\0b", r"a\\x00b' cannot be written: .*null byte"), ("/proc/target", r"cannot be written: ")])
def test_a_target_that_would_be_part_of_its_source(name, expected, source):
    (source.parent / "link").symlink_to("source/assets" if (source / "assets").exists() else "source")
    before = sorted(source.rglob("*"))
    refuses(expected, source.parents[1] / "out", lambda: rewrite_beside(source, name))
    assert sorted(source.rglob("*")) == before


@pytest.mark.parametrize("name, limit", [("nested_functions", 10), ("nested_functions", 5000), ("v1_momentum", 10),
                                         ("graph_def", 10), ("rewritten_nested_functions", 10)])
def test_nothing_remains_when_the_disk_is_full(name, limit, zoo, tmp_path, monkeypatch):
    """Files can have few bytes; it is noticed when they are written."""
    suffix = os.path.splitext(zoo[name])[1]
    monkeypatch.setattr(files, "check", lambda path: None)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(target):
        if name.startswith("rewritten"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            return rewriting.strip(zoo[name], target)
        return rewriting.rewrite(zoo[name], target, workers=2, train_op="train" if name == "graph_def" else (),
                                 progress=lambda what: what == "writing files" and resource.setrlimit(
                                     resource.RLIMIT_FSIZE, (limit, before[1])))

    try:
        refuses(r"target.*' cannot be written: File too large; nothing remains of it", tmp_path,
                lambda: write(tmp_path / f"target{suffix}"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_cannot_be_read(zoo, tmp_path):
    shutil.copytree(os.path.dirname(zoo["v1_momentum"]), tmp_path / "source")
    os.remove(tmp_path / "source" / "model.index")
    (tmp_path / "source" / "model.index").symlink_to("model.index")
    (tmp_path / "out").mkdir()
    refuses(r"model.index' is a link to 'model.index', which does not exist", tmp_path / "out",
            lambda: poseidon.rewrite_meta_graph(tmp_path / "source" / "model.meta", tmp_path / "out" / "target.meta",
                                                workers=2))


@pytest.mark.parametrize("name", ["nested_functions", "v1_momentum", "graph_def_as_text", "rewritten_nested_functions"])
def test_files_with_other_bytes(name, zoo, tmp_path):
    """Whatever is in a file, it is rewritten or refused in a sentence."""
    suffix, random_ = os.path.splitext(zoo[name])[1], random.Random(name)
    with open(zoo[name] if suffix else os.path.join(zoo[name], "saved_model.pb"), "rb") as file:
        content = file.read()
    path, target, refused = tmp_path / f"source{suffix}", tmp_path / f"target{suffix}", 0
    if not suffix:
        path.mkdir()
    for _ in range(30):
        data = bytearray(content[:random_.choice((len(content), random_.randrange(len(content))))])
        for _ in range(random_.randint(0 if len(data) < len(content) else 1, 3)):
            begin = random_.randrange(len(data))
            data[begin:begin + random_.choice((0, 1, 1, 4, 30))] = random_.randbytes(random_.choice((0, 1, 1, 4)))
        (path if suffix else path / "saved_model.pb").write_bytes(data)
        try:
            with ends_soon():
                if name.startswith("rewritten"):
                    poseidon.strip(path, target)
                else:
                    rewriting.rewrite(path, target, workers=2, train_op="train" if name.startswith("graph") else ())
        except poseidon.PoseidonError as error:
            refused += 1
            assert "\n" not in str(error) and str(error).endswith("."), str(error)
            assert not target.exists()
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
        assert os.listdir(tmp_path) == [path.name]
    assert refused > 5


# ---- graphs that are not valid ------------------------------------------------------------------


def _nodes(graph):
    return {node.name: node for node in graph.node}


def _needed_function(graph):
    """Returns the function that the signature calls, which calls the others."""
    calls = (node for node in _wrapper(graph)[1].node_def if "f" in node.attr)
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


def _newline_in_input(graph):
    _nodes(graph)["MatMul"].input[0] = "x\ny"


def _output_without_number(graph):
    _nodes(graph)["MatMul"].input[0] = "x:output"


def _control_first(graph):
    _nodes(graph)["MatMul"].input.insert(0, "^y")


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


def _loop_that_is_left_without_exit(graph):
    graph.node.add(name="loop", op="Enter", input=["x"])
    _nodes(graph)["loop"].attr["T"].type = types_pb2.DT_FLOAT
    _nodes(graph)["loop"].attr["frame_name"].s = b"loop"
    _nodes(graph)["train"].input.append("^loop")


def _loop_with_odd_name(graph):
    _loop_that_is_left_without_exit(graph)
    _nodes(graph)["loop"].attr["frame_name"].s = b"a:b\xff"


def _taken_name(graph):
    graph.node.add(name="poseidon/step/agree", op="NoOp")


def _taken_name_of_a_function_call(graph):
    _callee(graph)[1].node_def.add(name="poseidon", op="NoOp")


def _odd_name(graph):
    graph.node.add(name="a b", op="NoOp")


def _function_missing(graph):
    graph.library.function.remove(_callee(graph)[1])


def _function_of_other_arguments(graph):
    call, function = _callee(graph)
    other = next(f for f in graph.library.function if len(f.signature.input_arg) != len(function.signature.input_arg))
    call.attr["f"].func.name = other.signature.name


def _function_of_other_returns(graph):
    argument = _callee(graph)[1].signature.output_arg[0]
    argument.type = types_pb2.DT_INT32 if argument.type != types_pb2.DT_INT32 else types_pb2.DT_FLOAT


def _function_called_as_op_recursive(graph):
    call, function = _callee(graph)
    node = function.node_def.add(name="again", op=function.signature.name)
    node.input.extend(argument.name for argument in function.signature.input_arg)


def _function_twice(graph):
    graph.library.function.add().CopyFrom(_callee(graph)[1])


def _function_recursive(graph):
    _callee(graph)[0].attr["f"].func.name = _needed_function(graph).signature.name


def _wrapper(graph):
    """Returns (the node that calls the signature, the called function, which only calls another one)."""
    call = next(node for node in graph.node if "signature_wrapper" in node.attr["f"].func.name)
    return call, _function(graph, call.attr["f"].func.name)


def _functions_that_only_call_each_other(graph):
    _, wrapper = _wrapper(graph)
    other = graph.library.function.add()
    other.CopyFrom(wrapper)
    other.signature.name = "other"
    for function, called in ((wrapper, other), (other, wrapper)):
        next(node for node in function.node_def if "f" in node.attr).attr["f"].func.name = called.signature.name


def _call_with_too_few_arguments(graph):
    del _wrapper(graph)[0].input[-1]


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
    _newline_in_input: r"The graph reads 'x\\ny', which does not exist",
    _output_without_number: r"The graph reads 'x:output', which is not a tensor of a graph",
    _control_first: r"Node 'MatMul' has a control input before a tensor",
    _missing_output: r"Node 'MatMul' reads 'x:1', but that node has 1 outputs",
    _input_too_many: r"Node 'MatMul', a MatMul, reads 3 tensors, expected 2",
    _input_too_few: r"Node 'MatMul', a MatMul, reads 1 tensors, expected 2",
    _wrong_type: r"Node 'MatMul', a MatMul, reads 'y', which is int32, expected float32",
    _attribute_missing: r"Node 'MatMul', a 'MatMul', lacks its attribute 'T'",
    _attribute_of_another_kind: r"Attribute 'T' of node 'MatMul', a MatMul, is not a valid type",
    _type_that_the_op_does_not_take: r"Attribute 'T' of node 'MatMul', a MatMul, is string, which the op does not",
    _shape_of_negative_size: r"Attribute 'shape' of node 'first/kernel', a \w+, is not a valid shape",
    _constant_of_another_type: r"The value of constant '.*' is string, expected \w+",
    _cycle: r"The graph is not valid: node '.*' depends on itself",
    _self_cycle: r"The graph is not valid: node '.*' depends on itself",
    _unknown_op: r"Node 'MatMul' is a 'MyMatMul', an op that TensorFlow does not know; load the library",
    _two_nodes_of_a_name: r"The graph has two nodes of the same name",
    _taken_name: r"a node named 'poseidon/step/agree' already, .*; rename it",
    _taken_name_of_a_function_call: r"a node named 'poseidon' already, .*; rename it",
    _loop_that_is_left_without_exit: r"Node 'train' reads tensors in loop 'loop' and in no loop",
    _loop_with_odd_name: r"Node 'loop' enters a loop named b'a:b\\xff', which is not a valid loop name",
    _odd_name: r"The graph has a node named 'a b', which is not a valid node name",
    _function_missing: r"calls a function '__\w+', which it does not have",
    _function_twice: r"two functions of the same name",
    _function_recursive: r"Function '.*' (calls itself|takes \d+ tensors|returns \d+ tensors)",
    _functions_that_only_call_each_other: r"Function '.*' calls itself; such a step cannot be partitioned",
    _call_with_too_few_arguments: r"Function '.*' is called with \d+ arguments, and takes \d+",
    _function_called_as_op_recursive: r"Function '.*' calls itself; such a step cannot be partitioned",
    _function_without_name: r"Node '.*' calls a function without a name",
    _function_of_other_arguments: r"Function '.*' takes .*, but '.*' calls it with \d+ tensors \(",
    _function_of_other_returns: r"Function '.*' returns '.*' as '.*', which is not a tensor of the declared type",
    _argument_missing: r"Function '.*' (takes \d+ tensors \(.*\), but '.*' calls it|reads '.*', which does not exist)",
    _return_missing: r"Function '.*' does not say what its output '.*' is",
    _return_of_nothing: r"Function '.*' reads 'nothing', which does not exist",
    _control_return_of_nothing: r"Function '.*' waits for 'nothing', which does not exist",
    _output_missing: r"Function '.*' reads '.*', but the outputs of that node are",
    _two_nodes_of_a_name_in_a_function: r"Function '.*' has two nodes of the same name",
}
_OF_FUNCTIONS = ("function", "call", "argument", "return", "output_missing")


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
@pytest.mark.parametrize("change", [
    lambda value: b"", lambda value: b"a", lambda value: value[:-5], lambda value: value[:20] + b"abc" + value[23:],
    lambda value: zlib.compress(b"no graph at all")], ids=["empty", "one byte", "truncated", "changed", "no graph"])
def test_strip_of_damaged_original(name, change, zoo, tmp_path):
    graph = formats.read(zoo[f"rewritten_{name}"])
    original = _nodes(graph.graph_def)["poseidon/original"].attr["_poseidon_original"]
    original.s = change(original.s)
    suffix = os.path.splitext(graph.path)[1]
    graph.write(tmp_path / f"source{suffix}")
    refuses("The original graph in node 'poseidon/original' is damaged", tmp_path,
            lambda: poseidon.strip(tmp_path / f"source{suffix}", tmp_path / f"target{suffix}"))


# ---- random damage ------------------------------------------------------------------------------

_number = st.integers(0, damage_graphs.NUMBERS - 1)
_change = st.tuples(st.sampled_from(list(damage_graphs.CHANGES)), _number, _number, _number)
_changes = st.lists(_change, min_size=1, max_size=4)


@pytest.fixture(scope="module")
def graphs(zoo):
    """The graphs of the zoo, and what selects their steps."""
    found = {}
    for name in NAMES:
        graph = formats.read(zoo[name])
        found[name] = graph.graph_def, graph.steps(None, ("train", "loss") if graph.kind == "GraphDef" else ()), (
            graph.has_functions)
    library.load()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_graph_that_is_given_stays_as_it_is(name, graphs):
    graph, steps, has_functions = graphs[name]
    before = _bytes(graph)
    options = rewritten_steps.RewriteOptions(planning.Planner(planning.Cluster(4), "auto"), grappler.add_shapes, {}, 8)
    rewritten_steps.rewrite(graph, steps, has_functions, options)
    assert _bytes(graph) == before


def test_random_damage(graphs, request):
    """A damaged graph is refused with a message of one line, or rewritten without loss."""
    full = request.config.getoption("--full")

    @hypothesis.settings(max_examples=6000 if full else 200, derandomize=True, deadline=10_000, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(NAMES), _changes, st.sampled_from([None, 8]),
                      st.sampled_from(["auto", "sfb"]))
    def check(name, changes, rows, policy):
        graph, steps, has_functions = graphs[name]
        graph = damage_graphs.damaged(graph, changes)
        before = _bytes(graph)
        options = rewritten_steps.RewriteOptions(
            planning.Planner(planning.Cluster(4), policy), grappler.add_shapes, {}, rows)
        try:
            with ends_soon():
                once, again = (rewritten_steps.rewrite(graph, steps, has_functions, options).graph_def
                               for _ in range(2))
        except poseidon.PoseidonError as error:
            assert "\n" not in str(error)
        else:
            assert _bytes(once) == _bytes(again)
            assert _bytes(strip.strip(once)) == before
        assert _bytes(graph) == before

    check()


def test_random_damage_of_rewritten_graphs(zoo, request):
    """Stripping gives back the original, whatever else has changed, or refuses."""
    full = request.config.getoption("--full")
    rewritten = {name: formats.read(zoo[f"rewritten_{name}"]).graph_def
                 for name in ("nested_functions", "v1_momentum")}
    originals = {name: _bytes(formats.read(zoo[name]).graph_def) for name in rewritten}

    @hypothesis.settings(max_examples=6000 if full else 200, derandomize=True, deadline=10_000, database=None,
                         suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(st.sampled_from(sorted(rewritten)), _changes)
    def check(name, changes):
        graph = damage_graphs.damaged(rewritten[name], changes)
        if not strip.is_rewritten(graph):
            return
        try:
            stripped = strip.strip(graph)
        except poseidon.PoseidonError as error:
            assert "\n" not in str(error)
        else:
            assert _bytes(stripped) == originals[name]

    check()


def _bytes(graph):
    return graph.SerializeToString(deterministic=True)
