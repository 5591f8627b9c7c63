"""Whether hosts can be emulated on this machine."""

import os
import shlex
import shutil
import subprocess


def problem(*shaping):
    """Returns why this machine cannot make hosts with links of some `shaping`, or None."""
    if os.geteuid():
        return f"the user id is {os.geteuid()}, not 0"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "ip or tc is not installed"
    name = f"probe-{os.getpid()}"
    try:
        for command in (f"ip netns add {name}", f"ip -n {name} link add name b type bridge",
                        f"ip -n {name} link add name v type veth",
                        f"tc -n {name} qdisc add dev v root handle 1: tbf rate 1gbit burst 64kb "
                        "latency 20ms", *(f"tc -n {name} {line}" for line in shaping)):
            done = subprocess.run(shlex.split(command), capture_output=True, text=True)
            if done.returncode:
                return f"{command}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
    return None
