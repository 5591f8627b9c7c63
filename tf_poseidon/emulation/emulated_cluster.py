"""Emulates several hosts on one Linux machine, with links of a given rate, and runs commands on them.

Each host is a network namespace with one interface, eth0; all are connected by a switch, a bridge
in a namespace of its own. So nothing in the machine's own network changes, and several clusters can
run at a time. The hosts share the machine's cores: the bytes are those of a real cluster; the times are too, as long
as the links are the bottleneck.

Links can drop packets. Packets then have at most 1500 bytes, as on a real card, instead of
some 15 kB, and 2 cores may not reach 1 Gbit/s with them. So compare with a loss of 1e-6 %, not with none.

The command is started by a launcher, which also gives the exit status:

    launcher      the command is a program                  started by
    mpiexec       of MPI                                    mpiexec
    horovodrun    of Horovod, over Gloo                     horovodrun, if it is installed
    mwms          of tf.distribute's                        mpiexec, hidden from the program:
                  MultiWorkerMirroredStrategy               TF_CONFIG lists all workers
    command       any, beside the hosts                     itself; MPICH's mpiexec in it reaches them by name

horovodrun takes several seconds to start a command, and its exit status is 1 for any failure.

Processes on the hosts find the rate of the slowest link, in Gbit/s, in the environment variable
TF_POSEIDON_EMULATED_GBPS, and the name of their accelerator in TF_POSEIDON_ACCELERATOR: ranks of one
job on a host have one each, which they share with those of other jobs (kernels/emulated_ops.cc).

At its end, also after SIGINT, SIGTERM or SIGHUP, it removes everything that it made, and ends the
processes left on the hosts. The next start removes what a cluster killed by SIGKILL has left.

Tests: tests/scripts/test_emulated_cluster.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from tf_poseidon.emulation import launchers
from tf_poseidon.emulation import sandbox
from tf_poseidon.errors import ConfigurationError

_DELAYED_LINK = pathlib.Path(__file__).with_name("delayed_link.py")
_NAMES = pathlib.Path("/run/netns")
# Where root keeps files. Not in /tmp or /run, where they may not be executable.
_FILES = pathlib.Path("/etc/netns")
_SHARED_MEMORY = pathlib.Path("/dev/shm")  # has files of each accelerator, with its name in theirs
SWITCH_ADDRESS = "10.0.0.254"
_MOST_HOSTS = 250  # of the addresses 10.0.0.x
LAUNCHERS = ("mpiexec", "horovodrun", "mwms")  # of jobs


def _call(*command: str, text: str = "", needs: str = "network namespaces, veth, bridge and tbf") -> str:
    """Returns what `command` prints, given `text`; raises ConfigurationError when it fails.

    `needs` names the kernel feature that the command needs.
    """
    # In a session of its own, so that Ctrl-C in the terminal does not end it half-way.
    done = subprocess.run(command, input=text, capture_output=True, text=True,
                          start_new_session=True)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise ConfigurationError(f"`{' '.join(command)}` ended with status {done.returncode}, expected 0 "
                                 f"({said}); use a kernel that has {needs}.")
    return done.stdout


def _ip(namespace: str, *lines: str) -> None:
    """Runs lines of commands by `ip` in a namespace."""
    _call("ip", "-n", namespace, "-batch", "-", text="\n".join(lines))


def _rates(gbps: float | Sequence[float | str], hosts: int) -> list[float]:
    """Returns the rate of each host, Gbit/s, from the value of `--gbps`."""
    given = [gbps] if isinstance(gbps, (int, float)) else gbps
    said = f"--gbps={','.join(map(str, given))}"
    try:
        rates = [float(rate) for rate in given]
    except ValueError:
        rates = []
    if not rates or not all(0.01 <= rate <= 100 for rate in rates):
        raise ConfigurationError(f"{said} is not a list of rates, expected numbers from 0.01 to 100; give one "
                                 "for all hosts or one for each, with commas between them.")
    if len(rates) not in (1, hosts):
        raise ConfigurationError(f"{said} has {len(rates)} rates, expected 1 or {hosts}, the number of "
                                 "hosts; give one rate for all hosts or one for each.")
    return rates * (hosts if len(rates) == 1 else 1)


def _files() -> pathlib.Path:
    """Returns the folder of the files of all clusters that this process can see."""
    return sandbox.FOLDER if sandbox.FOLDER.is_dir() else _FILES


def _delayed_link(*ends_and_delay: str | int) -> subprocess.Popen[str]:
    """Starts delayed_link.py, and returns its process."""
    process = subprocess.Popen([sys.executable, "-S", _DELAYED_LINK, *map(str, ends_and_delay)], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)
    if process.stdout is None or not process.stdout.readline():
        said = process.communicate()[1].strip().rpartition("\n")[2]
        raise ConfigurationError(f"A link with a delay could not be made ({said}); use a kernel that has TAP devices "
                                 "(/dev/net/tun), or omit --delay_us.")
    return process


def _end_processes(namespace: str) -> None:
    """Ends all processes in a namespace; gives up after 5 s."""
    for _ in range(100):
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True,
                               start_new_session=True).stdout.split()
        if not found:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _remove(is_ours: Callable[[int], bool]) -> None:
    """Removes all namespaces of clusters whose pid `is_ours`, and with them their interfaces."""
    for path in (*_NAMES.glob("poseidon-*"), *_files().glob("poseidon-*")):
        match = re.fullmatch(r"poseidon-(\d+)-(switch|launch|host\d+)", path.name)
        if not match or not is_ours(int(match[1])):
            continue
        if path.parent == _NAMES:
            _end_processes(path.name)
            # Not checked: another cluster that starts now may remove it as well.
            subprocess.run(["ip", "netns", "delete", path.name], stderr=subprocess.DEVNULL,
                           start_new_session=True)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in _SHARED_MEMORY.glob("*poseidon-*-host*"):
        match = re.search(r"poseidon-(\d+)-host\d+", path.name)
        if match and is_ours(int(match[1])):
            path.unlink(missing_ok=True)


class EmulatedCluster:
    """Hosts with shaped links, for the duration of a `with` statement.

    SIGINT, SIGTERM and SIGHUP end the running jobs, and `run` or the end of the `with` statement
    then raises SystemExit. They never interrupt setup or removal of the hosts.

    Attributes:
        gbps: The rates of their links.
        names: The hosts' names, which each host can resolve: host0, host1, ...
        addresses: Their addresses.
        namespaces: The names of their network namespaces.
    """

    def __init__(self, hosts: int, gbps: float | Sequence[float | str], delay_us: int = 0,
                 loss_percent: float = 0) -> None:
        """Makes nothing yet.

        Args:
            hosts: Number of hosts.
            gbps: The rate of the hosts' links in each direction, Gbit/s, or a list with one rate per host.
            delay_us: Extra delay of each link in each direction, µs.
            loss_percent: Percentage of packets that each link drops, in each direction, at random.

        Raises:
            ConfigurationError: If these are not rates, or what no links have.
        """
        if hosts > _MOST_HOSTS:
            raise ConfigurationError(f"--hosts={hosts} is too many, expected at most {_MOST_HOSTS}; give fewer.")
        if not 0 <= loss_percent <= 10:
            raise ConfigurationError(f"--loss={loss_percent} is no share of packets, expected 0 to 10 %; give less.")
        self.gbps = _rates(gbps, hosts)
        self.names = [f"host{h}" for h in range(hosts)]
        self.addresses = [f"10.0.0.{h + 1}" for h in range(hosts)]
        self._prefix = f"poseidon-{os.getpid()}-"
        self.namespaces = [self._prefix + name for name in self.names]
        self._switch = self._prefix + "switch"
        self._launch = _files() / (self._prefix + "launch")
        self._delay_us = delay_us
        self._loss_percent = loss_percent
        self._delayed_links: list[subprocess.Popen[str]] = []
        self._jobs: list[subprocess.Popen[Any]] = []
        self._signal: int | None = None

    def __enter__(self) -> "EmulatedCluster":
        if not sandbox.may_make_hosts():
            raise ConfigurationError(f"A process of the user id {os.geteuid()} without the rights of root cannot make "
                                     "hosts; run it with sudo, or use `tf-poseidon emulate`, which may do without.")
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                raise ConfigurationError(f"The program {tool} is in none of the directories of PATH, "
                                         f"{os.environ.get('PATH')}; install iproute2.")
        self._handlers = {number: signal.signal(number, self._on_signal)
                          for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP,
                                         signal.SIGALRM)
                          if signal.getsignal(number) != signal.SIG_IGN}  # as nohup wants it
        try:
            # Anything under our own pid was left by a killed cluster with the same pid.
            _remove(lambda pid: pid == os.getpid() or not os.path.exists(f"/proc/{pid}"))
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._delayed_links:
            process.communicate()  # closes its input, which ends it
        _remove(lambda pid: pid == os.getpid())
        signal.alarm(0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._exit_if_signalled()

    def _make(self) -> None:
        # Without addrgenmode, IPv6's own messages would be counted. The bridge is called eth0, too, because
        # horovodrun looks for its own address at the interface that it names to all hosts.
        self._launch.mkdir(parents=True)
        for name, text in (("ssh", launchers.SSH % self._prefix), ("enter", launchers.ENTER)):
            (self._launch / name).write_text(text)
            (self._launch / name).chmod(0o755)
        _call("ip", "netns", "add", self._switch)
        _ip(self._switch, "link add name eth0 type bridge",
            "link set dev eth0 addrgenmode none", "link set dev eth0 up",
            "link set dev lo up", f"address add {SWITCH_ADDRESS}/24 dev eth0")
        self._write_hosts(self._switch, SWITCH_ADDRESS)
        for name, address, namespace, gbps in zip(self.names, self.addresses, self.namespaces,
                                                  self.gbps):
            _call("ip", "netns", "add", namespace)
            if self._delay_us:
                self._delayed_links.append(_delayed_link(namespace, "eth0", self._switch, name, self._delay_us))
            else:
                _ip(self._switch, f"link add name {name} type veth peer name eth0 netns {namespace}")
            _ip(self._switch, f"link set dev {name} addrgenmode none master eth0")
            _ip(namespace, "link set dev eth0 addrgenmode none", "link set dev lo up",
                f"address add {address}/24 dev eth0")
            # Each end shapes what it sends: the host's end what the host sends, the switch's end what the
            # host receives.
            for end in ((namespace, "eth0"), (self._switch, name)):
                self._shape(*end, gbps * 1e9 / 8)
                if self._loss_percent:
                    self._lose(*end)
            self._write_hosts(namespace, address)
            # Cubic, the congestion control of nearly every cluster. BBR, the default of some kernels, is made for
            # the Internet: it pauses for 200 ms now and then, to measure the round trip. Set by the route, since
            # a namespace's default must be one that its machine uses.
            _ip(namespace, f"route change 10.0.0.0/24 dev eth0 proto kernel scope link src {address} "
                "congctl cubic")

    def _shape(self, namespace: str, interface: str, bytes_per_s: float) -> None:
        """Limits what an interface sends."""
        # A burst passes at once, so with a large one small messages cost nothing; a small one costs throughput
        # when the timer is late. tbf splits packets larger than the burst, slowly: TCP is told to hand over
        # smaller ones. The queue holds 10 ms and drops the rest, as in a switch: with a longer queue, small
        # messages would wait behind large ones; with a shorter one, the last packets of many hosts are dropped,
        # which TCP notices after 200 ms.
        burst = max(8000, int(bytes_per_s * 1e-3))
        _ip(namespace, f"link set dev {interface} gso_max_size {min(burst // 2, 65536)} up")
        add = f"tc -n {namespace} qdisc add dev {interface}"
        _call(*add.split(), *f"root handle 1: tbf rate {bytes_per_s:.0f}bps "
              f"burst {burst} latency 10ms".split())

    def _lose(self, namespace: str, interface: str) -> None:
        """Drops some of the packets that arrive at an interface."""
        # A classic BPF program, which needs no compiler: it loads a random number of 32 bits, and returns 2,
        # TC_ACT_SHOT, for smaller ones than a limit, else 0, TC_ACT_OK. netem would do it too, but some
        # kernels do not have it, and iptables does not see what passes a bridge.
        smaller = int(self._loss_percent / 100 * 2**32)
        program = f"4,32 0 0 4294963256,53 1 0 {smaller},6 0 0 2,6 0 0 0"
        # TCP must not hand over packets larger than those of a card, which would be lost whole.
        _ip(namespace, f"link set dev {interface} gso_max_segs 1")
        for line in (f"qdisc add dev {interface} ingress",
                     f"filter add dev {interface} ingress bpf direct-action bytecode"):
            extra = [program] if line.endswith("bytecode") else []
            _call("tc", "-n", namespace, *line.split(), *extra,
                  needs="ingress and bpf, its modules sch_ingress and cls_bpf, or omit --loss")

    def _write_hosts(self, namespace: str, own_address: str) -> None:
        lines = ["127.0.0.1 localhost", f"{own_address} {socket.gethostname()}",
                 *map(" ".join, zip(self.addresses, self.names))]
        (self._launch / namespace).write_text("\n".join(lines) + "\n")

    def bytes(self) -> list[tuple[int, int]]:
        """Returns (sent, received) of each host since it was made.

        Headers are included, but only one for each large packet of TCP, which a real card would split.
        """
        counts = []
        for namespace in self.namespaces:
            output = _call("ip", "-json", "-s", "-n", namespace, "link", "show", "dev", "eth0")
            stats = json.loads(output)[0]["stats64"]
            counts.append((stats["tx"]["bytes"], stats["rx"]["bytes"]))
        return counts

    def run(self, command: Sequence[str | os.PathLike[str]], ranks_per_host: int = 1, launcher: str = "mpiexec",
            **options: Any) -> int:
        """Runs a command on all hosts and returns its exit status.

        Args:
            command: The program and its arguments.
            ranks_per_host: Number of processes on each host.
            launcher: "mpiexec", "horovodrun" (over Gloo), or "mwms", which sets TF_CONFIG to tell each
                process which worker of tf.distribute it is; or "command": it runs once, on a host beside these,
                and MPICH's mpiexec in it reaches them by their names.
            **options: For subprocess.Popen, such as `stdout`.

        Raises:
            SystemExit: If a signal has ended the job, or had come before.
            ConfigurationError: If the launcher is missing, or there is no such launcher.
        """
        return self.run_together([command], ranks_per_host, launcher, **options)[0]

    def run_together(self, commands: Sequence[Sequence[str | os.PathLike[str]]], ranks_per_host: int = 1,
                     launcher: str = "mpiexec", **options: Any) -> list[int]:
        """Runs several commands at the same time, each on all hosts, and returns their exit statuses.

        One that fails ends no other. Arguments and errors are those of `run`.
        """
        self._exit_if_signalled()
        start = self._start(launcher, ranks_per_host)
        # Overrides the caller's: UCX would send through shared memory, past the links. Ranks of one host
        # may use that; MPICH tells hosts apart by the names that mpiexec was given.
        environment = {**options.pop("env", os.environ), "MPIR_CVAR_CH4_NETMOD": "ofi",
                       "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0",
                       "TF_POSEIDON_EMULATED_GBPS": f"{min(self.gbps):g}"}
        environment["PATH"] = f"{self._launch}:{environment.get('PATH', os.defpath)}"
        if launcher == "command":
            environment |= {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(self._launch / "ssh"),
                            "HYDRA_IFACE": "eth0"}
        self._jobs = []
        for command in commands:
            self._jobs.append(subprocess.Popen([self._launch / "enter", self._switch, *start, *command],
                                               env=environment, start_new_session=True, **options))
        if self._signal:  # it came when there were not all jobs to end
            self._end_jobs(signal.SIGTERM)
        statuses = [job.wait() for job in self._jobs]
        signal.alarm(0)
        for namespace in (self._switch, *self.namespaces):
            _end_processes(namespace)
        self._exit_if_signalled()
        return [status if status >= 0 else 128 - status for status in statuses]

    def _start(self, launcher: str, ranks_per_host: int) -> list[str]:
        """Returns the command that starts a command on all hosts, from the switch."""
        if launcher == "command":
            return []
        of_rank = ["sh", "-c", launchers.LOCAL_RANK, "sh"] if ranks_per_host > 1 else []
        return [*self._launcher(launcher, ranks_per_host), *of_rank]

    def _launcher(self, launcher: str, ranks_per_host: int) -> list[str]:
        """Returns the launcher with its arguments."""
        if launcher not in LAUNCHERS:
            raise ConfigurationError(f"launcher is {launcher!r}, expected {', '.join(LAUNCHERS)} or command; give one "
                                     "of these.")
        if launcher == "horovodrun":
            return launchers.horovodrun(self.names, ranks_per_host)
        start = launchers.mpiexec(self.names, ranks_per_host, str(self._launch / "ssh"), SWITCH_ADDRESS)
        return start if launcher == "mpiexec" else [*start, *launchers.worker(self.addresses, ranks_per_host)]

    def _on_signal(self, number: int, _: object) -> None:
        """Ends the running jobs; raises nothing, so that no clean-up remains half done."""
        if self._signal is None:
            self._signal = number
            signal.alarm(5)  # for a job that does not end
            self._end_jobs(signal.SIGTERM)
        else:
            self._end_jobs(signal.SIGKILL)

    def _end_jobs(self, number: int) -> None:
        for job in self._jobs:
            job.send_signal(number)  # to the launcher, which tells the ranks

    def _exit_if_signalled(self) -> None:
        if self._signal:
            raise SystemExit(128 + self._signal)
