"""Horovod over Gloo, and TensorFlow's own collectives, in a job that mpiexec has started: for comparison.

Both must be started before anything else uses TensorFlow.
"""

import contextlib
import importlib.util
import json
import os
import socket

import tensorflow as tf


def names():
    """Returns the peers that are installed."""
    return ["horovod", "tensorflow"] if importlib.util.find_spec("horovod") else ["tensorflow"]


def start_tensorflow(comm):
    """Returns a MultiWorkerMirroredStrategy over the processes of an mpi4py communicator."""
    with socket.create_server(("", 0)) as probe:  # a free port
        port = probe.getsockname()[1]
    workers = comm.allgather(f"{_address(comm)}:{port}")
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers},
                                          "task": {"type": "worker", "index": comm.rank}})
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    del os.environ["TF_CONFIG"]
    return strategy


def start_horovod(comm):
    """Returns `horovod.tensorflow`, initialised over Gloo with the environment that horovodrun would set."""
    from horovod.runner.common.util import hosts
    from horovod.runner.gloo_run import create_run_env_vars
    from horovod.runner.gloo_run import create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer
    import horovod.tensorflow as hvd
    import psutil

    everyone = comm.allgather(_address(comm))
    slots = hosts.get_host_assignments(hosts.parse_hosts(",".join(
        f"{address}:{everyone.count(address)}" for address in dict.fromkeys(everyone))), comm.size)
    server, port = None, None
    if comm.rank == 0:
        server = RendezvousServer()
        port = server.start()
        server.init(slots)
    interface = next(name for name, addresses in psutil.net_if_addrs().items()
                     if any(a.address == everyone[comm.rank] for a in addresses))
    environment = {**create_run_env_vars(everyone[0], [interface], comm.bcast(port)),
                   **create_slot_env_vars(slots[comm.rank])}
    with _set(environment):
        hvd.init()
        comm.Barrier()
    hvd.rendezvous = server  # lives as long as Horovod
    return hvd  # which can be shut down, and started again


def _address(comm):
    """Returns the address at which the other processes' hosts reach this one."""
    own_name = socket.gethostname()
    names = comm.allgather(own_name)
    try:
        address = socket.gethostbyname(own_name)
    except OSError:
        address = "127.0.0.1"
    others = set(names) - {own_name}
    if not address.startswith("127.") or not others:
        return address
    # Many hosts resolve their own names to their loopback: then, the address that others would hear from.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((min(others), 9))  # sends nothing
        return probe.getsockname()[0]


@contextlib.contextmanager
def _set(environment):
    """Sets environment variables for the duration of a block; left set, they would look like a second launcher."""
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
