"""The command `tf-poseidon` on saved graphs, and the findings of its `verify`."""

import contextlib
import os
import pathlib
import pickle
import re
import shutil
import signal
import subprocess
import sysconfig
import time

import launch
import numpy as np
import pytest
import saved_zoo
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import rewriting
from tf_poseidon.saved_graphs import running
from tf_poseidon.saved_graphs import verifying

v1 = tf.compat.v1

COMMAND = os.path.join(sysconfig.get_path("scripts"), "tf-poseidon")
RANKS = 2


def command(*arguments, ranks=0, fresh=False):
    return launch.run([COMMAND, *arguments], ranks, timeout_s=60, fresh=fresh)


def serialized(path):
    return formats.read(str(path)).graph_def.SerializeToString(deterministic=True)


def test_rewrite_diff_and_strip_work_on_each_others_files(tmp_path):
    saved = saved_zoo.CASES["keras_clipped"](str(tmp_path))
    out, back, report = tmp_path / "out", tmp_path / "back", tmp_path / "report.json"
    outcome = command("rewrite", saved.path, out, "--workers=4", "--batch_size=16", "--policy=paper",
                      "--inputs=x=rows,y=0", f"--json={report}", f"--html={tmp_path / 'report.html'}")
    assert outcome.status == 0 and report.exists(), outcome.output
    assert "<td>model/last/kernel</td><td>16x5</td>" in (tmp_path / "report.html").read_text()
    assert re.search(r"^model/last/kernel +16x5 +(ps|sfb) ", outcome.output, re.MULTILINE)
    outcome = command("diff", saved.path, out)
    assert outcome.status == 0 and outcome.own_lines[-1] == "nothing else differs"
    assert re.search(r"^ +sum +(ps|sfb) +model/last/kernel +.*PoseidonSend", outcome.output, re.MULTILINE)
    outcome = command("verify", saved.path, out, "--batch_size=3", ranks=RANKS, fresh=True)
    assert outcome.status == 0 and outcome.output.count("all right") == 1, outcome.output
    assert re.search(r"^ +variable +sgd/iteration +2 +0$", outcome.output, re.MULTILINE)
    assert command("strip", out, back).status == 0
    assert serialized(back) == serialized(saved.path)
    assert sorted(os.listdir(tmp_path)) == ["back", "keras_clipped", "out", "report.html", "report.json"]


@pytest.mark.parametrize("status, arguments, message", [
    (2, ("rewrite", "there", "out"), "--workers is missing"),
    (2, ("rewrite", "there", "out", "--workers=2", "--inputs=x:rows"), "'x:rows', expected NAME=rows"),
    (2, ("explain", "there", "--workers=2", "--batch_size=0"), "--batch_size: 0, expected at least 1"),
    (2, ("explain", "there", "--workers=2", "--batch_size=1", "--pin=x=no"), "'x=no', expected PATTERN=SCHEME"),
    (3, ("explain", "there", "--workers=2", "--batch_size=1", "--json=there"), "cannot be written"),
    (3, ("explain", "there.keras", "--workers=2", "--batch_size=1"), "it is damaged or incomplete"),
    (3, ("rewrite", "there", "there", "--workers=2"), "exists already"),
    (3, ("rewrite", "there", "out", "--plan=nowhere"), "There is no file 'nowhere'; give rewrite a plan"),
    (3, ("verify", "there", "there", "--arrays=there/arrays.npz"), "cannot be read"),
    (3, ("verify", "there", "nowhere"), "There is no file 'nowhere'"),
    (3, ("strip", "nowhere", "out"), "nowhere"), (3, ("strip", "there", "there"), "exists already"),
    (3, ("diff", "there", "there"), "there"),
    (3, ("explain", "there", "--workers=2", "--batch_size=1", "--json=nowhere/x"), "--json=nowhere/x cannot be wr"),
    (3, ("explain", "there", "--workers=2", "--batch_size=1", f"--plan={'x' * 300}"), "File name too long"),
    (3, ("explain", "there", "--workers=2", "--batch_size=1", "--plan=/proc/plan"), "--plan=/proc/plan cannot be wri"),
    (3, ("explain", "there", "--workers=2", "--batch_size=1", "--gflops=1e400"), "gflops=inf, expected a positive"),
    (3, ("explain", "there", f"--workers={10 ** 20}", "--batch_size=1"), "expected at most 2147483647"),
    (2, ("explain", "there", f"--workers={'9' * 5000}", "--batch_size=1"), "expected a whole number of fewer digits"),
    (2, ("explain", "there", "--workers=2", "--batch_size=x"), "'x', expected a whole number"),
    (3, ("rewrite", "there", "out", "--workers=2", "--latency_us=nan"), "latency_us=nan, expected 0 or more"),
    (3, ("rewrite", "there", "out", "--plan=there"), "there' cannot be read: Is a directory; give the file of a plan"),
    (3, ("rewrite", "there", "out", "--plan=there.keras"), "there.keras': This is not a plan of tf_poseidon"),
    (3, ("rewrite", "there", "/proc/out", "--workers=2"), "OUT=/proc/out cannot be written"),
    (3, ("verify", "there", "there", "--arrays=/dev/null"), "--arrays=/dev/null cannot be read as a file of numpy"),
])
def test_mistakes_in_commands(status, arguments, message, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there.keras").write_text("cut")
    outcome = command(*(argument.replace("there", str(tmp_path / "there")) for argument in arguments))
    assert outcome.status == status, outcome.output
    assert "Traceback" not in outcome.output
    assert message in outcome.own_lines[-1] and outcome.own_lines[-1].startswith(f"tf-poseidon {arguments[0]}: ")


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """The options of an `explain` that takes little time."""
    path = tmp_path_factory.mktemp("explained") / "model.keras"
    tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2, name="dense")]).save(path)
    return ("explain", path, "--workers=2", "--batch_size=1")


@pytest.mark.parametrize("option", ["--html", "--json", "--plan"])
def test_disk_is_full_when_a_file_is_written(option, explained):
    outcome = command(*explained, f"{option}=/dev/full")
    assert outcome.status == 3 and "Traceback" not in outcome.output, outcome.output
    assert re.search(r"^dense/kernel +(ps|sfb) ", outcome.output, re.MULTILINE), "the result is printed all the same"
    assert "/dev/full" in outcome.own_lines[-1]
    assert "cannot be written: No space left on device; name a file in a directory that exists" in outcome.own_lines[-1]


def test_disk_is_full_when_the_result_is_printed(explained, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([COMMAND, *explained, f"--plan={tmp_path / 'plan'}"], stdout=full,
                              stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3 and "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "tf-poseidon explain: The result cannot be printed: No space left on device; ")
    assert (tmp_path / "plan").exists()


def test_commands_for_one_process_say_so_under_mpiexec():
    outcome = command("rewrite", "step", "out", "--workers=2", ranks=RANKS, fresh=True)
    assert outcome.status == 3
    assert outcome.own_lines[-1].endswith(": 2 processes were started, but rewrite runs in one; omit mpiexec.")


def test_what_verify_cannot_run_is_refused_by_name(tmp_path):
    source, target, arrays = tmp_path / "step", tmp_path / "out", tmp_path / "arrays.npz"
    save_two_signatures(str(source))
    poseidon.rewrite_saved_model(source, target, "train", workers=RANKS, policy="ps")
    outcome = command("verify", source, target)
    assert outcome.status == 0 and "nothing was exchanged: start it with mpiexec -n RANKS" in outcome.output
    np.savez(arrays, x=np.zeros((4, 3), np.float32), y=np.zeros((4, 2), np.float32))
    outcome = command("verify", source, target, f"--arrays={arrays}")
    assert outcome.status == 3 and "'x' has the shape [4, 3], but the step takes (None, 4)" in outcome.own_lines[-1]
    next((target / "variables").glob("variables.data*")).write_bytes(b"")
    outcome = command("verify", source, target, ranks=RANKS, fresh=True)
    assert outcome.status == 3 and f"'{target}' cannot be loaded" in outcome.output, outcome.output


def test_other_initial_values_are_wrong(tmp_path):
    for name, value in (("step", 1.0), ("other", 2.0)):
        save_two_signatures(str(tmp_path / name), value)
    poseidon.rewrite_saved_model(tmp_path / "step", tmp_path / "out", "train", workers=RANKS, policy="ps")
    shutil.rmtree(tmp_path / "out" / "variables")
    shutil.copytree(tmp_path / "other" / "variables", tmp_path / "out" / "variables")
    found = verifying.verify(tmp_path / "step", tmp_path / "out")
    assert found.failures == ["variable 'w' begins with other values than in the original"]


@pytest.mark.parametrize("device, text", [
    ("/job:ps/task:0", "nodes that name /job:ps/task:0 have run in each process all the same; to train, import the"),
    ("/job:worker/replica:0/task:1/device:GPU:0", "nodes that name /job:worker/replica:0/task:1 have run in each pro"),
    ("/gpu:7", ""), ("/job:localhost/replica:0/task:0/device:CPU:0", "")])
def test_graphs_of_other_devices_are_verified(device, text, tmp_path):
    source, target = save_v1(str(tmp_path / "model"), device), str(tmp_path / "out.meta")
    rewriting.rewrite(source, target, train_op=("train",), workers=RANKS)
    found = verifying.verify(source, target, train_op=("train",))
    assert not found.failures and found.errors
    assert text in str(found) and bool(text) == ("all the same" in str(found))


def test_only_files_are_blamed_for_errors_of_files(tmp_path):
    source, target = save_v1(str(tmp_path / "model")), str(tmp_path / "out.meta")
    rewriting.rewrite(source, target, train_op=("train",), workers=RANKS)
    with pytest.raises(poseidon.PoseidonError, match=r"out.meta' cannot be loaded: no number : .*; correct") as error:
        verifying.verify(source, target, train_op=("train",), initializer=["fails"])
    assert "damaged" not in str(error.value)


X = np.ones((4, 3), np.float32)


@pytest.mark.parametrize("arrays, refusal", [
    ({"x:0": X}, None), ({"x:0": X, "scale:0": np.ones(7)}, None),
    ({"scale:0": 1.0}, r"^The arrays are scale:0, but the step takes x:0; add x:0\.$"),
    ({"x:0": X, "y:0": X}, r"^The arrays are x:0, y:0, but the graph has no input 'y:0', and the step takes rate:0, "),
    ({"x:0": X, "rate:0": X}, r"^The array 'rate:0' has the shape \[4, 3\], but the step takes \(\); "),
])
def test_arrays_are_those_of_the_graph(arrays, refusal, tmp_path):
    source, target = save_v1(str(tmp_path / "model")), str(tmp_path / "out.meta")
    rewriting.rewrite(source, target, train_op=("train",), workers=RANKS)
    with pytest.raises(poseidon.ConfigurationError, match=refusal) if refusal else contextlib.nullcontext():
        assert not verifying.verify(source, target, train_op=("train",), inputs=arrays).failures


def test_arrays_with_defaults_are_fed(tmp_path):
    """With a rate of zero, nothing is trained."""
    source, target = save_v1(str(tmp_path / "model")), str(tmp_path / "out.meta")
    rewriting.rewrite(source, target, train_op=("train",), workers=RANKS)
    step = running.runner(formats.read(target), train_op=("train",))
    before = step.state()
    step.run(verifying._checked({"x:0": X, "rate:0": 0.0, "scale:0": 2.0}, step))
    np.testing.assert_array_equal(step.state(), before)


def test_what_else_differs(tmp_path):
    """The main graph does not belong to a step that is a function."""
    source, target = str(tmp_path / "step"), str(tmp_path / "out")
    save_two_signatures(source)
    poseidon.rewrite_saved_model(source, target, ["train", "evaluate"], workers=RANKS, policy="ps")
    difference = poseidon.diff(source, target)
    assert not difference.others
    exchanges = [exchange for step in difference.steps for exchange in step.exchanges]
    assert [(e.kind, e.scheme) for e in exchanges if e.site == "w"] == [("sum", "ps")]
    assert {(e.kind, e.scheme) for e in exchanges} == {("sum", "ps"), ("max", "gather"), ("rows", "gather")}
    graph = formats.read(target)
    next(node for node in graph.graph_def.node if node.op == "VarHandleOp").device = "/device:CPU:0"
    graph.write(tmp_path / "changed")
    sentence, = poseidon.diff(source, tmp_path / "changed").others
    assert sentence.startswith("the main graph: 1 nodes, the first is '")


@pytest.mark.parametrize("name, flags", [
    ("explain", ["batch_size", "workers", "plan", "policy", "gflops", "html", "json"]),
    ("rewrite", ["inputs", "signature", "train_op", "engine", "workers", "bandwidth_gbps"]),
    ("diff", []), ("strip", []), ("run", ["restarts", "hosts", "mpiexec"]),
    ("verify", ["arrays", "seed", "initializer", "signature", "steps"])])
def test_help_of_a_command_names_its_flags(name, flags):
    outcome = command(name, "--help")
    assert outcome.status == 0 and "exit status: 0 done; 1 " in outcome.output
    assert re.search(rf"^example:\n  .*tf-poseidon {name} ", outcome.output, re.MULTILINE)
    named = set(re.findall(r"^ +--(\w+)", outcome.output, re.MULTILINE))
    assert named >= set(flags)
    assert ("workers" in named) == (name in ("explain", "rewrite")), "flags of other commands"


def test_help_names_all_commands():
    outcome = command("--help")
    assert outcome.status == 0
    assert all(re.search(rf"^ +{name} +\w", outcome.output, re.MULTILINE)
               for name in ("explain", "rewrite", "diff", "strip", "verify", "run"))
    assert command("--version").status == 0


def test_graphs_that_differ_have_a_status_of_their_own(tmp_path):
    save_gan(str(tmp_path / "step"))
    poseidon.rewrite_saved_model(tmp_path / "step", tmp_path / "out", workers=RANKS, policy="ps")
    graph = formats.read(str(tmp_path / "out"))
    next(node for node in graph.graph_def.node if node.op == "VarHandleOp").device = "/device:CPU:0"
    graph.write(str(tmp_path / "changed"))
    assert command("diff", tmp_path / "step", tmp_path / "out").status == 0
    assert command("diff", tmp_path / "step", tmp_path / "changed").status == 1


def with_ops(path):
    """Returns the numbers of the processes that were given a path and have loaded our ops, rank 0 first."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if (str(path).encode() in (process / "cmdline").read_bytes()
                    and "libposeidon_ops_" in (process / "maps").read_text()):
                found.append((b"PMI_RANK=0\0" not in (process / "environ").read_bytes(), int(process.name)))
    return [number for _, number in sorted(found)]


@pytest.mark.parametrize("ranks", [0, 2])
def test_interrupted_command_says_so_in_a_line(ranks, tmp_path):
    save_gan(str(tmp_path / "step"))
    poseidon.rewrite_saved_model(tmp_path / "step", tmp_path / "out", workers=RANKS, policy="ps")
    launcher = [launch.mpiexec(), "-n", str(ranks)] if ranks else []
    # A shell ignores the signal for what it runs in the background, such as these tests.
    with subprocess.Popen([*launcher, COMMAND, "verify", tmp_path / "step", tmp_path / "out", "--steps=100000"],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as job:
        deadline = time.monotonic() + 60
        while len(with_ops(tmp_path / "step")) < max(ranks, 1) and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(3)  # for its first steps
        rank_0 = with_ops(tmp_path / "step")[0]
        os.kill(rank_0, signal.SIGSTOP)  # the rank that says it is the last to hear of it
        os.killpg(job.pid, signal.SIGINT)
        time.sleep(0.5)
        os.kill(rank_0, signal.SIGCONT)
        output = job.communicate(timeout=60)[0]
    assert "Traceback" not in output, output
    assert "interrupted" in output
    assert job.returncode != 0 if ranks else job.returncode == 130


# ---- verify -----------------------------------------------------------------------------------------


def save_gan(path):
    """Saves a step of two players, each with its own loss and variables; they draw noise without a seed."""
    module = tf.Module()
    module.generator = tf.Variable(tf.random.stateless_normal((3, 4), (1, 1)), name="generator")
    module.critic = tf.Variable(tf.random.stateless_normal((4, 1), (1, 2)), name="critic")

    @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x")])
    def step(x):
        noise = tf.random.normal((tf.shape(x)[0], 3))
        with tf.GradientTape(persistent=True) as tape:
            made = tf.tanh(noise @ module.generator)
            of_real, of_made = x @ module.critic, made @ module.critic
            losses = {"critic": tf.reduce_mean(tf.nn.softplus(-of_real) + tf.nn.softplus(of_made)),
                      "generator": tf.reduce_mean(tf.nn.softplus(-of_made))}
        for name, variable in (("critic", module.critic), ("generator", module.generator)):
            variable.assign_sub(0.1 * tape.gradient(losses[name], variable))
        return losses

    module.step = step
    tf.saved_model.save(module, path, signatures={"train": step})


def save_centred(path):
    """Saves a step with products of all pairs of rows, from which the means of columns are subtracted."""
    module = tf.Module()
    module.w = tf.Variable(tf.random.stateless_normal((3, 3), (1, 4)), name="w")

    @tf.function(input_signature=[tf.TensorSpec((None, 3), name="x")])
    def step(x):
        with tf.GradientTape() as tape:
            products = tf.matmul(tf.tanh(x @ module.w), x, transpose_b=True)
            loss = tf.reduce_mean(tf.square(products - tf.reduce_mean(products, 0, keepdims=True)))
        module.w.assign_sub(0.1 * tape.gradient(loss, module.w))
        return {"loss": loss}

    module.step = step
    tf.saved_model.save(module, path, signatures={"train": step})


def save_v1(path, device=""):
    """Saves a MetaGraph with a placeholder that its step does not need, and one with a default, and a checkpoint."""
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, (None, 3), "x")
        rate = v1.placeholder_with_default(0.1, (), "rate")
        w = v1.get_variable("w", (3, 2), use_resource=False)
        tf.multiply(x @ w, v1.placeholder(tf.float32, (), "scale"), name="scaled")
        tf.debugging.check_numerics(v1.placeholder_with_default(np.nan, ()), "no number", name="fails")
        v1.train.GradientDescentOptimizer(rate).minimize(tf.reduce_mean(tf.square(x @ w)), name="train")
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, path)
    meta_graph = v1.MetaGraphDef.FromString(pathlib.Path(f"{path}.meta").read_bytes())
    for node in meta_graph.graph_def.node:
        node.device = device
    pathlib.Path(f"{path}.meta").write_bytes(meta_graph.SerializeToString())
    return f"{path}.meta"


def save_two_signatures(path, factor=1.0):
    """Saves a step that trains, and one that evaluates and counts; initial values are multiplied by a factor."""
    module = tf.Module()
    module.w = tf.Variable(factor * tf.random.stateless_normal((4, 2), (1, 3)), name="w")
    module.count = tf.Variable(0, name="count")

    @tf.function(input_signature=[tf.TensorSpec((None, 4), name="x"), tf.TensorSpec((None, 2), name="y")])
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ module.w - y))
        module.w.assign_sub(0.1 * tape.gradient(loss, module.w))
        return {"loss": loss}

    @tf.function(input_signature=train.input_signature)
    def evaluate(x, y):
        errors = tf.abs(x @ module.w - y)
        module.count.assign_add(tf.shape(x)[0])
        return {"largest": tf.reduce_max(errors), "errors": errors, "what": tf.constant("errors")}

    module.train, module.evaluate = train, evaluate
    tf.saved_model.save(module, path, signatures={"train": train, "evaluate": evaluate})


def save_v1_signatures(path):
    """Saves the same with TensorFlow 1, and variables that are references."""
    with tf.Graph().as_default(), v1.Session() as session:
        x, y = v1.placeholder(tf.float32, (None, 4), "x"), v1.placeholder(tf.float32, (None, 2), "y")
        w = v1.get_variable("w", initializer=tf.random.stateless_normal((4, 2), (1, 3)), use_resource=False)
        count = v1.get_variable("count", initializer=0, use_resource=False)
        errors = tf.abs(x @ w - y)
        loss = tf.reduce_mean(tf.square(errors), name="loss")
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.control_dependencies([train]):
            trained = tf.identity(loss, name="trained")
        counted = tf.identity(v1.assign_add(count, tf.shape(x)[0]), name="counted")
        outputs = {"train": {"loss": trained},
                   "evaluate": {"largest": tf.reduce_max(errors, name="largest"), "count": counted}}
        session.run(v1.global_variables_initializer())
        builder, describe = v1.saved_model.Builder(path), v1.saved_model.utils.build_tensor_info
        builder.add_meta_graph_and_variables(session, ["serve"], {
            name: v1.saved_model.signature_def_utils.build_signature_def(
                {"x": describe(x), "y": describe(y)}, {key: describe(tensor) for key, tensor in of_signature.items()},
                name) for name, of_signature in outputs.items()})
        builder.save()


def function_with(graph_def, op, **attributes):
    """Returns (FunctionDef, node) of the only node of an op with some attributes."""
    (function, node), = [(f, n) for f in graph_def.library.function for n in f.node_def
                         if n.op == op and all(n.attr[key].s.decode() == value for key, value in attributes.items())]
    return function, node


def replace_reads(function, old, new):
    """Makes all nodes of a function read another tensor."""
    for node in function.node_def:
        node.input[:] = [new if tensor == old else tensor for tensor in node.input]


def double(graph_def):
    """Doubles a sum."""
    function, send = function_with(graph_def, "PoseidonSend", site="dense1/kernel")
    total = f"{send.name.removesuffix('/send')}:values:0"
    replace_reads(function, total, "double:z:0")
    node = function.node_def.add(name="double", op="AddV2", input=[total, total])
    node.attr["T"].type = tf.float32.as_datatype_enum


def leave_out(graph_def):
    """Makes an update read this rank's summand."""
    function, send = function_with(graph_def, "PoseidonSend", site="dense1/bias")
    replace_reads(function, f"{send.name.removesuffix('/send')}:values:0", send.input[0])


def mix_up_rows(graph_def):
    """Takes the labels of other rows."""
    function, part = function_with(graph_def, "PoseidonPart")
    slices = next(node for node in function.node_def if node.op == "StridedSlice" and node.input[0] == "y"
                  and any(tensor.startswith(part.name.removesuffix("/part")) for tensor in node.input))
    slices.input[0] = "reversed:output:0"
    node = function.node_def.add(name="reversed", op="ReverseV2", input=["y", "reversed/axis:output:0"])
    node.attr["T"].type, node.attr["Tidx"].type = tf.int32.as_datatype_enum, tf.int32.as_datatype_enum
    axis = function.node_def.add(name="reversed/axis", op="Const")
    axis.attr["dtype"].type = tf.int32.as_datatype_enum
    axis.attr["value"].tensor.CopyFrom(tf.make_tensor_proto([0], tf.int32))


DAMAGE = {"doubled": double, "left_out": leave_out, "mixed_up": mix_up_rows}


def say_rows_of_a_rank(graph_def):
    """Declares sums over rows with the rows that the plan is for: TensorFlow's optimizer computes with such sizes."""
    shapes = [shape for function in graph_def.library.function for node in function.node_def
              if node.op == "PoseidonRecv" for shape in node.attr["shapes"].list.shape]
    of_columns = [shape for shape in shapes if [dim.size for dim in shape.dim][:1] == [1]]
    assert of_columns
    for shape in of_columns:
        shape.dim[1].size = 4


@pytest.fixture(scope="module")
def verified(tmp_path_factory):
    """The findings of `verify` on some graphs, by name."""
    folder = tmp_path_factory.mktemp("verified")
    cases = {}

    def add(name, source, suffix="", what=None, **options):
        target = folder / f"out_{name}{suffix}"
        what = what or {}
        rewriting.rewrite(str(source), str(target), workers=RANKS, batch_size=4, **what, **options)
        cases[name] = dict(source=str(source), target=str(target), **what)

    save_gan(str(folder / "gan"))
    add("gan", folder / "gan")
    for prefix, save in (("", save_two_signatures), ("v1_", save_v1_signatures)):
        name = f"{prefix}two"
        save(str(folder / name))
        add(name, folder / name, what={"signature": ["train", "evaluate"]})
        both = cases.pop(name)
        cases |= {prefix + signature: {**both, "signature": signature} for signature in ("train", "evaluate")}
    for name, suffix in (("keras_dropout", ""), ("keras_mixed_precision", ""), ("v1_adam", ".meta")):
        saved = saved_zoo.CASES[name](str(folder))
        add(name, saved.path, suffix, {"train_op": saved.fetches} if suffix else None)
    saved = saved_zoo.CASES["graph_def"](str(folder))
    add("graph_def", saved.path, ".pb", {"train_op": saved.fetches})
    cases["graph_def"]["initializer"] = [saved.initializer]
    saved = saved_zoo.CASES["sgd"](str(folder))
    add("sgd", saved.path, policy="ps", wire_dtype="bfloat16")
    add("whole", saved.path, policy="ps")
    for name, damage in DAMAGE.items():
        graph = formats.read(cases["whole"]["target"])
        damage(graph.graph_def)
        graph.write(str(folder / name))
        cases[name] = {**cases["whole"], "target": str(folder / name)}
    cases["sgd"]["steps"] = 3  # kernels count their calls: the original's runs must not disturb that
    save_centred(str(folder / "centred"))
    add("centred", folder / "centred", policy="ps")
    graph = formats.read(cases["centred"]["target"])
    say_rows_of_a_rank(graph.graph_def)
    graph.write(str(folder / "wrong_shapes"))
    cases["wrong_shapes"] = {**cases["centred"], "target": str(folder / "wrong_shapes")}
    cases["other"] = {**cases["sgd"], "source": str(folder / "two")}
    (folder / "cases").write_bytes(pickle.dumps(cases))
    launch.run_ok(["verify_saved.py", folder / "cases", folder / "results"], RANKS, timeout_s=120)
    return pickle.loads((folder / "results").read_bytes())


@pytest.mark.parametrize("name, values", [
    ("gan", {("variable", "generator"), ("variable", "critic"), ("output", "generator"), ("output", "critic")}),
    ("train", {("variable", "w"), ("output", "loss")}),
    ("evaluate", {("variable", "w"), ("variable", "count"), ("output", "largest"), ("output", "errors"),
                  ("output", "what")}),
    ("v1_train", {("variable", "w"), ("output", "trained:0")}),
    ("v1_evaluate", {("variable", "w"), ("variable", "count"), ("output", "largest:0"), ("output", "counted:0")}),
    ("keras_dropout", {("variable", "model/last/bias"), ("output", "loss")}),
    ("keras_mixed_precision", {("variable", "model/last/bias"), ("output", "loss")}),
    ("v1_adam", {("variable", "first/kernel/Adam_1"), ("output", "loss:0")}),
    ("graph_def", {("variable", "last/bias"), ("output", "loss:0")}),
    ("sgd", {("variable", "dense1/bias"), ("output", "loss")}),
    ("centred", {("variable", "w"), ("output", "loss")}),
])
def test_what_is_right_is_verified(verified, name, values):
    found = verified[name]
    assert not found.failures and not found.differing, found
    assert values <= set(found.errors)
    assert all(number > 0 and error <= 1 for number, error in found.errors.values())
    assert str(found).endswith("\nall right")


@pytest.mark.parametrize("name, message", [
    ("doubled", r"variable 'dense1/kernel' is off by \S+ times the rounding bound"),
    ("left_out", r"variable 'dense1/bias' is off by \S+ times the rounding bound"),
    ("left_out", r"ranks have different bits of variable 'dense1/bias'"),
    ("mixed_up", r"output 'loss' is off by \S+ times the rounding bound"),
    ("wrong_shapes", r"variable 'w' is off by \S+ times the rounding bound"),
    ("other", r"'.*out_sgd' was made from a different graph than '.*two'"),
])
def test_what_is_wrong_is_not_verified(verified, name, message):
    assert re.search(f"^WRONG: {message}$", str(verified[name]), re.MULTILINE), verified[name]
    assert str(verified[name]).endswith("\nwrong")
