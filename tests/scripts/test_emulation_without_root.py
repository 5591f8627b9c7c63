"""`tf-poseidon emulate` as a user without rights: hosts, links, ends; nothing is left."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

NOBODY = 65534
AS_USER = dict(user=NOBODY, group=NOBODY, extra_groups=[]) if os.geteuid() == 0 else {}
ROOT = pathlib.Path(__file__).resolve().parents[2]
# Each rank says which it is, where, and on which accelerator; and that nobody else's files are in /dev/shm.
PLACES = """
import os, pathlib, socket
pathlib.Path("/dev/shm", os.environ["TF_POSEIDON_ACCELERATOR"]).touch()
assert all("poseidon" in name for name in os.listdir("/dev/shm")), os.listdir("/dev/shm")
own = socket.gethostbyname(socket.gethostname())
accelerator = os.environ["TF_POSEIDON_ACCELERATOR"].partition("-host")[2]
os.write(1, f"{os.environ['PMI_RANK']} {own} {accelerator} {os.getuid()}\\n".encode())
"""
# Rank 1 sends 2 MB to rank 0.
SEND = """
import os, socket, time
if os.environ["PMI_RANK"] == "0":
    connection, _ = socket.create_server(("10.0.0.1", 5000)).accept()
    while connection.recv(1 << 20):
        pass
while os.environ["PMI_RANK"] == "1":
    try:
        socket.create_connection(("host0", 5000)).sendall(bytes(2_000_000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
"""
WAIT = "import os, time; os.write(1, b'up\\n'); time.sleep(611)"


@pytest.fixture(scope="module")
def python():
    """A Python that the user can run, with the packages of this one: that may be in root's home."""
    folder = pathlib.Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    python = folder / "bin" / "python"
    system = pathlib.Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    for base in ([sys.executable] if not AS_USER else [sys.executable, system]):
        if os.path.exists(base) and can_run(base):
            break
    else:
        shutil.rmtree(folder)
        pytest.skip("there is no Python that a user other than root can run")
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True)
    packages, = folder.glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text("\n".join([str(ROOT), *filter(os.path.isdir, sys.path)]))
    for launcher in pathlib.Path(sys.executable).parent.glob("*"):
        if launcher.name.startswith(("mpiexec", "hydra")):
            (folder / "bin" / launcher.name).symlink_to(launcher)
    found = run_as_user([python, "-c", "from tf_poseidon.emulation import ability; print(ability.problem() or '')"])
    if found.returncode or found.stdout.strip():
        shutil.rmtree(folder)
        pytest.skip(f"no hosts can be made without root: {found.stdout}{found.stderr}")
    yield python
    shutil.rmtree(folder)


def can_run(python):
    try:
        return run_as_user([python, "-c", ""]).returncode == 0
    except PermissionError:
        return False


def run_as_user(command):
    return subprocess.run(command, text=True, capture_output=True, cwd="/", **AS_USER)


def start(python, *arguments):
    return subprocess.Popen([python, "-m", "tf_poseidon", "emulate", *arguments], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, cwd="/", start_new_session=True,
                            env={"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": "/"}, **AS_USER)


def test_each_rank_has_its_host(python):
    process = start(python, "--hosts", "2", "--ranks_per_host", "2", "--", "python", "-c", PLACES)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    assert sorted(stdout.splitlines()) == [
        f"{rank} 10.0.0.{rank // 2 + 1} {rank // 2}-{rank % 2} 0" for rank in range(4)]
    assert not list(pathlib.Path("/dev/shm").glob("poseidon-*-host*"))


def test_links_have_their_rate_and_bytes_are_counted(python):
    process = start(python, "--hosts", "2", "--gbps", "0.1,0.02", "--", "python", "-c", SEND)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0, stderr
    seconds = float(re.search(r"ended after (\S+) s, with status 0", stderr)[1])
    assert seconds > 0.9 * 2e6 * 8 / 0.02e9
    sent, busy = re.search(r"host1 +0.02 +(\S+) +\S+ +(\d+)%", stderr).groups()
    assert 2.0 <= float(sent) < 2.2 and int(busy) > 40
    assert "2 hosts shared" in stderr


def test_status_is_that_of_the_program(python):
    process = start(python, "--hosts", "1", "--", "python", "-c", "import sys; sys.exit(7)")
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 7, stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_ends_all(python, number):
    process = start(python, "--hosts", "2", "--", "python", "-c", WAIT)
    assert [process.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    process.send_signal(number)
    process.communicate(timeout=20)  # until nobody has its pipes any more
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    until = time.monotonic() + 5
    while running(WAIT) and time.monotonic() < until:
        time.sleep(0.05)
    assert not running(WAIT)


def running(program):
    found = []
    for line in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if program.encode() in line.read_bytes():
                found.append(line)
        except OSError:  # it has ended
            pass
    return found
