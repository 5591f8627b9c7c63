"""explain predicts in one process what a job does; as a function and as a command."""

from concurrent import futures
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig

import explain_models
import keras
import launch
import numpy as np
import pytest

import tf_poseidon as poseidon
from tf_poseidon.explanations import explaining
from tf_poseidon.graph_passes.partition.updates import early_updates
from tf_poseidon.graph_passes.partition.updates import last_readers

NAMES = tuple(explain_models.CASES) if "POSEIDON_ALL_CELLS" in os.environ else (
    "wide", "embedding", "own_step", "gan", "sequential", "whole_step", "columns", "accumulated_columns")
TF_POSEIDON = pathlib.Path(sysconfig.get_path("scripts"), "tf-poseidon")


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """The directory with the executed and explained plans."""
    out = tmp_path_factory.mktemp("plans")
    with futures.ThreadPoolExecutor() as pool:
        for job in [pool.submit(launch.run_ok, ["explain_models.py", out, how, *NAMES], ranks, 240)
                    for how, ranks in (("execute", explain_models.RANKS), ("explain", 0))]:
            job.result()
    return out


def decisions_of(plan):
    """Returns decisions by site, without the names of nodes: TensorFlow numbers those of loops, and removes some."""
    return {decision.site: {**vars(decision), "reason": re.sub(r" \(node '.*'\)", "", decision.reason)}
            for decision in plan.decisions}


@pytest.mark.parametrize("name", NAMES)
def test_explained_plan_is_the_executed_one(plans, name):
    executed, explained = (poseidon.Plan.load(plans / f"{name}.{how}")
                           for how in ("executed", "explained"))
    assert executed.divided == explained.divided
    assert [weight.path for weight in executed.divided] == ([
        f"sequential/divided/{variable}" for variable in ("kernel", "bias")] if "columns" in name else [])
    assert executed.diff(explained) == ""
    assert executed.digest == explained.digest
    assert executed.whole == explained.whole
    assert bool(executed.whole) == (name in ("ranked", "sorted_step", "whole_step"))
    if name == "whole_step":
        assert not executed.decisions and not executed.refusal
        return
    if name == "gan":  # of the same products, TensorFlow has merged other ones
        return
    assert executed.operations == explained.operations
    assert executed.operations > 0
    # TensorFlow orders the nodes of a function, and those that it was called with, in different ways.
    assert decisions_of(executed) == decisions_of(explained)
    exchanges, explained_exchanges = ({exchange.site: exchange for exchange in plan.exchanges}
                                      for plan in (executed, explained))
    assert exchanges == explained_exchanges


def test_plans_are_mixed(plans):
    """The comparison would prove little if all plans were the same."""
    plan = poseidon.Plan.load(plans / "sequential.executed")
    by_site = {d.site: d.scheme for d in plan.decisions}
    assert by_site["sequential/first/kernel"] == "ps"  # pinned
    assert by_site["sequential/dense/kernel"] == "sfb"
    assert by_site["sequential/dense_2/kernel"] == "ps"  # narrow
    plan = poseidon.Plan.load(plans / "wide.executed")
    assert {d.scheme for d in plan.decisions} == {"sfb", "ps"}
    plan = poseidon.Plan.load(plans / "embedding.executed")
    assert [exchange.site for exchange in plan.exchanges] == ["rows/embedding/embeddings"]


@pytest.fixture(scope="module")
def vgg19():
    return keras.applications.VGG19(weights=None)


# Gbit that a node sends plus receives in a step, K = 32: from table 1 of the paper.
@pytest.mark.parametrize("workers, ps, hybrid", [(8, 16.09, 2.85), (16, 17.24, 3.71),
                                                 (32, 17.81, 5.18)])
def test_vgg19(vgg19, workers, ps, hybrid):
    # As slow as a processor, where all bytes are hidden, and as fast as an accelerator.
    for policy, gflops, expected in (("ps", 1000, ps), ("paper", 1000, hybrid), ("auto", 1000, ps),
                                     ("auto", 5000, hybrid)):
        plan = poseidon.explain(vgg19, batch_size=32, workers=workers, bandwidth_gbps=10, policy=policy, gflops=gflops)
        assert plan.total_bytes * 8 / 1e9 == pytest.approx(expected, abs=0.01)
        assert not plan.is_slower_than_one_process
    # 19.6e9 multiplications and additions for an image, and about as many again for each of the two
    # gradients.
    assert plan.operations == pytest.approx(3 * 2 * 19.6e9 * 32, rel=0.02)


def test_explaining_leaves_the_model_as_it_was():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    before = model.get_weights()
    plan = poseidon.explain(model, 8, 4)
    assert [d.scheme for d in plan.decisions]
    assert vars(model).get("_distribute_strategy") is None
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)
    model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)


@pytest.mark.parametrize("options, fewer, sentence", [
    ({}, True, "Steps overlap."),
    ({"global_clipnorm": 1.0}, False,
     "Steps overlap: 16 of 16 updates wait for several gradients, as with a global norm.")])
def test_steps_that_overlap(options, fewer, sentence):
    """Forward pass and exchanges take about as long as each other; with a global norm none of it can overlap."""
    model = keras.Sequential([keras.Input((512,)), *(keras.layers.Dense(512) for _ in range(8))])
    model.compile(keras.optimizers.SGD(0.1, **options), "mse")
    single, overlapping = (poseidon.explain(model, 512, 2, bandwidth_gbps=4, latency_us=1, gflops=500, policy="ps",
                                            steps_per_execution=steps) for steps in (1, 8))
    assert single.diff(overlapping) == "" and (single.steps, overlapping.steps) == (1, 8)
    assert overlapping.overlap == sentence and str(overlapping).endswith(sentence)
    assert " ms for a step of 8 that overlap" in str(overlapping) and "overlap" not in str(single)
    ratio = overlapping.step_seconds / single.step_seconds
    assert ratio < 0.9 if fewer else ratio == pytest.approx(1)


@pytest.mark.parametrize(("layer", "gates", "options"), [
    ("SimpleRNN", 1, {}), ("GRU", 3, {}), ("LSTM", 4, {"go_backwards": True})])
def test_recurrent_layers_count_in_each_round(layer, gates, options):
    rows, length, width, units = 8, 7, 6, 5
    model = keras.Sequential([keras.Input((length, width)), keras.layers.Dense(width, name="dense"),
                              getattr(keras.layers, layer)(units, **options)])
    sites = poseidon.explain(model, rows, workers=2, policy="ps").sites
    operations = {site.name.removeprefix(f"{model.name}/"): site.operations for site in sites}
    dense, rounds = 2 * rows * length * width**2, length * 2 * rows * gates * units * (width + units)
    # The gradients of a round's kernels, and the errors of its inputs, take as long as the round each.
    assert operations.pop("dense/kernel") == 2 * dense + 3 * rounds
    assert operations.pop("dense/bias") == set(operations.values()).pop() == dense + 3 * rounds
    assert len(set(operations.values())) == 1


def test_what_runs_whole_is_said():
    plan = poseidon.explain(explain_models.compiled("ranked"), 8, 4)
    sort, = (op for op in plan.whole if op.op == "TopKV2")
    assert sort.bytes_per_row == 16 * 4
    assert f"  TopKV2 '{sort.node}', with 64 bytes a row\n" in str(plan)
    assert plan.predictions()["whole"][plan.whole.index(sort)] == dict(node=sort.node, op="TopKV2", bytes_per_row=64)


def test_wire_dtype_halves_the_bytes():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(3)])
    for policy in ("ps", "sfb"):
        full, half = (poseidon.explain(model, 8, 4, policy=policy, wire_dtype=wire)
                      for wire in (None, "bfloat16"))
        assert half.total_bytes == full.total_bytes / 2


def test_what_would_help_is_what_explain_plans_then():
    """Larger batches and steps that overlap are estimated from one trace."""
    model = keras.Sequential([keras.Input((512,)), *(keras.layers.Dense(512) for _ in range(8))])
    model.compile("sgd", "mse")
    options = {"bandwidth_gbps": 4, "latency_us": 1, "gflops": 500, "policy": "ps"}
    advice = poseidon.advise(model, 256, 4, **options)
    expected = {change.name: change.step_seconds for change in advice.changes}
    assert advice.plan.diff(poseidon.explain(model, 256, 4, **options)) == ""
    for name, others, is_exact in (
            ("batches of 512 rows on each worker", {"batch_size": 512}, True),
            ("2 workers with 512 rows each", {"batch_size": 512, "workers": 2}, True),
            ("links of 40 Gbit/s", {"bandwidth_gbps": 40}, True),
            ('wire_dtype="bfloat16"', {"wire_dtype": "bfloat16"}, True),
            ("compile(steps_per_execution=5)", {"steps_per_execution": 5}, False)):
        plan = poseidon.explain(model, **{"batch_size": 256, "workers": 4, **options, **others})
        assert expected[name] == pytest.approx(plan.step_seconds, rel=1e-9 if is_exact else 0.05), name


@pytest.mark.parametrize("optimizer, may_overlap", [("sgd", True), (keras.optimizers.SGD(global_clipnorm=1.0), False)])
def test_steps_are_said_to_overlap_only_if_they_do(optimizer, may_overlap):
    changes = poseidon.advise(compiled(optimizer=optimizer), 8, 4).changes
    assert may_overlap == any("steps_per_execution" in change.name for change in changes)


def test_other_policies_divide_no_weights():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2048), keras.layers.Dense(2048)])
    model.compile("sgd", "mse")
    advice = poseidon.advise(model, 64, 4, bandwidth_gbps=1, gflops=100)
    steps = {policy.name: policy.step_seconds for policy in advice.policies}
    assert advice.plan.divided and steps["auto"] == advice.plan.step_seconds
    for policy in ("ps", "sfb", "paper"):
        assert steps[policy] == poseidon.explain(model, 64, 4, 1, policy, gflops=100).step_seconds > steps["auto"]


SEQUENCE = keras.Input((None, 4))


def compiled(**options):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile(**{"optimizer": "adam", "loss": "mse", **options})
    return model


@pytest.mark.parametrize("outputs, loss", [
    (lambda x: keras.layers.Dense(5, name="o")(x), {"o": "sparse_categorical_crossentropy"}),
    (lambda x: {"p": keras.layers.Dense(5)(x), "q": keras.layers.Dense(2)(x)},
     {"p": "mse", "q": "mse"}),
    (lambda x: [keras.layers.Dense(5, name="a")(x), keras.layers.Dense(2, name="b")(x)],
     {"a": "sparse_categorical_crossentropy", "b": "mse"}),
    (lambda x: [keras.layers.Dense(5)(x), keras.layers.Dense(2)(x)],
     [keras.losses.SparseCategoricalCrossentropy(), "mse"]),
])
def test_losses_of_several_outputs(outputs, loss):
    x = keras.Input((8,))
    model = keras.Model(x, outputs(x))
    model.compile("sgd", loss)
    sites = {decision.site for decision in poseidon.explain(model, 8, 2).decisions}
    assert sites == {variable.path for variable in model.trainable_variables}  # losses are added up when logs are read


def test_plans_of_stale_weights_are_dense_and_say_so():
    plan = poseidon.explain(compiled(), 8, 4, synchrony=poseidon.SSP(3), steps_per_execution=4)
    assert {decision.scheme for decision in plan.decisions} == {"ps"} and plan.steps == 1
    assert str(plan).endswith("Workers may run ahead of the weights that they read, by SSP(3); the results are not "
                              "those of one process.")
    assert "sfb" in {decision.scheme for decision in poseidon.explain(compiled(), 8, 4).decisions}


def normalized():
    """Returns a model in which ranks need each other before there are gradients."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(synchronized=True),
                              keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


def test_one_worker_sends_nothing():
    plan = poseidon.explain(compiled(), 8, 1)
    assert plan.total_bytes == 0 and plan.step_seconds == plan.compute_seconds


def test_inside_of_a_scope_is_refused():
    with poseidon.PoseidonStrategy(cluster=poseidon.Cluster(4)).scope():  # for four, but alone
        model = compiled()
        with pytest.raises(poseidon.PoseidonError, match="call it outside `with strategy.scope"):
            poseidon.explain(model, 8, 4)
    assert poseidon.explain(model, 8, 4).decisions


@pytest.mark.parametrize("names, numbers", [
    ({}, (10, 50, 1000, False)), ({"network": "25GbE"}, (25, 50, 1000, False)),
    ({"network": "1GbE", "accelerator": "v100"}, (1, 50, 8500, True)),
    ({"accelerator": "cpu", "latency_us": 5, "gflops": 1000}, (10, 5, 1000, False))])
def test_speeds_have_names(names, numbers):
    cluster = explain(**names).cluster
    assert (cluster.bandwidth_gbps, cluster.latency_us, cluster.gflops, cluster.accelerators) == numbers


def explain(**options):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    return poseidon.explain(model, **{"batch_size": 8, "workers": 4, **options})


@pytest.mark.parametrize("make, message", [
    (lambda: explain(batch_size=0), "batch_size=0, expected a whole number, at least one row"),
    (lambda: explain(workers=0), "workers=0, expected a whole number"),
    (lambda: explain(wire_dtype="float16"), "wire_dtype='float16', expected 'bfloat16' or None"),
    (lambda: explain(batch_size=8.0), "batch_size=8.0, expected a whole number, at least one row"),
    (lambda: poseidon.explain("model.keras", 8, 4), "explain was given a str, expected a Keras model"),
    (lambda: poseidon.explain(compiled(jit_compile=True), 8, 4), "compiled with jit_compile=True"),
    (lambda: poseidon.explain(compiled(run_eagerly=True), 8, 4), "runs eagerly"),
    (lambda: poseidon.explain(compiled(), 8, 4, data=np.ones((4, 8))),
     r"cannot be traced: .*; data must be arrays as fit takes them: x, \(x, y\) or"),
    (lambda: poseidon.explain(compiled(loss=keras.losses.CTC()), 8, 4),
     r"give explain a .*data=\(x, y\)"),
    (lambda: poseidon.explain(keras.Model(SEQUENCE, keras.layers.Dense(3)(SEQUENCE)), 8, 4),
     r"The shape of '\S*' is \(None, None, 4\), but the cost of a step depends on all sizes"),
    (lambda: explain(network="10 GbE"),
     "network='10 GbE', expected one of 1GbE, 10GbE, 25GbE, 40GbE, 100GbE, 200GbE, or None"),
    (lambda: explain(accelerator=["a100"]), r"accelerator=\['a100'\], expected one of cpu, titan-x, v100, a100, h100"),
    (lambda: explain(network="1GbE", bandwidth_gbps=10),
     "bandwidth_gbps=10 with network='1GbE', which stands for bandwidth_gbps=1.0; give one of the two"),
    (lambda: explain(accelerator="a100", accelerators=False),
     "accelerators=False with accelerator='a100', which stands for accelerators=True; give one of the two"),
    (lambda: explain(policy="best"), "policy='best', expected one of"),
    (lambda: explain(shard_update="never"), "shard_update='never', expected True, False or 'auto'"),
    (lambda: explain(pins={"*": "fast"}), "The pin of"),
    (lambda: explain(synchrony="ssp"), "synchrony='ssp', expected 'bsp', poseidon.SSP"),
    *((lambda options=options: explain(synchrony=poseidon.SSP(2), **options),
       rf"{next(iter(options))}=.* is not possible with synchrony=SSP\(2\)") for options in (
           {"policy": "sfb"}, {"pins": {"*": "ps"}}, {"wire_dtype": "bfloat16"}, {"merge": True},
           {"global_batch_norm": True}, {"shard_update": "auto"})),
    (lambda: poseidon.explain(normalized(), 8, 4, synchrony=poseidon.DSSP(1, 2)),
     "Workers are to read stale weights, but .*batch_normalization"),
    (lambda: poseidon.explain(compiled(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())), 8, 4,
                              synchrony=poseidon.SSP(2)), r"synchrony=SSP\(2\), but '.*' scales losses"),
    (lambda: poseidon.explain(explain_models.Subclassed(), 8, 4), "give explain a batch: data="),
    (lambda: poseidon.explain(keras.Sequential([keras.Input((8,)), keras.layers.Flatten()]), 8, 4),
     "no trainable variables"),
])
def test_explain_refuses_models_and_values_by_name(make, message):
    with pytest.raises(poseidon.PoseidonError, match=message):
        make()


@pytest.mark.parametrize("optimizer, largest", [("adam", 3 * 8 * 2**16 // 4), ("muon", 4 * 2**16)])
def test_memory_is_that_of_the_rank_that_holds_most(optimizer, largest):
    """Of Adam's variables all ranks hold as much; Muon's of a matrix are on one rank, of all three on one each."""
    model = keras.Sequential([keras.Input((256,)), *(keras.layers.Dense(256, use_bias=False) for _ in range(3))])
    model.compile(optimizer, "mse")
    plan = poseidon.explain(model, 8, 4, 1.0, policy="ps", shard_update=True)
    numbers = plan.memory.whole_slots - 3 * (8 if optimizer == "adam" else 4) * 2**16  # not of matrices
    assert 0 < numbers < 100
    assert plan.memory.slots == largest + numbers


@pytest.mark.parametrize("optimizer, has_shards", [("adam", True), ("muon", False)])
def test_auto_divides_updates_if_steps_are_no_longer_for_it(optimizer, has_shards):
    """All of a matrix that Muon updates goes to its owner, and comes back from there."""
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256, use_bias=False),
                              keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, "mse")
    divided, plan = (poseidon.explain(model, 8, 4, 1.0, policy="ps", shard_update=way) for way in (True, "auto"))
    assert divided.has_shards and plan.has_shards == has_shards
    assert plan.memory.slots <= plan.memory.whole_slots
    assert plan.step_seconds <= 1.005 * divided.step_seconds


def test_auto_divides_updates_if_it_must(monkeypatch):
    """Though steps are longer for it: if memory is short, or if what is whole kept others from being read in time."""
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256, use_bias=False)])
    model.compile("muon", "mse")

    def has_shards():
        return poseidon.explain(model, 8, 4, 1.0, policy="ps", shard_update="auto").has_shards

    for memory_bytes, is_short in ((3 * 4 * 2**16, True), (5 * 4 * 2**16, False)):  # the kernel, and its momentum
        monkeypatch.setattr(explaining, "_MEMORY_BYTES", memory_bytes)
        assert has_shards() == is_short
    find = early_updates.find
    monkeypatch.setattr(early_updates, "find", lambda graph, shards: find(graph, shards) if shards else {"another"})
    assert has_shards()


def test_columns_that_ranks_update_come_back_as_weights():
    """Nothing but factors goes up, and weights come down in place of the gradient."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096, name="head")])
    model.compile("adam", "mse")
    plans = {is_sharded: poseidon.explain(model, 8, 4, 1.0, policy="ps", pins={"*/kernel": "hfb"},
                                          shard_update=is_sharded) for is_sharded in (False, True)}
    whole, up = (decision.num_bytes for plan in plans.values() for decision in plan.decisions
                 if decision.site.endswith("head/kernel"))
    down, = (exchange.cost(plans[True].cluster).num_bytes for exchange in plans[True].exchanges
             if exchange.site.endswith("head/kernel"))
    assert up + down == whole and up < down
    assert str(plans[True]).count("each rank updates the columns that it rebuilds") == 1
    assert [plan.has_shards for plan in plans.values()] == [False, True]
    assert poseidon.Plan.from_text(plans[True].to_text()).sites == plans[True].sites


def test_weights_that_ranks_divide_take_a_part_of_the_memory():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(4096, name="head")],
                             name="net")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    whole, plan, sharded, auto = (poseidon.explain(model, 8, 4, 1.0, policy="ps", **options) for options in (
        {}, *({"pins": {"*head/kernel": "columns"}, "shard_update": way} for way in (False, True, "auto"))))
    assert not whole.divided and "columns" not in str(whole)
    assert [(weight.path, weight.shape, weight.dimension) for weight in plan.divided] == [
        ("net/head/kernel", (64, 4096), 1), ("net/head/bias", (4096,), 0)]
    assert not any("head" in site.name for site in plan.sites if "/MatMul" not in site.name)
    head, others = 4 * 65 * 4096, whole.memory.weights - 4 * 65 * 4096
    assert plan.memory.whole_weights == whole.memory.weights
    assert plan.memory.weights == plan.memory.gradients == others + head // 4
    assert plan.memory.whole_slots - plan.memory.slots == 2 * head * 3 // 4
    assert not plan.has_shards and sharded.has_shards
    assert sharded.divided == auto.divided == plan.divided and sharded.memory.slots < plan.memory.slots
    assert poseidon.Plan.from_text(plan.to_text()) == plan


def test_auto_divides_weights_if_it_must(monkeypatch):
    """Though steps are longer for it: if variables take more than half of the memory, those that are shards in part."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2**14, name="wide"),
                              keras.layers.Dense(8, name="narrow")], name="net")
    model.compile("adam", "mse")
    size, divided = 4 * (65 * 2**14 + (2**14 + 1) * 8), {}
    for name, memory_bytes, shard_update in (
            ("enough", 7 * size, False), ("short", 5 * size, False), ("enough of shards", 5 * size, True),
            ("short of shards", 2 * size, True)):
        monkeypatch.setattr(explaining, "_MEMORY_BYTES", memory_bytes)
        plan = poseidon.explain(model, 4096, 4, 1e5, shard_update=shard_update)
        divided[name] = [weight.path for weight in plan.divided]
    in_columns = ["net/wide/kernel", "net/wide/bias"]
    assert divided == {"enough": [], "short": in_columns, "enough of shards": [], "short of shards": in_columns}


def test_updates_of_weights_that_ranks_divide_overwrite_the_gradient(monkeypatch):
    """What computes with it for Adam's second slot waits until the first one no longer needs it."""
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096, use_bias=False, name="head")])
    model.compile("adam", "mse")
    waiting, made = last_readers.waiting, []

    def noted(graph_def, layouts):
        made.append((graph_def, waiting(graph_def, layouts)))
        return made[-1][1]

    monkeypatch.setattr(last_readers, "waiting", noted)
    poseidon.explain(model, 8, 4, 1.0, pins={"*head/kernel": "columns"})
    before, after = made[-1]
    changed = {other.op for node, other in zip(before.node, after.node, strict=True) if node != other}
    assert changed & {"Square", "Sub"}


def test_steps_whose_weights_are_all_divided_have_a_plan():
    """No gradient travels, so TensorFlow hands the graph to no pass."""
    rows, inputs, outputs, ranks = 8, 64, 4096, 4
    model = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(outputs, use_bias=False, name="head")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    plan = poseidon.explain(model, rows, ranks, pins={"*": "columns"})
    assert plan.sites == () and [weight.shape for weight in plan.divided] == [(inputs, outputs)]
    assert plan.operations == 2 * 2 * rows * inputs * outputs  # all rows by a part of the columns, and the gradient
    assert {exchange.kind for exchange in plan.exchanges} >= {"gather"} and plan.total_bytes > 0


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", "categorical_crossentropy"])
def test_what_ranks_exchange_of_columns_has_a_cost(loss):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64),
                              keras.layers.Dense(4096, "softmax", name="head")])
    model.compile("sgd", loss, metrics=["accuracy"])
    plan = poseidon.explain(model, 8, 4, 1.0, pins={"*head/kernel": "columns"})
    assert any(exchange.site.endswith("/firsts") for exchange in plan.exchanges)
    assert all(exchange.cost(plan.cluster) is not None for exchange in plan.exchanges)


def command(*arguments):
    return subprocess.run([TF_POSEIDON, *map(str, arguments)], text=True, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_explain_command_writes_a_page_a_plan_and_predictions(tmp_path):
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512, name="wide"),
                              keras.layers.Dense(3, name="narrow")])
    model.compile("adam", "mse")
    model.save(tmp_path / "model.keras")
    arguments = (tmp_path / "model.keras", "--batch_size", 8, "--workers", 4, "--bandwidth_gbps", 1,
                 "--pin", "narrow/*=ps", "--steps_per_execution", 4, "--gpus_per_node", 4, "--gpu_link_gbps", 2)
    outcome = command("explain", *arguments, "--json", tmp_path / "json", "--plan", tmp_path / "plan",
                      "--html", tmp_path / "html")
    assert outcome.returncode == 0, outcome.stderr
    plan = poseidon.Plan.load(tmp_path / "plan")
    lines = outcome.stdout.splitlines()
    assert 15 <= len(lines) <= 30 and max(map(len, lines)) <= 100 and lines[-1] == "Steps overlap."
    whole = command("explain", *arguments, "--all")
    shown, memory = whole.stdout.removesuffix("\nSteps overlap.\n").rsplit("\n", 1)
    assert shown == str(plan) and plan.steps == 4
    assert memory.startswith("memory of a rank: weights 1.06 MB, gradients 1.06 MB, the optimizer's variables 2.11 MB")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert plan.diff(poseidon.explain(loaded, 8, 4, 1.0, pins={"narrow/*": "ps"}, gpus_per_node=4,
                                      gpu_link_gbps=2.0)) == ""
    assert "pinned to 'ps'" in whole.stdout and "wide/kernel" in outcome.stdout
    plan.save_html(tmp_path / "again")  # a plan's file does not tell how steps overlap
    assert (tmp_path / "html").read_text() == (tmp_path / "again").read_text().replace(
        f"{plan.cluster.routes}<", f"{plan.cluster.routes} Steps overlap.<")
    stale = command("explain", tmp_path / "model.keras", "--batch_size", 8, "--workers", 4, "--synchrony", "dssp:1,4")
    assert stale.returncode == 0
    assert "read, by DSSP(1, 4); the results are not those of one process." in stale.stdout.replace("\n", " ")
    mistaken = command("explain", tmp_path / "model.keras", "--batch_size", 8, "--workers", 4, "--pin", "narow/*=ps")
    assert mistaken.returncode == 3
    assert "The pin of 'narow/*' matches no variable of this step; the nearest is 'narrow/" in mistaken.stderr
    predictions = json.loads((tmp_path / "json").read_text())
    assert predictions["total_bytes"] == plan.total_bytes
    assert {policy["name"]: policy["step_seconds"] for policy in predictions["policies"]}["auto"] == plan.step_seconds
    assert {change["name"] for change in predictions["changes"]} >= {"links of 10 Gbit/s"}
    schemes = {v["name"]: v["scheme"] for v in predictions["variables"]}
    assert schemes == {"wide/kernel": "sfb", "wide/bias": "sfb", "narrow/kernel": "ps", "narrow/bias": "ps"}


@pytest.mark.parametrize("level, is_quiet", [(None, True), ("1", False)])
def test_the_command_says_nothing_of_what_tensorflow_and_keras_do(level, is_quiet, tmp_path):
    """Adam was saved before its first step, of which Keras warns; TensorFlow says that it uses oneDNN."""
    compiled().save(tmp_path / "model.keras")
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    outcome = subprocess.run(
        [TF_POSEIDON, "explain", tmp_path / "model.keras", "--batch_size=8", "--workers=4"], timeout=120, text=True,
        capture_output=True, env=environment | ({"TF_CPP_MIN_LOG_LEVEL": level} if level else {}))
    assert outcome.returncode == 0 and "speed-up" in outcome.stdout
    assert "Skipping" not in outcome.stderr and not (is_quiet and outcome.stderr.strip())
    assert is_quiet or "oneDNN" in outcome.stderr


@pytest.mark.parametrize("status, arguments, message", [
    (2, ["explain", "model.keras", "--workers", 4], "the following arguments are required: --batch_size"),
    (2, ["explain", "/no/model.keras", "--workers", 4, "--batch_size", 8, "--pin", "x"],
     "argument --pin: 'x', expected PATTERN=SCHEME"),
    (2, ["verify", "in", "out", "--steps", 0], "argument --steps: 0, expected at least 1"),
    (2, ["expain"], "invalid choice: 'expain'"),
    (2, ["explain", "/no/model.keras", "--workers", 4, "--batch_size", 8, "--synchrony", "ssp:"],
     "argument --synchrony: 'ssp:', expected bsp, ssp:STALENESS or dssp:LOWER,UPPER, such as ssp:3"),
    (2, ["explain", "/no/model.keras", "--workers", 4, "--batch_size", 8, "--synchrony", "dssp:3,2"],
     "argument --synchrony: DSSP(3, 2) has upper=2, expected a whole number from 3 to 64"),
    (2, [], "rewrite   Rewrites a saved training step"),
    (3, ["explain", "/no/model.keras", "--workers", 4, "--batch_size", 8],
     "There is no file '/no/model.keras'"),
    (2, ["explain", "/no/model.keras", "--workers", 0, "--batch_size", 8], "--workers: 0, expected at least 1"),
])
def test_mistakes_in_the_command(status, arguments, message):
    outcome = command(*arguments)
    assert outcome.returncode == status, outcome.stderr
    assert message in outcome.stderr and "Traceback" not in outcome.stderr


def test_mistakes_are_noticed_before_tensorflow_is_imported():
    program = ("import sys; sys.argv[1:] = ['explain', 'none', '--workers=1', '--batch_size=1']\n"
               "from tf_poseidon.commands import cli\n"
               "try: cli.main()\n"
               "finally: assert 'tensorflow' not in sys.modules")
    outcome = subprocess.run([sys.executable, "-c", program], timeout=60, stderr=subprocess.PIPE,
                             text=True)
    assert outcome.returncode == 3 and "AssertionError" not in outcome.stderr, outcome.stderr
