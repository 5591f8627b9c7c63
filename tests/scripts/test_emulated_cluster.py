"""The emulated cluster shapes links, counts bytes, passes on the exit status, and cleans up."""

import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig

import host_emulation
import launch
import pytest

from tf_poseidon.commands.status import Status
from tf_poseidon.emulation import emulated_cluster
from tf_poseidon.emulation import sandbox
from tf_poseidon.errors import ConfigurationError

MEGABYTES = 2
# Ranks 0 and 1 are connected.
CONNECT = """
import os, socket, sys, time
own = socket.gethostbyname(socket.gethostname())
rank = int(os.environ["PMI_RANK"])
if rank == 0:
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE: all of them
    datagrams.bind((own, 5000))
    connection, _ = socket.create_server((own, 5000)).accept()
while rank == 1:
    try:
        connection = socket.create_connection(("host0", 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
"""
# Rank 1 sends to rank 0; each prints its rank, its own address, its environment variables, and its seconds.
SEND = CONNECT + f"""
begin = time.monotonic()
if rank == 0:
    while connection.recv(1 << 20):
        pass
elif rank == 1:
    connection.sendall(bytes({MEGABYTES} * 10**6))
# Lines of ranks would run into each other.
with open(sys.argv[1] + f"/{{rank}}", "w") as file:
    print(rank, own, os.environ["OF_CALLER"], os.environ["TF_POSEIDON_EMULATED_GBPS"], time.monotonic() - begin,
          file=file)
"""
DATAGRAMS = 10000
# Rank 1 sends datagrams to rank 0, which prints how many came.
COUNT = CONNECT + f"""
if rank == 1:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for number in range({DATAGRAMS}):
        sender.sendto(bytes(100), ("10.0.0.1", 5000))
        if number % 50 == 49:  # so that no queue overflows
            time.sleep(0.001)
else:
    while connection.recv(1):  # until all are sent
        pass
    datagrams.settimeout(0.5)
    came = 0
    try:
        while datagrams.recv(1000):
            came += 1
    except TimeoutError:
        print(came)
"""
# Rank 0 prints the seconds of a round trip.
ROUND_TRIP = CONNECT + """
begin = time.monotonic()
if rank == 0:
    connection.sendall(b"0")
    connection.recv(1)
    print(time.monotonic() - begin)
else:
    connection.sendall(connection.recv(1))
"""
# Each rank prints its rank, their number, and a sum over them of a megabyte.
JOBS = {"horovodrun": """
import os
import horovod.tensorflow as hvd
import tensorflow as tf
hvd.init()
total = hvd.allreduce(tf.fill([250000], hvd.rank() + 1.0), op=hvd.Sum)
os.write(1, f"{hvd.rank()} {hvd.size()} {set(total.numpy().tolist())}\\n".encode())
""", "mwms": """
import os
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
def step():
    context = tf.distribute.get_replica_context()
    return context.all_reduce("sum", tf.fill([250000], rank + 1.0))
total = tf.function(lambda: strategy.run(step))()
size = strategy.num_replicas_in_sync
os.write(1, f"{rank} {size} {set(total.numpy().tolist())}\\n".encode())
"""}
LOSS = "qdisc add dev v ingress", "filter add dev v ingress bpf da bytecode '1,6 0 0 0,'"


def start(*arguments, hosts=2):
    return subprocess.Popen(
        [sys.executable, "-m", "tf_poseidon", "emulate", "--hosts", str(hosts), *arguments],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "OF_CALLER": "passed on"},
        # A shell ignores it for what it runs in the background, such as these tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def left_by(pid):
    return [path for directory in ("/run/netns", "/etc/netns")
            for path in pathlib.Path(directory).glob(f"poseidon-{pid}-*")]


def running(pids):
    """Returns the pids that still run our program; a zombie's command line is empty."""
    lines = ((pid, pathlib.Path(f"/proc/{pid}/cmdline")) for pid in pids)
    return [pid for pid, line in lines if line.exists() and b"time.sleep" in line.read_bytes()]


def test_bytes_rate_and_status(able, tmp_path):
    out = tmp_path / "out.json"
    process = start("--gbps", "0.1", "--json", out, "--", sys.executable, "-c", SEND, tmp_path)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert [(tmp_path / rank).read_text().rpartition(" ")[0] for rank in "01"] == [
        "0 10.0.0.1 passed on 0.1", "1 10.0.0.2 passed on 0.1"]
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


@pytest.mark.parametrize("gbps, slowest, used", [
    ("0.1,1,1", 0.1, 0.1), ("1,0.1,1", 0.1, 0.1), ("1,1,0.01", 0.01, 1)])
def test_slower_of_two_links_is_the_rate(able, gbps, slowest, used, tmp_path):
    process = start("--gbps", gbps, "--", sys.executable, "-c", SEND, tmp_path, hosts=3)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    receiver, *others = [(tmp_path / rank).read_text() for rank in "012"]
    assert all(line.split()[-2] == str(slowest) for line in (receiver, *others))
    seconds, ideal = float(receiver.split()[-1]), MEGABYTES * 8e6 / (used * 1e9)
    # The third host's link, which nothing uses, would take twice as long as the second limit.
    assert seconds > 0.9 * ideal if used == slowest else seconds < 50 * ideal


@pytest.mark.parametrize("percent", [0, 5])
def test_links_lose_the_share_that_is_asked_for(able, percent):
    process = start("--loss", str(percent), "--", sys.executable, "-c", COUNT)
    stdout, stderr = process.communicate(timeout=60)
    if percent and host_emulation.problem(*LOSS):
        assert process.returncode == Status.REFUSED
        assert re.search(r"use a kernel that has ingress and bpf, .* or omit --loss", stderr)
    else:
        assert process.returncode == 0, stderr
        lost = 1 - (1 - percent / 100)**2  # on the sender's link or the receiver's
        deviation = (DATAGRAMS * lost * (1 - lost))**0.5  # of a binomial distribution
        assert abs(int(stdout) - DATAGRAMS * (1 - lost)) <= 6 * deviation
    assert not left_by(process.pid)


def test_links_have_the_delay_that_was_asked_for(able):
    process = start("--delay_us", "20000", "--", sys.executable, "-c", ROUND_TRIP)
    stdout, stderr = process.communicate(timeout=20)
    if not os.path.exists("/dev/net/tun"):
        assert process.returncode == Status.REFUSED
        assert re.search(r"use a kernel that has TAP devices .* or omit --delay_us", stderr)
    else:
        assert process.returncode == 0, stderr
        assert 4 * 20e-3 < float(stdout) < 4 * 40e-3
    assert not left_by(process.pid)


@pytest.mark.parametrize("launcher, hosts, ranks_per_host", [("horovodrun", 2, 1), ("mwms", 2, 1)])
def test_jobs_of_other_libraries(able, tmp_path, launcher, hosts, ranks_per_host):
    if launcher == "horovodrun" and not importlib.util.find_spec("horovod") and "CI" not in os.environ:
        pytest.skip("Horovod is not installed (scripts/install_horovod.sh)")
    out = tmp_path / "out.json"
    process = start("--launcher", launcher, "--ranks_per_host", str(ranks_per_host), "--json", out, "--",
                    sys.executable, "-c", JOBS[launcher], hosts=hosts)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    size = hosts * ranks_per_host
    # horovodrun prefixes each line with its rank.
    assert sorted(re.findall(r"\d+ \d+ \{.*\}", stdout)) == [
        f"{rank} {size} {{{size * (size + 1) / 2}}}" for rank in range(size)]
    for host in json.loads(out.read_text())["hosts"]:
        # Each host must be told what the other has.
        assert min(host["sent"], host["received"]) > 1e6
    assert not left_by(process.pid)


def test_the_status_of_a_failed_rank_is_that_of_the_cluster(able):
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


# Waits until as many ranks as both commands have run at the same time, and has a status of its own.
TOGETHER = """
import os, pathlib, sys, time
folder, number, status = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
name = os.environ["TF_POSEIDON_ACCELERATOR"]
(folder / f"{status} {os.environ['PMI_RANK']} {name.partition('-host')[2]}").touch()
pathlib.Path("/dev/shm", f"test-{name}").touch()
while len(list(folder.iterdir())) < number:
    time.sleep(0.01)
sys.exit(status)
"""


def test_commands_that_run_together_have_the_same_accelerators(able, tmp_path):
    with emulated_cluster.EmulatedCluster(2, 1) as cluster:
        statuses = cluster.run_together(
            [[sys.executable, "-c", TOGETHER, tmp_path, "8", str(status)] for status in (0, 3)], ranks_per_host=2)
        of_accelerators = list(pathlib.Path("/dev/shm").glob(f"test-{cluster.namespaces[0]}*"))
        alone = cluster.run([sys.executable, "-c", TOGETHER, tmp_path, "10", "5"])
    assert (statuses, alone) == ([0, 3], 5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"{status} {rank} {rank // 2}-{rank % 2}" for status in (0, 3) for rank in range(4)] + [
        "5 0 0", "5 1 1"]
    assert len(of_accelerators) == 2 and not any(path.exists() for path in of_accelerators)


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


@pytest.mark.parametrize("gbps, text", [
    (["1", "0.1"], r"--gbps=1,0.1 has 2 rates, expected 1 or 3, .*; give one rate for all hosts"),
    ([1, 0.1, 1, 1], r"--gbps=1,0.1,1,1 has 4 rates, expected 1 or 3"),
    (["1", "fast", "1"], r"--gbps=1,fast,1 is not a list of rates, expected numbers from 0.01 to 100"),
    (["nan"], r"--gbps=nan is not a list of rates"),
    (1000, r"--gbps=1000 is not a list of rates, .*; give one for all hosts or one for each, with"),
    ([], r"--gbps= is not a list of rates")])
def test_rates_that_no_link_has_are_refused(gbps, text):
    with pytest.raises(ConfigurationError, match=text):
        emulated_cluster.EmulatedCluster(3, gbps)


@pytest.mark.parametrize("hosts, loss, text", [
    (251, 0, r"--hosts=251 is too many, expected at most 250; give fewer"),
    (2, 11, r"--loss=11 is no share of packets, expected 0 to 10 %; give less"),
    (2, float("nan"), r"--loss=nan is no share")])
def test_hosts_and_losses_that_cannot_be_are_refused(hosts, loss, text):
    with pytest.raises(ConfigurationError, match=text):
        emulated_cluster.EmulatedCluster(hosts, 1, loss_percent=loss)


def test_launchers_that_are_missing_are_refused(monkeypatch, tmp_path):
    cluster = emulated_cluster.EmulatedCluster(2, gbps=1)
    with pytest.raises(ConfigurationError, match=r"'ssh', expected mpiexec, horovodrun, mwms or command"):
        cluster.run(["true"], launcher="ssh")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"There is no .*/horovodrun, expected .*install_horovod"):
        cluster.run(["true"], launcher="horovodrun")


def test_clusters_that_cannot_be_emulated_are_refused(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    monkeypatch.setattr(sandbox, "may_make_hosts", lambda: True)
    with pytest.raises(ConfigurationError, match=r"program ip is in none of .*; install iproute2"):
        emulated_cluster.EmulatedCluster(2, gbps=1).__enter__()
    monkeypatch.setattr(sandbox, "may_make_hosts", lambda: False)
    with pytest.raises(ConfigurationError, match=r"without the rights of root cannot make hosts; run it with sudo"):
        emulated_cluster.EmulatedCluster(2, gbps=1).__enter__()


def said(output):
    """Returns the output of each rank of train_on_nodes.py, by rank."""
    return sorted((json.loads(line) for line in output.splitlines() if line.startswith("{")),
                  key=lambda rank: rank["rank"])


def train_on_hosts(cluster, file, *arguments):
    """Runs train_on_nodes.py with two ranks per host; returns their output, and the bytes that the last host sends."""
    before = cluster.bytes()
    with open(file, "w+") as out:
        status = cluster.run([sys.executable, pathlib.Path(__file__).with_name("train_on_nodes.py"), *arguments], 2,
                             stdout=out, stderr=subprocess.STDOUT)
    assert status == 0, file.read_text()
    ranks = said(file.read_text())
    assert [r["rank"] for r in ranks] == [0, 1, 2, 3]
    assert {s["scheme"] for s in ranks[0]["sites"].values()} == {"ps", "sfb"}
    return ranks, cluster.bytes()[-1][0] - before[-1][0]


def test_ranks_of_a_host_combine(able, tmp_path):
    """Each gradient crosses a host's link once, as planned; twice if ranks do not combine."""
    alone, = said(launch.run_ok(["train_on_nodes.py"], 0, timeout_s=60).output)
    with emulated_cluster.EmulatedCluster(2, 1) as cluster:
        together, bytes_together = train_on_hosts(cluster, tmp_path / "together")
        apart, bytes_apart = train_on_hosts(cluster, tmp_path / "apart", "1")
    assert {r["weights"] for r in together + apart} == {alone["weights"]}
    assert {r["ranks_per_node"] for r in together} == {2}
    assert {r["ranks_per_node"] for r in apart} == {1}
    for name, site in together[0]["sites"].items():
        for host in (together[:2], together[2:]):  # half of the planned bytes is sent, the rest received
            counted = sum(r["sites"][name]["network_bytes"] for r in host)
            assert counted == site["planned_bytes"] / 2
    planned = sum(site["planned_bytes"] for site in together[0]["sites"].values()) / 2
    measured = 4 * (512 << 10)  # by which hosts find out how fast their links are (mpi_transport.cc)
    # The rest: headers, and the messages of ranks at the start.
    assert bytes_together - measured == pytest.approx(planned, rel=0.08)
    assert bytes_apart - measured > 2 * (bytes_together - measured)
