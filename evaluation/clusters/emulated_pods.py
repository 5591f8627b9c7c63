"""Runs an MPIJob of Kubernetes on emulated hosts: what its pods run, found and reached as by the MPI operator.

    sudo env "PATH=$PATH" python -m evaluation.clusters.emulated_pods examples/kubernetes/mpijob.yaml

The hosts are those of tf_poseidon/emulation/emulated_cluster.py, one for each replica of the job's workers. Each starts
what the job says, an sshd, configured as by the lines of the Dockerfile beside the job that change /etc/ssh. Beside
them, the launcher's command finds the hosts in HYDRA_HOST_FILE, and reaches them by a real ssh. The image's
/opt/examples are those of this checkout, its Python is this one. All run as the image's user, without capabilities, and
see a root file system that is read-only but for the job's emptyDirs, where its securityContext says so; seccomp is not
emulated. Needs Debian's packages openssh-server and openssh-client (or those of another distribution), and root.
Nothing is changed outside of the hosts' processes, which alone see what is mounted. Kubernetes itself is not emulated.
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
# In a pod, given its name: the files of the image, what Kubernetes and the operator mount, and then its command. How
# MPICH starts processes on emulated hosts otherwise is switched off.
_POD = """set -e
hostname "$1"
shift
for file in hosts passwd ssh; do
  mount --bind {folder}/$file /etc/$file
done
mount -t tmpfs -o mode=755 none /home
mkdir -p {home} {keys}
cp {folder}/keys/* {keys}
mount -t tmpfs -o mode=755 none /opt
mkdir /opt/kept
ln -s {root}/examples /opt/examples
{mounts}
unset HYDRA_LAUNCHER HYDRA_LAUNCHER_EXEC HYDRA_IFACE TMPDIR
export HOME={home} {environment} PATH={path}
cd /opt
exec setpriv {rights} "$@"
"""
# All files but the kernel's; of a folder that another one covers, nothing is seen.
_READ_ONLY = """for target in $(findmnt --raw --noheadings --output TARGET --types ext4,xfs,btrfs,overlay,tmpfs); do
  case "$target" in
    {writable}|/dev|/dev/*|/proc/*|/sys/*) ;;
    *) ! mountpoint --quiet "$target" || mount -o remount,bind,ro "$target" ;;
  esac
done"""


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
    with (tempfile.TemporaryDirectory(prefix="pods-") as name,
          emulated_cluster.EmulatedCluster(workers, 1.0) as cluster):
        folder = pathlib.Path(name)
        folder.chmod(0o755)
        image = write_image(folder, pathlib.Path(path).with_name("Dockerfile"))
        for kind, replica in job["mpiReplicaSpecs"].items():
            (folder / kind).write_text(pod(folder, image, job.get("sshAuthMountPath", "/root/.ssh"),
                                           replica["template"]["spec"]))
        slots = [f"{name}:{job['slotsPerWorker']}\n" for name in cluster.names]
        (folder / "slots").write_text("".join(slots))
        hosts = zip(["127.0.0.1", emulated_cluster.SWITCH_ADDRESS, *cluster.addresses],
                    ["localhost", _LAUNCHER, *cluster.names])
        (folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))
        inside = [*modules.command("clusters.emulated_pods"), f"--folder={folder}", path]
        return cluster.run(inside, launcher="command", **options)


def write_image(folder, dockerfile):
    """Writes /etc/ssh and /etc/passwd of the image, and keys as the operator makes them; returns what else it says."""
    ssh, keys = folder / "ssh", folder / "keys"
    shutil.copytree("/etc/ssh", ssh)
    text = dockerfile.read_text().replace("\\\n", " ")
    steps = [step.strip().splitlines()[0] for step in text.replace("RUN ", "&& ").split("&&")]
    changes = [step.replace(" /etc/ssh", f" {ssh}") for step in steps if " /etc/ssh" in step]
    users = [match for step in steps if (match := re.match(r"useradd .*--uid (\d+) .*?(\S+)$", step))]
    if not (changes and len(users) == 1):
        raise SystemExit(f"{dockerfile} does not change /etc/ssh, or does not add one user by its number, expected how "
                         "sshd and ssh are configured, and for whom.")
    subprocess.run(["sh", "-e", "-c", "\n".join(changes)], check=True)
    number, name = users[0].groups()
    others = [line for line in pathlib.Path("/etc/passwd").read_text().splitlines() if line.split(":")[2] != number]
    home = f"/home/{name}"
    (folder / "passwd").write_text("\n".join([*others, f"{name}:x:{number}:{number}::{home}:/bin/sh", ""]))
    keys.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", keys / "id_rsa"], check=True)
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    for key in keys.iterdir():
        key.chmod(0o644)  # root's, as in a volume of a Secret
    return {"home": home, "environment": " ".join(re.findall(r"^ENV (.*)$", text, re.MULTILINE))}


def pod(folder, image, keys, spec):
    """Returns what a pod does first, as a shell script."""
    container, user = spec["containers"][0], spec.get("securityContext", {})
    rights = container.get("securityContext", {})
    flags = [f"--reuid={user.get('runAsUser', 0)}", f"--regid={user.get('runAsGroup', 0)}", "--clear-groups"]
    if not rights.get("allowPrivilegeEscalation", True):
        flags.append("--no-new-privs")
    if rights.get("capabilities", {}).get("drop") == ["ALL"]:
        flags.append("--bounding-set=-all")
    volumes = {volume["name"]: volume["emptyDir"] for volume in spec.get("volumes", ())}
    writable = {mount["mountPath"]: volumes[mount["name"]]["sizeLimit"] for mount in container.get("volumeMounts", ())}
    # This checkout and Python stay where they are, although the folders that they are in may be of another user, or be
    # one of those that are mounted.
    kept = {str(modules.ROOT), sys.prefix, sys.base_prefix, str(folder)}
    kept = {path for path in kept if not any(path.startswith(f"{other}/") for other in kept)}
    covered = dict.fromkeys(filter(None, map(_closed, kept)), "") | {
        path: f",size={size.removesuffix('i')}" for path, size in writable.items()}
    mounts = []
    for number, path in enumerate(sorted(kept)):
        mounts += [f"mkdir /opt/kept/{number}", f"mount --bind {path} /opt/kept/{number}"]
    mounts += [f"mkdir -p {path}" for path in covered]
    mounts += [f"mount -t tmpfs -o mode={1777 if path in writable else 755}{size} none {path}"
               for path, size in covered.items()]
    for number, path in enumerate(sorted(kept)):
        mounts += [f"mkdir -p {path}", f"mount --move /opt/kept/{number} {path}"]
    if rights.get("readOnlyRootFilesystem"):
        mounts.append(_READ_ONLY.format(writable="|".join(writable) or "/dev"))
    path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
    return _POD.format(folder=folder, root=modules.ROOT, path=path, keys=keys, mounts="\n".join(mounts),
                       rights=" ".join(flags), **image)


def _closed(path):
    """Returns the first folder above a path that only its owner may enter; None if there is none."""
    parents = pathlib.Path(path).parents
    return next((str(parent) for parent in reversed(parents) if not parent.stat().st_mode & 0o001), None)


def inside(folder, path):
    """Starts the workers, and runs the launcher; called on the host beside the emulated ones."""
    job = yaml.safe_load(pathlib.Path(path).read_text())["spec"]["mpiReplicaSpecs"]
    launcher, worker = (job[kind]["template"]["spec"]["containers"][0] for kind in ("Launcher", "Worker"))
    names = [line.partition(":")[0] for line in (folder / "slots").read_text().split()]
    pods = f"unshare --mount --uts sh {folder}"
    log = open(folder / "log", "w+")
    for name in names:
        subprocess.Popen(["ssh", name, f"{pods}/Worker {name} {' '.join(worker['command'])}"], stdin=subprocess.DEVNULL,
                         stdout=log, stderr=log)
    end = time.monotonic() + _START_S
    port = worker["readinessProbe"]["tcpSocket"]["port"]
    while not all(_listens(name, port) for name in names):
        if time.monotonic() > end:
            log.seek(0)
            raise SystemExit(f"The workers do not listen at port {port} after {_START_S:g} s.\n{log.read()}")
        time.sleep(0.2)
    operators = {"HYDRA_HOST_FILE": str(folder / "slots"), "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10"}
    return subprocess.run([*f"{pods}/Launcher".split(), _LAUNCHER, *launcher["command"]],
                          env=os.environ | operators).returncode


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
