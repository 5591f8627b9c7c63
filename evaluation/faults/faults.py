"""Lets everything go wrong that docs/faults.md tells of, checks how jobs end, and writes a table of it.

    python -m evaluation.faults.faults --markdown docs/results/faults.md
    python -m evaluation.faults.faults --kinds=mpiexec --only='signal|SIG'

Prints a line for each fault. The exit status is 1 if a job hangs, ends otherwise than it must, or too late. Faults of
hosts and links need root, and what emulated hosts need; kills.py kills ranks at every moment.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from typing import NamedTuple

from absl import app
from absl import flags

from evaluation import modules
from evaluation import output
from evaluation.faults import fault_table
from evaluation.faults import hosts

_LONGEST_S = 120.0  # of a job; then it hangs
_SHOWN = 160  # characters of a message in the table
_KINDS = ("mpiexec", "horovodrun", "hosts")


class Row(NamedTuple):
    """A fault that has happened.

    Attributes:
        fault: What it was.
        injected: How it was made to happen.
        launcher: What has started the job.
        seen: What its user sees.
        status: Its exit status.
        seconds: From the fault to the end; None if the job goes on.
        problem: What is wrong with that, or "".
    """

    fault: str
    injected: str
    launcher: str
    seen: str
    status: int
    seconds: float | None
    problem: str


def _launcher(name: str, ranks: int) -> list[str]:
    if not ranks:
        return []
    program = os.path.join(sysconfig.get_path("scripts"), name)
    return [program, "-n", str(ranks)] if name == "mpiexec" else [
        program, "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}"]


def run_program(fault: fault_table.Fault, launcher: str) -> fault_table.Ended:
    """Runs a job in which a fault of a program happens, by mpiexec or horovodrun."""
    with tempfile.TemporaryDirectory() as directory:
        time_of_fault = pathlib.Path(directory) / "fault"
        environment = {"TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONUNBUFFERED": "", "FAULT_TIME": str(time_of_fault)}
        process = subprocess.Popen(
            [*_launcher(launcher, fault.ranks), *modules.command("faults.faulty_program"), *map(str, fault.program)],
            text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | environment | dict(fault.environment))
        try:
            output, _ = process.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[0]}\nThe job hung."
        end = time.time()
        seconds = end - float(time_of_fault.read_text()) if time_of_fault.exists() else None
    return fault_table.Ended(process.returncode, output, seconds)


def seen(says: str, output: str) -> str:
    """Returns the first line that matches a regular expression, shortened; "" if the launcher alone says something."""
    if not says:
        return ""
    line = next((line for line in fault_table.own_lines(output) if re.search(says, line)), "").strip()
    # Of Horovod's log, and what differs from machine to machine.
    line = re.sub(r"^\[\d{4}-.*?\w (?=/)|/tmp/\S*/", "", line).replace(socket.gethostname(), "HOST")
    line = re.sub(r"[0-9a-f]{60,}", "...", line)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN].rstrip()} ..."


def programs(launcher: str, only: str) -> Iterator[Row]:
    """Runs the faults of programs whose names match a regular expression."""
    for fault in fault_table.FAULTS:
        if not re.search(only, fault.name) or launcher == "horovodrun" and not fault.horovod:
            continue
        ended = run_program(fault, launcher)
        by_mpiexec = launcher == "mpiexec"
        says = fault.says if by_mpiexec or fault.horovod_says is None else fault.horovod_says
        yield Row(fault.name, fault.injected, launcher if fault.ranks else "", seen(says, ended.output), ended.status,
                  None if fault.succeeds else ended.seconds, fault_table.wrong(fault, ended, by_mpiexec))


def of_hosts(only: str) -> Iterator[Row]:
    """Breaks hosts and links, those whose names match a regular expression."""
    names = [name for name in hosts.FAULTS if re.search(only, name) and name != hosts.NOTHING]
    undisturbed = hosts.run(hosts.NOTHING) if names else None
    for name in names:
        broken, ended = hosts.FAULTS[name], hosts.run(name)
        yield Row(name, broken.injected, "tf-poseidon run" if broken.restarts else "mpiexec",
                  seen(broken.says, ended.output), ended.status, None if broken.goes_on else ended.seconds,
                  hosts.wrong(name, ended, undisturbed))


def report(rows: Sequence[Row]) -> str:
    """Returns the report as Markdown."""
    cells = [(row.fault, row.injected, row.launcher,
              "the launcher's message" if not row.seen else f"`{row.seen}`".replace("|", "\\|"), str(row.status),
              "" if row.seconds is None else f"{row.seconds:.1f}") for row in rows]
    header = ("fault", "how it happens", "started by", "what its user sees", "status", "s to the end")
    wrong = [f"* {row.fault} ({row.launcher}): {row.problem.partition(chr(10))[0]}" for row in rows if row.problem]
    return "\n".join([
        "# What went wrong, and how jobs ended", "",
        "Written by `evaluation.faults.faults --markdown`. Times are from the fault to the end of the launcher; jobs "
        "without", "one go on, and end well.", "",
        *output.markdown_table(header, cells), "",
        f"{len(rows)} faults; {len(wrong) or 'nothing'} {'are' if wrong else 'is'} wrong.", *wrong, ""])


def main(_: Sequence[str]) -> int:
    rows, only = [], _ONLY.value
    for kind in _CHOSEN.value:
        if kind == "hosts" and os.geteuid():
            print("hosts: omitted, since network namespaces need root")
            continue
        for row in of_hosts(only) if kind == "hosts" else programs(kind, only):
            rows.append(row)
            after = "" if row.seconds is None else f" after {row.seconds:.1f} s"
            print(f"{kind}, {row.fault}: {row.problem or f'as it must, with status {row.status}{after}'}", flush=True)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(report(rows))
    return any(row.problem for row in rows)


if __name__ == "__main__":
    _CHOSEN = flags.DEFINE_multi_enum("kinds", list(_KINDS), list(_KINDS), "What goes wrong where.")
    _ONLY = flags.DEFINE_string("only", "", "Regular expression of the names of faults.")
    _MARKDOWN = output.markdown_flag()
    app.run(main)
