"""The emulated cluster shapes links, counts bytes, passes on the status, leaves nothing behind."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[1] / "scripts"
MEGABYTES = 2
# Rank 1 sends to rank 0; each prints its rank and its own address.
SEND = f"""
import os, socket, time
own = socket.gethostbyname(socket.gethostname())
rank = os.environ["PMI_RANK"]
if rank == "0":
    connection, _ = socket.create_server((own, 5000)).accept()
    while connection.recv(1 << 20):
        pass
else:
    while True:
        try:
            connection = socket.create_connection(("host0", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    connection.sendall(bytes({MEGABYTES} * 10**6))
print(rank, own, os.environ["OF_CALLER"])
"""


def problem():
    """Returns why this machine cannot make hosts, or None."""
    if os.geteuid():
        return f"the user id is {os.geteuid()}, not 0"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip or tc is not installed"
    name = f"probe-{os.getpid()}"
    try:
        for command in (["ip", "netns", "add", name],
                        ["ip", "-n", name, "link", "add", "name", "b", "type", "bridge"],
                        ["ip", "-n", name, "link", "add", "name", "v", "type", "veth"],
                        ["tc", "-n", name, "qdisc", "add", "dev", "v", "root", "tbf", "rate",
                         "1gbit", "burst", "64kb", "latency", "20ms"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"{' '.join(command)}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
    return None


@pytest.fixture(scope="module")
def able():
    """Skips where hosts cannot be made, but not in CI, where that would hide a failure."""
    reason = problem()
    if reason and "CI" in os.environ:
        pytest.fail(f"No hosts can be made: {reason}.")
    if reason:
        pytest.skip(f"no hosts can be made: {reason}")


def start(*arguments, hosts=2):
    return subprocess.Popen(
        [sys.executable, SCRIPTS / "emulated_cluster.py", "--hosts", str(hosts), *arguments],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "OF_CALLER": "passed on"})


def left_by(pid):
    return [path for directory in ("/run/netns", "/etc/netns")
            for path in pathlib.Path(directory).glob(f"poseidon-{pid}-*")]


def running(pids):
    """Returns those of the pids that still run our program; a zombie's command line is empty."""
    lines = ((pid, pathlib.Path(f"/proc/{pid}/cmdline")) for pid in pids)
    return [pid for pid, line in lines if line.exists() and b"time.sleep" in line.read_bytes()]


def test_bytes_rate_and_status(able, tmp_path):
    out = tmp_path / "out.json"
    process = start("--gbps", "0.1", "--json", out, "--", sys.executable, "-c", SEND)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == ["0 10.0.0.1 passed on", "1 10.0.0.2 passed on"]
    assert "received MB" in stderr
    result = json.loads(out.read_text())
    assert result["status"] == 0
    sent, received = ([host[key] for host in result["hosts"]] for key in ("sent", "received"))
    for count in (sent[1], received[0]):
        assert MEGABYTES * 1e6 < count < 1.1 * MEGABYTES * 1e6
    for count in (sent[0], received[1]):  # acknowledgements, and mpiexec's own
        assert 0 < count < 0.1 * MEGABYTES * 1e6
    assert result["seconds"] > 0.9 * MEGABYTES * 8e6 / 0.1e9
    assert not left_by(process.pid)


def test_failure_passes_on(able):
    process = start("--", sys.executable, "-c", "import sys; sys.exit(7)")
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 7, stderr
    assert not left_by(process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_leaves_nothing(able, number):
    process = start("--", sys.executable, "-c",
                    "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)")
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    assert left_by(process.pid) and running(ranks) == ranks
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 128 + number, stderr
    assert not left_by(process.pid)
    assert not running(ranks)


def test_next_one_removes_what_a_killed_one_left(able):
    killed = start("--", sys.executable, "-c",
                   "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)")
    ranks = [int(killed.stdout.readline()) for _ in range(2)]
    killed.kill()
    killed.wait()
    assert left_by(killed.pid) and running(ranks) == ranks
    process = start("--", "true", hosts=1)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert not left_by(killed.pid)
    assert not running(ranks)
    killed.communicate()


def test_refusals(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import emulated_cluster
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SystemExit, match=r"program ip is in none of .*: install iproute2"):
        emulated_cluster.EmulatedCluster(2, gbps=1).__enter__()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"user id is 1000, .*root \(0\) only: run this with sudo"):
        emulated_cluster.EmulatedCluster(2, gbps=1).__enter__()
