"""What evaluation/faults/long_runs.py calls growth; and that names of exchanges do not grow with new models."""

import subprocess

import launch
import pytest

from evaluation import modules
from evaluation.faults import long_runs

FLAT = long_runs.Resources(500.0, 30, 10, 46, 1000)


@pytest.mark.parametrize("changes, problem", [
    ({}, ""), ({"mib": 520.0}, ""), ({"mib": 600.0}, "100 MiB of memory"), ({"sites": 50}, "4 sites"),
    ({"descriptors": 31, "threads": 12}, "1 descriptors, 2 threads"), ({"objects": 2000}, "")])
def test_growth_of_the_second_half(changes, problem):
    looks = [FLAT._replace(mib=100.0, sites=1)] + [FLAT] * 4 + [FLAT._replace(**changes)] * 5
    assert long_runs.problem(looks, 64) == problem


def test_new_models_add_no_names_descriptors_or_threads(tmp_path):
    report = tmp_path / "report.md"
    done = subprocess.run(
        [launch.mpiexec(), "-n", "2", *modules.command("faults.long_runs"), "--steps=400", "--fits=10",
         f"--markdown={report}"], text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| 10 fits |" in report.read_text() and "No second half adds" in report.read_text()
