"""Stands in for a process that is forked from a server of forking.py: stand_in.py SOCKET,SOCKET… PROGRAM ARGUMENT…

A launcher starts this quickly, without TensorFlow. It passes its files, environment and arguments to a server, and ends
as the forked process does; that process ends with it. Each rank asks another server.
"""

import json
import os
import socket
import sys

_RANKS = ("PMI_RANK", "HOROVOD_RANK")  # as launchers set it


def main(sockets, arguments):
    rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        files = [int(name) for name in os.listdir("/proc/self/fd")]
        files = [file for file in files if file != server.fileno() and os.path.exists(f"/proc/self/fd/{file}")]
        process = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
        server.connect(sockets[rank % len(sockets)])
        socket.send_fds(server, [json.dumps(process).encode()], files)
        status = int(server.recv(100) or 1)
    if "PMI_FD" in os.environ:  # as a rank does, see `engines.mpi.disconnect`
        os.close(int(os.environ["PMI_FD"]))
    if status < 0:  # it was ended by a signal
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
