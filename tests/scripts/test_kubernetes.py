"""The pods of the example's MPIJob, on emulated hosts: their own commands, over a real ssh."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from evaluation import modules

ROOT = pathlib.Path(__file__).parents[2]


EXAMPLE = ROOT / "examples" / "kubernetes"


@pytest.fixture
def pods(able):
    """Runs an MPIJob, and returns its exit status and what it prints."""
    if not shutil.which("sshd", path="/usr/sbin"):
        (pytest.fail if "CI" in os.environ else pytest.skip)("openssh-server is not installed")

    def run(job):
        done = subprocess.run(
            [*modules.command("clusters.emulated_pods"), job], cwd=ROOT, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=180)
        return done.returncode, done.stdout

    return run


def changed(folder, *changes):
    """Returns the file of an MPIJob that is the example, but for pieces of its text."""
    text = (EXAMPLE / "mpijob.yaml").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    shutil.copy(EXAMPLE / "Dockerfile", folder)
    (folder / "mpijob.yaml").write_text(text)
    return folder / "mpijob.yaml"


def test_mpi_job_trains(pods):
    status, said = pods(EXAMPLE / "mpijob.yaml")
    assert status == 0, said
    assert "2 ranks on 2 hosts over MPICH" in said, said
    assert float(re.search(r"Test accuracy with 2 process\(es\): ([\d.]+)", said)[1]) >= 0.97


def test_pods_are_restricted(pods, tmp_path):
    """What ranks may write is what the job mounts, so that the test above shows that nothing else has to be."""
    probe = ("import os; print(os.getuid(), [folder for folder in ('/', '/etc', '/home', os.environ['HOME'], '/opt', "
             "'/run', '/var/tmp', '/tmp', '/dev/shm', '/root') if os.access(folder, os.W_OK)], "
             "[line.split()[1].strip('0') for line in open('/proc/self/status') if line.startswith('Cap')])")
    status, said = pods(changed(tmp_path, ('"python", "/opt/examples/digits.py"', f'"python", "-c", "{probe}"')))
    assert status == 0, said
    assert said.count("1000 ['/tmp', '/dev/shm'] ['', '', '', '', '']\n") == 2, said


def test_a_job_without_a_temporary_folder_is_told_so(pods, tmp_path):
    status, said = pods(changed(
        tmp_path, ("mountPath: /tmp\n", "mountPath: /opt/scratch\n"),
        ('"python", "/opt/examples/digits.py"', '"python", "-m", "tf_poseidon", "selftest"')))
    assert status == 3, said
    assert said.count("No temporary file can be written in /tmp, /var/tmp, /usr/tmp, /opt, expected room") == 2, said
    assert "Traceback" not in said
