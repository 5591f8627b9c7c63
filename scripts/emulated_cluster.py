"""Runs a command on hosts that tf_poseidon/emulation/emulated_cluster.py emulates.

    sudo env "PATH=$PATH" python scripts/emulated_cluster.py --hosts 4 --gbps 1 -- \
        python -m evaluation.benchmarks.bench_sync

The bytes that passed each host's eth0 and the wall time go to stderr. Rates can differ, as in --gbps=1,1,0.1,1.
"""

import pathlib
import sys
import time

from absl import app
from absl import flags

del sys.path[0]  # this folder
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))  # at the end: an installed tf_poseidon is used

from evaluation import output  # noqa: E402
from tf_poseidon.emulation import emulated_cluster  # noqa: E402
from tf_poseidon.errors import ConfigurationError  # noqa: E402


def main(arguments):
    try:
        _run(arguments)
    except ConfigurationError as error:
        raise SystemExit(str(error)) from None


def _run(arguments):
    command = arguments[1:]
    if not command:
        raise SystemExit("No command was given, expected one after `--`, such as: "
                         f"{arguments[0]} --hosts 2 -- python -V")
    given = flags.FLAGS
    launcher = {None: "mpiexec", "horovod": "horovodrun", "mwms": "mwms"}[given.peers]
    with emulated_cluster.EmulatedCluster(given.hosts, given.gbps, given.delay_us, given.loss) as cluster:
        before = cluster.bytes()
        begin = time.monotonic()
        status = cluster.run(command, given.ranks_per_host, launcher)
        seconds = time.monotonic() - begin
        after = cluster.bytes()
    hosts = [{"name": name, "address": address, "gbps": gbps, "sent": new[0] - old[0],
              "received": new[1] - old[1]}
             for name, address, gbps, old, new in zip(cluster.names, cluster.addresses,
                                                      cluster.gbps, before, after)]
    rows = [(host["name"], host["address"], f"{host['gbps']:g}", f"{host['sent'] / 1e6:.3f}",
             f"{host['received'] / 1e6:.3f}") for host in hosts]
    output.show(f"{seconds:.1f} s, status {status}", ("host", "address", "Gbit/s", "sent MB", "received MB"), rows,
                file=sys.stderr)
    output.write_json(given.json, {
        "delay_us": given.delay_us, "loss_percent": given.loss, "launcher": launcher,
        "ranks_per_host": given.ranks_per_host, "seconds": seconds, "status": status, "hosts": hosts})
    sys.exit(status)


if __name__ == "__main__":
    flags.DEFINE_integer("hosts", 4, "Number of hosts.", lower_bound=1, upper_bound=250)
    flags.DEFINE_list("gbps", "1", "Rate of the hosts' links in each direction, Gbit/s: one rate for "
                      "all, or one for each host.")
    flags.DEFINE_integer("delay_us", 0, "Extra delay of each link in each direction, µs; "
                         "a message passes two links.", lower_bound=0)
    flags.DEFINE_float("loss", 0.0, "Packets that each link drops in each direction, at random, "
                       "%; a message passes two links.", lower_bound=0, upper_bound=10)
    flags.DEFINE_integer("ranks_per_host", 1, "Ranks per host.", lower_bound=1)
    flags.DEFINE_enum("peers", None, ["horovod", "mwms"], "The library of the command, if not "
                      "MPI.")
    flags.DEFINE_string("json", None, "File for bytes per host, wall time and exit status.")
    app.run(main)
