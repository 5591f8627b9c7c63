"""Imports Keras once, and forks a process for each program that a stand_in.py asks for: forking.py LISTENER

Importing TensorFlow and Keras takes longer than most test programs. TensorFlow is imported before the fork, but
nothing of it runs. LISTENER is the number of a listening socket. The server ends when its input does, that is, with
the process that started it, and all processes that it has forked end with it.
"""

import contextlib
import fcntl
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys

_MOST_BYTES, _MOST_FILES = 200_000, 200


class Server:
    """Waits for stand-ins that ask for a process, for processes to end, and for stand-ins that end before them."""

    def __init__(self, listener):
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._watch(listener, self._fork)
        self._watch(open(os.dup(0), "rb"), lambda: os.killpg(0, signal.SIGKILL))  # itself too

    def _watch(self, file, function):
        self._selector.register(file, selectors.EVENT_READ, function)

    def _forget(self, file):
        self._selector.unregister(file)
        file.close()

    def run(self):
        """Returns only in forked processes, with the stand-in that each must become."""
        while True:
            key, _ = self._selector.select()[0]  # only one, since it may be the end of another
            process = key.data()
            if process:
                return process

    def _fork(self):
        asking, _ = self._listener.accept()
        message, files, *_ = socket.recv_fds(asking, _MOST_BYTES, _MOST_FILES)
        child = os.fork()
        if not child:
            for file in [asking, self._selector, *(key.fileobj for key in self._selector.get_map().values())]:
                file.close()
            return {**json.loads(message), "files here": files}
        for file in files:
            os.close(file)
        self._watch_both(child, asking)

    def _watch_both(self, child, asking):
        running = open(os.pidfd_open(child), "rb", buffering=0)

        def end():
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            self._forget(running)
            if asking.fileno() >= 0:
                with contextlib.suppress(OSError):  # the stand-in has ended too
                    asking.send(str(status).encode())
                self._forget(asking)

        def kill():
            signal.pidfd_send_signal(running.fileno(), signal.SIGKILL)
            self._forget(asking)

        self._watch(running, end)
        self._watch(asking, kill)


def import_keras():
    """Imports it without scikit-learn, which only unused wrappers need.

    The garbage collector does not scan the imported modules either, during the import or later.
    """
    gc.disable()
    sys.modules["sklearn"] = None  # as if it was not installed
    import keras  # noqa: F401
    del sys.modules["sklearn"]
    gc.freeze()
    gc.enable()


def become(process):
    """Takes over the files, environment and arguments of the stand-in, and runs its program."""
    import numpy as np
    numbers = process["files"]
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in process["files here"]]
    for file in process["files here"]:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(process["environment"])
    os.chdir(process["folder"])
    np.random.seed()  # as in a new process; Python reseeds its random numbers after a fork anyway
    sys.argv[:] = process["arguments"]
    sys.path[:1] = [os.path.dirname(os.path.abspath(sys.argv[0])), *os.environ["PYTHONPATH"].split(os.pathsep)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    server = Server(socket.socket(fileno=int(sys.argv[1])))
    import_keras()
    become(server.run())
