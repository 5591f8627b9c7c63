"""What keeps a machine from emulating hosts is named, with what to do; how a job's traffic is told."""

import argparse
import os
import stat
import subprocess

import pytest

from tf_poseidon.commands import doctor
from tf_poseidon.commands import emulation_command
from tf_poseidon.commands.doctor import Kind
from tf_poseidon.emulation import ability
from tf_poseidon.emulation import emulated_cluster
from tf_poseidon.emulation import sandbox
from tf_poseidon.emulation import traffic
from tf_poseidon.errors import ConfigurationError

TOOLS = ("ip", "tc", "mount")
BARRED = "making a user namespace: Operation not permitted"
FULL = "making a user namespace: No space left on device"
UNMAPPED = "writing /proc/self/uid_map: Operation not permitted"
# Of the user, the settings, and what the sandbox says, or the status and the last lines of a probe in it.
PROBLEMS = {
    "no tc": (1000, ("ip", "mount"), {}, 0, "", "the program tc is in none of the directories of PATH",
              "apt install iproute2"),
    "no mount": (1000, ("ip", "tc"), {}, 0, "", "the program mount is in none", "apt install mount"),
    "Debian's setting": (1000, TOOLS, {"kernel/unprivileged_userns_clone": "0"}, sandbox.CANNOT, BARRED,
                         f"{BARRED}: kernel.unprivileged_userns_clone is 0",
                         "sudo sysctl kernel.unprivileged_userns_clone=1, or use sudo env"),
    "no namespaces": (1000, TOOLS, {"user/max_user_namespaces": "0"}, sandbox.CANNOT, FULL,
                      f"{FULL}: user.max_user_namespaces is 0", "sudo sysctl user.max_user_namespaces=10000, or use"),
    "Ubuntu's setting": (1000, TOOLS, {"kernel/unprivileged_userns_clone": "1",
                                       "kernel/apparmor_restrict_unprivileged_userns": "1"}, sandbox.CANNOT, UNMAPPED,
                         f"{UNMAPPED}: kernel.apparmor_restrict_unprivileged_userns is 1",
                         "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0, or use sudo env"),
    "a container": (1000, TOOLS, {}, sandbox.CANNOT, BARRED, BARRED, "containers need docker run --privileged"),
    "root in a container": (0, TOOLS, {"user/max_user_namespaces": "0"}, sandbox.CANNOT, BARRED, BARRED,
                            "containers need docker run --privileged"),
    "no tbf": (1000, TOOLS, {}, 2, "+ ip netns add probe\n+ tc qdisc add dev eth0 root tbf\nError: Unknown qdisc.",
               "`tc qdisc add dev eth0 root tbf` says 'Error: Unknown qdisc.'", "use a kernel with network"),
    "a silent failure": (1000, TOOLS, {}, 2, "", "`sh` says 'status 2'", "use a kernel with network namespaces, veth"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_is_missing_is_named(case, tmp_path, monkeypatch):
    user, tools, settings, status, says, what, remedy = PROBLEMS[case]
    for tool in tools:
        (tmp_path / tool).touch()
        (tmp_path / tool).chmod(stat.S_IRWXU)
    for name, value in settings.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
    monkeypatch.setattr(ability, "environment", lambda: {"PATH": str(tmp_path)})
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, status, "", says))
    found, help_ = ability.problem(tmp_path)
    assert found.startswith(what) and remedy in help_


def test_doctor_tells_it_in_a_line(monkeypatch):
    monkeypatch.setattr(ability, "problem", lambda: ("no tc", "install it"))
    finding, = doctor._emulation()
    assert (finding.subject, finding.kind, finding.remedy) == ("emulate", Kind.NOTE, "install it")
    assert finding.value == "no hosts can be emulated here: no tc"
    monkeypatch.setattr(ability, "problem", lambda: None)
    finding, = doctor._emulation()
    assert finding.kind is Kind.FINE and f"user id {os.geteuid()}" in finding.value


@pytest.mark.parametrize("is_able", [True, False], ids=["root", "user"])
def test_emulate_names_it_before_it_makes_hosts(is_able, monkeypatch):
    monkeypatch.setattr(ability, "environment", dict)
    monkeypatch.setattr(ability, "problem", lambda: ("there is no tbf", "take another kernel"))
    monkeypatch.setattr(sandbox, "may_make_hosts", lambda: is_able)
    monkeypatch.setattr(emulated_cluster.EmulatedCluster, "__enter__", lambda _: pytest.fail("hosts were made"))
    given = argparse.Namespace(program=["true"], json="", hosts=2, gbps=1, delay_us=0, loss=0)
    with pytest.raises(ConfigurationError, match="emulated here, since there is no tbf; take another kernel[.]"):
        emulation_command.emulate(given)


def test_users_find_the_tools(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    assert ability.environment()["PATH"] == "/usr/bin:/usr/sbin:/sbin"


def test_traffic_is_a_table():
    hosts = [traffic.HostTraffic("host0", "10.0.0.1", 1.0, 250_000_000, 1_000_000),
             traffic.HostTraffic("host1", "10.0.0.2", 0.1, 1_000_000, 25_000_000)]
    assert traffic.table(hosts, 4, 2).splitlines() == [
        "host   Gbit/s  sent MB  received MB  link busy",
        "host0       1    250.0          1.0        50%",
        "host1     0.1      1.0         25.0        50%",
        "busy: of 4.0 s, in which programs have started, too, in the busier direction",
        "2 hosts shared the 2 cores of this machine: the bytes are those of a cluster, but of times compare the ratios"]
