"""Runs a command in namespaces of its own, in which hosts can be emulated, also without root.

    python -S sandbox.py COMMAND ...

The command has the rights of root over its own network, mounts and processes, and over nothing else: what it reads and
writes is what its user may. With it ends all that it has started, and all that it has made; it ends with this process,
also when that is killed. SIGINT, SIGTERM and SIGHUP are passed on to it. If the kernel allows no such namespaces, the
exit status is `CANNOT`, and the last line on stderr says which step failed. Imports nothing of this project: it is run
by itself, in a process of one thread, as the kernel wants it.

Tests: tests/scripts/test_emulation_without_root.py.
"""

from collections.abc import Sequence
import contextlib
import ctypes
import os
import pathlib
import signal
import sys

CANNOT = 125
# Each sandbox has its own, empty at first. EmulatedCluster keeps files here if there is such a folder, and knows by it
# that it may make hosts.
FOLDER = pathlib.Path("/run/poseidon")

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000  # of linux/sched.h
_NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000  # of sys/mount.h
_PR_SET_PDEATHSIG = 1
_NET_ADMIN, _SYS_ADMIN = 12, 21  # of linux/capability.h
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def may_make_hosts() -> bool:
    """Returns whether this process may make network namespaces, and configure interfaces: as root, or in a sandbox."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    rights = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    return all(rights >> right & 1 for right in (_NET_ADMIN, _SYS_ADMIN))


def _call(what: str, function: str, *arguments: object) -> None:
    """Calls a function of libc; raises an OSError that names a step."""
    if getattr(_LIBC, function)(*arguments):
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(kind: str, target: str, flags: int, options: str = "") -> None:
    _call(f"mounting {target}", "mount", kind.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags),
          options.encode())


def _enter() -> None:
    """Moves this process into other namespaces; a process that it forks is the first of another pid namespace."""
    user, group = os.geteuid(), os.getegid()
    if may_make_hosts():
        _call("making namespaces", "unshare", _NEWNS | _NEWPID | _NEWNET)
        return
    _call("making a user namespace", "unshare", _NEWUSER | _NEWNS | _NEWPID | _NEWNET)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        try:
            pathlib.Path("/proc/self", name).write_text(text)
        except OSError as error:
            raise OSError(error.errno, f"writing /proc/self/{name}: {error.strerror}") from None


def _mount_own() -> None:
    """Mounts what the command must have for itself."""
    _call("keeping mounts apart", "mount", None, b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None)
    _mount("proc", "/proc", _NOSUID | _NODEV | _NOEXEC)
    # Names of accelerators have pids, of which each sandbox has its own.
    _mount("tmpfs", "/dev/shm", _NOSUID | _NODEV, "mode=1777")
    # `ip` keeps names of namespaces in /run/netns. What else is in /run stays where it was.
    former = os.open("/run", os.O_RDONLY | os.O_DIRECTORY)
    _mount("tmpfs", "/run", _NOSUID | _NODEV, "mode=755")
    for entry in os.scandir(former):
        if entry.is_dir(follow_symlinks=False) and entry.name not in ("netns", FOLDER.name):
            os.mkdir(f"/run/{entry.name}")
            with contextlib.suppress(OSError):  # then it is empty
                _call("", "mount", f"/proc/self/fd/{former}/{entry.name}".encode(), f"/run/{entry.name}".encode(), None,
                      ctypes.c_ulong(_BIND | _REC), None)
    os.close(former)
    FOLDER.mkdir()
    if not may_make_hosts():
        raise OSError("the kernel gives no rights in a user namespace")


def _end_of(child: int) -> int:
    """Returns the exit status of a child; passes signals on to it until then, which the caller has blocked."""
    for number in _PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, lambda received, _: os.kill(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    ended = None
    while ended != child:  # the first process of a pid namespace has the children of others that ended
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main(command: Sequence[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        _enter()
        if first := os.fork():
            return _end_of(first)
        os.setsid()  # Ctrl-C in the terminal reaches the command once, by the process outside
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _mount_own()
    except OSError as error:
        print(error.args[-1], file=sys.stderr)
        return CANNOT
    if program := os.fork():
        return _end_of(program)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
