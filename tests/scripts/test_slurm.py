"""A real Slurm of two emulated hosts runs the example's batch job, as any cluster does."""

import os
import pathlib
import shutil
import subprocess
import sys

import launch
import pytest

from evaluation import modules

ROOT = pathlib.Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits.py"
TIMEOUT_S = 240


@pytest.fixture
def slurm(able):
    """Runs a command where `sbatch` and `srun` are; returns how it ended."""
    if not shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"):
        (pytest.fail if "CI" in os.environ else pytest.skip)("Slurm is not installed")

    def run(*command):
        emulated = [*modules.command("clusters.emulated_slurm"), "--hosts=2", "--", *command]
        environment = os.environ | {"VIRTUAL_ENV": sys.prefix, "TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run([str(part) for part in emulated], cwd=ROOT, env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S)

    return run


def test_batch_job_trains_as_one_process(slurm, tmp_path):
    done = slurm("sbatch", "--wait", f"--output={tmp_path}/out", "examples/slurm.sbatch", DIGITS, "--epochs=2",
                 f"--save={tmp_path}/two.npz")
    output = (tmp_path / "out").read_text() if (tmp_path / "out").exists() else ""
    assert done.returncode == 0, done.stdout + output
    assert "2 ranks on 2 hosts over MPICH" in output and "\nall right, in" in output, output
    assert "Test accuracy with 2 process(es)" in output, output
    one = launch.run_ok([DIGITS, "--epochs=2", f"--compare={tmp_path}/two.npz"], ranks=0, timeout_s=120)
    assert ": equal up to rounding" in one.output


def test_srun_that_does_not_speak_to_mpi_is_refused(slurm):
    done = slurm("srun", "--mpi=none", "-N2", "-n2", sys.executable, "-m", "tf_poseidon", "selftest")
    assert done.returncode != 0
    assert "SLURM_STEP_NUM_TASKS=2), but MPI sees 1" in done.stdout
    assert "Launch with srun --mpi=pmi2" in done.stdout
