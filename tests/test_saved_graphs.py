"""Rewriting saved training graphs: what is found in them, what comes out, and how that trains."""

import os
import pathlib
import pickle
import re
import sysconfig

import launch
import numpy as np
import pytest
import saved_jobs
import saved_zoo

import tf_poseidon as poseidon
from tf_poseidon.graph_passes import inserted
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import rewriting

COMMAND = os.path.join(sysconfig.get_path("scripts"), "tf-poseidon")
RANKS = {1: "auto", 2: "sfb", 3: "ps"}  # with the policy that each number of ranks is planned by


class Zoo:
    """Saved graphs, and what they are rewritten to."""

    def __init__(self, folder):
        self._folder = folder
        self._saved = {}
        self._jobs = {}

    def saved(self, name):
        """Returns the `saved_zoo.Saved` of a case."""
        if name not in self._saved:
            self._saved[name] = saved_zoo.CASES[name](str(self._folder))
        return self._saved[name]

    def rewritten(self, name, ranks):
        """Returns (path, report) of a case for some ranks."""
        saved, policy = self.saved(name), RANKS[ranks]
        suffix = pathlib.Path(saved.path).suffix
        path = self._folder / policy / f"{name}{suffix}"
        if (name, policy) not in self._jobs:
            path.parent.mkdir(exist_ok=True)
            self._jobs[name, policy] = rewriting.rewrite(
                saved.path, str(path), *step_of(saved), workers=ranks, batch_size=saved.rows, policy=policy,
                rule=saved.rule)
        return path, self._jobs[name, policy]

    def job(self, ranks):
        """Returns the results of tests/saved_jobs.py for all cases on some ranks."""
        if ranks not in self._jobs:
            self._jobs[ranks] = None  # once: if it fails, all its tests do
            cases = {name: (self.saved(name), str(self.rewritten(name, ranks)[0])) for name in saved_zoo.CASES}
            (self._folder / "cases").write_bytes(pickle.dumps(cases))
            out = self._folder / f"results{ranks}"
            launch.run_ok(["saved_jobs.py", self._folder / "cases", out], ranks, timeout_s=300)
            self._jobs[ranks] = pickle.loads(out.read_bytes())
        assert self._jobs[ranks] is not None, "the job has failed, as another test shows"
        return self._jobs[ranks]


def step_of(saved):
    """Returns (signature, train_op) of a case."""
    return (saved.fetches[0], ()) if saved.kind == "saved_model" else (None, saved.fetches[:1])


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("zoo"))


def serialized(path):
    return formats.read(str(path)).graph_def.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", saved_zoo.CASES)
def test_what_is_found_and_stripped(zoo, name, tmp_path):
    saved = zoo.saved(name)
    for ranks in RANKS:
        path, report = zoo.rewritten(name, ranks)
        assert {s.site for s in report.synchronised} == {
            *saved.weights, *(f"state/{variable}" for variable in saved.averaged)}
        assert set(saved.local) <= set(report.local)
        assert {s.rule for s in report.synchronised if not s.site.startswith("state/")} == {saved.rule}
        back = tmp_path / f"{ranks}{path.suffix}"
        poseidon.strip(path, back)
        assert serialized(back) == serialized(saved.path)
        difference = poseidon.diff(saved.path, path)
        assert not difference.others
        assert {s.name for s in difference.sites} == {s.site for s in report.synchronised}


@pytest.mark.parametrize("name", saved_zoo.CASES)
def test_what_is_inserted_is_what_was_planned(zoo, name):
    for ranks, policy in RANKS.items():
        path, report = zoo.rewritten(name, ranks)
        sites = {site.name: site for site in inserted.sites(formats.read(str(path)).graph_def)}
        for decision in report.plan.decisions:
            site = sites[decision.site]
            ops = [node.op for node in site.nodes]
            assert site.scheme == decision.scheme and site.rides_on == decision.rides_on
            assert ops.count("SufficientFactorOuterProduct") == (
                decision.scheme == "sfb" and not decision.rides_on)
            assert ("PoseidonSend" in ops) == ("PoseidonRecv" in ops) == (decision.scheme != "sparse")
            if policy == "ps":
                assert decision.scheme == "ps" and ops.count("PoseidonSend") == 1


def test_all_products_of_factors_are_found(zoo):
    """What a table of models in `fit` has: dense layers by factors, and their biases with them."""
    _, report = zoo.rewritten("keras_attention", 2)
    by_scheme = {d.site: (d.scheme, d.rides_on) for d in report.plan.decisions}
    for layer in ("last", "wide", "attention/attention_output"):
        assert by_scheme[f"{layer}/kernel"] == ("sfb", None)
        assert by_scheme[f"{layer}/bias"] == ("sfb", f"{layer}/kernel")
    assert by_scheme["norm/gamma"] == ("ps", None)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", saved_zoo.CASES)
def test_verified(zoo, name, ranks):
    saved, found = zoo.saved(name), zoo.job(ranks)[name]["verified"]
    assert not found.failures, found
    assert set(found.errors) == {*saved.weights, *(f"state/{variable}" for variable in saved.averaged)}
    assert all(number > 0 for _, number, _ in found.errors.values())
    assert not found.differing and not found.states
    if not found.row_dependence:  # only what is independent may be found to be
        assert saved.row_independent and found.joined <= found.joined_bound


def test_independent_rows_are_found(zoo):
    found = {name: not result["verified"].row_dependence for name, result in zoo.job(2).items()}
    cannot_be_told = {"as_many_rows_as_columns", "several_steps", "keras_convolutions", "keras_lstm",
                      "v1_control_flow", "v1_control_flow_of_references"}
    for name, is_found in found.items():
        assert is_found == (zoo.saved(name).row_independent and name not in cannot_be_told), name


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", sorted(saved_jobs.JOINED))
def test_trains_as_one_process(zoo, name, ranks):
    """The original trained on the joined batches, in one process, ends with the same weights."""
    result = zoo.job(ranks)[name]
    trained, expected = result["trained"], result["one process"]
    assert trained and trained.keys() == expected.keys()
    for variable, value in trained.items():
        # Metrics add up rows: those of a rank in two places, of all in the other.
        if np.issubdtype(value.dtype, np.floating) and not variable.endswith(("count", "total")):
            np.testing.assert_allclose(value, expected[variable], rtol=0, err_msg=variable,
                                       atol=5e-2 if name == "keras_mixed_precision" else 5e-4)


@pytest.mark.parametrize("name", ["sgd", "keras_adam", "keras_convolutions", "v1_momentum", "graph_def"])
def test_bytes_are_those_of_the_plan(zoo, name):
    for ranks in (2, 3):
        _, report = zoo.rewritten(name, ranks)
        counted = zoo.job(ranks)[name]["bytes"]
        for decision in report.plan.decisions:
            if ranks == 2 or decision.scheme == "sfb":
                assert counted.get(decision.site, 0) == decision.num_bytes, decision.site
        # Of 3 ranks each is a server of some pieces, and rank 0 not of a third of each variable.
        if ranks == 3:
            assert sum(counted.values()) <= 2 * sum(d.num_bytes for d in report.plan.decisions)


def test_rewriting_is_deterministic(zoo, tmp_path):
    """In another process, where Python's sets have another order."""
    for name in ("keras_lstm", "v1_control_flow"):
        saved = zoo.saved(name)
        path, _ = zoo.rewritten(name, 2)
        target = tmp_path / path.name
        what = ["--signature", saved.fetches[0]] if saved.kind == "saved_model" else [
            "--train_op", saved.fetches[0]]
        launch.run_ok([COMMAND, "rewrite", saved.path, target, *what, "--workers=2",
                       f"--batch_size={saved.rows}", "--policy=sfb"], ranks=0, timeout_s=60,
                      environment={"PYTHONHASHSEED": "12345"})
        assert serialized(target) == serialized(path)


@pytest.mark.parametrize("scheme, ranks", [("sfb", 2), ("ps", 3)])
def test_no_send_waits_for_a_later_gradient(zoo, scheme, ranks):
    """Wait-free: what the last layer sends does not depend on the first layer's gradient."""
    path, _ = zoo.rewritten("sgd", ranks)
    graph_def = formats.read(str(path)).graph_def
    sites = {site.name: site for site in inserted.sites(graph_def)}
    function = next(f for f in graph_def.library.function if f.signature.name == sites["dense0/kernel"].function)
    nodes = {node.name: node for node in function.node_def}

    def before(name):
        queue, seen = [name], set()
        while queue:
            node = nodes.get(queue.pop())
            if node is not None and node.name not in seen:
                seen.add(node.name)
                queue += [tensor.lstrip("^").split(":")[0] for tensor in node.input]
        return seen

    first_gradient = sites["dense0/kernel"].before[0].split(":")[0]
    for layer in ("dense1", "dense2"):
        assert first_gradient not in before(f"poseidon/{layer}/kernel/send")
    assert sites["dense0/kernel"].scheme == scheme
    sends = [name for name in before("poseidon/dense0/kernel/send") if name.endswith("send")]
    assert sends == ["poseidon/dense0/kernel/send"]


def test_commands(zoo, tmp_path):
    saved = zoo.saved("keras_clipped")
    out, back, report = tmp_path / "out", tmp_path / "back", tmp_path / "report.json"

    def command(*arguments, ranks=0):
        return launch.run([COMMAND, *arguments], ranks, timeout_s=60)

    outcome = command("rewrite", saved.path, out, "--workers=4", "--batch_size=16", "--policy=paper",
                      f"--json={report}")
    assert outcome.status == 0 and report.exists()
    assert re.search(r"^model/last/kernel +16x5 +(ps|sfb) ", outcome.output, re.MULTILINE)
    assert re.search(r"^  model/last/kernel +mean of __inference_\S+/MatMul_1:product:0", outcome.output, re.MULTILINE)
    assert "sgd/iteration: it is the same on all ranks" in outcome.output
    outcome = command("diff", saved.path, out)
    assert outcome.status == 0 and "the same, node for node" in outcome.output
    outcome = command("verify", saved.path, out, "--batch_size=3", ranks=2)
    assert outcome.status == 0 and outcome.output.count("all right") == 1
    assert command("strip", out, back).status == 0
    assert serialized(back) == serialized(saved.path)
    for wrong, message in ((("rewrite", saved.path, tmp_path / "other"), "--workers is missing"),
                           (("verify", saved.path, saved.path), "was not rewritten")):
        outcome = command(*wrong)
        assert outcome.status == 1
        assert message in outcome.own_lines[-1] and outcome.own_lines[-1].startswith(f"tf-poseidon {wrong[0]}: ")
    assert sorted(os.listdir(tmp_path)) == ["back", "out", "report.json"]


def _multiply(graph_def):
    """Multiplies shares where they should be divided."""
    for function in graph_def.library.function:
        for node in function.node_def:
            if node.name == "poseidon/dense0/kernel/v0_scaled0":
                node.op = "Mul"


def _leave_out(graph_def):
    """Lets an update read this rank's gradient, and says so nowhere."""
    site = next(site for site in inserted.sites(graph_def) if site.name == "dense1/bias")
    for function in graph_def.library.function:
        for node in function.node_def:
            if "_poseidon_inserted" not in node.attr:
                node.input[:] = [site.before[0] if tensor == site.sums[0] else tensor for tensor in node.input]


@pytest.mark.parametrize("damage, message", [
    (_multiply, "WRONG: the gradient of 'dense0/kernel' is off by .* times what rounding explains"),
    (_leave_out, "WRONG: .*'dense1/bias'"),
])
def test_what_is_wrong_is_not_verified(zoo, damage, message, tmp_path):
    saved = zoo.saved("sgd")
    graph = formats.read(str(zoo.rewritten("sgd", 2)[0]))
    damage(graph.graph_def)
    graph.write(tmp_path / "damaged")
    outcome = launch.run([COMMAND, "verify", saved.path, tmp_path / "damaged"], ranks=2, timeout_s=60)
    assert outcome.status == 1 and re.search(message, outcome.output), outcome.output


def test_wrong_rule_is_not_verified(zoo, tmp_path):
    """The loss is a mean of rows, but gradients are summed."""
    saved = zoo.saved("sgd")
    poseidon.rewrite_saved_model(saved.path, tmp_path / "sum", workers=2, batch_size=saved.rows, rule="sum")
    outcome = launch.run([COMMAND, "verify", saved.path, tmp_path / "sum"], ranks=2, timeout_s=60)
    assert outcome.status == 1 and "WRONG: rows are independent, but the joined batch" in outcome.output


def test_plan_is_replayed(zoo, tmp_path):
    saved, plan = zoo.saved("sgd"), tmp_path / "plan.json"
    path, report = zoo.rewritten("sgd", 2)
    report.plan.save(plan)
    again = poseidon.rewrite_saved_model(saved.path, tmp_path / "again", plan=str(plan), batch_size=saved.rows)
    assert again.plan == report.plan and serialized(tmp_path / "again") == serialized(path)
    with pytest.raises(poseidon.PoseidonError, match="made for another training graph"):
        poseidon.rewrite_saved_model(zoo.saved("momentum").path.replace("momentum", "shared_weights"),
                                     tmp_path / "other", plan=str(plan), batch_size=8)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["sgd", "nested_functions", "accumulated_in_call", "v1_momentum"])
def test_gradients_can_be_given(zoo, name, tmp_path):
    """By the names that the report has."""
    saved = zoo.saved(name)
    path, report = zoo.rewritten(name, 2)
    target = tmp_path / path.name
    rewriting.rewrite(saved.path, target, *step_of(saved), workers=2, batch_size=saved.rows, policy="sfb",
                      gradients={s.site: s.tensor for s in report.synchronised})
    assert serialized(target) == serialized(path)


def test_rule_of_a_gradient_can_be_given(zoo, tmp_path):
    saved = zoo.saved("v1_momentum")
    _, report = zoo.rewritten("v1_momentum", 2)
    given = {s.site: s.tensor for s in report.synchronised}
    site = report.synchronised[0].site
    again = poseidon.rewrite_meta_graph(
        saved.path, tmp_path / "sum.meta", saved.fetches[:1], workers=2, batch_size=saved.rows,
        gradients={site: {"tensor": given[site], "rule": "sum"}})
    assert {s.site: s.rule for s in again.synchronised}[site] == "sum"


def test_graph_of_keras_applications(tmp_path):
    """A graph of ten thousand nodes, saved by a program that knows nothing of this project."""
    launch.run_ok(["save_mobilenet.py", tmp_path / "step"], ranks=0, timeout_s=120)
    report = poseidon.rewrite_saved_model(tmp_path / "step", tmp_path / "out", workers=2, batch_size=2)
    kernels = [s for s in report.synchronised if not s.site.startswith("state/")]
    states = [s for s in report.synchronised if s.site.startswith("state/")]
    assert len(kernels) == 158 and len(states) == 104  # 52 batch norms have two moving statistics each
    outcome = launch.run([COMMAND, "verify", tmp_path / "step", tmp_path / "out", "--batch_size=2",
                          "--steps=1"], ranks=2, timeout_s=200)
    assert outcome.status == 0, outcome.output
