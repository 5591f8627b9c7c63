"""Programs for tf.distribute with poseidon.enable(); those for Horovod are in test_horovod.py."""

import pathlib
import pickle
import re
import socket
import stat
import sys

import launch
import numpy as np
import pytest
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon import drop_in
from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.graph_passes import session
from tf_poseidon.job import agreement
from tf_poseidon.ops import library

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
FACTORS = {"AddN": "sfb", "gradient_tape/add/Reshape": "sfb", "gradient_tape/matmul_1/MatMul_1": "sfb",
           "gradient_tape/add_1/Reshape": "sfb"}
# Ranks count those that have another batch.
HAS_NEXT = {"Reshape": "it does not reduce floating-point numbers (node 'CollectiveReduceV2')"}
# For each loop of tests/engines/enabled_loops.py: the schemes of its gradients, or why it is left unchanged.
EXPECTED = {
    "laid_end_to_end": FACTORS, "one_by_one": FACTORS, "means": FACTORS, "in_small_packs": FACTORS,
    "fewer_rows_later": FACTORS, "more_rows_later": FACTORS,
    "bfloat16": "TensorFlow's collectives do not gather bfloat16",
    "open_number_of_rows": "not known before the step; give the batch its shape with tf.ensure_shape",
    "open_number_of_rows_that_is_ensured": {**FACTORS, **HAS_NEXT}, "no_end": FACTORS,
    "fewer_rows_on_rank_1_from_the_first": "ranks would do different things: 'AddN' 6 rows, ",
}


def free_ports(number):
    """Returns free ports."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(number)]
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


def check_loops(ranks, expected, gather):
    """Compares loops of tests/engines/enabled_loops.py before and after `enable()`."""
    assert list(ranks[0]) == list(expected)
    for name, wanted in expected.items():
        for result in ranks:
            (before, _), (after, ops), found = result[name]
            for a, b in zip(before, after):  # three steps in float64
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-14, err_msg=name)
            if isinstance(wanted, dict):
                assert found == wanted, name
                assert ops[gather] > 0 and ops["SufficientFactorOuterProduct"] > 0, name
            else:
                reasons = [found] if isinstance(found, str) else found.values()
                assert any(wanted in reason for reason in reasons), f"{name}: {found}"
                assert ops[gather] == ops["SufficientFactorOuterProduct"] == 0, name


def test_loops_for_tf_distribute(tmp_path):
    launch.run_ok(["enabled_loops.py", "tf_distribute", tmp_path / "out"], ranks=2, timeout_s=180,
                  environment={"PORTS": ",".join(free_ports(2))}.items())
    ranks = [pickle.loads((tmp_path / f"out.{rank}").read_bytes()) for rank in range(2)]
    check_loops(ranks, EXPECTED, "CollectiveGatherV2")


def test_two_lines_in_a_program(tmp_path):
    """Weights of examples/tf_distribute_loop.py, unchanged and with poseidon.enable()."""
    program = (EXAMPLES / "tf_distribute_loop.py").read_text()
    two_lines = "import tf_poseidon as poseidon\nenabled = poseidon.enable(policy='sfb')\nimport argparse\n"
    enabled = tmp_path / "enabled.py"
    enabled.write_text(program.replace("import argparse\n", two_lines, 1)
                       + "print(enabled.plan, flush=True)\n")
    for path in (EXAMPLES / "tf_distribute_loop.py", enabled):
        ports = free_ports(2)
        # The usual launch of such programs: the same command, with another TF_CONFIG per process.
        workers = ", ".join(f'\\"localhost:{port}\\"' for port in ports)
        starter = tmp_path / "worker.sh"
        starter.write_text(f'#!/bin/sh\nTF_CONFIG="{{\\"cluster\\": {{\\"worker\\": [{workers}]}}, '
                           '\\"task\\": {\\"type\\": \\"worker\\", \\"index\\": $PMI_RANK}}" '
                           f'exec "$@"\n')
        starter.chmod(starter.stat().st_mode | stat.S_IXUSR)
        outcome = launch.run_ok([path, "--width", 64, "--save", tmp_path / f"{path.stem}.npz"], ranks=2,
                                timeout_s=60, through=[starter])
    assert re.search(r"64x64 +sfb ", outcome.output), outcome.output
    before, after = (np.load(tmp_path / f"{name}.npz") for name in ("tf_distribute_loop", "enabled"))
    for key in before:  # 20 steps in single precision
        np.testing.assert_allclose(before[key], after[key], rtol=0, atol=1e-5)


def test_neither_library_is_in_use(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    with pytest.raises(poseidon.PoseidonError, match=r"call it after hvd\.init\(\), or set TF_CONFIG"):
        poseidon.enable()


def test_program_without_eager_execution(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}')
    monkeypatch.delitem(sys.modules, "horovod.tensorflow", raising=False)
    with tf.Graph().as_default(), pytest.raises(poseidon.PoseidonError, match="without eager execution.*tf.function"):
        poseidon.enable()


@pytest.mark.parametrize("task, expected", [
    ('{"type": "worker", "index": 1}', (1, 2)),
    ('{"type": "chief", "index": 0}', "TF_CONFIG says that this is task ('chief', 0)"),
    ('{"type": "ps", "index": 0}', "TF_CONFIG says that this is task ('ps', 0)"),
])
def test_place_in_tf_config(monkeypatch, task, expected):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": %s}' % task)
    if isinstance(expected, tuple):
        assert drop_in._place_in_tf_config() == expected
    else:
        with pytest.raises(poseidon.PoseidonError, match=re.escape(expected)):
            drop_in._place_in_tf_config()


@pytest.mark.parametrize("name", ["ranks_per_node", "gpus_per_node"])
def test_ranks_of_a_node_do_not_combine_for_other_libraries(monkeypatch, name):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}')
    with pytest.raises(poseidon.PoseidonError, match=f"The cluster has {name}=2, .*; give it {name}=1"):
        drop_in.enable(cluster=planning.Cluster(2, **{name: 2}))


def test_variables_of_the_program_are_not_divided(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}')
    with pytest.raises(poseidon.PoseidonError, match="'head/kernel' is to be divided by 'columns', but only PoseidonS"):
        drop_in.enable(pins={"head/kernel": "columns"})


def test_rank_that_cannot_follow_the_others_fails():
    """After ranks may have agreed, the function fails with any error, and runs nothing."""
    library.load()

    class Fails:
        def difference(self, *args):
            raise poseidon.JobEndedError("Rank 0 waited 2 s for rank 1")

    passes = grappler.GraphPass(session.RewriteSession(planning.Planner(planning.Cluster(2), "ps"), comparison=Fails()))
    with passes.registered():
        function = tf.function(lambda x: ops.sync(2 * x, "site"))
        with pytest.raises(tf.errors.InvalidArgumentError, match="Rank 0 waited 2 s for rank 1"):
            function(tf.ones([3, 4]))


def test_first_difference():
    assert agreement.first_difference("same\nmine", "same", 0, 3) == (
        "ranks would do different things: mine on rank 0, but nothing on rank 3")
