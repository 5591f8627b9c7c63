"""The paper's numbers beside ours: the stored report follows from the stored parts, and wrong numbers are noticed."""

import copy
import dataclasses
import json
import math
import pathlib
import subprocess

import pytest

from evaluation import modules
from evaluation.paper import claims
from evaluation.paper import parts as parts_lib
from evaluation.paper import points
from evaluation.paper import report
from evaluation.paper.claims import CLAIMS
from evaluation.paper.parts import PARTS
from evaluation.paper.points import Point

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLES = modules.command("paper.tables")
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def parts():
    return report.stored(RESULTS)


def section(text, name):
    """Returns the lines of a part's first table."""
    return text.split(f"## {PARTS[name].title}\n")[1].split("\n## ")[0].splitlines()


def put(parts, point, **values):
    """Returns the parts with other values of a point in all of them."""
    changed = copy.deepcopy(parts)
    for part in changed.values():
        if point.key in part["rows"]:
            part["rows"][point.key].update(values)
    return changed


# ---- the stored report -------------------------------------------------------------------------

def test_the_stored_report_is_made_of_what_is_stored(parts):
    assert (RESULTS / "paper.md").read_text() == report.report(parts)


@pytest.mark.parametrize("name", PARTS)
def test_the_report_prints_every_claim_as_it_is(parts, name):
    """One row for each, in this order: the number with its unit, and the grade."""
    rows = [line.strip("| ").split(" | ") for line in section(report.report(parts), name)]
    start = next(i for i, row in enumerate(rows) if row[:3] == ["what", "nodes at Gbit/s", "paper"]) + 2
    told = [claim for claim in CLAIMS if claim.part == name]
    for claim, row in zip(told, rows[start:start + len(told)], strict=True):
        assert row[3].split(",")[0] == claim.grade in claims.GRADES
        assert claim.said in row[2]
        if claim.number is not None:
            assert float(row[2].removeprefix("<= ").split("x")[0].split(" ")[0]) == claim.number
    assert len(rows[start + len(told)][0]) == 0  # and no more


@pytest.mark.parametrize("claim", [c for c in CLAIMS if c.number is not None], ids=str)
def test_a_claim_is_matched_or_has_a_reason(parts, claim):
    _, _, difference, reason = report.compare(claim, parts[claim.part])
    if abs(difference) > claims.TOLERANCE:
        assert reason in report.report(parts) and len(reason) > 40
    else:
        assert reason == ""


@pytest.mark.parametrize("name", PARTS)
def test_plots_are_stored(name):
    for file in [name, *(["break_even"] if name == "beyond" else [])]:
        assert (RESULTS / "paper" / f"{file}.png").read_bytes().startswith(b"\x89PNG")
        assert f"](paper/{file}.png)" in (RESULTS / "paper.md").read_text()


def test_what_is_missing_or_doubtful_is_no_check():
    assert not any(c.is_checked for c in CLAIMS if c.grade in ("M", "R?") or c.number is None)
    assert all(c.number is None for c in CLAIMS if c.grade == "M")
    assert {c.reason for c in CLAIMS} - {""} == set(claims.REASONS)


# ---- the numbers -------------------------------------------------------------------------------

@pytest.mark.parametrize("name, point", [
    ("scaling_caffe", Point("vgg19_22k", "titan_x", "wfbp", 8, 40)),
    ("scaling_tensorflow", Point("vgg19", "titan_x_tf", "tensorflow", 8, 40)),
    ("bandwidth", Point("vgg19_22k", "titan_x", "poseidon-paper", 16, 10)),
    ("stalls", Point("vgg19", "titan_x_tf", "wfbp", 8, 40)),
    ("traffic", Point("vgg19", "titan_x_tf", "adam", 8, 40)),
    ("gpus", Point("vgg19", "k80", "poseidon-paper", 4, 10, 8)),
    ("beyond", Point("bert_base_head", "a100", "horovod", 1024, 100))])
def test_stored_points_are_what_the_simulator_says(parts, name, point):
    computed, stored = points.measure(point), parts[name]["rows"][point.key]
    for key in ("step_s", "speed_up", "gb_worst", "waiting"):
        assert computed[key] == pytest.approx(stored[key], rel=1e-5, abs=1e-9)


def test_gain_is_over_what_others_have(parts):
    rows = {row["system"]: row for row in parts["bandwidth"]["rows"].values()
            if (row["model"], row["nodes"], row["gbps"], row["profile"]) == ("vgg19_22k", 16, 10, "titan_x")}
    gain = f"{rows['wfbp']['step_s'] / rows['poseidon']['step_s']:.2f}"
    assert float(gain) > 1.5
    line = next(line for line in section(report.report(parts), "bandwidth")
                if line.startswith("| VGG19-22K | 16 |"))
    assert line.endswith(f"| {gain} |")


def test_parts_run_apart_give_what_they_give_together(tmp_path, parts, monkeypatch):
    """Of a few points: two parts in either order, and at once."""
    monkeypatch.setitem(PARTS, "gpus", dataclasses.replace(PARTS["gpus"], points=PARTS["gpus"].points[:12]))
    together = {name: parts_lib.compute(name, []) for name in ("stalls", "gpus")}
    apart = {name: parts_lib.compute(name, []) for name in ("gpus", "stalls")}
    assert report.report(parts | together) == report.report(parts | apart)
    stored = {**parts["stalls"], "rows": {**parts["stalls"]["rows"]}}
    for row in stored["rows"].values():
        row["emulated"] = None
    assert together["stalls"] == stored


def test_the_rate_that_explains_a_time_gives_that_time():
    point = Point("vgg19_22k", "titan_x", "wfbp", 8, 40)
    rate = points.rate_for(point, 1.21)
    assert points.simulate(point, rate).step_seconds == pytest.approx(1.21, rel=0.01)
    assert rate == pytest.approx(0.35 * 40, rel=0.05)


@pytest.mark.parametrize("layer, k", [("VGG19 fc6", 32), ("GoogLeNet", 128), ("BERT-base head", 8)])
def test_factors_pay_until_rows_of_all_are_the_harmonic_mean(layer, k):
    m, n = parts_lib.LAYERS[layer]
    assert parts_lib.largest_nodes(m, n, k) == math.floor(2 * m * n / (m + n) / k)


# ---- emulated points ---------------------------------------------------------------------------

def emulated(step_ms, shrink=16, **changes):
    run = {"model": "vgg19_22k", "hosts": 8, "gbps": 40, "systems": "poseidon,poseidon-ps",
           "profile": "titan_x", "dilation": 4.0, "shrink": shrink, "batch_size": None, "ranks_per_host": 1,
           **changes}
    rows = [("single", 920), ("poseidon", 960), ("poseidon-ps", step_ms)]
    return {"run": run, "results": [{"system": name, "step": {"median_ms": ms}, "payload_bytes": 1e9}
                                    for name, ms in rows]}


def test_emulated_points_are_compared_where_they_are(parts):
    point = Point("vgg19_22k", "titan_x", "wfbp", 8, 40)
    runs = [emulated(1300), emulated(1200, shrink=4), emulated(1, shrink=1, profile=None),
            emulated(1, shrink=1, hosts=4), emulated(1, shrink=1, ranks_per_host=2)]
    found = points.measure(point, runs)["emulated"]
    assert found == {"step_s": 1.2, "speed_up": pytest.approx(8 * 920 / 1200), "gb_mean": 8.0}
    claim = next(c for c in CLAIMS if (c.system, c.nodes, c.unit) == ("wfbp", 8, "s"))
    data = put(parts, point, emulated=found)
    assert report.compare(claim, data["scaling_caffe"])[::2] == (1.2, pytest.approx(1.2 / 1.21 - 1))
    text = report.report(data)
    assert "(6.13)" in text and "points are emulated too" in text


# ---- errors that are noticed -------------------------------------------------------------------

BROKEN = Point("vgg19_22k", "titan_x", "poseidon-paper", 16, 10)


@pytest.mark.parametrize("speed_up, message", [
    (17.5, "bandwidth: VGG19-22K, Poseidon, 16 at 10 has 17.5 x, expected a finite number"),
    (math.nan, "has nan x, expected a finite number"), (-1, "has -1 x, expected a finite number"),
    (12.0, "has 12 x, expected the paper's 15.5 within 5%: give the claim a reason, or mend the number")])
def test_a_broken_number_is_refused(parts, speed_up, message):
    with pytest.raises(SystemExit, match=message):
        report.report(put(parts, BROKEN, speed_up=speed_up))


def test_a_changed_number_is_noticed(parts):
    row = parts["bandwidth"]["rows"][BROKEN.key]
    changed = report.report(put(parts, BROKEN, speed_up=row["speed_up"] + 0.01))
    assert changed != (RESULTS / "paper.md").read_text()


@pytest.mark.parametrize("arguments, message", [
    (["--parts", "x"], "--parts has 'x', expected some of scaling_caffe"),
    (["more"], "There is an argument 'more', expected flags only"),
    (["--parts", "", "--out", "{tmp}"], "stalls.json' cannot be read")])
def test_command_refuses_in_a_sentence(arguments, message, tmp_path):
    (tmp_path / "paper").mkdir()
    for name in PARTS:
        (tmp_path / "paper" / f"{name}.json").write_text("{}" if name != "stalls" else "")
    done = subprocess.run([*TABLES,
                           *(a.format(tmp=tmp_path) for a in arguments)],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_command_makes_the_report_of_what_is_stored_alone(tmp_path, parts):
    """Neither Keras nor matplotlib is needed."""
    (tmp_path / "paper").mkdir()
    for name, part in parts.items():
        (tmp_path / "paper" / f"{name}.json").write_text(json.dumps(part))
    for name in ("keras", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    done = subprocess.run(
        [*TABLES, "--parts", "", "--out", tmp_path],
        capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "paper.md").read_text() == (RESULTS / "paper.md").read_text()
