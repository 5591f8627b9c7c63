"""evaluation/gpu/gpu_train.py, rehearsed where there is no GPU, and what it takes to be wrong."""

import json
import subprocess
import sys

import pytest

from evaluation import modules
from evaluation.gpu import gpu_train

SCRIPT = modules.ROOT / "scripts" / "gpu_train.py"


def test_rehearsal(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path, "--rehearse", "--models=mlp",
                           "--parts=alone,auto.mixed,rates.apart,rates"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "gpu_train.json").read_text())
    assert results["is_rehearsal"]
    alone, mixed, apart, linked = (results["parts"][name]["found"]
                                   for name in ("alone", "auto.mixed", "rates.apart", "rates"))
    assert {name: each["is_equal"] for name, each in alone.items()} == {
        f"mlp {numbers}": True for numbers in ("float32", "tf32", "mixed")}
    assert mixed["mlp"]["copied"]["down_bytes"] > 0 and mixed["mlp"]["schemes"]["sfb"] > 0
    # Of a step of median length; a copy can begin after its end, and count for the next one.
    assert all(apart["copies"][row]["bytes"] > 5e5 for row in ("down", "up")) and "across" not in apart["copies"]
    assert linked["copies"]["across"]["bytes"] > 5e5 > linked["copies"]["down"]["bytes"]  # down go small tensors


GOOD = {"error": 0.1, "is_equal_to_whole": True, "places": {"PoseidonSend GPU": 3},
        "copied": {"down_bytes": 8, "across_bytes": 8}}


@pytest.mark.parametrize("part, change, rehearse, says", [
    ("ps.float32", {}, False, []),
    ("ps.float32", {"error": 1.5}, False, ["mlp differs from one process"]),
    ("ps.float32", {"error": float("nan")}, True, ["mlp differs from one process"]),
    ("sfb.tf32", {"is_equal_to_whole": False}, False, ["mlp has other bits where TensorFlow copies whole tensors"]),
    ("sfb.tf32", {"places": {"PoseidonSend CPU": 3}}, False, ["mlp exchanges nothing of the GPU's memory"]),
    ("sfb.tf32", {"places": {"PoseidonSend CPU": 3}}, True, []),
    ("auto.mixed", {"copied": {"down_bytes": 0, "across_bytes": 8}}, True, ["mlp has copied nothing in pieces, down"]),
    ("ps.tf32", {"copied": {"down_bytes": 8, "across_bytes": 0}}, False, ["mlp has copied nothing in pieces, across"]),
    ("ps.tf32", {"copied": {"down_bytes": 8, "across_bytes": 0}}, True, []),
    ("sfb.tf32", {"copied": {"down_bytes": 0, "across_bytes": 8}}, False, []),
    ("ps.float32.apart", {"copied": {"down_bytes": 8, "across_bytes": 0}}, True, []),
    ("alone", {"error": 2.0}, False, ["mlp differs from plain Keras"]),
    ("alone", {}, False, []),
])
def test_what_is_wrong(part, change, rehearse, says):
    assert list(gpu_train.wrong(part, {"mlp": GOOD | change}, rehearse)) == says


def test_a_part_that_hangs_leaves_the_others(tmp_path, monkeypatch, capsys):
    script = tmp_path / "hangs.py"
    script.write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    monkeypatch.setattr(gpu_train, "PARTS", {"alone": ([str(script)], 1, 0.5), "rates": (["absent.py"], 1, 10)})
    monkeypatch.setattr(gpu_train.modules, "command", lambda script: [sys.executable, script])
    monkeypatch.setattr(sys, "argv", ["gpu_train.py", "--out", str(tmp_path), "--parts=alone,rates"])
    assert gpu_train.main() == 1
    parts = json.loads((tmp_path / "gpu_train.json").read_text())["parts"]
    assert parts["alone"]["error"] == "took longer than 0 s" and "begun" in parts["alone"]["log"]
    assert parts["rates"]["error"] == "status 2" and "absent.py" in parts["rates"]["log"]
    assert "0 of 2 parts" in capsys.readouterr().out
