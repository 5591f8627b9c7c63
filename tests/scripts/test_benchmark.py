"""The benchmark of models and systems, and its emulation."""

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import launch
import numpy as np
import pytest
import tensorflow as tf

from evaluation.comparisons import systems
from evaluation.workloads import emulation
from evaluation.workloads import profiles
from evaluation.workloads import zoo
from tf_poseidon.ops import library

BENCHMARK = str(pathlib.Path(__file__).resolve().parents[2] / "scripts" / "benchmark.py")


@pytest.mark.parametrize("name, parameters, gigaoperations", [
    # Two operations per multiplication and addition, and three passes; the first layer has only two.
    ("cifar10_quick", 145_578, 0.0692), ("googlenet", 6_998_552, 9.26), ("inception_v3", 23_817_352, 34.2),
    ("vgg19", 143_667_240, 117.6), ("vgg19_22k", 229_052_817, 118.1), ("resnet50", 25_583_592, 22.9),
    ("resnet152", 60_268_520, 67.5), ("mlp", 25_076_712, 0.142), ("bert_base_head", 24_063_546, 2.86)])
def test_models_have_the_sizes_that_are_published(name, parameters, gigaoperations):
    described = zoo.describe(name)
    assert sum(math.prod(shape) for layer in described for _, shape in layer.weights) == parameters
    assert zoo.operations(name) == pytest.approx(1e9 * gigaoperations, rel=0.01)


def test_sites_are_those_of_backpropagation():
    sites = {site.name: site for site in zoo.sites("cifar10_quick", 100)}
    weights = [site for site in sites.values() if not site.bias_of]
    ready = [site.operations for site in weights if site.name.endswith("kernel")]
    assert ready == sorted(ready, reverse=True)
    assert ready[0] == 100 * zoo.operations("cifar10_quick")  # the first layer's gradient comes last
    dense = [site for site in weights if site.factors]
    assert [(s.factors.m, s.factors.n, s.factors.k) for s in dense] == [(1024, 64, 100), (64, 10, 100)]
    assert {site.bias_of for site in sites.values()} == {None, *(site.name for site in dense)}


@pytest.mark.parametrize("shrink", [1, 4, 16])
def test_shrinking_divides_gradients_and_factors_alike(shrink):
    model = emulation.EmulatedModel("vgg19", 32, profiles.PROFILES["titan_x"], shrink=shrink)
    whole = {f"x/{site.name}": site for site in zoo.sites("vgg19", 32)}
    dense = factors = 0
    for variable in model.variables("x"):
        site = whole[variable.path]
        dense += 4 * variable.shape.num_elements()
        if site.factors:
            m, n = variable.shape
            factors += 4 * round(32 / math.sqrt(shrink)) * (m + n)
    assert dense == pytest.approx(sum(site.num_bytes for site in whole.values()) / shrink, rel=0.002)
    assert factors == pytest.approx(
        sum(s.factors.num_bytes for s in whole.values() if s.factors) / shrink, rel=0.002)


def test_an_emulated_accelerator_does_one_thing_after_the_other():
    model = emulation.EmulatedModel("cifar10_quick", 100, profiles.PROFILES["titan_x"], dilation=50)
    step = tf.function(lambda: [tf.reshape(g, [-1])[0] for g in model.gradients()])
    values = step()
    seconds = []
    for _ in range(5):
        begin, cpu = time.perf_counter(), time.process_time()
        step()
        seconds.append((time.perf_counter() - begin, time.process_time() - cpu))
    expected = 50 * profiles.PROFILES["titan_x"].step_seconds("cifar10_quick", 100)
    assert expected == pytest.approx(min(wall for wall, _ in seconds), rel=0.2)
    assert all(wall > 0.999 * expected for wall, _ in seconds)
    assert min(cpu for _, cpu in seconds) < 0.25 * expected
    assert {float(value) for value in values} == {1.0, 100.0}  # of biases, the sum of the rows


# Asks for 40 pieces of work of 10 ms, one after the other, when all have come; prints the begin and end.
PIECES, PIECE_S = 40, 0.01
WORK = f"""
import pathlib, sys, time
import tensorflow as tf
from tf_poseidon.ops import library
work = lambda: library.load()[0].poseidon_emulated_kernel(after=[], T=[tf.float32], shapes=[()], seconds={PIECE_S})
work()
folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(folder / sys.argv[3]).touch()
while len(list(folder.iterdir())) < number:
    time.sleep(0.001)
begin = time.monotonic()
for _ in range({PIECES}):
    work()
print(begin, time.monotonic())
"""


def test_processes_share_an_accelerator_of_a_name(tmp_path):
    """Of two with one name each takes as long as both; one with another name takes its own time."""
    names = [f"{os.getpid()}/{name}" for name in ("one", "one", "other")]
    processes = [subprocess.Popen([sys.executable, "-c", WORK, tmp_path, str(len(names)), str(number)],
                                  stdout=subprocess.PIPE, text=True, env=os.environ | {"TF_POSEIDON_ACCELERATOR": name})
                 for number, name in enumerate(names)]
    spans = [list(map(float, process.communicate(timeout=60)[0].split())) for process in processes]
    for path in pathlib.Path("/dev/shm").glob(f"poseidon-accelerator-{os.geteuid()}-{os.getpid()}_o*"):
        path.unlink()
    together = max(end for _, end in spans[:2]) - min(begin for begin, _ in spans[:2])
    alone = spans[2][1] - spans[2][0]
    assert [together, alone] == pytest.approx([2 * PIECES * PIECE_S, PIECES * PIECE_S], rel=0.3)
    assert together > 0.999 * 2 * PIECES * PIECE_S


def test_an_accelerator_that_cannot_be_shared_is_refused(tmp_path):
    name = f"{os.getpid()}-refused"
    path = pathlib.Path(f"/dev/shm/poseidon-accelerator-{os.geteuid()}-{name}")
    path.symlink_to(tmp_path / "elsewhere")
    done = subprocess.run([sys.executable, "-c", WORK], text=True, capture_output=True, timeout=60,
                          env=os.environ | {"TF_POSEIDON_ACCELERATOR": name})
    path.unlink()
    assert done.returncode == 1
    assert f"TF_POSEIDON_ACCELERATOR={name}, but processes cannot share this emulated accelerator" in done.stderr


def run(tmp_path, *flags, launcher="mpiexec", fresh=False):
    """Runs a benchmark on 2 ranks; returns its results by system, and its output."""
    path = tmp_path / "results.json"
    outcome = launch.run_ok([BENCHMARK, "--model=cifar10_quick", "--rounds=3", "--steps=1", f"--json={path}",
                             *flags], ranks=2, timeout_s=120, launcher=launcher, fresh=fresh)
    return {row["system"]: row for row in json.loads(path.read_text())["results"]}, outcome.output


def test_real_computing(tmp_path):
    """Every system trains its own model, and the script compares their weights before it times."""
    results, output = run(tmp_path, "--batch_size=8", "--system=poseidon-ps,poseidon-sfb+merge,mwms,mwms+enable",
                          fresh=True)
    assert "round 3 of 3, 0 s left" in output  # mpiexec is not a terminal
    assert set(results) == {"single", "poseidon-ps", "poseidon-sfb+merge", "mwms", "mwms+enable"}
    assert results["poseidon-ps"]["schemes"] == {"ps": 10}
    assert results["poseidon-sfb+merge"]["schemes"] == {"ps": 6, "sfb": 2}
    for name in ("poseidon-ps", "poseidon-sfb+merge"):
        assert results[name]["payload_bytes"] == results[name]["planned_bytes"]
    assert results["poseidon-ps"]["payload_bytes"] == 2 * 4 * 145_578
    for row in results.values():
        assert row["step"]["median_ms"] > 0 and row["rows_per_s"] > 0


def test_emulated_computing(tmp_path):
    results, output = run(tmp_path, "--compute=emulated:titan_x", "--dilation=40", "--shrink=4", "--mixed",
                          "--system=poseidon-ps,poseidon-sfb,poseidon-hfb,poseidon-ps+shards,mwms",
                          f"--timeline={tmp_path / 'trace.json'}")
    # Times are reported undilated, and bytes are those of the whole model.
    alone = 1e3 * profiles.PROFILES["titan_x"].step_seconds("cifar10_quick", 100)
    assert results["single"]["step"]["median_ms"] == pytest.approx(alone, rel=0.2)
    of_products = 1025 * 64 + 65 * 10
    for name, ways in (("poseidon-ps", 2 + 4), ("poseidon-ps+shards", 2 + 2)):  # other gradients are cast from 16 bits
        expected = (4 + 4) * of_products + ways * (145_578 - of_products)
        assert results[name]["payload_bytes"] == pytest.approx(expected, rel=0.01)
        assert results[name]["planned_bytes"] == pytest.approx(expected, rel=0.01)
    for scheme in ("sfb", "hfb"):
        assert results[f"poseidon-{scheme}"]["schemes"] == {"ps": 6, scheme: 2}
    assert "poseidon_ps/dense/kernel" in output and "waiting for exchanges" in output
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None,
                    reason="Horovod is not installed (scripts/install_horovod.sh)")
def test_under_horovodrun(tmp_path):
    """Ours travel by Horovod's ops, and Horovod is compared with that."""
    results, output = run(tmp_path, "--batch_size=8", "--system=poseidon-sfb,horovod,horovod+enable",
                          launcher="horovodrun")
    assert set(results) == {"single", "poseidon-sfb", "horovod", "horovod+enable"}
    assert results["poseidon-sfb"]["schemes"] == {"ps": 6, "sfb": 2}
    assert results["poseidon-sfb"]["payload_bytes"] is None
    assert "round 3 of 3" in output


def replicas(*names):
    """Returns replicas of a model with equal initial weights; their steps are those of a single rank."""
    initial = []
    return [systems.RealReplica(name, "cifar10_quick", 8, 0, 1, initial) for name in names]


class Alone:
    """A communicator without other ranks."""

    @staticmethod
    def broadcast(_, value):
        return value


@pytest.mark.parametrize("damage, is_noticed", [
    (lambda gradients: gradients, False),
    (lambda gradients: [g * (1 + 1e-4) for g in gradients], False),  # more than rounding
    (lambda gradients: [g * 0.9 for g in gradients], True),
    (lambda gradients: [gradients[0] * 1.05, *gradients[1:]], True),
    (lambda gradients: [*gradients[:-1], gradients[-1] * 0], True),
])
def test_systems_that_train_otherwise_are_noticed(damage, is_noticed):
    right, other = replicas("right", "other")
    right.apply(right.gradients())
    other.apply(damage(other.gradients()))
    if not is_noticed:
        return other.check(None, None, Alone, right)
    with pytest.raises(AssertionError, match="otherwise than with the first system"):
        other.check(None, None, Alone, right)


def test_weights_that_nobody_trains_are_noticed():
    one, other = replicas("one", "other")
    with pytest.raises(AssertionError, match="No weight has moved"):
        other.check(None, None, Alone, one)


@pytest.mark.parametrize("damage, message", [
    (lambda sums: sums, None), (lambda sums: sums / 3, "of 100 to 100, expected 300, the sum of 3"),
    (lambda sums: sums - [1, 0], "of 2 to 3, expected 3, the sum of 3 ranks"),
    (lambda sums: np.where(np.arange(len(sums))[:, None] == 0, 1, sums), "1 gradients are made of factors"),
])
def test_emulated_sums_that_are_wrong_are_noticed(damage, message):
    model = emulation.EmulatedModel("cifar10_quick", 100, profiles.PROFILES["titan_x"])
    replica = systems.EmulatedReplica("x", model, ranks=3)
    sums = 3.0 * np.array(model.values)[:, None] * [1, 1]
    if message is None:
        return replica.check(damage(sums), None, None, None)
    with pytest.raises(AssertionError, match=message):
        replica.check(damage(sums), None, None, None)


def test_emulated_products_look_at_their_factors():
    product = library.load()[0].poseidon_emulated_product
    whole = np.ones((3, 4), np.float32)
    assert product(u=whole, v=whole, operations_per_second=1e12).shape == (4, 4)
    with pytest.raises(tf.errors.InternalError, match="begins its row 2 with 0, expected 1"):
        product(u=whole, v=whole * [[1], [1], [0]], operations_per_second=1e12)


@pytest.mark.parametrize("flag, message", [
    ("--system=poseidon,fast", "--system has 'fast', expected some of single, poseidon, "),
    ("--compute=emulated:abacus", "--compute=emulated:abacus, expected real or emulated:PROFILE"),
    ("--dilation=2", "change an emulation, but --compute=real"),
    ("--system=poseidon+shards", "--system has 'poseidon+shards', which can be emulated only, but --compute=real"),
    ("--dedicated_servers=1 --system=mwms+enable", "but --system has 'mwms+enable', which trains on all ranks"),
    ("--json=/nowhere/results.json", "--json=/nowhere/results.json cannot be written (No such file or directory)"),
    ("--timeline=trace.json --system=mwms", "but --system has none of its policies; add poseidon"),
])
def test_flags_of_the_benchmark_that_contradict_are_refused(flag, message):
    outcome = launch.run([BENCHMARK, *flag.split()], ranks=0, timeout_s=60)
    assert outcome.status != 0 and message in outcome.output
