"""Runs an MPIJob of Kubernetes on emulated hosts: what its pods run, found and reached as by the MPI operator.

    sudo env "PATH=$PATH" python -m evaluation.clusters.emulated_pods examples/kubernetes/mpijob.yaml

The hosts are those of tf_poseidon/emulation/emulated_cluster.py, one for each replica of the job's workers. Each starts
what the job says, an sshd, configured as by the lines of the Dockerfile beside the job that change /etc/ssh. Beside
them, the launcher's command finds the hosts in HYDRA_HOST_FILE, and reaches them by a real ssh. The image's
/opt/examples are those of this checkout, its Python is this one. Needs Debian's packages openssh-server and
openssh-client (or those of another distribution), and root. Nothing is changed outside of the hosts' processes, which
alone see what is mounted, but that sshd's directory /run/sshd is made. Kubernetes itself is not emulated.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
import yaml

from evaluation import modules
from tf_poseidon.emulation import emulated_cluster

_START_S = 20.0
_LAUNCHER = "launcher"
# In a pod, given its name: the files of the image, and then its command. How MPICH starts processes on emulated hosts
# otherwise is switched off.
_POD = """set -e
hostname "$1"
shift
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh /etc/ssh
mount -t tmpfs none /opt
ln -s {root}/examples /opt/examples
mkdir -p /run/sshd
unset HYDRA_LAUNCHER HYDRA_LAUNCHER_EXEC HYDRA_IFACE
PATH={path}
cd /opt
exec "$@"
"""


def run(path, **options):
    """Runs an MPIJob, and returns the exit status of its launcher.

    Args:
        path: The file of the MPIJob; a Dockerfile is beside it.
        **options: For subprocess.Popen, such as `stdout`.

    Raises:
        SystemExit: If sshd is missing, or the emulated hosts cannot be made.
    """
    if hidden := [path for path in (sys.prefix, str(modules.ROOT)) if path.startswith("/opt/")]:
        raise SystemExit(f"{hidden[0]} is in /opt, where the image has its own files; use a checkout and a Python "
                         "elsewhere.")
    if not (shutil.which("sshd", path="/usr/sbin") and shutil.which("ssh-keygen")):
        raise SystemExit("There is no /usr/sbin/sshd or no ssh-keygen; install them (Debian: apt-get install "
                         "openssh-server openssh-client).")
    job = yaml.safe_load(pathlib.Path(path).read_text())["spec"]
    workers = job["mpiReplicaSpecs"]["Worker"]["replicas"]
    with (tempfile.TemporaryDirectory(prefix="pods-") as folder,
          emulated_cluster.EmulatedCluster(workers, 1.0) as cluster):
        write_image(pathlib.Path(folder), pathlib.Path(path).with_name("Dockerfile"))
        slots = [f"{name}:{job['slotsPerWorker']}\n" for name in cluster.names]
        pathlib.Path(folder, "slots").write_text("".join(slots))
        hosts = zip(["127.0.0.1", emulated_cluster.SWITCH_ADDRESS, *cluster.addresses],
                    ["localhost", _LAUNCHER, *cluster.names])
        pathlib.Path(folder, "hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))
        inside = [*modules.command("clusters.emulated_pods"), f"--folder={folder}", path]
        return cluster.run(inside, launcher="command", **options)


def write_image(folder, dockerfile):
    """Writes /etc/ssh of the image, with the operator's keys, and what a pod does first."""
    ssh = folder / "ssh"
    shutil.copytree("/etc/ssh", ssh)
    steps = dockerfile.read_text().replace("\\\n", " ").split("&&")
    changes = [step.splitlines()[0].replace("/etc/ssh", str(ssh)) for step in steps if "/etc/ssh" in step]
    if not changes:
        raise SystemExit(f"{dockerfile} does not change /etc/ssh, expected how sshd and ssh are configured.")
    subprocess.run(["sh", "-e", "-c", "\n".join(changes)], check=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", ssh / "key"], check=True)
    (ssh / "key").rename(ssh / "id")
    (ssh / "key.pub").rename(ssh / "authorized_keys")
    # The operator mounts its keys into ~/.ssh. Of several values, sshd and ssh take the first.
    for name, first in (("sshd_config", "AuthorizedKeysFile /etc/ssh/authorized_keys\nPidFile none\n"),
                        ("ssh_config", "IdentityFile /etc/ssh/id\n")):
        (ssh / name).write_text(first + (ssh / name).read_text())
    path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
    (folder / "pod").write_text(_POD.format(folder=folder, root=modules.ROOT, path=path))


def inside(folder, path):
    """Starts the workers, and runs the launcher; called on the host beside the emulated ones."""
    job = yaml.safe_load(pathlib.Path(path).read_text())["spec"]["mpiReplicaSpecs"]
    launcher, worker = (job[kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker"))
    names = [line.partition(":")[0] for line in (folder / "slots").read_text().split()]
    pod = f"unshare --mount --uts sh {folder}/pod"
    log = open(folder / "log", "w+")
    for name in names:
        subprocess.Popen(["ssh", name, f"{pod} {name} {' '.join(worker['command'])}"], stdin=subprocess.DEVNULL,
                         stdout=log, stderr=log)
    end = time.monotonic() + _START_S
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    while not all(_listens(name, port) for name in names):
        if time.monotonic() > end:
            log.seek(0)
            raise SystemExit(f"The workers do not listen at port {port} after {_START_S:g} s.\n{log.read()}")
        time.sleep(0.2)
    return subprocess.run([*pod.split(), _LAUNCHER, *launcher["command"]],
                          env=os.environ | {"HYDRA_HOST_FILE": str(folder / "slots")}).returncode


def _listens(name, port):
    listening = subprocess.run(["ssh", name, "ss -ltnH"], capture_output=True, text=True).stdout
    return re.search(rf":{port}\s", listening) is not None


def main(arguments):
    if len(arguments) != 2:
        raise SystemExit(f"Expected the file of an MPIJob, such as: {arguments[0]} examples/kubernetes/mpijob.yaml")
    if _FOLDER.value:
        return inside(pathlib.Path(_FOLDER.value), arguments[1])
    return run(arguments[1])


if __name__ == "__main__":
    _FOLDER = flags.DEFINE_string("folder", None, "For its own use: this process is on the emulated cluster.")
    app.run(main)
