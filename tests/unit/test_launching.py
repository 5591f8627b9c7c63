"""Jobs are started again without hosts that are gone: with a stand-in for mpiexec, and with mpiexec itself."""

import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import time

import pytest

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job.host import launching

COMMAND = os.path.join(sysconfig.get_path("scripts"), "tf-poseidon")
# Notes its arguments; the k-th job ends with the k-th status, which may be that of a signal. A job that has to start a
# process on a host for "true", as launching does to reach it, fails on host "gone".
STAND_IN = """#!/bin/sh
case "$*" in
  *"-hosts gone "*-S*) exit 255 ;;
  *-S*) exit 0 ;;
esac
printf "%s\\n" "$*" >> {calls}
set -- {ends}
shift $(($(wc -l < {calls}) - 1))
case $1 in
  kill*) kill -${{1#kill}} $$ ;;
  *) exit $1 ;;
esac
"""


@pytest.fixture
def mpiexec(tmp_path):
    def make(*ends):
        path = tmp_path / "mpiexec"
        path.write_text(STAND_IN.format(calls=tmp_path / "calls", ends=" ".join(map(str, ends))))
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize("ends, hosts, restarts, status, calls, told", [
    ([0], (), 3, 0, ["-n 4 train"], []),
    ([7], (), 0, 7, ["-n 4 train"], ["status 7, and --restarts=0 does not let it start again"]),
    ([1, "kill9", 0], (), 2, 0, ["-n 4 train"] * 3, ["status 1; it starts again on 4 ranks (1 more restart)",
                                                     "status 137 (SIGKILL); it starts again on 4 ranks (0 more"]),
    ([1, 2], (), 1, 2, ["-n 4 train"] * 2, ["status 1; it starts again", "status 2, and --restarts=1 does not"]),
    ([1, 0], ("a", "gone", "b"), 1, 0, ["-n 4 -hosts a:2,gone:1,b:1 train", "-n 3 -hosts a:2,b:1 train"],
     ["status 1, and gone cannot be reached; it starts again on 3 ranks of a, b (0 more"]),
    ([1], ("gone",), 5, 1, ["-n 4 -hosts gone:4 train"], ["gone cannot be reached; there is no host left"])])
def test_job_starts_again(mpiexec, tmp_path, monkeypatch, ends, hosts, restarts, status, calls, told):
    monkeypatch.setattr(time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))
    lines = []
    assert launching.run(["train"], 4, hosts, restarts, mpiexec(*ends), lines.append) == status
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert len(lines) == len(told) and all(part in line for part, line in zip(told, lines))


@pytest.mark.parametrize("ranks, hosts, launcher, message", [
    (1, ("a", "b"), "mpiexec", "1 ranks cannot run on 2 hosts, .* give 2 ranks or more, or fewer hosts"),
    (2, ("a", "a"), "mpiexec", "The hosts a, a name one twice"),
    (2, (), "/no/mpiexec", "There is no launcher '/no/mpiexec'; pip install 'mpich>=5', or give the path")])
def test_launchers_and_hosts_that_cannot_start_a_job_are_refused(mpiexec, ranks, hosts, launcher, message):
    given = mpiexec(0) if launcher == "mpiexec" else launcher
    with pytest.raises(ConfigurationError, match=message):
        launching.run(["train"], ranks, hosts, 0, given)


def test_job_on_a_host_that_is_gone_ends(mpiexec, tmp_path, monkeypatch):
    path = mpiexec()
    script = pathlib.Path(path).read_text().replace("set --", "exec sleep 60\nset --")
    pathlib.Path(path).write_text(script)
    monkeypatch.setattr(launching, "_WATCH_S", 0.05)
    begin = time.monotonic()
    assert launching.run(["train"], 2, ["here", "gone"], 0, path, lambda text: None) == 128 + signal.SIGKILL
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_job_ends_with_the_command(tmp_path, number, status):
    """And does not start again; nothing of it is left, also when the command cannot end it."""
    program = f"import os, time; open('{tmp_path}/' + str(os.getpid()), 'w'); time.sleep(60)"
    process = subprocess.Popen(
        [COMMAND, "run", "-n", "2", "--restarts", "5", "--", sys.executable, "-S", "-c", program])
    begin = time.monotonic()
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() - begin < 60 and process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == status
    begin = time.monotonic()
    while any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir()):
        assert time.monotonic() - begin < 10
        time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("arguments, status, message", [
    (["-n", "2"], 2, "there is no program; give run a command"), (["-n", "0", "--", "true"], 2, "expected at least 1"),
    (["--", "sh", "-c", "exit 9"], 9, "the job ended with status 9 (SIGKILL, which also ends the other "),
    (["--", "sh", "-c", "exit 5"], 5, "the job ended with status 5, and"), (["--", "true"], 0, "")])
def test_run_command_ends_with_the_status_of_its_program(arguments, status, message):
    ended = subprocess.run([COMMAND, "run", *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == status and message in ended.stderr, ended.stderr
