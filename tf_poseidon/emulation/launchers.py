"""How a job is started on emulated hosts: the commands of launchers, and what they start on each host.

Tests: tests/scripts/test_emulated_cluster.py.
"""

from collections.abc import Sequence
import json
import os
import sysconfig

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job.host import launching

_FIRST_PORT = 2222  # of tf.distribute's workers; below the kernel's ephemeral ports

# Runs a command in a namespace, which has an /etc/hosts of its own: `ip` looks for that in /etc/netns, where only root
# may write.
ENTER = """#!/bin/sh
namespace="$1"; shift
exec ip netns exec "$namespace" sh -c 'mount --bind "$0" /etc/hosts && exec "$@"' "${0%/*}/$namespace" "$@"
"""
# For horovodrun and mpiexec, which pass a host's name and a command line, as to ssh and rsh. It does not
# `exec` the line's shell: horovodrun ends the children of what it has started. The accelerator has the name of
# the host's namespace: other clusters have other ones.
SSH = """#!/bin/sh
host=
while :; do
  case "$1" in
    -*) shift 2 ;;  # options of horovodrun, before and after the host; each has a value
    *) [ -z "$host" ] || break; host="$1"; shift ;;
  esac
done
export TF_POSEIDON_ACCELERATOR="%s$host"
"${0%%/*}/enter" "$TF_POSEIDON_ACCELERATOR" sh -c "$*"
"""
# Starts one of several ranks of a host.
LOCAL_RANK = """TF_POSEIDON_ACCELERATOR="$TF_POSEIDON_ACCELERATOR-${MPI_LOCALRANKID:-$HOROVOD_LOCAL_RANK}"
exec "$@"
"""
# Starts a worker of tf.distribute in a job of mpiexec, given its TF_CONFIG except the end.
_WORKER = """TF_CONFIG="$1$PMI_RANK}}"; shift; export TF_CONFIG
unset PMI_RANK PMI_SIZE PMI_FD  # or the program could take it for an MPI job
exec "$@"
"""


def mpiexec(names: Sequence[str], ranks_per_host: int, ssh: str, own_address: str) -> list[str]:
    """Returns the launcher of MPI programs with its arguments.

    Args:
        names: Those of the hosts.
        ranks_per_host: Number of processes on each.
        ssh: The path of `SSH`, with its prefix.
        own_address: Where it runs.

    Raises:
        ConfigurationError: If there is none.
    """
    return [launching.find(), "-launcher", "rsh", "-launcher-exec", ssh, "-localhost", own_address,
            "-hosts", ",".join(names), "-ppn", str(ranks_per_host), "-n", str(ranks_per_host * len(names))]


def horovodrun(names: Sequence[str], ranks_per_host: int) -> list[str]:
    """Returns the launcher of Horovod's programs, over Gloo; raises ConfigurationError if there is none."""
    path = os.path.join(sysconfig.get_path("scripts"), "horovodrun")
    if not os.path.exists(path):
        raise ConfigurationError(f"There is no {path}, expected horovodrun beside Python; run "
                                 "scripts/install_horovod.sh.")
    # It would mistake these hosts for the next cluster's, by its cache in the home directory.
    return [path, "--gloo", "--disable-cache", "--network-interfaces", "eth0",
            "-np", str(ranks_per_host * len(names)), "-H", ",".join(f"{name}:{ranks_per_host}" for name in names)]


def worker(addresses: Sequence[str], ranks_per_host: int) -> list[str]:
    """Returns what starts a rank of mpiexec's as a worker of tf.distribute, which TF_CONFIG tells of all."""
    workers = [f"{address}:{_FIRST_PORT + rank}" for address in addresses for rank in range(ranks_per_host)]
    config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": None}})
    return ["sh", "-c", _WORKER, "sh", config.removesuffix("null}}")]
