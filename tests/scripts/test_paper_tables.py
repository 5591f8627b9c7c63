"""The paper's numbers beside ours: docs/results/paper.md follows from its tables, and wrong numbers are noticed."""

import json
import math
import re
import subprocess

import pytest

from evaluation import modules
from evaluation.paper import plots
from evaluation.paper import points
from evaluation.paper import report
from evaluation.paper import tables
from tf_poseidon.planning import cost

TABLES = modules.command("paper.tables")
TEXT = (modules.RESULTS / "paper.md").read_text()
CLAIMS = report.load(modules.RESULTS / "paper" / "claims.csv")
POINTS = report.load(modules.RESULTS / "paper" / "points.csv")


def find(rows, part, model, system, nodes, gbps, **more):
    """Returns the first of these rows."""
    wanted = {"part": part, "model": model, "system": system, "nodes": nodes, "gbps": gbps, **more}
    return next(row for row in rows if wanted.items() <= row.items())


HEADLINE = find(CLAIMS, "bandwidth", "vgg19_22k", "poseidon-paper", 16, 10, profile="titan_x")
WFBP = find(CLAIMS, "scaling_caffe", "vgg19_22k", "wfbp", 8, 40)
WFBP_GB = 25.6539  # that each node sends and receives in this step


# ---- what is stored ----------------------------------------------------------------------------

def test_the_page_has_the_tables_of_what_is_stored():
    assert report.report(TEXT, CLAIMS, POINTS) == TEXT
    for part in {row["part"] for row in CLAIMS}:
        assert f"<!-- claims {part} -->" in TEXT and f"<!-- points {part} " in TEXT
    for part in plots.PARTS:
        assert f"](paper/{part}.png)" in TEXT
        assert (modules.RESULTS / "paper" / f"{part}.png").read_bytes().startswith(b"\x89PNG")


def test_each_claim_agrees_or_has_a_reason():
    assert report.problems(CLAIMS) == []
    for claim in CLAIMS:
        assert f"| {claim['grade']} | " in TEXT  # its meaning
        assert claim["paper"] is None or claim["grade"] != "M"
        assert bool(claim["why"]) == (claim["paper"] is not None and
                                      abs(report.ours(claim) / claim["paper"] - 1) > report.TOLERANCE)
        assert f"* **{claim['why']}:**" in TEXT or not claim["why"]


def test_claims_and_points_have_the_same_results():
    stored = {points.Point.of(row): row for row in POINTS}
    both = [(claim, stored[points.Point.of(claim)]) for claim in CLAIMS if points.Point.of(claim) in stored]
    assert len(both) > 50
    assert all(claim["simulated"] == row[claim["quantity"]] for claim, row in both)


def test_what_the_page_says_about_all_points():
    emulated = [row for row in POINTS if row["emulated_step_ms"]]
    assert len(emulated) > 20
    assert all(row[f"emulated_{name}"] == pytest.approx(row[name], rel=0.05) for row in emulated
               for name in ("step_ms", "gb_mean"))
    gains = [gain for part in {row["part"] for row in POINTS} for found in report.groups(
        row for row in POINTS if row["part"] == part).values() if (gain := report.gain(found))]
    assert min(gains) > 0.999 and max(gains) > 5


def test_layers_have_the_break_even_of_table_1():
    """The factors of a layer are no more bytes than its gradient's up to so many nodes."""
    rows = re.findall(r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", TEXT.partition("| layer |")[2])
    assert len(rows) == 7
    for m, n, *most in (map(int, row) for row in rows):
        for k, nodes in zip((8, 32, 128), most, strict=True):
            assert nodes == math.floor(2 * m * n / (m + n) / k)
            pays = [cost.factor_broadcasting(4 * k * (m + n), p) <= cost.parameter_server(4 * m * n, p, p)
                    for p in (nodes, nodes + 1)]
            assert pays == [True, False]


# ---- what is computed --------------------------------------------------------------------------

@pytest.mark.parametrize("row", [
    HEADLINE, WFBP, find(CLAIMS, "traffic", "vgg19", "adam", 8, 40, quantity="gb_worst"),
    find(CLAIMS, "gpus", "vgg19", "ps", 1, 40), find(CLAIMS, "bandwidth", "googlenet", "poseidon-paper", 16, 2),
    find(POINTS, "scaling_tensorflow", "vgg19", "tensorflow", 8, 40), find(POINTS, "stalls", "vgg19", "wfbp", 8, 40),
    find(POINTS, "gpus", "vgg19", "poseidon-paper", 4, 10),
    find(POINTS, "beyond", "vgg19", "horovod", 1024, 100, options="message_us=10")],
    ids=lambda row: f"{row['part']}-{row['model']}-{row['system']}")
def test_stored_rows_are_what_is_computed(row):
    computed = dict(row)
    tables.compute(computed, json.loads((modules.RESULTS / "emulated.json").read_text()))
    assert computed == {name: pytest.approx(value, rel=1e-5, abs=1e-9) if isinstance(value, float) else value
                        for name, value in row.items()}


def test_the_rate_that_a_claim_needs_gives_its_time():
    point = points.Point.of({**WFBP, "options": f"gbps={WFBP['needs_gbps']}"})
    assert 1e3 * points.simulate(point).step_seconds == pytest.approx(WFBP["paper"], rel=0.01)
    assert points.needed_gbps(points.Point.of(WFBP), 1) is None  # in no time


def test_the_emulated_run_that_shrinks_least_counts_if_it_had_the_same_plan():
    def run(step_ms, shrink=16, payload=WFBP_GB * 1e9 / 8, **changes):
        rows = [("single", 920), ("poseidon", 960), ("poseidon-ps", step_ms)]
        return {"run": {"model": "vgg19_22k", "hosts": 8, "gbps": 40, "systems": "poseidon,poseidon-ps",
                        "profile": "titan_x", "shrink": shrink, "batch_size": None, "ranks_per_host": 1, **changes},
                "results": [{"system": name, "step": {"median_ms": ms}, "payload_bytes": payload} for name, ms in rows]}

    runs = [run(1300), run(1200, shrink=4), run(1, shrink=1, profile=None), run(1, shrink=1, hosts=4),
            run(1, shrink=1, ranks_per_host=2)]
    assert points.emulated(points.Point.of(WFBP), runs) == {
        "step_ms": 1200, "speed_up": pytest.approx(8 * 920 / 1200, rel=1e-5), "gb_mean": WFBP_GB}
    assert points.emulated(points.Point.of(WFBP), [run(1200, payload=1e9)]) == {}


# ---- errors that are noticed -------------------------------------------------------------------

@pytest.mark.parametrize("speed_up, message", [
    (17.5, "bandwidth: VGG19-22K, Poseidon, 16 at 10 has 17.5 speed_up, expected a number that is not negative"),
    (math.nan, "has nan speed_up, expected a number"), (-1, "has -1 speed_up, expected a number"),
    (12.0, "has 12.0 speed_up, expected 15.5x (with Caffe) within 5%: give the claim a reason, or mend the number")])
def test_a_wrong_number_is_noticed(speed_up, message):
    problem, = report.problems([{**claim, "simulated": speed_up} if claim is HEADLINE else claim for claim in CLAIMS])
    assert message in problem


def test_a_changed_number_is_noticed():
    changed = [{**claim, "simulated": claim["simulated"] + 0.01} if claim is HEADLINE else claim for claim in CLAIMS]
    assert report.report(TEXT, changed, POINTS) != TEXT


@pytest.mark.parametrize("arguments, message", [
    (["--parts", "x"], "--parts has 'x', expected some of bandwidth"),
    (["more"], "There is an argument 'more', expected flags only"),
    (["--out", "/nowhere"], "claims.csv' cannot be read")])
def test_command_refuses_in_a_sentence(arguments, message):
    done = subprocess.run([*TABLES, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_command_writes_the_tables_of_what_is_stored_alone(tmp_path):
    """Neither Keras nor matplotlib is needed; what stood in the tables before does not matter."""
    (tmp_path / "paper").mkdir()
    for name in ("claims.csv", "points.csv"):
        (tmp_path / "paper" / name).write_text((modules.RESULTS / "paper" / name).read_text())
    (tmp_path / "paper.md").write_text(report.report(TEXT, [], []))
    for name in ("keras", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    done = subprocess.run([*TABLES, "--parts", "", "--out", tmp_path], capture_output=True, text=True, timeout=60,
                          env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    for name in ("paper.md", "paper/claims.csv", "paper/points.csv"):
        assert (tmp_path / name).read_bytes() == (modules.RESULTS / name).read_bytes()
