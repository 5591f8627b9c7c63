"""The pods of the example's MPIJob, on emulated hosts: their own commands, over a real ssh."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from evaluation import modules

ROOT = pathlib.Path(__file__).parents[2]


def test_mpi_job_trains(able):
    if not shutil.which("sshd", path="/usr/sbin"):
        (pytest.fail if "CI" in os.environ else pytest.skip)("openssh-server is not installed")
    done = subprocess.run(
        [*modules.command("clusters.emulated_pods"), "examples/kubernetes/mpijob.yaml"],
        cwd=ROOT, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=180)
    assert done.returncode == 0, done.stdout
    assert "2 ranks on 2 hosts over MPICH" in done.stdout, done.stdout
    assert float(re.search(r"Test accuracy with 2 process\(es\): ([\d.]+)", done.stdout)[1]) >= 0.97
