"""Runs a command in a real Slurm on emulated hosts: `sbatch` and `srun` are those of any cluster.

    sudo env "PATH=$PATH" python -m evaluation.clusters.emulated_slurm --hosts 2 -- sbatch --wait examples/slurm.sbatch

The hosts are those of tf_poseidon/emulation/emulated_cluster.py. Each runs a slurmd; the controller, and munge, which
proves who sends Slurm's messages, run on a host beside them. Needs Debian's packages slurmctld, slurmd, slurm-client
and munge (or those of another distribution), and root. Nothing outside the emulated hosts and a temporary folder is
used or changed. What the daemons say is printed if they do not start.
"""

import os
import pathlib
import secrets
import shutil
import socket
import subprocess
import tempfile
import time

from absl import app
from absl import flags

from evaluation import modules
from tf_poseidon.emulation import emulated_cluster

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")
_START_S = 30.0

# Nothing that needs cgroups or a database. Nodes have more processors than the machine: tasks share them.
_CONF = """
ClusterName=emulated
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def run(command, hosts=2, gbps=1.0, **options):
    """Runs a command where `sbatch` and `srun` reach the emulated hosts; returns its exit status.

    Args:
        command: The program and its arguments.
        hosts: Number of hosts; each takes up to 8 tasks.
        gbps: The rate of their links.
        **options: For subprocess.Popen, such as `stdout`.

    Raises:
        SystemExit: If a program is missing, or the emulated hosts cannot be made.
    """
    missing = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if missing:
        raise SystemExit(f"There is no {missing[0]}; install Slurm and munge (Debian: apt-get install slurmctld slurmd "
                         "slurm-client munge).")
    with (tempfile.TemporaryDirectory(prefix="slurm-") as folder,
          emulated_cluster.EmulatedCluster(hosts, gbps) as cluster):
        configure(pathlib.Path(folder), cluster)
        inside = [*modules.command("clusters.emulated_slurm"), f"--folder={folder}", f"--hosts={hosts}", "--", *command]
        return cluster.run(inside, launcher="command",
                           env=os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": _path()}, **options)


def configure(folder, cluster):
    """Writes Slurm's configuration, and munge's key."""
    folder.chmod(0o755)
    for name in ("state", *cluster.names):
        (folder / name).mkdir()
    nodes = "\n".join(f"NodeName={name} NodeHostname={name} NodeAddr={address} CPUs=8 State=UNKNOWN"
                      for name, address in zip(cluster.names, cluster.addresses))
    controller = f"{socket.gethostname()}({emulated_cluster.SWITCH_ADDRESS})"
    (folder / "slurm.conf").write_text(_CONF.format(controller=controller, folder=folder, nodes=nodes))
    # Version 1 is not looked for before something uses it; hosts of network namespaces have no cgroups.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)


def inside(folder, hosts, command):
    """Starts the daemons, and runs the command; called on the host beside the emulated ones."""
    munge = {name: folder / f"munge.{name.partition('-')[0]}"
             for name in ("socket", "key-file", "pid-file", "log-file", "seed-file")}
    daemons = [["munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in munge.items())],
               ["slurmctld", "-D"],
               *(["ssh", f"host{host}", f"slurmd -D -N host{host}"] for host in range(hosts))]
    log = open(folder / "daemons.log", "w")
    for daemon in daemons:
        subprocess.Popen(daemon, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        if daemon[0] == "munged":
            _wait(folder, lambda: (folder / "munge.socket").exists())
    _wait(folder, lambda: subprocess.run(["sinfo", "--noheader", "--states=idle", "--format=%D"], text=True,
                                         capture_output=True).stdout.strip() == str(hosts))
    return subprocess.run(command).returncode


def _wait(folder, is_ready):
    end = time.monotonic() + _START_S
    while not is_ready():
        if time.monotonic() > end:
            said = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(folder.glob("*.log")))
            raise SystemExit(f"Slurm is not ready after {_START_S:g} s.\n{said}")
        time.sleep(0.2)


def _path():
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin"  # of the daemons


def main(arguments):
    if len(arguments) < 2:
        raise SystemExit(f"No command was given, expected one after `--`, such as: {arguments[0]} -- srun hostname")
    if _FOLDER.value:
        return inside(pathlib.Path(_FOLDER.value), _HOSTS.value, arguments[1:])
    return run(arguments[1:], _HOSTS.value, _GBPS.value)


if __name__ == "__main__":
    _HOSTS = flags.DEFINE_integer("hosts", 2, "Number of hosts.", lower_bound=1)
    _GBPS = flags.DEFINE_float("gbps", 1.0, "Rate of their links, in Gbit/s.")
    _FOLDER = flags.DEFINE_string("folder", None, "For its own use: this process is on the emulated cluster.")
    app.run(main)
