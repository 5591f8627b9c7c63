"""`tf-poseidon doctor`: what is installed and what this machine allows; with a remedy where something is wrong.

Each check looks at one thing, and none relies on another one: where nothing works, all that is wrong should be told.

Tests: tests/unit/test_doctor.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import difflib
import enum
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from packaging import requirements

from tf_poseidon import environment
from tf_poseidon import supported
from tf_poseidon.base import files
from tf_poseidon.base import tables
from tf_poseidon.emulation import ability
from tf_poseidon.emulation import sandbox
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import engines
from tf_poseidon.job.host import gpu_driver
from tf_poseidon.job.host import launching
from tf_poseidon.job.host import mpi_library
from tf_poseidon.job.host import processors

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu")
_PACKAGES = ("tf_poseidon", *_TENSORFLOWS, "keras", "numpy", "mpich")
_NEWEST = supported.TENSORFLOW_SERIES[-1]
_INSTALL = f"pip install 'tensorflow-cpu=={_NEWEST}.*', or 'tensorflow[and-cuda]=={_NEWEST}.*' for GPUs"
# What launchers say of themselves. Those of the MPICH family start each other's ranks.
_LAUNCHERS = {"Intel MPI": ("Intel",), "Open MPI": ("Open MPI", "OpenRTE", "PRRTE"), "MPICH": ("HYDRA",)}
_ANSWER_S = 60.0  # longest time for another program to answer
_CHOICES = ("MPIEXEC_PORT_RANGE", "TF_POSEIDON_INTERFACE", "TF_POSEIDON_PORT_RANGE")  # of connections
_FEW_FILES = 1024
_LONG_TURN_S = 60.0
_STARTER_FAILED = 255  # of ssh
_LAUNCHERS_OWN = ("[mpiexec@", "[proxy:")  # lines of it that tell where in its source something failed


class Kind(enum.Enum):
    """How bad a finding is."""

    FINE = "ok"
    NOTE = "note"  # it works, but perhaps not as well as it could
    PROBLEM = "PROBLEM"  # something will not work


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What it is.
        value: What was found.
        kind: How bad that is.
        remedy: What to do, where it is not fine.
    """

    subject: str
    value: str
    kind: Kind = Kind.FINE
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings. `print(report)` shows them."""

    findings: Sequence[Finding]

    @property
    def has_problems(self) -> bool:
        return any(finding.kind is Kind.PROBLEM for finding in self.findings)

    def __str__(self) -> str:
        cells = [(finding.kind.value, finding.subject, finding.value) for finding in self.findings]
        lines = tables.aligned(cells, left=(0, 1, 2))
        shown = [line for finding, row in zip(self.findings, lines)
                 for line in (row, *([f"{'':9}-> {finding.remedy}"] if finding.remedy else []))]
        counts = {kind: sum(finding.kind is kind for finding in self.findings) for kind in (Kind.PROBLEM, Kind.NOTE)}
        verdict = ", ".join(f"{count} {kind.name.lower()}{'s' * (count != 1)}" for kind, count in counts.items())
        return "\n".join([*shown, verdict])


def examine(hosts: Sequence[str] = (), mpiexec: str = "") -> Diagnosis:
    """Returns what is found on this machine, and on others.

    Args:
        hosts: Machines that a job shall use, which are reached as mpiexec reaches them.
        mpiexec: Same as in `launching.run`.
    """
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("Python", _python), ("temporary", _temporary_files), ("TensorFlow", _tensorflow), ("Keras", _keras),
        ("op library", _op_library), ("MPI", _mpi), ("launcher", lambda: _launcher(mpiexec)), ("GPUs", _gpus),
        ("network", _network), ("limits", _limits), ("environment", _environment), ("turns", _turns),
        ("emulate", _emulation), ("hosts", lambda: _hosts(hosts, mpiexec))]
    return Diagnosis([finding for subject, check in checks for finding in _findings(subject, check)])


def _findings(subject: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Returns what a check finds; an error of it is a problem of its subject."""
    findings = []
    try:
        for finding in check():  # what it has found before stays
            findings.append(finding)
    except PoseidonError as error:
        value, _, remedy = str(error).partition("; ")
        findings.append(Finding(subject, value, Kind.PROBLEM, remedy))
    except Exception as error:  # whatever is broken
        findings.append(Finding(subject, f"{type(error).__name__}: {error}".splitlines()[0], Kind.PROBLEM))
    return findings


def versions() -> dict[str, str]:
    """Returns the versions that have to be the same on all hosts; imports none of these packages."""
    installed = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    return {"Python": platform.python_version(), **installed}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Finding]:
    libc, version = platform.libc_ver()
    yield Finding("Python", f"{platform.python_version()} ({sys.executable}), {platform.system()} "
                            f"{platform.machine()}, {libc} {version}")
    yield Finding("tf_poseidon", f"{_version('tf_poseidon')} ({pathlib.Path(__file__).parents[1]})")


def _temporary_files() -> Iterator[Finding]:
    if problem := files.no_temporary_folder():
        value, _, remedy = problem.partition("; ")
        yield Finding("temporary", value, Kind.PROBLEM, remedy)
        return
    folder = tempfile.gettempdir()
    room = os.statvfs(folder)
    wanted = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    yield _unless(not wanted or os.path.abspath(os.environ[wanted]) == folder, "temporary",
                  f"{folder}, {room.f_bavail * room.f_frsize >> 20} MiB free", Kind.NOTE,
                  f"{wanted} is {os.environ.get(wanted, '')}, which cannot be written; make that folder, or unset it")


def _tensorflow() -> Iterator[Finding]:
    installed = {name: version for name in _TENSORFLOWS if (version := _version(name)) is not None}
    if len(installed) > 1:
        yield Finding("TensorFlow", " and ".join(f"{name} {version}" for name, version in installed.items()),
                      Kind.PROBLEM, "each has overwritten files of the other: pip uninstall both, then install one")
        return
    for name, version in installed.items():
        yield _in_range("TensorFlow", f"{version} ({name})", version, supported.TENSORFLOW,
                        f"pip install '{name}=={_NEWEST}.*'")
    if not installed:
        yield Finding("TensorFlow", "not installed", Kind.PROBLEM, _INSTALL)


def _keras() -> Iterator[Finding]:
    version = _version("keras")
    install = f"pip install '{supported.KERAS}'"
    yield (Finding("Keras", "not installed", Kind.PROBLEM, install) if version is None else
           _in_range("Keras", version, version, supported.KERAS, install))
    settings = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras"), "keras.json").expanduser()
    backend = os.environ.get("KERAS_BACKEND") or json.loads(_read(settings) or "{}").get("backend", "tensorflow")
    if backend != "tensorflow":
        yield Finding("Keras' backend", backend, Kind.PROBLEM, f"set KERAS_BACKEND=tensorflow, or edit {settings}")


def _in_range(subject: str, value: str, version: str, requirement: str, remedy: str) -> Finding:
    specifier = requirements.Requirement(requirement).specifier
    if specifier.contains(version, prereleases=True):
        return Finding(subject, f"{value}, supported: {specifier}")
    return Finding(subject, f"{value}, but tf_poseidon works with {specifier} only", Kind.PROBLEM, remedy)


def _op_library() -> Iterator[Finding]:
    from tf_poseidon.ops import library
    built = library.built_for()
    yield Finding("op library", f"built for TensorFlow {', '.join(built) or 'none'}")
    library.load()
    yield Finding("op library", "loads")


def _mpi() -> Iterator[Finding]:
    yield Finding("MPI", mpi_library.version())
    yield Finding("MPI", "the one that MPICXX named at the build" if mpi_library.is_own() else
                  f"that of the mpich wheel, {_version('mpich')}")


def _launcher(mpiexec: str) -> Iterator[Finding]:
    launcher = launching.find(mpiexec)
    answer = _answer([launcher, "--version"])
    kind = next((kind for kind, words in _LAUNCHERS.items() if any(word in answer for word in words)), "another MPI")
    value = f"{launcher}, of {kind}"
    library = mpi_library.version()
    if kind in _LAUNCHERS and (kind == "Open MPI") != library.startswith("Open MPI"):
        yield Finding("launcher", f"{value}, but tf_poseidon uses {library}", Kind.PROBLEM,
                      "launch with the mpiexec of that MPI; its ranks would not see each other")
    else:
        yield Finding("launcher", value)
    in_path = shutil.which("mpiexec")
    if not mpiexec and not mpi_library.is_own() and in_path and os.path.realpath(in_path) != os.path.realpath(launcher):
        yield Finding("launcher", f"PATH has another one, {in_path}", Kind.NOTE,
                      f"activate this environment, or launch with {launcher}, or with tf-poseidon run")
    if shutil.which("srun"):
        version, plugins = (_answer(["srun", option]).strip() for option in ("--version", "--mpi=list"))
        if failed := next((line for line in (version, plugins) if "error:" in line), None):
            yield Finding("launcher", f"srun, which does not run here: {failed.splitlines()[0]}", Kind.NOTE,
                          "launch with mpiexec; or, in a cluster with Slurm, look at SLURM_CONF and /etc/slurm")
        else:
            yield Finding("launcher", f"srun, {version}; {' '.join(plugins.split())}")
    size = engines.launch().size
    yield Finding("this process", f"one of {size}" if size > 1 else "started alone")


def _gpus() -> Iterator[Finding]:
    present = [line for line in _answer(["nvidia-smi", "-L"]).splitlines() if line.startswith("GPU")]
    import tensorflow as tf
    seen = tf.config.list_physical_devices("GPU")
    if present and not seen:
        what = "sees none" if tf.test.is_built_with_cuda() else "runs on CPUs only"
        yield Finding("GPUs", f"{len(present)}, but TensorFlow {what}", Kind.NOTE,
                      "to use them: pip uninstall tensorflow-cpu, then pip install "
                      f"'tensorflow[and-cuda]=={_NEWEST}.*'; and look at CUDA_VISIBLE_DEVICES")
        return
    yield Finding("GPUs", ", ".join(device.name for device in seen) or "none")
    if not seen:
        return
    if (driver := gpu_driver.find()) is not None:
        yield from _gpu_driver(driver)
    from tf_poseidon import ops
    from tf_poseidon.ops import library
    if problem := library.gpu_problem():
        value, remedy = problem.split("; ", 1)
        yield Finding("GPU kernels", f"none: {value}", Kind.NOTE, remedy)
    elif ops.multiplying_device().device_type == "GPU":
        yield Finding("GPU kernels", "for copies, and for products of factors")
    else:
        yield Finding("GPU kernels", "for copies alone: the CPU rebuilds gradients from factors", Kind.NOTE,
                      "products need a GPU of compute capability 8.0 or newer")


def _gpu_driver(driver: gpu_driver.Driver) -> Iterator[Finding]:
    major, minor = driver.version()
    yield Finding("GPUs' driver", f"supports CUDA {major}.{minor}")
    numbers = range(driver.count())
    apart = [f"{a} and {b}" for a in numbers for b in numbers if a < b and not driver.reaches(a, b)]
    yield _unless(not apart, "between GPUs", f"{', '.join(apart)} do not reach each other's memory" if apart else
                  "all reach each other's memory", Kind.NOTE,
                  "what their ranks add up goes through the host; look at nvidia-smi topo -p2p r")
    refused = driver.share()
    yield _unless(not refused, "GPU memory", f"another process cannot open it: {refused}" if refused else
                  "another process can open it", Kind.NOTE,
                  "what ranks of this machine add up goes through the host; containers of them need --ipc=host, and "
                  "--pid=host if each has its own")
    try:
        driver.pin()
        yield Finding("pinned memory", "allowed")
    except OSError as error:
        yield Finding("pinned memory", f"none: {error}", Kind.NOTE,
                      "copies from and to GPUs are slower without; look at the memory limit of the container")


def _network() -> Iterator[Finding]:
    for interface in sorted(pathlib.Path("/sys/class/net").glob("*")):
        if interface.name != "lo" and _read(interface / "operstate") == "up":
            speed = _read(interface / "speed")
            is_known = speed.isdecimal() and int(speed) > 0
            yield Finding(f"interface {interface.name}",
                          f"{int(speed) / 1000:g} Gbit/s" if is_known else "unknown speed")
    for device in sorted(pathlib.Path("/sys/class/infiniband").glob("*")):
        yield Finding(f"InfiniBand {device.name}", ", ".join(
            f"port {port.name}: {_read(port / 'state')}, {_read(port / 'rate')}" for port in device.glob("ports/*")))
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if locked != resource.RLIM_INFINITY:
            yield Finding("locked memory", f"at most {locked >> 20} MiB", Kind.PROBLEM,
                          "InfiniBand needs it: ulimit -l unlimited, or in /etc/security/limits.conf; containers: "
                          "--ulimit memlock=-1")
    chosen = {name: value for name, value in os.environ.items()
              if name.startswith(("UCX_", "FI_", "MPIR_CVAR_")) or name in _CHOICES}
    if chosen:
        yield Finding("chosen transport", ", ".join(f"{name}={value}" for name, value in sorted(chosen.items())))


def _limits() -> Iterator[Finding]:
    yield from _processors()
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield _unless(open_files >= _FEW_FILES, "open files", f"at most {open_files}", Kind.NOTE,
                  "a large job has a connection per rank: ulimit -n 65536")
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", str(error.strerror), Kind.NOTE,
                      "ranks of a machine exchange over loopback without it")
        return
    if not os.access("/dev/shm", os.W_OK):
        yield Finding("/dev/shm", "cannot be written", Kind.PROBLEM,
                      "let this user write it, or mount one (a tmpfs, in Kubernetes an emptyDir)")
        return
    free = room.f_bavail * room.f_frsize
    few, several = mpi_library.shared_bytes(2), mpi_library.shared_bytes(8)
    yield _unless(free >= several, "/dev/shm", f"{free >> 20} MiB free", Kind.NOTE if free >= few else Kind.PROBLEM,
                  f"MPI needs {few >> 20} MiB there for 2 ranks of a host, {several >> 20} for 8: remove what ended "
                  "programs have left ('/dev/shm/mpich_shm_*'), or docker run --shm-size=1g")


def _processors() -> Iterator[Finding]:
    own, of_machine = processors.found(), os.cpu_count() or 1
    usable, cores = len(own.numbers), len(own.cores)
    value = f"{usable} of {of_machine}, on {cores} core{'s' * (cores > 1)}"
    yield _unless(usable == of_machine, "processors", value, Kind.NOTE,
                  "a cpuset, taskset or Slurm leaves this process a part of them, and its ranks too; ask for more if "
                  "they compute slowly")
    if own.quota < cores:
        yield Finding("processors", f"the time of {own.quota:g} of them", Kind.NOTE,
                      "the container has a limit, which its ranks share; raise it if they compute slowly")
    if chosen := os.environ.get("TF_NUM_INTRAOP_THREADS"):
        yield Finding("threads", f"{chosen} on each rank, since TF_NUM_INTRAOP_THREADS says so", Kind.NOTE,
                      "without it, the ranks of a host share its processors")
    else:
        threads = max(1, int(min(cores, own.quota)))
        yield Finding("threads", f"{threads} for the ranks of this host together, each at least 1")


def _environment() -> Iterator[Finding]:
    for name, text in environment.variables().items():
        yield Finding(name, text, Kind.NOTE, "programs that do not say otherwise take this; unset it to change that")
    options = [name.removeprefix(environment.PREFIX).lower() for name in environment.variables()]
    environment.defaults(options)  # checks them
    for name in environment.unknown():
        close = difflib.get_close_matches(name, environment.names(), 1)
        yield Finding(name, "no variable of tf_poseidon", Kind.NOTE,
                      f"nothing reads it; {f'{close[0]} is one' if close else 'unset it'}")


def _turns() -> Iterator[Finding]:
    from tf_poseidon.job.host import accelerator_turns  # it loads the op library
    for table in accelerator_turns.tables():
        late = [taker for taker in table["takers"] if taker["state"] == "holding" and taker["seconds"] > _LONG_TURN_S]
        yield _unless(
            not late, f"turns '{table['name']}'", f"{table['accelerator']}: " + ", ".join(
                f"process {taker['pid']} ({taker['program']}, rank {taker['rank']}) {_doing(taker)}"
                for taker in table["takers"]), Kind.NOTE,
            f"a step rarely takes so long: if process {late[0]['pid']} hangs, end it; others do not wait for it after "
            "a tenth of their timeout_s" if late else "")


def _doing(taker: Mapping[str, Any]) -> str:
    """Returns what a process does that takes turns."""
    if taker["state"] == "idle":
        return "is between two turns" if taker["number"] else "has had no turn yet"
    return f"{'waits for its turn' if taker['state'] == 'waiting' else 'has the turn'} for {taker['seconds']:.1f} s"


def _emulation() -> Iterator[Finding]:
    how = f"as user id {os.geteuid()}, {'with' if sandbox.may_make_hosts() else 'without'} the rights of root"
    if found := ability.problem():
        yield Finding("emulate", f"no hosts can be emulated here: {found[0]}", Kind.NOTE, found[1])
    else:
        yield Finding("emulate", f"hosts can be emulated here, {how}")


def _hosts(hosts: Sequence[str], mpiexec: str) -> Iterator[Finding]:
    if not hosts:
        return
    launcher = launching.find(mpiexec)
    own_versions = versions()
    with futures.ThreadPoolExecutor(len(hosts)) as pool:
        for host, answer in zip(hosts, pool.map(lambda host: _versions_on(host, launcher), hosts)):
            if isinstance(answer, _NoAnswer):
                yield Finding(f"host {host}", answer.says, Kind.PROBLEM,
                              f"'ssh {host} true' has to work without a password" if answer.is_unreachable else
                              f"the environment of {sys.executable} has to be there, too")
            elif answer != own_versions:
                names = sorted(name for name in {*answer, *own_versions} if answer.get(name) != own_versions.get(name))
                yield Finding(f"host {host}", ", ".join(f"{name} {answer.get(name, 'missing')}, here "
                                                        f"{own_versions.get(name, 'missing')}" for name in names),
                              Kind.PROBLEM, "install the same versions on all hosts")
            else:
                yield Finding(f"host {host}", "reached; has the same versions")


@dataclasses.dataclass(frozen=True)
class _NoAnswer:
    """Why another host has not told its versions."""

    says: str
    is_unreachable: bool


def _versions_on(host: str, launcher: str) -> dict[str, str] | _NoAnswer:
    """Returns what `versions` does on another host, or why that is not known."""
    program = "import json; from tf_poseidon.commands import doctor; print(json.dumps(doctor.versions()))"
    try:
        done = subprocess.run([launcher, "-n", "1", "-hosts", host, sys.executable, "-c", program], text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return _NoAnswer(f"no answer in {_ANSWER_S:.0f} s", is_unreachable=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip() or f"ended with status {done.returncode}"
        own = [line for line in said.splitlines() if not line.startswith(_LAUNCHERS_OWN)]  # what ssh says, or Python
        return _NoAnswer((own or said.splitlines())[-1], done.returncode == _STARTER_FAILED)
    return json.loads(lines[-1])


def _unless(is_fine: bool, subject: str, value: str, kind: Kind, remedy: str) -> Finding:
    return Finding(subject, value) if is_fine else Finding(subject, value, kind, remedy)


def _answer(command: Sequence[str]) -> str:
    """Returns what a program prints; nothing if there is no such program."""
    try:
        done = subprocess.run(command, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
