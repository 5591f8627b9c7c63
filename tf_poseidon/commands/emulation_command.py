"""The command emulate: a cluster on one machine.

Tests: tests/unit/test_emulation_ability.py, tests/scripts/test_emulated_cluster.py,
tests/scripts/test_emulation_without_root.py.
"""

import argparse
import dataclasses
import json
import os
import sys
import time

from tf_poseidon.commands import command_files
from tf_poseidon.commands.status import Mistake
from tf_poseidon.emulation import ability
from tf_poseidon.emulation import emulated_cluster
from tf_poseidon.emulation import sandbox
from tf_poseidon.emulation import traffic
from tf_poseidon.errors import ConfigurationError


def emulate(given: argparse.Namespace) -> int:
    """Runs a program on several hosts with slow links, which this machine emulates: as root, or in a user namespace."""
    program = given.program[given.program[:1] == ["--"]:]
    if not program:
        raise Mistake("there is no program; give emulate a command: tf-poseidon emulate --hosts 4 -- python train.py.")
    command_files.check_output("--json", given.json)
    cluster = emulated_cluster.EmulatedCluster(given.hosts, given.gbps, given.delay_us, given.loss)
    os.environ.update(ability.environment())
    if found := ability.problem():  # also of root, which containers deny some of it
        what, remedy = found
        raise ConfigurationError(f"No hosts can be emulated here, since {what}; {remedy}.")
    if not sandbox.may_make_hosts():
        command = ability.command(sys.executable, "-m", "tf_poseidon", *sys.argv[1:])
        os.execv(command[0], command)
    with cluster:
        before = cluster.bytes()
        begin = time.monotonic()
        status = cluster.run(program, given.ranks_per_host, given.launcher)
        seconds = time.monotonic() - begin
        after = cluster.bytes()
    hosts = [traffic.HostTraffic(name, address, gbps, new[0] - old[0], new[1] - old[1])
             for name, address, gbps, old, new in zip(cluster.names, cluster.addresses, cluster.gbps, before, after)]
    print(f"tf-poseidon emulate: the program ended after {seconds:.1f} s, with status {status}",
          traffic.table(hosts, seconds, len(os.sched_getaffinity(0))), sep="\n", file=sys.stderr, flush=True)
    command_files.save("--json", given.json, lambda: json.dumps({
        "delay_us": given.delay_us, "loss_percent": given.loss, "launcher": given.launcher,
        "ranks_per_host": given.ranks_per_host, "seconds": seconds, "status": status,
        "hosts": [dataclasses.asdict(host) for host in hosts]}, indent=1) + "\n")
    return status
