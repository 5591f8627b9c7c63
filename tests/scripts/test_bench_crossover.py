"""The comparison of jobs that share accelerators: its sums, and a run of it on an emulated cluster."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import host_emulation
import pytest

from evaluation import modules
from evaluation.comparisons import shared_jobs

CELL = shared_jobs.Cell("pair", (shared_jobs.SharedJob("mlp", 4), shared_jobs.SharedJob("vgg19", 2)), gbps=0.094,
                        dilation=2, hosts=4)
# Seconds of the emulation; links carry 0.094 * 0.94 Gbit/s undilated.
JOBS = [{"compute_s": 1.0, "planned_bytes": 2 * 11_045_000 / 2, "alone": [12.0, 12.0, 14.0],
         "together": [[0.0, 16.0], [100.0, 115.0], [200.0, 216.0]], "turns": {}},
        {"compute_s": 2.0, "planned_bytes": 2 * 11_045_000, "alone": [10.0, 8.0, 10.0],
         "together": [[1.0, 17.0], [100.0, 116.0], [200.0, 215.0]], "turns": {}}]


def test_gain_of_jobs_that_train_together():
    entry = {"cell": json.loads(json.dumps(dataclasses.asdict(CELL))), "with": JOBS}
    found = shared_jobs.gain(entry, "with")
    assert found.step_s == [1.5, 2.5] and found.compute_s == [0.5, 1.0]
    assert found.wire_s == pytest.approx([0.5, 1.0], rel=1e-3)
    assert found.sequential == [11.0, 10.0, 12.0] and found.together == [8.5, 8.0, 8.0]
    assert found.ratios == pytest.approx([11 / 8.5, 10 / 8, 12 / 8])
    assert found.bound == pytest.approx((4 * 1.5 + 2 * 2.5) / (4 * 0.5 + 2 * 1.0), rel=1e-3)
    header, (row,) = shared_jobs.table([entry])
    assert dict(zip(header, row, strict=True)) | {
        "jobs": "pair", "turns": "with", "T, ms": "1,500 2,500", "steps": "4 2", "together, s": "8.00 (8.00 to 8.50)",
        "as fast": "1.294 (1.250 to 1.500)", "bound": "2.75", "of it": "0.471"} == dict(zip(header, row))


def test_cells_are_found_again():
    for cell in shared_jobs.CELLS.values():
        assert shared_jobs.Cell.of(json.loads(json.dumps(dataclasses.asdict(cell)))) == cell


@pytest.mark.parametrize("flag, message", [
    ("--cells=ten", "--cells has 'ten', expected some of two VGG19, "), ("--ways=both", "--ways has 'both', expected")])
def test_flags_that_name_nothing_are_refused(flag, message):
    done = subprocess.run([*modules.command("comparisons.bench_crossover"), flag], capture_output=True, text=True)
    assert done.returncode != 0 and message in done.stdout + done.stderr


SMALL = """
import json, sys
from absl import app
from evaluation.comparisons import bench_crossover, shared_jobs
jobs = [shared_jobs.SharedJob("cifar10_quick", 8, overlaps=overlaps) for overlaps in (False, True)]
cell = shared_jobs.Cell("small", tuple(jobs), 4, dilation=40, shrink=4, hosts=2)
bench_crossover.CELLS = {cell.name: cell}
app.run(bench_crossover.main)
"""


@pytest.mark.skipif(bool(host_emulation.problem()), reason="needs root, ip and tc")
def test_small_jobs_share_accelerators(tmp_path):
    path = tmp_path / "out.json"
    done = subprocess.run([sys.executable, "-c", SMALL, "--rounds=2", f"--json={path}"], capture_output=True, text=True,
                          timeout=300, cwd=pathlib.Path(__file__).resolve().parents[2])
    assert done.returncode == 0, done.stderr
    entry, = json.loads(path.read_text())
    for way in ("without", "with"):
        found = shared_jobs.gain(entry, way)
        assert [len(found.sequential), len(found.together)] == [2, 2]
        for alone, compute in zip(found.step_s, found.compute_s):
            assert compute < alone < 3 * compute
        assert all(ratio > 0.7 for ratio in found.ratios)
    # A turn for each step of one job, and for each of the other's, in their functions: warm up and checks included.
    assert [job["turns"]["count"] for job in entry["with"]] == [2 + 2 * 2 * 9 + 1, 8 * (2 + 2 * 2 * 2 + 1)]
