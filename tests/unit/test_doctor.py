"""`tf-poseidon doctor`: what is wrong is named, with a remedy, and hides nothing else."""

import errno
import importlib.metadata
import json
import os
import stat
import subprocess
import sys
import tempfile

import pytest

from tf_poseidon.commands import cli
from tf_poseidon.commands import doctor
from tf_poseidon.commands import job_commands
from tf_poseidon.commands.doctor import Finding
from tf_poseidon.commands.doctor import Kind
from tf_poseidon.job.host import accelerator_turns
from tf_poseidon.job.host import mpi_library
from tf_poseidon.job.host import processors
from tf_poseidon.job.host.processors import Processors


def of(findings, subject):
    return [finding for finding in findings if finding.subject == subject]


@pytest.mark.parametrize("own, chosen, lines", [
    (Processors(((0,), (1,))), "", [("processors", "2 of 4, on 2 cores"),
                                    ("threads", "2 for the ranks of this host together, each at least 1")]),
    (Processors(((0, 4), (1, 5)), quota=1.5), "", [
        ("processors", "4 of 4, on 2 cores"), ("processors", "the time of 1.5 of them"),
        ("threads", "1 for the ranks of this host together, each at least 1")]),
    (Processors(((3,),)), "7", [("processors", "1 of 4, on 1 core"),
                                ("threads", "7 on each rank, since TF_NUM_INTRAOP_THREADS says so")])])
def test_processors(own, chosen, lines, monkeypatch):
    monkeypatch.setattr(processors, "found", lambda: own)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", chosen)
    findings = [finding for finding in doctor.examine().findings if finding.subject in ("processors", "threads")]
    assert [(finding.subject, finding.value) for finding in findings] == lines
    assert all(finding.remedy for finding in findings if finding.kind is Kind.NOTE)


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def with_versions(monkeypatch, **versions):
    """Lets packages have other versions; None: not installed."""
    real = importlib.metadata.version

    def version(name):
        found = versions.get(name.replace("-", "_"), "real")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name) if found == "real" else found

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_this_environment_is_fine():
    report = doctor.examine()
    assert not report.has_problems, str(report)
    assert of(report.findings, "MPI")[0].value == mpi_library.version()
    assert "PROBLEM" not in str(report) and "0 problems" in str(report)


@pytest.mark.parametrize("versions, says, remedy", [
    (dict(tensorflow="2.17.1", tensorflow_cpu=None),
     "2.17.1 (tensorflow), but tf_poseidon works with <2.22,>=2.18 only", "pip install 'tensorflow=="),
    (dict(tensorflow=None, tensorflow_cpu="2.22.0"), "2.22.0 (tensorflow-cpu), but", "pip install 'tensorflow-cpu=="),
    (dict(tensorflow=None, tensorflow_cpu=None), "not installed", "pip install 'tensorflow-cpu=="),
    (dict(tensorflow="2.21.0", tensorflow_cpu="2.21.0"), "tensorflow 2.21.0 and tensorflow-cpu 2.21.0",
     "uninstall both")])
def test_tensorflow_that_does_not_fit(versions, says, remedy, monkeypatch):
    with_versions(monkeypatch, **versions)
    finding, = doctor._tensorflow()
    assert finding.kind is Kind.PROBLEM and says in finding.value and remedy in finding.remedy


@pytest.mark.parametrize("version, environment, settings, subject, says", [
    ("3.11.3", {}, "", "Keras", "3.11.3, but tf_poseidon works with"), (None, {}, "", "Keras", "not installed"),
    ("3.15.1", {"KERAS_BACKEND": "jax"}, "", "Keras' backend", "jax"),
    ("3.15.1", {}, '{"backend": "torch"}', "Keras' backend", "torch"), ("3.15.1", {}, "{}", "", "")])
def test_keras_that_does_not_fit(version, environment, settings, subject, says, monkeypatch, tmp_path):
    with_versions(monkeypatch, keras=version)
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    for name, value in {**environment, "KERAS_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "keras.json").write_text(settings)
    problems = [finding for finding in doctor._keras() if finding.kind is Kind.PROBLEM]
    assert [finding.subject for finding in problems] == ([subject] if subject else [])
    assert all(says in finding.value and finding.remedy for finding in problems)


@pytest.mark.parametrize("says, kind, problem", [
    ("HYDRA build details:", "MPICH", ""), ("mpiexec (OpenRTE) 4.1.4", "Open MPI", "but tf_poseidon uses MPICH"),
    ("Intel(R) MPI Library for Linux* OS, HYDRA", "Intel MPI", ""), ("version 1", "another MPI", "")])
def test_launchers_of_another_mpi(says, kind, problem, tmp_path):
    finding, *others = doctor._launcher(script(tmp_path / "mpiexec", f"echo '{says}'"))
    assert f"of {kind}" in finding.value and problem in finding.value
    assert (finding.kind is Kind.PROBLEM) == bool(problem)
    assert others[-1].value == "started alone"


def test_another_launcher_in_path(tmp_path, monkeypatch):
    other = script(tmp_path / "mpiexec", "echo HYDRA")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    notes = [finding.value for finding in doctor._launcher("") if finding.kind is Kind.NOTE]
    assert f"PATH has another one, {other}" in notes


@pytest.mark.parametrize("answer, value, kind", [
    ("echo slurm 22.05", "srun, slurm 22.05; slurm 22.05", Kind.FINE),
    ("echo 'srun: error: Unknown host' >&2; exit 1", "srun, which does not run here: srun: error: Unknown host",
     Kind.NOTE)])
def test_srun(answer, value, kind, tmp_path, monkeypatch):
    script(tmp_path / "srun", answer)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert [finding.kind for finding in doctor._launcher("") if finding.value == value] == [kind]


@pytest.mark.parametrize("wanted, kind, says", [
    ("/no/such", Kind.NOTE, "TMPDIR is /no/such, which cannot be written"), ("", Kind.FINE, ""),
    (tempfile.gettempdir(), Kind.FINE, "")])
def test_temporary_folder(wanted, kind, says, monkeypatch):
    for name in ("TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", wanted)
    finding, = doctor._temporary_files()
    assert finding.kind is kind and finding.value.startswith(f"{tempfile.gettempdir()}, ") and says in finding.remedy


def test_nothing_temporary_can_be_written(monkeypatch, capsys):
    """TensorFlow's import fails then, which is told in place of its traceback."""

    def selftest(*_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/a']")

    monkeypatch.setattr(tempfile, "gettempdir", selftest)
    finding, = doctor._temporary_files()
    assert finding.kind is Kind.PROBLEM and "Kubernetes: an emptyDir" in finding.remedy
    assert finding.value.startswith("No temporary file can be written in /tmp, /a, expected room for some")
    monkeypatch.setattr(job_commands, "selftest", selftest)
    with pytest.raises(SystemExit) as end:
        cli.main(["selftest"])
    assert end.value.code == 3
    said = capsys.readouterr().err
    assert said == f"tf-poseidon selftest: {finding.value}; {finding.remedy}\n"


def test_shared_memory_that_cannot_be_written(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm")
    finding, = of(list(doctor._limits()), "/dev/shm")
    assert finding.kind is Kind.PROBLEM and finding.value == "cannot be written" and "emptyDir" in finding.remedy


def test_chosen_ports_are_shown(monkeypatch):
    monkeypatch.setenv("TF_POSEIDON_PORT_RANGE", "30200-30299")
    assert "TF_POSEIDON_PORT_RANGE=30200-30299" in of(list(doctor._network()), "chosen transport")[0].value


@pytest.mark.parametrize("answer, says, remedy", [
    (None, "reached; has the same versions", ""), ({"numpy": "1.0"}, "numpy 1.0, here", "install the same versions"),
    ("exit 7", "ended with status 7", "has to be there, too"), ("exit 0", "ended with status 0", "has to be there"),
    ("echo No route to host >&2; exit 255", "No route to host", "'ssh far true'"),
    ("printf '%s\\n' 'ssh: unknown far' '[mpiexec@here] ui_cmd_cb: failed.' >&2; exit 255", "ssh: unknown far",
     "'ssh far true'")])
def test_other_hosts(answer, says, remedy, tmp_path):
    """The launcher stands for one that starts a process elsewhere."""
    if not isinstance(answer, str):
        answer = f"echo '{json.dumps({**doctor.versions(), **(answer or {})})}'"
    finding, = doctor._hosts(["far"], script(tmp_path / "mpiexec", answer))
    assert finding.subject == "host far" and says in finding.value
    assert (finding.kind is Kind.FINE) == says.startswith("reached") == (finding.remedy == "")
    assert remedy in finding.remedy


def test_this_host_is_reached_like_any_other():
    assert [finding.value for finding in doctor._hosts(["localhost"], "")] == ["reached; has the same versions"]


def test_what_is_broken_is_found_beside_everything_else(monkeypatch):
    def breaks():
        yield Finding("a", "found before")
        raise RuntimeError("broken\nfor two lines")

    found = doctor._findings("b", breaks)
    assert [(each.subject, each.value, each.kind) for each in found] == [
        ("a", "found before", Kind.FINE), ("b", "RuntimeError: broken", Kind.PROBLEM)]
    monkeypatch.setattr(mpi_library, "TRANSPORT", mpi_library.TRANSPORT.with_name("none.so"))
    report = doctor.examine()
    missing, = of(report.findings, "MPI")
    assert "transport is missing" in missing.value and "pip install" in missing.remedy
    assert report.has_problems and of(report.findings, "/dev/shm")
    lines = str(report).splitlines()
    assert any(line.startswith("PROBLEM") and "transport is missing" in line for line in lines)
    assert any(line.strip().startswith("->") for line in lines)


def test_without_tensorflow_the_rest_is_found():
    program = ("import sys; sys.modules['tensorflow'] = None; from tf_poseidon.commands import doctor, cli; "
               "print(doctor.examine()); cli.main(['selftest'])")
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=60)
    assert "MPI             MPICH 5" in done.stdout and "mpiexec, of MPICH" in done.stdout, done.stdout
    assert done.returncode == 3 and "TensorFlow is not installed; run pip install" in done.stderr, done.stderr


def test_versions_import_nothing():
    program = ("import sys; from tf_poseidon.commands import doctor; doctor.versions(); "
               "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("state, seconds, kind, says", [
    ("idle", 500, Kind.FINE, "is between two turns"),
    ("waiting", 70, Kind.FINE, "waits for its turn for 70.0 s"),
    ("holding", 2.34, Kind.FINE, "has the turn for 2.3 s"), ("holding", 61, Kind.NOTE, "has the turn for 61.0 s")])
def test_jobs_that_take_turns(state, seconds, kind, says, monkeypatch):
    taker = {"job": 1, "pid": 12, "rank": 3, "program": "train.py", "state": state, "number": 5, "seconds": seconds}
    new = {**taker, "pid": 13, "state": "idle", "number": 0}
    table = {"name": "night", "accelerator": "GPU 1", "takers": [taker, new]}
    monkeypatch.setattr(accelerator_turns, "tables", lambda: iter([table]))
    finding, = doctor._turns()
    assert (finding.subject, finding.kind) == ("turns 'night'", kind)
    assert finding.value == (f"GPU 1: process 12 (train.py, rank 3) {says}, "
                             "process 13 (train.py, rank 3) has had no turn yet")
    assert ("if process 12 hangs" in finding.remedy) == (kind is Kind.NOTE)
