"""Whether hosts can be emulated on this machine, by this user; and if not, why, and what would help.

Tests: tests/unit/test_emulation_ability.py, tests/scripts/test_emulation_without_root.py.
"""

import os
import pathlib
import shutil
import subprocess
import sys

from tf_poseidon.emulation import sandbox

# What EmulatedCluster does, for one host.
_PROBE = """set -e
ip netns add probe
ip netns exec probe mount --bind /etc/hosts /etc/hosts
ip -n probe link add name bridge type bridge
ip -n probe link add name host type veth peer name eth0
tc -n probe qdisc add dev eth0 root tbf rate 1gbit burst 64kb latency 10ms
"""
_SANDBOX = pathlib.Path(sandbox.__file__)
# Settings that keep users other than root from namespaces: where, the value, and the one that does not.
_SETTINGS = (("kernel/unprivileged_userns_clone", "0", "1"), ("user/max_user_namespaces", "0", "10000"),
             ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"))


def environment() -> dict[str, str]:
    """Returns the environment variables with which `ip` and `tc` are found: PATH of users may lack their folder."""
    return os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}


def command(*words: str) -> list[str]:
    """Returns the command that runs another one where hosts can be made."""
    return [sys.executable, "-S", str(_SANDBOX), *words]


def problem(settings: pathlib.Path = pathlib.Path("/proc/sys")) -> tuple[str, str] | None:
    """Returns why no hosts can be made, and what to do; None if they can be.

    Args:
        settings: The folder of the kernel's settings.
    """
    path = environment()["PATH"]
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("mount", "mount")):
        if not shutil.which(tool, path=path):
            return f"the program {tool} is in none of the directories of PATH, {path}", f"apt install {package}"
    done = subprocess.run(command("sh", "-xc", _PROBE), env=environment(), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, start_new_session=True)
    if done.returncode == 0:
        return None
    *others, last = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    if done.returncode != sandbox.CANNOT:
        failed = next((line.removeprefix("+ ") for line in reversed(others) if line.startswith("+ ")), "sh")
        return (f"`{failed}` says '{last}'",
                "use a kernel with network namespaces, veth, bridge and tbf (modprobe veth bridge sch_tbf), such as a "
                "virtual machine's, not gVisor's; containers need docker run --privileged")
    for name, value, other in _SETTINGS if os.geteuid() else ():
        file = settings / name
        if file.exists() and file.read_text().strip() == value:
            setting = name.replace("/", ".")
            return (f"{last}: {setting} is {value}",
                    f"sudo sysctl {setting}={other}, or use sudo env \"PATH=$PATH\" tf-poseidon emulate")
    if os.geteuid():
        return last, "use sudo env \"PATH=$PATH\" tf-poseidon emulate; containers need docker run --privileged"
    return last, "containers need docker run --privileged"
