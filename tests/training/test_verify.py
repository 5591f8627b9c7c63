"""Verify mode finds faults, and reports none in correct runs."""

import itertools
import json
import re

import launch
import pytest

RANKS = 2
STEPS = 12  # 4 epochs of 3 batches


def run(fault, policy, reports="", way=()):
    return launch.run(["train_verified.py", fault, policy, *way], RANKS, timeout_s=90,
                      environment={"REPORTS": str(reports)})


@pytest.mark.parametrize("policy", ["ps", "sfb"])
def test_right_training_passes(policy, tmp_path):
    outcome = run("none", policy, tmp_path)
    assert outcome.status == 0, outcome.output
    report = json.loads((tmp_path / "1.json").read_text())
    assert set(report["schemes"].values()) == ({"ps"} if policy == "ps" else
                                               {"ps", "sfb"})
    for site in set(report["schemes"]) - {"loss/total"}:  # which trains nothing
        assert report["counts"][f"verify/{site}"] == STEPS / 2
    assert report["counts"]["verify/digests"] == STEPS / 2


def test_shards_are_compared_and_what_is_not_is_said(tmp_path):
    outcome = run("none", "ps", tmp_path, ("shards",))
    assert outcome.status == 0, outcome.output
    counts = json.loads((tmp_path / "1.json").read_text())["counts"]
    for layer, part in itertools.product(("first", "second"), ("kernel", "bias")):
        assert counts[f"verify/{layer}/{part}"] == counts[f"verify/shards/{layer}/{part}"] == STEPS / 2
    assert "not the step with one process: each rank holds a shard of 'sgd/" in outcome.output


@pytest.mark.parametrize("fault, policy, way, message", [
    ("factors", "sfb", "",
     r"gradient of '(first|second)/(kernel|bias)' on rank [01] differs .* by [\d.e+-]+ at element "
     r".* where rounding explains \d\.\d+e-1\d"),
    ("sums", "ps", "",
     r"gradient of '(first|second)/(kernel|bias)' on rank 1 differs .* by [\d.]+ at element .*"),
    ("sums", "ps", "shards", r"gradient of '(first|second)/(kernel|bias)' on rank [01] differs .* by [\d.]+ at"),
    ("weights", "sfb", "",
     r"variable 'second/kernel' is not the same on all ranks: on rank 1 it is up to 0\.25 away"),
])
def test_fault_ends_the_job_with_name_rank_and_size(fault, policy, way, message):
    outcome = run(fault, policy, way=(way,))
    assert outcome.status != 0
    assert re.search("verify: the .*" + message, outcome.own_lines[-1]), outcome.own_lines[-1]


@pytest.mark.parametrize("method, name", [("fit", "train_step"), ("distribute", "step")])
def test_steps_are_compared_as_the_optimizer_leaves_them(method, name):
    right, wrong = (run(fault, "auto", way=(method,)) for fault in ("none", "shapes"))
    assert right.status == 0, right.output
    assert ("verify has compared every 2 steps, gradients with plain sums" in right.output) == (method == "fit")
    assert wrong.status != 0
    assert re.search(rf"verify: '{name}' has computed other values than one process: (output|variable) .* times the "
                     "rounding bound", wrong.own_lines[-1]), wrong.own_lines[-1]
